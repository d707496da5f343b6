"""Create topics, fill them, and read them back. librdkafka does this, so that the tests check Spark against another
client.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Sequence

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tests.pipeline.jobs import Record

_numbers = itertools.count()
SECONDS = 60.0
# Timestamps are current. Otherwise retention could remove records that a slow test still needs.
START_MS = int(time.time() * 1000) - 3_600_000


def fresh(bootstrap: str, partitions: int, **config: str) -> str:
    """Return a name for a new topic."""
    name = f"topic-{next(_numbers)}-{random.randrange(10**9)}"
    make(bootstrap, name, partitions, **config)
    return name


def make(bootstrap: str, name: str, partitions: int, **config: str) -> None:
    settings = {key.replace("_", "."): value for key, value in config.items()}
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(name, partitions, 1, config=settings)]).values():
        future.result(SECONDS)


def grow(bootstrap: str, name: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_partitions([NewPartitions(name, partitions)]).values():
        future.result(SECONDS)


def delete(bootstrap: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_topics([name]).values():
        future.result(SECONDS)


def delete_records(bootstrap: str, name: str, partition: int, before: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_records([TopicPartition(name, partition, before)]).values():
        future.result(SECONDS)


def records(count: int, partitions: int, *, seed: int = 0, size: int = 40) -> list[Record]:
    """Return records of every form: with and without key, value and headers, and with arbitrary bytes."""
    chance = random.Random(seed)
    found: list[Record] = []
    for index in range(count):
        key = None if index % 7 == 0 else b"" if index % 11 == 0 else b"key %d" % (index % 100)
        value = None if index % 13 == 0 else chance.randbytes(chance.randrange(size))
        headers: list[tuple[str, bytes | None]] = []
        if index % 3 == 0:
            headers = [("trace", chance.randbytes(4)), ("trace", None), ("größe", b"")]
        found.append((index % partitions, key, value, START_MS + index * 10, headers))
    return found


def fill(bootstrap: str, topic: str, given: Iterable[Record]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "enable.idempotence": True})
    for partition, key, value, timestamp, headers in given:
        while True:
            try:
                producer.produce(topic, value, key, partition, timestamp=timestamp, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(SECONDS) == 0


def read(bootstrap: str, topic: str, partition: int, count: int) -> list[tuple[int, Record]]:
    """Return the first `count` records of a partition with their offsets."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, partition, 0)])
    found: list[tuple[int, Record]] = []
    deadline = time.monotonic() + SECONDS
    try:
        while len(found) < count:
            assert time.monotonic() < deadline, f"{topic}-{partition}: {len(found)} of {count} records"
            for message in consumer.consume(count - len(found), 1.0):
                assert message.error() is None, message.error()
                record = (
                    partition,
                    message.key(),
                    message.value(),
                    message.timestamp()[1],
                    list(message.headers() or ()),
                )
                found.append((message.offset(), record))
    finally:
        consumer.close()
    return found


def per_partition(given: Sequence[Record], partition: int) -> list[Record]:
    return [record for record in given if record[0] == partition]
