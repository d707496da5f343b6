"""Workloads for Sluice and Apache Kafka alike: each one takes a fresh broker and returns figures by name.

A workload does not know which server it measures. It speaks to the server by stock librdkafka, and observes its
processes and the disk from outside. So both servers are measured in the same way.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from bench import librdkafka
from bench.client_defaults import CLIENT_WORKLOADS
from bench.commits import commits
from bench.servers import cpu_s as server_cpu_s
from bench.stalls import watching
from tests.compat.brokers import BrokerProcess
from tests.gateway_process import find_coordinator

PARTITIONS = 6
RECORD_BYTES = 1024
SMALL_RECORD_BYTES = 100
JAVA_BATCH_BYTES = 16_384
"""The default of Java's producer."""
PAYLOADS = 1000
"""Number of different payloads. The producer uses them in turn."""
MEBIBYTE = 1024 * 1024
PACE = 1000
"""Records a second of the paced workloads."""
END_TO_END_PACE = 200
WARM_UP_S = 3.0
PRODUCERS = 20
TRANSACTION_RECORDS = 10
TRANSACTION_PARTITIONS = 4
TRANSACTIONAL_PRODUCERS = 8
LOG_RECORDS = 2 * 1024 * MEBIBYTE // RECORD_BYTES
"""Records of the log that is read cold: 2 GiB."""
WARM_RECORDS = 200_000
"""Number of records that a server can still keep in memory."""
TOPICS = 2_000
TOPICS_PER_REQUEST = 100
REST_S = 10.0
"""Seconds during which a server at rest writes next to nothing."""
REST_BYTES = 4 * MEBIBYTE
REST_LIMIT_S = 180.0
DEADLINE_S = 300.0

Figures = dict[str, float]
Workload = Callable[[BrokerProcess, float], Figures]


@dataclass(slots=True)
class Acknowledged:
    """Counts of the delivery reports."""

    records: int = 0
    failures: list[KafkaError] = field(default_factory=list[KafkaError])

    def on_delivery(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self.records += 1
        else:
            self.failures.append(error)

    def check(self) -> int:
        """Return how many records were acknowledged. Raise RuntimeError if one of them failed, or if no record was
        sent.
        """
        if self.failures or not self.records:
            raise RuntimeError(f"{len(self.failures)} records failed: {self.failures[:1]}")
        return self.records


def _producer(
    bootstrap: str, batch_bytes: int = 1_000_000, *, buffer_kib: int = 65536, idempotent: bool = False
) -> Producer:
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "enable.idempotence": idempotent,
            "linger.ms": 5,
            "batch.size": batch_bytes,
            "queue.buffering.max.kbytes": buffer_kib,
            "queue.buffering.max.messages": 1_000_000,
        }
    )


def _flood(
    producer: Producer,
    topic: str,
    acknowledged: Acknowledged,
    *,
    until: Callable[[int], bool],
    record_bytes: int = RECORD_BYTES,
) -> None:
    """Produce as fast as acknowledgements allow until `until` accepts the count, then wait for the rest."""
    payloads = [os.urandom(record_bytes) for _ in range(PAYLOADS)]
    turns = itertools.cycle(payloads)
    number = 0
    while not until(number):
        for _ in range(200):
            while True:
                try:
                    producer.produce(topic, next(turns), on_delivery=acknowledged.on_delivery)
                    break
                except BufferError:
                    producer.poll(0.01)
        number += 200
        producer.poll(0)
    if producer.flush(DEADLINE_S):
        raise RuntimeError(f"not all records were acknowledged within {DEADLINE_S:.0f} s")


def _for(seconds: float) -> Callable[[int], bool]:
    ends = time.perf_counter() + seconds
    return lambda _: time.perf_counter() >= ends


