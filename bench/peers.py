"""`python -m bench.peers`: Sluice beside Apache Kafka, the same client on the same machine, one server at a time.

    python -m bench.peers                        all workloads, three servers, two rounds: some minutes
    python -m bench.peers produce one-in-flight  some of it
    python -m bench.peers --seconds 5 --rounds 1

Servers take turns within a round, so that what else the machine does falls on all. Kafka is measured as it is shipped,
when it acknowledges before a sync, and with a sync for every message (`log.flush.interval.messages=1`); Sluice always
syncs. A ratio above 1 says that Sluice is faster, or needs more where the figure is a cost.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from confluent_kafka import KafkaError, Message, Producer

from bench import librdkafka
from tests.compat.brokers import APACHE_KAFKA, SLUICE, Broker, BrokerProcess

PARTITIONS = 6
RECORD_BYTES = 1024
PAYLOADS = 1000
MEBIBYTE = 1024 * 1024
PACE = 1000
"""Records a second where the pace is given."""
WARM_UP_S = 3.0

SERVERS: Sequence[tuple[str, Broker, dict[str, str]]] = (
    ("sluice", SLUICE, {}),
    ("kafka", APACHE_KAFKA, {}),
    ("kafka synced", APACHE_KAFKA, {"log.flush.interval.messages": "1"}),
)

Figures = dict[str, float]
Workload = Callable[[BrokerProcess, float], Figures]


def produce(broker: BrokerProcess, seconds: float, *, batch_bytes: int = 1_000_000) -> Figures:
    """Records of 1 KiB that differ, acknowledged; with the server's CPU for each megabyte."""
    topic = f"produce-{batch_bytes}"
    librdkafka.create_topic(broker.bootstrap, topic, PARTITIONS)
    failures: list[KafkaError] = []
    acknowledged = 0

    def on_delivery(error: KafkaError | None, _message: Message) -> None:
        nonlocal acknowledged
        if error is None:
            acknowledged += 1
        else:
            failures.append(error)

    payloads = [os.urandom(RECORD_BYTES) for _ in range(PAYLOADS)]
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": batch_bytes,
            "queue.buffering.max.kbytes": 65536,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    cpu_s = _cpu_s(broker)
    started = time.perf_counter()
    number = 0
    while time.perf_counter() - started < seconds:
        for _ in range(200):
            number += 1
            try:
                producer.produce(topic, payloads[number % PAYLOADS], on_delivery=on_delivery)
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    producer.flush(60)
    elapsed_s = time.perf_counter() - started
    if failures or not acknowledged:
        raise RuntimeError(f"{len(failures)} records failed: {failures[:1]}")
    mebibytes = acknowledged * RECORD_BYTES / MEBIBYTE
    return {"MiB/s": mebibytes / elapsed_s, "server CPU ms/MiB": (_cpu_s(broker) - cpu_s) * 1000 / mebibytes}


def produce_small_batches(broker: BrokerProcess, seconds: float) -> Figures:
    """The same with Java's default batch."""
    return produce(broker, seconds, batch_bytes=16_384)


def one_in_flight(broker: BrokerProcess, _seconds: float) -> Figures:
    """From produce() to the acknowledgement, one record at a time."""
    librdkafka.create_topic(broker.bootstrap, "one-in-flight", 1)
    latency = librdkafka.one_in_flight(broker.bootstrap, "one-in-flight")
    return {"p50 ms": latency.p50_ms, "p99 ms": latency.p99_ms}


