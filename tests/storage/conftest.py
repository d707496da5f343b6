"""Stores on an empty database, and small values that most tests need."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from storage.log import Bounds, LogStore
from storage.nodes import NodeStore
from storage.pool import SESSION_SETTINGS, Database
from storage.segments import SegmentDirectory
from storage.topics import TopicStore
from storage.types import CoordinatorLease, NewTopic, PartitionKey, Topic
from tests.postgres import Databases

MakeTopic = Callable[..., Awaitable[Topic]]
MakeLog = Callable[..., LogStore]

SMALL_SEGMENT_BYTES = 256 * 1024
"""Size of segments, so small that tests reach the end of a file."""

EMPTY = """
delete from committed_offset; delete from group_member; delete from consumer_group; delete from coordinator_lease;
delete from node; delete from compaction_state; delete from producer_state; delete from chunk;
truncate inline_records; delete from client_quota; delete from acl;
delete from scram_credential; delete from delegation_token;
delete from log_object; update inline_rotation set current_slot = 0; delete from partition;
delete from topic; delete from broker_config; delete from function_schema;
delete from transactional_producer; delete from open_transaction; delete from aborted_transaction;
delete from transaction_group; delete from pending_offset; delete from finalized_feature;
"""


@pytest.fixture(scope="module")
def module_database_url(postgres: Databases) -> Iterator[str]:
    """A migrated database that the tests of a module use one after the other."""
    url = postgres.create()
    yield url
    postgres.drop(url)


@pytest.fixture
async def database_url(module_database_url: str) -> str:
    """The module's database, emptied before each test. It continues to count ids. This is much faster than a new
    database for each test.
    """
    connection = await asyncpg.connect(module_database_url, server_settings=dict(SESSION_SETTINGS))
    try:
        await connection.execute(EMPTY)
    finally:
        await connection.close()
    return module_database_url


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=4, cold_connections=2)
    yield opened
    await opened.close()


@pytest.fixture
async def sql(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A plain connection beside the stores, with the same session settings."""
    settings = {**SESSION_SETTINGS, "application_name": "test"}
    connection = await asyncpg.connect(database_url, server_settings=settings)
    yield connection
    await connection.close()


@pytest.fixture
def place() -> str:
    """The place where the log's bytes are stored. `statement` and `copy` store them inline and name the two ways to
    write them. `segment` is a directory.
    """
    return "statement"


@pytest.fixture
async def make_log(place: str, tmp_path: Path) -> AsyncIterator[MakeLog]:
    """Make the stores of one place. Further arguments are fields of `Bounds`."""
    never, always = 2**62, 0
    limit = always if place == "copy" else never
    made: list[LogStore] = []

    def make(database: Database, **bounds: int) -> LogStore:
        directory = SegmentDirectory(tmp_path, segment_bytes=SMALL_SEGMENT_BYTES) if place == "segment" else None
        given = Bounds(copy_mean_bytes=limit, copy_group_bytes=limit, **bounds)
        made.append(LogStore(database, directory, inline_max_bytes=0, bounds=given))
        return made[-1]

    yield make
    for log in made:
        await log.close()


@pytest.fixture
def log(database: Database, make_log: MakeLog) -> LogStore:
    return make_log(database)


@pytest.fixture
def topics(database: Database) -> TopicStore:
    return TopicStore(database)


@pytest.fixture
def make_topic(topics: TopicStore) -> MakeTopic:
    async def make(name: str = "orders", partition_count: int = 1) -> Topic:
        (topic,) = await topics.create([NewTopic(name, partition_count, {})])
        assert isinstance(topic, Topic)
        return topic

    return make


@pytest.fixture
async def key(make_topic: MakeTopic) -> PartitionKey:
    """The key of a new topic's only partition."""
    return (await make_topic()).partitions[0].partition_key


LATER_REVISION = 1_000_000
"""A revision that no catalog of these tests reaches."""


@pytest.fixture
async def leases(database: Database) -> list[CoordinatorLease]:
    """Leases of shards 0 to 2, held by a registered node that follows every change of the catalog."""
    nodes = NodeStore(database)
    node_id = await nodes.register("localhost:9092", {"PLAINTEXT": ("localhost", 9092)}, None, 60_000)
    await nodes.renew(node_id, 60_000, catalog_revision=LATER_REVISION)
    return await nodes.acquire_leases(node_id, [0, 1, 2], 60_000)
