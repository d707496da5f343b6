"""A rolling upgrade: a node of the previous release and one of this release on one schema, under load."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.init_producer_id import InitProducerIdRequest
from storage.schema import FUNCTION_SCHEMA, migrations
from tests.chaos.load import Load, assert_nothing_lost
from tests.clients.topics import create_topic
from tests.closing import close
from tests.cluster.previous_release import WITH_NAMED_PARTITIONS, unpack
from tests.frames.transactions import Transactional, delivered, fetch
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.postgres import Databases, short_directory
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
        # librdkafka's own codes below zero say that a node went away, which is expected here.
        if error.code() >= 0 and not error.retriable():
            self.errors.append(error)


@pytest.fixture(scope="module")
def former() -> Iterator[Path]:
    with short_directory() as directory:
        yield unpack(directory)


@pytest.fixture
def unmigrated_url(postgres: Databases) -> Iterator[str]:
    url = postgres.create(empty=True)
    yield url
    postgres.drop(url)


def wait_for(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def nodes_of(node: GatewayProcess) -> set[str]:
    brokers = AdminClient({"bootstrap.servers": node.bootstrap}).list_topics(timeout=30).brokers.values()
    return {f"{broker.host}:{broker.port}" for broker in brokers}


def topics_of(node: GatewayProcess) -> set[str]:
    return set(AdminClient({"bootstrap.servers": node.bootstrap}).list_topics(timeout=30).topics)


def delete_topic(node: GatewayProcess, topic: str) -> None:
    client = AdminClient({"bootstrap.servers": node.bootstrap})
    client.delete_topics([topic])[topic].result(30)


async def test_the_previous_release_and_this_one_serve_together_and_either_may_stop(
    gateway_factory: GatewayFactory, unmigrated_url: str, former: Path
) -> None:
    old = gateway_factory(database_url=unmigrated_url, root=former)
    sql = await asyncpg.connect(unmigrated_url)
    try:
        before = await sql.fetchval("select max(version) from sluice.schema_migration")
        (theirs,) = [row["nspname"] for row in await sql.fetch(SCHEMAS)]
        assert before < len(migrations())
        assert theirs != FUNCTION_SCHEMA
        topic = create_topic(old.bootstrap, PARTITIONS)
        doomed = [create_topic(old.bootstrap, 2) for _ in range(2)]

        # The new node migrates while the old one works.
        address = f"127.0.0.1:{free_ports(1)[0]}"
        both = f"{old.bootstrap},{address}"
        load = Load(both, topic, PARTITIONS)
        load.start()
        load.wait_for(500)
        new = gateway_factory({"listeners": f"PLAINTEXT://{address}"}, database_url=unmigrated_url)
        assert await sql.fetchval("select max(version) from sluice.schema_migration") == len(migrations())
        assert await sql.fetchval("select array_agg(function_schema) from sluice.former_release") == [theirs]
        wait_for(lambda: nodes_of(old) == nodes_of(new) == {old.bootstrap, new.bootstrap}, "they do not see each other")
        readers = [Reader(both, topic, "readers") for _ in range(2)]
        for reader in readers:
            reader.start()
        load.wait_for(1000)

        # The old node would return uncommitted records to consumers with read_committed.
        assert await initialized(new) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert await transaction_version(new) == 0

        # Each node changes something and the other one sees the change.
        for one, other, name in ((old, new, doomed[0]), (new, old, doomed[1])):
            made = create_topic(one.bootstrap, 2)
            wait_for(lambda made=made, other=other: made in topics_of(other), "a topic that was created is not seen")
            delete_topic(one, name)
            wait_for(lambda name=name, other=other: name not in topics_of(other), "a topic that was deleted is seen")
        load.wait_for(500)

        # The upgrade is taken back: the old node continues alone, and its functions still exist. Then the upgrade is
        # repeated.
        new.stop()
        load.wait_for(1000)
        assert {theirs, FUNCTION_SCHEMA} == {row["nspname"] for row in await sql.fetch(SCHEMAS)}
        new.start()
        wait_for(lambda: nodes_of(new) == {old.bootstrap, new.bootstrap}, "they do not see each other")
        load.wait_for(500)
        old.stop()
        load.bootstrap = new.bootstrap
        load.wait_for(1000)
        assert await initialized(new) is ErrorCode.NONE

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


async def test_producers_enlist_their_partitions_while_a_node_of_the_previous_release_lives(
    gateway_factory: GatewayFactory, unmigrated_url: str
) -> None:
    """If one node announced transaction.version 2 to a client, the other node would refuse that client."""
    with short_directory() as directory:
        old = gateway_factory(database_url=unmigrated_url, root=unpack(directory, WITH_NAMED_PARTITIONS))
        address = f"127.0.0.1:{free_ports(1)[0]}"
        new = gateway_factory({"listeners": f"PLAINTEXT://{address}"}, database_url=unmigrated_url)
        wait_for(lambda: nodes_of(old) == nodes_of(new) == {old.bootstrap, new.bootstrap}, "they do not see each other")
        assert await transaction_version(new) == 1
        partition = (create_topic(old.bootstrap, 1), 0)
        async with await WireClient.connect(old.bootstrap) as first, await WireClient.connect(new.bootstrap) as second:
            producer = Transactional(second, "named")
            assert await producer.initialize() is ErrorCode.NONE
            for client in (first, second):
                assert await producer.add(partition) == [ErrorCode.NONE]
                producer.client = client
                assert (await producer.send(partition, b"x", version=11)).error_code == ErrorCode.NONE
                assert await producer.end(committed=True) is ErrorCode.NONE
            unnamed = await producer.send(partition, b"x", version=11)
            assert unnamed.error_code == ErrorCode.TRANSACTION_ABORTABLE
            old.stop()
            deadline = time.monotonic() + PATIENCE_S
            while await transaction_version(new) != 2:
                assert time.monotonic() < deadline, "the old one has gone"
                await asyncio.sleep(0.05)
            producer.client = second
            assert (await producer.send(partition, b"x", version=12)).error_code == ErrorCode.NONE
            assert await producer.end(committed=True, version=5) is ErrorCode.NONE
            assert len(delivered(await fetch(second, partition, 0, committed=True))) == 3


SCHEMAS = "select nspname::text from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$'"


async def initialized(node: GatewayProcess) -> ErrorCode:
    """Start a transactional producer, and return the error code."""
    async with await WireClient.connect(node.bootstrap) as client:
        asked = InitProducerIdRequest(transactional_id="transactional", transaction_timeout_ms=60_000)
        return ErrorCode((await client.send(asked, 4)).error_code)


async def transaction_version(node: GatewayProcess) -> int:
    """Return the finalized transaction.version that clients see, or 0 without one."""
    async with await WireClient.connect(node.bootstrap) as client:
        asked = ApiVersionsRequest(client_software_name="tests", client_software_version="1")
        finalized = (await client.send(asked, 4)).finalized_features
    return next((each.max_version_level for each in finalized if each.name == "transaction.version"), 0)


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