def produce(
    broker: BrokerProcess,
    seconds: float,
    *,
    batch_bytes: int = 1_000_000,
    record_bytes: int = RECORD_BYTES,
    idempotent: bool = False,
) -> Figures:
    """Produce different records: acknowledged records, and the server's CPU for each mebibyte."""
    topic = f"produce-{batch_bytes}-{record_bytes}"
    librdkafka.create_topic(broker.bootstrap, topic, PARTITIONS)
    acknowledged = Acknowledged()
    producer = _producer(broker.bootstrap, batch_bytes, idempotent=idempotent)
    # The first record waits for the leaders and, if the producer is idempotent, for its id.
    producer.produce(topic, os.urandom(record_bytes))
    if producer.flush(DEADLINE_S):
        raise RuntimeError("the first record was not acknowledged")
    cpu_s = server_cpu_s(broker)
    started = time.perf_counter()
    _flood(producer, topic, acknowledged, until=_for(seconds), record_bytes=record_bytes)
    elapsed_s = time.perf_counter() - started
    mebibytes = acknowledged.check() * record_bytes / MEBIBYTE
    return {"MiB/s": mebibytes / elapsed_s, "server CPU ms/MiB": (server_cpu_s(broker) - cpu_s) * 1000 / mebibytes}


def produce_small_batches(broker: BrokerProcess, seconds: float) -> Figures:
    """The same as `produce`, with Java's default batch."""
    return produce(broker, seconds, batch_bytes=JAVA_BATCH_BYTES)


def produce_idempotent(broker: BrokerProcess, seconds: float) -> Figures:
    """The same as `produce-16k`, with an idempotent producer, which has at most five batches in flight."""
    return produce(broker, seconds, batch_bytes=JAVA_BATCH_BYTES, idempotent=True)


def produce_small_records(broker: BrokerProcess, seconds: float) -> Figures:
    """The same as `produce`, with records of 100 bytes."""
    return produce(broker, seconds, record_bytes=SMALL_RECORD_BYTES)


