"""Measure throughput and latency with librdkafka: produce, one record in flight, tail and cold consumption.

Every figure comes from a stock confluent-kafka client on the same machine. A produce figure counts only records whose
delivery report (acks=all, so a committed transaction with a synced WAL) has arrived.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Throughput:
    records: int
    seconds: float
    record_bytes: int

    @property
    def megabytes_per_second(self) -> float:
        return self.records * self.record_bytes / self.seconds / MEGABYTE


@dataclass(frozen=True, slots=True)
class Latency:
    p50_ms: float
    p99_ms: float
    samples: int


def create_topic(bootstrap: str, name: str, partitions: int, configs: dict[str, str] | None = None) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1, config=configs or {})])[name].result(30)


def produce(
    bootstrap: str, topic: str, *, seconds: float, record_bytes: int = 1024, stop: threading.Event | None = None
) -> Throughput:
    """Produce for `seconds` as fast as acknowledgements allow, then wait for the remaining acknowledgements. If `stop`
    is set, end at once without waiting. Return the number of acknowledged records.
    """
    stop = stop or threading.Event()
    acknowledged = 0
    failures: list[KafkaError] = []

    def on_delivery(error: KafkaError | None, _message: Message) -> None:
        nonlocal acknowledged
        if error is None:
            acknowledged += 1
        else:
            failures.append(error)

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": 5,
            "queue.buffering.max.kbytes": 65536,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    payload = os.urandom(record_bytes)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds and not stop.is_set():
        for _ in range(200):
            try:
                producer.produce(topic, payload, on_delivery=on_delivery)
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    if stop.is_set():
        producer.purge()
    producer.flush(60)
    elapsed = time.perf_counter() - started
    if failures:
        raise RuntimeError(f"{len(failures)} records failed, first: {failures[0]}")
    return Throughput(acknowledged, elapsed, record_bytes)


def one_in_flight(bootstrap: str, topic: str, *, samples: int = 2000) -> Latency:
    """Measure the time from produce() to the delivery report with a single record in flight, acks=all, no linger."""
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
    payload = os.urandom(100)
    times: list[float] = []
    for index in range(samples + 100):
        reports: list[KafkaError | None] = []
        started = time.perf_counter()
        producer.produce(topic, payload, on_delivery=lambda error, _m, reports=reports: reports.append(error))
        while not reports:
            producer.poll(1)
        if reports[0] is not None:
            raise RuntimeError(str(reports[0]))
        if index >= 100:
            times.append((time.perf_counter() - started) * 1000)
    return Latency(statistics.median(times), statistics.quantiles(times, n=100)[98], samples)


def disk_sync(directory: str, *, samples: int = 500) -> Latency:
    """Measure one write of 8 KiB followed by fdatasync. No durable acknowledgement can be faster."""
    path = os.path.join(directory, "sync-probe")
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    block = os.urandom(8192)
    times: list[float] = []
    try:
        for index in range(samples):
            started = time.perf_counter()
            os.pwrite(descriptor, block, index * len(block))
            os.fdatasync(descriptor)
            times.append((time.perf_counter() - started) * 1000)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return Latency(statistics.median(times), statistics.quantiles(times, n=100)[98], samples)


def consume(bootstrap: str, topic: str, partitions: int, *, records: int, record_bytes: int = 1024) -> Throughput:
    """Read `records` from the start of the topic with manual assignment. Time runs from the first message."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"bench-{time.time_ns()}",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 5,
            "queued.max.messages.kbytes": 131072,
            "fetch.message.max.bytes": 4 * 1024 * 1024,
        }
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
    return drain(consumer, records, record_bytes)


def consume_tail(bootstrap: str, topic: str, partitions: int, *, records: int, record_bytes: int = 1024) -> Throughput:
    """Read the newest `records` of the topic. If there are not too many, the gateway still holds them in memory."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"bench-{time.time_ns()}",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 5,
            "queued.max.messages.kbytes": 131072,
            "fetch.message.max.bytes": 4 * 1024 * 1024,
        }
    )
    starts = []
    available = 0
    for index in range(partitions):
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, index), 10)
        start = max(low, high - records // partitions)
        available += high - start
        starts.append(TopicPartition(topic, index, start))
    consumer.assign(starts)
    return drain(consumer, available, record_bytes)


def drain(consumer: Consumer, records: int, record_bytes: int) -> Throughput:
    seen = 0
    started = 0.0
    deadline = time.monotonic() + 120
    while seen < records:
        messages = consumer.consume(min(10_000, records - seen), timeout=1)
        if messages and not started:
            started = time.perf_counter()
        for message in messages:
            error = message.error()
            if error is not None:
                raise RuntimeError(str(error))
        seen += len(messages)
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {seen} of {records} records arrived")
    elapsed = time.perf_counter() - started
    consumer.close()
    return Throughput(seen, elapsed, record_bytes)
