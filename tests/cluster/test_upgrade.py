"""A rolling upgrade under load: a node of the current release and one of a synthetic next release, on one schema."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from protocol.errors import ErrorCode
from storage.schema import FUNCTION_SCHEMA, migrations
from tests.chaos.load import Load, assert_nothing_lost
from tests.clients.topics import create_topic
from tests.closing import close
from tests.cluster.next_release import write_next_release
from tests.frames.transactions import Transactional, delivered, fetch
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.postgres import EMPTY, Databases, short_directory
from tests.steps.waiting import wait_for
from tests.wire import WireClient

PARTITIONS = 4
PATIENCE_S = 60.0


class Reader(threading.Thread):
    """A group member that reads and commits until it is stopped, and keeps the errors that it received."""

    def __init__(self, bootstrap: str, topic: str, group: str) -> None:
        super().__init__(daemon=True)
        self.seen: set[tuple[int, int]] = set()
        self.errors: list[KafkaError] = []
        self._stop_requested = threading.Event()
        self._topic = topic
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 500,
                "reconnect.backoff.max.ms": 500,
                "error_cb": self._told,
                "log_level": 0,
            }
        )

    def run(self) -> None:
        self._consumer.subscribe([self._topic])
        while not self._stop_requested.is_set():
            self._take()
        close(self._consumer, self._take)

    def _take(self) -> None:
        try:
            message = self._consumer.poll(0.2)
        except KafkaException as error:
            self._told(error.args[0])
            return
        if message is None:
            return
        error, partition, offset = message.error(), message.partition(), message.offset()
        if error is not None:
            self._told(error)
        elif partition is not None and offset is not None:
            self.seen.add((partition, offset))

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()

    def _told(self, error: KafkaError) -> None:
        # librdkafka's own error codes (below zero) report a lost node, which is expected here.
        if error.code() >= 0 and not error.retriable():
            self.errors.append(error)


@pytest.fixture(scope="module")
def next_release() -> Iterator[Path]:
    with short_directory() as directory:
        yield write_next_release(directory)


@pytest.fixture
def unmigrated_url(postgres: Databases) -> Iterator[str]:
    url = postgres.create(EMPTY)
    yield url
    postgres.drop(url)


def nodes_of(node: GatewayProcess) -> set[str]:
    brokers = AdminClient({"bootstrap.servers": node.bootstrap}).list_topics(timeout=30).brokers.values()
    return {f"{broker.host}:{broker.port}" for broker in brokers}


def topics_of(node: GatewayProcess) -> set[str]:
    return set(AdminClient({"bootstrap.servers": node.bootstrap}).list_topics(timeout=30).topics)


def delete_topic(node: GatewayProcess, topic: str) -> None:
    client = AdminClient({"bootstrap.servers": node.bootstrap})
    client.delete_topics([topic])[topic].result(30)


async def test_this_release_and_the_next_serve_together_and_either_may_stop(
    gateway_factory: GatewayFactory, unmigrated_url: str, next_release: Path
) -> None:
    old = gateway_factory(database_url=unmigrated_url)
    sql = await asyncpg.connect(unmigrated_url)
    try:
        assert await sql.fetchval(VERSION) == len(migrations())
        assert await function_schemas(sql) == {FUNCTION_SCHEMA}
        topic = create_topic(old.bootstrap, PARTITIONS)
        doomed = [create_topic(old.bootstrap, 2) for _ in range(2)]

        # The new node migrates while the old one works.
        address = f"127.0.0.1:{free_ports(1)[0]}"
        both = f"{old.bootstrap},{address}"
        load = Load(both, topic, PARTITIONS)
        load.start()
        load.wait_for(500)
        new = gateway_factory({"listeners": f"PLAINTEXT://{address}"}, database_url=unmigrated_url, root=next_release)
        assert await sql.fetchval(VERSION) == len(migrations()) + 1
        schemas = await function_schemas(sql)
        assert len(schemas) == 2
        assert FUNCTION_SCHEMA in schemas
        wait_for(lambda: nodes_of(old) == nodes_of(new) == {old.bootstrap, new.bootstrap}, "they do not see each other")
        readers = [Reader(both, topic, "readers") for _ in range(2)]
        for reader in readers:
            reader.start()
        load.wait_for(1000)

        # The transaction is begun on one node and ended on the other.
        await assert_transactions_span(old, new)

        # Each node changes something, and the other node sees the change.
        for one, other, name in ((old, new, doomed[0]), (new, old, doomed[1])):
            made = create_topic(one.bootstrap, 2)
            wait_for(lambda made=made, other=other: made in topics_of(other), "a topic that was created is not seen")
            delete_topic(one, name)
            wait_for(lambda name=name, other=other: name not in topics_of(other), "a topic that was deleted is seen")
        load.wait_for(500)

        # Undo the upgrade: the old node continues alone, and its SQL functions still exist. Then repeat the upgrade.
        new.stop()
        load.wait_for(1000)
        assert await function_schemas(sql) == schemas
        assert await sql.fetch(WITHDRAWN) == [("next",)]
        new.start()
        wait_for(lambda: nodes_of(new) == {old.bootstrap, new.bootstrap}, "they do not see each other")
        load.wait_for(500)
        old.stop()
        load.bootstrap = new.bootstrap
        load.wait_for(1000)
        assert await sql.fetch(WITHDRAWN) == [("next",)], "the old node calls its own function"

        load.stop()
        assert_nothing_lost(load)
        acknowledged = set(load.acknowledged.values())
        wait_for(
            lambda: acknowledged <= readers[0].seen | readers[1].seen,
            "the group does not come to the end of the log",
        )
        for reader in readers:
            reader.stop()
            assert not reader.errors, reader.errors[:5]
        assert_committed(new, topic, acknowledged)
        deadline = time.monotonic() + PATIENCE_S
        while await sql.fetchval("select count(*) from sluice.topic where deleted_at is not null"):
            assert time.monotonic() < deadline, "data of deleted topics stays"
        for node in (old, new):
            assert not re.search(r'"level": *"error"', node.log_text()), node.log_tail()
    finally:
        await sql.close()


VERSION = "select max(version) from sluice.schema_migration"
WITHDRAWN = "select withdrawn_by from sluice.node where withdrawn_by is not null"


async def function_schemas(sql: asyncpg.Connection) -> set[str]:
    rows = await sql.fetch("select nspname::text from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$'")
    return {row["nspname"] for row in rows}


async def assert_transactions_span(old: GatewayProcess, new: GatewayProcess) -> None:
    """Begin each transaction on one node and end it on the other."""
    partition = (create_topic(old.bootstrap, 1), 0)
    async with await WireClient.connect(old.bootstrap) as first, await WireClient.connect(new.bootstrap) as second:
        producer = Transactional(second, "both")
        assert await producer.initialize() is ErrorCode.NONE
        for begins, ends in ((first, second), (second, first)):
            producer.client = begins
            assert (await producer.send(partition, b"x", version=12)).error_code == ErrorCode.NONE
            producer.client = ends
            assert await producer.end(committed=True, version=5) is ErrorCode.NONE
        assert len(delivered(await fetch(second, partition, 0, committed=True))) == 2


def assert_committed(node: GatewayProcess, topic: str, acknowledged: set[tuple[int, int]]) -> None:
    ends = {
        index: max(offset for partition, offset in acknowledged if partition == index) for index in range(PARTITIONS)
    }
    consumer = Consumer({"bootstrap.servers": node.bootstrap, "group.id": "readers"})
    try:
        stored = consumer.committed([TopicPartition(topic, index) for index in ends], 30)
    finally:
        consumer.close()
    assert {each.partition: each.offset for each in stored} == {index: end + 1 for index, end in ends.items()}