def produce_many(broker: BrokerProcess, seconds: float) -> Figures:
    """The same as `produce`, by twenty producers in one process, each with a thread of its own."""
    topic = "produce-many"
    librdkafka.create_topic(broker.bootstrap, topic, PARTITIONS)
    counts = [Acknowledged() for _ in range(PRODUCERS)]
    producers = [_producer(broker.bootstrap, buffer_kib=65536 // PRODUCERS) for _ in counts]
    cpu_s = server_cpu_s(broker)
    started = time.perf_counter()
    until = _for(seconds)
    threads = [
        threading.Thread(target=_flood, args=(producer, topic, count), kwargs={"until": until})
        for producer, count in zip(producers, counts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - started
    mebibytes = sum(count.check() for count in counts) * RECORD_BYTES / MEBIBYTE
    return {"MiB/s": mebibytes / elapsed_s, "server CPU ms/MiB": (server_cpu_s(broker) - cpu_s) * 1000 / mebibytes}


def one_in_flight(broker: BrokerProcess, _seconds: float) -> Figures:
    """Measure from produce() to the acknowledgement, one record at a time."""
    librdkafka.create_topic(broker.bootstrap, "one-in-flight", 1)
    latency = librdkafka.one_in_flight(broker.bootstrap, "one-in-flight")
    return {"p50 ms": latency.p50_ms, "p99 ms": latency.p99_ms}


def end_to_end(broker: BrokerProcess, seconds: float) -> Figures:
    """Measure from produce() to the consumer's poll(), 200 records of 100 bytes a second, without linger."""
    librdkafka.create_topic(broker.bootstrap, "end-to-end", 1)
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "end-to-end", "enable.auto.commit": False})
    consumer.assign([TopicPartition("end-to-end", 0, 0)])
    acknowledged = Acknowledged()
    sent_s: list[float] = []
    received_s: list[float] = []
    wanted = int((seconds + WARM_UP_S) * END_TO_END_PACE)

    def read() -> None:
        limit = time.monotonic() + seconds + DEADLINE_S
        while len(received_s) < wanted and time.monotonic() < limit:
            message = consumer.poll(1.0)
            if message is None:
                continue
            if (error := message.error()) is not None:
                raise RuntimeError(str(error))
            received_s.append(time.perf_counter())

    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all", "linger.ms": 0})
    payload = os.urandom(SMALL_RECORD_BYTES)
    try:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            started_s = time.perf_counter()
            for number in range(wanted):
                while (early_s := started_s + number / END_TO_END_PACE - time.perf_counter()) > 0:
                    producer.poll(min(early_s, 0.001))
                sent_s.append(time.perf_counter())
                producer.produce("end-to-end", payload, on_delivery=acknowledged.on_delivery)
            producer.flush(60)
            reading.result()
    finally:
        consumer.close()
    if acknowledged.check() != len(received_s):
        raise RuntimeError(f"{len(received_s)} of {acknowledged.records} records were read")
    warm = int(WARM_UP_S * END_TO_END_PACE)
    waited_ms = _milliseconds(list(zip(sent_s, received_s, strict=True))[warm:])
    return {"p50 ms": statistics.median(waited_ms), "p99 ms": statistics.quantiles(waited_ms, n=100)[98]}


def transactions(broker: BrokerProcess, seconds: float) -> Figures:
    """Run one transaction after another, then eight producers concurrently. A
    transaction has ten records over four partitions and is measured from its begin to its commit's answer.
    """
    librdkafka.create_topic(broker.bootstrap, "transactions", PARTITIONS)
    payloads = [os.urandom(SMALL_RECORD_BYTES) for _ in range(PAYLOADS)]

    def transact(name: str, seconds: float, took_s: list[float]) -> None:
        turns = itertools.cycle(payloads)
        settings = {"bootstrap.servers": broker.bootstrap, "transactional.id": name, "linger.ms": 0}
        producer = Producer(settings)
        producer.init_transactions(30)
        ends = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < ends:
            producer.begin_transaction()
            for number in range(TRANSACTION_RECORDS):
                producer.produce("transactions", next(turns), partition=number % TRANSACTION_PARTITIONS)
            producer.commit_transaction(30)
            took_s.append(time.perf_counter() - begun)

    transact("warm-up", WARM_UP_S, [])
    alone_s: list[float] = []
    transact("alone", seconds / 2, alone_s)
    together_s: list[list[float]] = [[] for _ in range(TRANSACTIONAL_PRODUCERS)]
    with ThreadPoolExecutor(TRANSACTIONAL_PRODUCERS) as pool:
        ended = [
            pool.submit(transact, f"together-{number}", seconds / 2, took_s) for number, took_s in enumerate(together_s)
        ]
    for future in ended:
        future.result()
    return {
        "p50 ms": statistics.median(alone_s) * 1000,
        "p99 ms": statistics.quantiles(alone_s, n=100)[98] * 1000,
        "eight producers' transactions/s": sum(map(len, together_s)) / (seconds / 2),
    }


def paced(broker: BrokerProcess, seconds: float) -> Figures:
    """Produce a thousand records of 100 bytes a second without linger: the server's CPU for each record, and two p99.

    No record waits for another. One p99 counts all records. The other leaves out the records that were sent while a
    separate writer met a stall of the disk, too.
    """
    librdkafka.create_topic(broker.bootstrap, "paced", PARTITIONS)
    waited: list[tuple[float, float]] = []
    failures: list[KafkaError] = []

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(error)
        now = time.perf_counter()
        waited.append((now - (message.latency() or 0.0), now))

    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all", "linger.ms": 0})
    payloads = [os.urandom(SMALL_RECORD_BYTES) for _ in range(PAYLOADS)]
    cpu_s = 0.0
    started = time.perf_counter()
    warm = False
    number = 0
    with watching(broker.log_path.parent) as disk:
        while (elapsed_s := time.perf_counter() - started) < seconds + WARM_UP_S:
            if not warm and elapsed_s > WARM_UP_S:
                warm, cpu_s = True, server_cpu_s(broker)
                waited.clear()
            while number < elapsed_s * PACE:
                producer.produce("paced", payloads[number % PAYLOADS], on_delivery=on_delivery)
                number += 1
            producer.poll(0.001)
        producer.flush(60)
        cpu_s = server_cpu_s(broker) - cpu_s
    if failures or not waited:
        raise RuntimeError(f"{len(failures)} records failed: {failures[:1]}")
    latencies_ms = _milliseconds(waited)
    return {
        "server CPU ms/record": cpu_s * 1000 / len(latencies_ms),
        "p50 ms": statistics.median(latencies_ms),
        "p99 ms": statistics.quantiles(latencies_ms, n=100)[98],
        "p99 ms, the disk's stalls apart": statistics.quantiles(_milliseconds(disk.apart(waited)), n=100)[98],
        "p99 ms of a stranger's sync": disk.p99_ms,
    }


def _milliseconds(spans: list[tuple[float, float]]) -> list[float]:
    return [(end - begin) * 1000 for begin, end in spans]


def paced_after_flood(broker: BrokerProcess, seconds: float) -> Figures:
    """The same as `paced`, right after some seconds of `produce` at full speed, while the server still does background
    work."""
    produce(broker, seconds)
    return paced(broker, seconds)


def disk(broker: BrokerProcess, seconds: float) -> Figures:
    """Measure the bytes written to the disk for each byte produced, until the server is at rest. No other program may
    write at the same time.
    """
    os.sync()
    before = _written_bytes()
    figures = produce(broker, seconds)
    produced = figures["MiB/s"] * MEBIBYTE * seconds
    os.sync()
    limit = time.monotonic() + REST_LIMIT_S
    last = _written_bytes()
    while time.monotonic() < limit:
        time.sleep(REST_S)
        os.sync()
        now = _written_bytes()
        if now - last < REST_BYTES:
            break
        last = now
    return {"bytes written/byte": (_written_bytes() - before) / produced}


def consume(broker: BrokerProcess, _seconds: float) -> Figures:
    """Read two gibibytes from the beginning after a restart, when the server has nothing in its own memory."""
    topic = "consume"
    _fill(broker, topic, LOG_RECORDS)
    broker.restart()
    read = librdkafka.consume(broker.bootstrap, topic, PARTITIONS, records=LOG_RECORDS, record_bytes=RECORD_BYTES)
    return {"MiB/s": LOG_RECORDS * RECORD_BYTES / MEBIBYTE / read.seconds}


def consume_warm(broker: BrokerProcess, _seconds: float) -> Figures:
    """Read records that were just produced, by one reader after another: the median of five."""
    topic = "consume-warm"
    _fill(broker, topic, WARM_RECORDS)
    reads = [
        librdkafka.consume(broker.bootstrap, topic, PARTITIONS, records=WARM_RECORDS, record_bytes=RECORD_BYTES)
        for _ in range(5)
    ]
    return {"MiB/s": WARM_RECORDS * RECORD_BYTES / MEBIBYTE / statistics.median(read.seconds for read in reads)}


def follow(broker: BrokerProcess, seconds: float) -> Figures:
    """Read behind a producer at full speed, in a process of its own: from the first record to the last one read."""
    topic = "follow"
    librdkafka.create_topic(broker.bootstrap, topic, PARTITIONS)
    command = [sys.executable, "-m", "bench.workloads", broker.bootstrap, topic, str(seconds)]
    started = time.perf_counter()
    writer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "follow",
            "enable.auto.commit": False,
            "queued.max.messages.kbytes": 131072,
            "fetch.message.max.bytes": 4 * MEBIBYTE,
        }
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
    seen, wanted, elapsed_s = 0, -1, 0.0
    try:
        while wanted < 0 or seen < wanted:
            messages = consumer.consume(1_000, timeout=0.1)
            for message in messages:
                if (error := message.error()) is not None:
                    raise RuntimeError(str(error))
            seen += len(messages)
            elapsed_s = time.perf_counter() - started
            if wanted < 0 and writer.poll() is not None:
                wanted = int(writer.communicate()[0])
            if elapsed_s > DEADLINE_S:
                raise RuntimeError(f"{seen} of {wanted} records were read")
    finally:
        writer.kill()
        writer.wait()
        consumer.close()
    return {"MiB/s": seen * RECORD_BYTES / MEBIBYTE / elapsed_s}


def topics(broker: BrokerProcess, _seconds: float) -> Figures:
    """Create two thousand topics of one partition, a hundred by each request."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.list_topics(timeout=30)
    started = time.perf_counter()
    for first in range(0, TOPICS, TOPICS_PER_REQUEST):
        made = admin.create_topics(
            [NewTopic(f"topic-{number}", 1, 1) for number in range(first, first + TOPICS_PER_REQUEST)],
            operation_timeout=60,
        )
        for each in made.values():
            each.result(60)
    return {"seconds": time.perf_counter() - started}


def offset_commits(broker: BrokerProcess, seconds: float) -> Figures:
    """Commit offsets of one partition each, in four ways:
    one at a time; twenty pipelined on one connection; one at a time on each of a hundred connections; and one at a time
    for a topic that does not exist.
    """
    librdkafka.create_topic(broker.bootstrap, "commits", 1)
    find_coordinator(broker.bootstrap)
    host, _, port = broker.bootstrap.rpartition(":")

    def rate(topic: str, connections: int, window: int) -> float:
        exists = topic == "commits"
        measured = commits(
            host, int(port), topic, connections=connections, window=window, seconds=seconds / 4, exists=exists
        )
        return asyncio.run(measured).per_second

    return {
        "commits/s, one at a time": rate("commits", 1, 1),
        "commits/s, twenty deep": rate("commits", 1, 20),
        "commits/s, a hundred connections": rate("commits", 100, 1),
        "refusals/s, unknown topic": rate("absent", 1, 1),
    }


WORKLOADS: dict[str, Workload] = {
    "produce": produce,
    "produce-16k": produce_small_batches,
    "produce-idempotent": produce_idempotent,
    "produce-many": produce_many,
    "produce-100b": produce_small_records,
    "one-in-flight": one_in_flight,
    "transactions": transactions,
    "paced": paced,
    "paced-after": paced_after_flood,
    "end-to-end": end_to_end,
    "consume": consume,
    "consume-warm": consume_warm,
    "follow": follow,
    "disk": disk,
    "topics": topics,
    "commits": offset_commits,
    **CLIENT_WORKLOADS,
}


def _fill(broker: BrokerProcess, topic: str, records: int) -> None:
    librdkafka.create_topic(broker.bootstrap, topic, PARTITIONS)
    acknowledged = Acknowledged()
    _flood(_producer(broker.bootstrap), topic, acknowledged, until=lambda number: number >= records)
    if acknowledged.check() < records:
        raise RuntimeError(f"{acknowledged.records} of {records} records were acknowledged")


def _written_bytes() -> int:
    counters = psutil.disk_io_counters()
    if counters is None:
        raise RuntimeError("this system does not report the writes of its disks")
    return counters.write_bytes


def _write(arguments: Sequence[str]) -> None:
    """Run the producer that `follow` reads behind; the arguments are BOOTSTRAP TOPIC SECONDS. Print how many records
    were acknowledged.
    """
    bootstrap, topic, seconds = arguments
    acknowledged = Acknowledged()
    _flood(_producer(bootstrap), topic, acknowledged, until=_for(float(seconds)))
    print(acknowledged.check())


if __name__ == "__main__":
    _write(sys.argv[1:])