def paced(broker: BrokerProcess, seconds: float) -> Figures:
    """A thousand records of 100 bytes a second, none waiting for another (no linger): the server's CPU for each."""
    librdkafka.create_topic(broker.bootstrap, "paced", PARTITIONS)
    latencies_ms: list[float] = []
    failures: list[KafkaError] = []

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(error)
        latencies_ms.append((message.latency() or 0.0) * 1000)

    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all", "linger.ms": 0})
    payloads = [os.urandom(100) for _ in range(PAYLOADS)]
    cpu_s = 0.0
    started = time.perf_counter()
    warm = False
    number = 0
    while (elapsed_s := time.perf_counter() - started) < seconds + WARM_UP_S:
        if not warm and elapsed_s > WARM_UP_S:
            warm, cpu_s = True, _cpu_s(broker)
            latencies_ms.clear()
        while number < elapsed_s * PACE:
            producer.produce("paced", payloads[number % PAYLOADS], on_delivery=on_delivery)
            number += 1
        producer.poll(0.001)
    producer.flush(60)
    if failures or not latencies_ms:
        raise RuntimeError(f"{len(failures)} records failed: {failures[:1]}")
    return {
        "server CPU ms/record": (_cpu_s(broker) - cpu_s) * 1000 / len(latencies_ms),
        "p50 ms": statistics.median(latencies_ms),
        "p99 ms": statistics.quantiles(latencies_ms, n=100)[98],
    }


def consume(broker: BrokerProcess, seconds: float) -> Figures:
    """From the beginning, after a restart: nothing is in the server's own memory."""
    topic = "consume"
    librdkafka.create_topic(broker.bootstrap, topic, PARTITIONS)
    records = librdkafka.produce(broker.bootstrap, topic, seconds=seconds, record_bytes=RECORD_BYTES).records
    broker.restart()
    read = librdkafka.consume(broker.bootstrap, topic, PARTITIONS, records=records, record_bytes=RECORD_BYTES)
    return {"MiB/s": records * RECORD_BYTES / MEBIBYTE / read.seconds}


WORKLOADS: dict[str, Workload] = {
    "produce": produce,
    "produce-16k": produce_small_batches,
    "one-in-flight": one_in_flight,
    "paced": paced,
    "consume": consume,
}


def _cpu_s(broker: BrokerProcess) -> float:
    """Of the server and all its children, those that have ended among them."""
    process = psutil.Process(_pid(broker))
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _pid(broker: BrokerProcess) -> int:
    port = int(broker.bootstrap.rpartition(":")[2])
    for process in psutil.Process().children(recursive=True):
        try:
            listening = any(
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
                for connection in process.net_connections("tcp")
            )
        except psutil.Error:
            continue
        if listening:
            return process.pid
    raise RuntimeError(f"nothing listens at {broker.bootstrap}")


def measure(names: Sequence[str], *, seconds: float, rounds: int) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Per workload and figure, each server's values in the order of the rounds."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name in names:
        for _ in range(rounds):
            for server, broker, settings in SERVERS:
                directory = Path(tempfile.mkdtemp(prefix="sluice-peers-", dir=os.environ.get("SLUICE_BENCH_DIR")))
                directory.chmod(0o755)
                process = broker.process(directory, settings)
                try:
                    process.start()
                    figures = WORKLOADS[name](process, seconds)
                finally:
                    process.close()
                    shutil.rmtree(directory)
                for figure, value in figures.items():
                    found.setdefault((name, figure), {}).setdefault(server, []).append(value)
                print(
                    f"{name:15} {server:13} " + ", ".join(f"{value:.2f} {figure}" for figure, value in figures.items())
                )
    return found


def report(found: dict[tuple[str, str], dict[str, list[float]]]) -> str:
    lines = [
        "| workload | figure | Sluice | Kafka | Kafka synced | Sluice ÷ Kafka | Sluice ÷ synced |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, figure), values in found.items():
        shown = [" ; ".join(f"{value:.2f}" for value in values[server]) for server, *_ in SERVERS]
        means = [statistics.mean(values[server]) for server, *_ in SERVERS]
        lines.append(
            f"| {name} | {figure} | {' | '.join(shown)} | {means[0] / means[1]:.2f} | {means[0] / means[2]:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--seconds", type=float, default=30, help="of each produce")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    unknown = set(given.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    print(report(measure(given.workloads or list(WORKLOADS), seconds=given.seconds, rounds=given.rounds)))


if __name__ == "__main__":
    main()
