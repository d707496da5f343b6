"""Measure the cost of looking inside every produced batch: the gateway with and without that check, in turns.

Two gateways run from beginning to end: the real one, and one that checks heads alone (`bench/unvalidated.py`). The same
producer sends to one, then to the other, a few seconds each, so that other load on the machine falls on both. Records
differ, and compress to about a third, as text does.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import psutil
from confluent_kafka import KafkaError, Message, Producer

from bench import librdkafka
from tests.gateway_process import GatewayProcess

CODECS = ("none", "lz4", "zstd", "snappy", "gzip")
BATCH_BYTES = (1_000_000, 16_384)
RECORD_BYTES = 1024
PARTITIONS = 6
ROUNDS = 3
SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Cost:
    codec: str
    batch_bytes: int
    validated: float
    """The median of the rounds with validation, in MB/s of records."""
    unvalidated: float
    validated_cpu_ms: float
    """CPU milliseconds of the validating gateway's process for each MB of records."""
    unvalidated_cpu_ms: float

    @property
    def lost(self) -> float:
        """The share of the throughput that validation costs."""
        return 1 - self.validated / self.unvalidated


def unvalidated(gateway: GatewayProcess) -> GatewayProcess:
    """Return a gateway without validation that is otherwise the same. It is not started yet."""
    gateway._arguments[gateway._arguments.index("gateway.cli")] = "bench.unvalidated"
    return gateway


def measure(
    running: Callable[[Callable[[GatewayProcess], GatewayProcess]], AbstractContextManager[GatewayProcess]],
    *,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    tell: Callable[[Cost], None] = lambda cost: None,
) -> list[Cost]:
    """Measure both gateways. `running` is a context manager that starts a gateway after applying the given change."""
    costs: list[Cost] = []
    with ExitStack() as stack:
        gateways = [stack.enter_context(running(change)) for change in (lambda gateway: gateway, unvalidated)]
        for gateway in gateways:
            librdkafka.create_topic(gateway.bootstrap, "validation", PARTITIONS)
        payloads = _payloads()
        for batch_bytes in BATCH_BYTES:
            for codec in CODECS:
                rates: list[list[float]] = [[], []]
                cpus: list[list[float]] = [[], []]
                for number in range(rounds):
                    for which in (0, 1) if number % 2 else (1, 0):
                        rate, cpu_ms = _produce(gateways[which], codec, batch_bytes, payloads, seconds)
                        rates[which].append(rate)
                        cpus[which].append(cpu_ms)
                cost = Cost(
                    codec,
                    batch_bytes,
                    statistics.median(rates[0]),
                    statistics.median(rates[1]),
                    statistics.median(cpus[0]),
                    statistics.median(cpus[1]),
                )
                tell(cost)
                costs.append(cost)
    return costs


def _payloads() -> list[bytes]:
    chance = random.Random(1)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(3, 9))) for _ in range(2000)]
    return [" ".join(chance.choices(words, k=RECORD_BYTES // 4)).encode()[:RECORD_BYTES] for _ in range(2000)]


def _produce(
    gateway: GatewayProcess, codec: str, batch_bytes: int, payloads: list[bytes], seconds: float
) -> tuple[float, float]:
    failures: list[KafkaError] = []
    acknowledged = 0

    def on_delivery(error: KafkaError | None, _message: Message) -> None:
        nonlocal acknowledged
        if error is None:
            acknowledged += 1
        else:
            failures.append(error)

    producer = Producer(
        {
            "bootstrap.servers": gateway.bootstrap,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": batch_bytes,
            "compression.type": codec,
            "queue.buffering.max.kbytes": 65536,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    process = psutil.Process(gateway.pid)
    before = process.cpu_times()
    started = time.perf_counter()
    number = 0
    while time.perf_counter() - started < seconds:
        for _ in range(200):
            number += 1
            try:
                producer.produce("validation", payloads[number % len(payloads)], on_delivery=on_delivery)
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    producer.flush(60)
    elapsed_s = time.perf_counter() - started
    after = process.cpu_times()
    if failures or not acknowledged:
        raise RuntimeError(f"{len(failures)} records failed: {failures[:1]}")
    megabytes = acknowledged * RECORD_BYTES / 1e6
    cpu_ms = (after.user + after.system - before.user - before.system) * 1000
    return megabytes / elapsed_s, cpu_ms / megabytes
