"""Run `sluice mirror` as a user does, and read both clusters."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from typing import Any, NamedTuple

import confluent_kafka
import pytest

from gateway.commands import groups
from gateway.commands.client import Cluster
from gateway.commands.groups import Commit, commit_offsets
from tests.gateway_process import GatewayProcess
from tests.kafka.process import LIBRARIES
from tests.steps.command import Command, sluice

TIMEOUT_S = 120
needs_kafka = pytest.mark.skipif(
    shutil.which("java") is None or (shutil.which("mvn") is None and not LIBRARIES.exists()),
    reason="Kafka needs java, and mvn for its jars",
)
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


class Seen(NamedTuple):
    """A record as a consumer sees it."""

    offset: int
    timestamp: tuple[int, int]
    key: bytes | None
    value: bytes | None
    headers: tuple[Any, ...]


def words(source: str, target: GatewayProcess, *more: str) -> list[str]:
    """Return the words of a command that mirrors into a gateway's database."""
    assert target.database_url is not None
    return ["mirror", "--from", source, "--to", target.bootstrap, "--database-url", target.database_url, *more]


def start(source: str, target: GatewayProcess, *more: str) -> Command:
    return Command(*words(source, target, *more))


def mirror_once(source: str, target: GatewayProcess, *more: str) -> dict[str, Any]:
    """Mirror up to the source's end and return the report."""
    code, report, said = try_once(source, target, *more)
    assert code == 0, said
    (found,) = json.loads(report)
    return found


def try_once(source: str, target: GatewayProcess, *more: str) -> tuple[int, str, str]:
    """Run the mirror. Return its exit code and its output."""
    done = sluice(*words(source, target, "--once", "--json", *more))
    return done.returncode, done.stdout, done.stderr


def read_partition(bootstrap: str, topic: str, partition: int = 0, **settings: Any) -> list[Seen]:
    """Return the committed records of a partition, up to its current last stable offset."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": uuid.uuid4().hex,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
            "auto.offset.reset": "earliest",
            **settings,
        }
    )
    found: list[Seen] = []
    try:
        start_offset, _ = consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, partition), 30)
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, start_offset)])
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            message = consumer.poll(1)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                assert error.name() == "_PARTITION_EOF", error
                return found
            offset, headers = message.offset(), message.headers() or []
            assert offset is not None
            found.append(Seen(offset, message.timestamp(), message.key(), message.value(), tuple(headers)))
        raise AssertionError(f"no end of {topic}[{partition}] in {TIMEOUT_S} s")
    finally:
        consumer.close()


def watermarks(bootstrap: str, topic: str, partition: int = 0) -> tuple[int, int]:
    """Return the log's first offset and its next offset."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": uuid.uuid4().hex})
    try:
        return consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, partition), 30)
    finally:
        consumer.close()


def cluster(bootstrap: str) -> Cluster:
    """Return a cluster client of the kind that commands use."""
    host, _, port = bootstrap.partition(":")
    return Cluster([(host, int(port))], timeout_s=30)


def commit(bootstrap: str, group: str, offsets: dict[tuple[str, int], int]) -> None:
    """Commit offsets of a group without members, with metadata."""
    with cluster(bootstrap) as broker:
        commit_offsets(broker, group, {key: Commit(offset, "from the source") for key, offset in offsets.items()})


def commits_of(bootstrap: str, group: str) -> dict[tuple[str, int], Commit]:
    with cluster(bootstrap) as broker:
        return groups.committed(broker, group)


def committed(bootstrap: str, group: str, *places: tuple[str, int]) -> list[int]:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        asked = [confluent_kafka.TopicPartition(topic, partition) for topic, partition in places]
        return [place.offset for place in consumer.committed(asked, 30)]
    finally:
        consumer.close()


def fill(bootstrap: str, topic: str, partition: int, count: int, **settings: object) -> None:
    """Produce records with keys, headers and timestamps of their own."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, **settings})
    first_ms = time.time_ns() // 1_000_000 - count * 1000  # so recent that retention keeps the records
    for number in range(count):
        producer.produce(
            topic,
            key=None if number % 7 == 0 else b"key-%d" % (number % 20),
            value=None if number % 11 == 0 else b"%06d" % number * 20,
            partition=partition,
            timestamp=first_ms + number * 1000,
            headers=[("number", b"%d" % number), ("empty", None)],
        )
        producer.poll(0)
    assert producer.flush(60) == 0


def transact(bootstrap: str, topic: str, values: list[bytes], *, commits: bool) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": uuid.uuid4().hex})
    producer.init_transactions(30)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(30) == 0
    if commits:
        producer.commit_transaction(30)
    else:
        producer.abort_transaction(30)


def consume(bootstrap: str, topic: str, group: str, count: int) -> list[int | None]:
    """Read this many records as a member of the group, commit, and return their offsets."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False}
        | {"auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe([topic])
        messages = consumer.consume(count, 60)
        assert len(messages) == count
        consumer.commit(asynchronous=False)
        return [message.offset() for message in messages]
    finally:
        consumer.close()
