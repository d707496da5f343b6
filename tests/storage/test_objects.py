"""Records in a bucket: sorted into objects, named in one statement under a lease, rewritten, removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg
import pytest
from obstore.store import MemoryStore

from storage import retention, roller
from storage.byte_store import Buffer
from storage.chunks import chunk_of
from storage.errors import StorageConflict
from storage.log import LogStore
from storage.mover import Sizes
from storage.nodes import NodeStore
from storage.object_store import ObjectStore, StoreAwayError
from storage.pool import Database
from storage.roller import Roller
from storage.types import CoordinatorLease, LeaseKind, PartitionKey, ReadRequest, ReadResult, Refusal
from tests.storage.batches import EVERYTHING, append, append_each, new_batch, offsets, read
from tests.storage.conftest import MakeTopic

MINUTE_MS = 60_000


class Bucket(ObjectStore):
    """A bucket in memory that can be unavailable, and records what it was asked to write."""

    def __init__(self) -> None:
        super().__init__("s3://bucket", MemoryStore())
        self.away = False
        self.written: dict[int, int] = {}
        self.before_put = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def put(self, object_id: int, pieces: Sequence[Buffer]) -> None:
        self.before_put.set()
        await self.go_on.wait()
        self._look()
        self.written[object_id] = sum(map(len, pieces))
        await super().put(object_id, pieces)

    async def load(self, object_id: int, ranges: Any, look: Any) -> Any:
        self._look()
        return await super().load(object_id, ranges, look)

    async def remove(self, object_ids: Sequence[int]) -> None:
        self._look()
        await super().remove(object_ids)

    def _look(self) -> None:
        if self.away:
            raise StoreAwayError("it is away")


@pytest.fixture
async def bucket() -> AsyncIterator[Bucket]:
    made = Bucket()
    yield made
    made.close()


@pytest.fixture
async def log(database: Database, bucket: Bucket) -> AsyncIterator[LogStore]:
    store = LogStore(database, bucket, inline_max_bytes=0)
    yield store
    await store.close()


@pytest.fixture
def rolls(database: Database, log: LogStore, bucket: Bucket) -> Roller:
    return Roller(database, log, bucket)


async def keys_of(make_topic: MakeTopic, count: int) -> list[PartitionKey]:
    return [partition.partition_key for partition in (await make_topic(partition_count=count)).partitions]


async def objects(bucket: Bucket) -> set[int]:
    return {each.object_id for each in await bucket.listed()}


async def lease_of(database: Database, name: str = "node", ttl_ms: int = MINUTE_MS) -> CoordinatorLease:
    nodes = NodeStore(database)
    node_id = await nodes.register(name, {"PLAINTEXT": (name, 9092)}, None, ttl_ms)
    (lease,) = await nodes.acquire_leases(node_id, [4], ttl_ms, LeaseKind.JOBS)
    return lease


async def age(sql: asyncpg.Connection, column: str) -> None:
    """Make the rows two minutes older."""
    await sql.execute(f"update log_object set {column} = {column} - interval '2 minutes'")


async def test_commits_stay_inline_and_are_moved_sorted_by_partition(
    log: LogStore, rolls: Roller, bucket: Bucket, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    keys = await keys_of(make_topic, 3)
    for number in range(30):
        await append(log, *(new_batch(key, size_bytes=(200, 3_000)[number % 2], fill=number) for key in keys))
    assert await objects(bucket) == set()
    before = [await read(log, key) for key in keys]
    assert await rolls.roll(**EVERYTHING) == 3 * 15 * 3_200
    (object_id,) = await objects(bucket)
    rows = await sql.fetch("select *, null::bytea as records from chunk order by partition_key, base_offset")
    assert [(row["partition_key"], row["base_offset"], row["last_offset"]) for row in rows] == [
        (key, 0, 29) for key in keys
    ]
    assert [row["position"] for row in rows] == [0, 15 * 3_200, 2 * 15 * 3_200], "in the order of the log"
    assert {row["object_id"] for row in rows} == {object_id}
    assert await sql.fetchval("select count(*) from inline_records") == 0
    assert await sql.fetchval("select size_bytes from log_object where sealed_at is not null") == 3 * 15 * 3_200
    assert [await read(log, key) for key in keys] == before
    found = await log.batch_at_timestamp(keys[1], 0)
    assert found is not None
    assert chunk_of(rows[0]).final_heads


async def test_objects_are_of_one_size(database: Database, log: LogStore, bucket: Bucket, key: PartitionKey) -> None:
    rolls = Roller(database, log, bucket, sizes=Sizes(object_bytes=4_000_000))
    await append_each(log, *(new_batch(key, size_bytes=300_000, fill=number) for number in range(70)))
    await rolls.roll(**EVERYTHING)
    sizes = sorted(bucket.written.values())
    assert sum(sizes) == 21_000_000
    assert sizes[0] > 2_000_000
    assert sizes[-1] < 6_000_000
    assert offsets((await read(log, key)).batches) == [(n, n) for n in range(70)]


async def test_a_node_that_has_lost_the_lease_names_no_object(
    database: Database, log: LogStore, rolls: Roller, bucket: Bucket, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append_each(log, *(new_batch(key, fill=number) for number in range(5)))
    lease = await lease_of(database)
    bucket.go_on.clear()
    rolling = asyncio.create_task(rolls.roll(**EVERYTHING, lease=lease))
    await bucket.before_put.wait()
    await sql.execute("update coordinator_lease set expires_at = clock_timestamp() - interval '1 hour'")
    later = await lease_of(database, "successor")
    bucket.go_on.set()
    with pytest.raises(StorageConflict):
        await rolling
    (orphan,) = await objects(bucket)
    assert await sql.fetchval("select count(*) from chunk where inline_slot is not null") == 5
    assert await rolls.roll(**EVERYTHING, lease=later) == 500
    assert await sql.fetchval("select array_agg(distinct object_id) from chunk") != [orphan]
    assert await rolls.sweep(grace_ms=0, lease=later) == 1
    assert orphan not in await objects(bucket)
    assert len((await read(log, key)).batches) == 5


async def test_bytes_stay_inline_while_the_store_refuses_writes(
    log: LogStore, rolls: Roller, bucket: Bucket, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append_each(log, *(new_batch(key, fill=number) for number in range(5)))
    bucket.away = True
    assert await rolls.roll(**EVERYTHING) == 0
    assert len((await read(log, key)).batches) == 5
    assert await rolls.sweep() == 0
    bucket.away = False
    assert await rolls.roll(**EVERYTHING) == 500
    assert await sql.fetchval("select count(*) from inline_records") == 0
    assert len((await read(log, key)).batches) == 5


async def test_records_in_an_unavailable_store_are_damaged_and_the_rest_is_served(
    log: LogStore, rolls: Roller, bucket: Bucket, make_topic: MakeTopic
) -> None:
    far, near = await keys_of(make_topic, 2)
    await append(log, new_batch(far))
    await rolls.roll(**EVERYTHING)
    await append(log, new_batch(near))
    bucket.away = True
    requests = [ReadRequest(far, 0, 10_000), ReadRequest(near, 0, 10_000)]
    one, two = await log.read(requests, max_bytes=10_000)
    assert one is Refusal.DAMAGED
    assert isinstance(two, ReadResult)
    assert len(two.batches) == 1
    assert log.damaged_chunks == 1
    bucket.away = False
    assert len((await read(log, far)).batches) == 1


async def test_an_unreferenced_object_is_removed_after_a_grace(
    database: Database, log: LogStore, rolls: Roller, bucket: Bucket, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append(log, new_batch(key))
    await rolls.roll(**EVERYTHING)
    await log.delete_records(key, -1)
    await retention.apply(database, [retention.RetentionPolicy(key, -1)])
    assert await rolls.sweep() == 0, "just sealed"
    await age(sql, "sealed_at")
    assert await rolls.sweep() == 0, "who found it in the index a moment ago may be about to read it"
    assert len(await objects(bucket)) == 1
    await age(sql, "unreferenced_since")
    assert await rolls.sweep() == 1
    assert await objects(bucket) == set()
    assert await sql.fetchval("select count(*) from log_object") == 0


async def test_small_objects_are_joined_and_sparse_ones_rewritten(
    database: Database, log: LogStore, rolls: Roller, bucket: Bucket, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    one, two = await keys_of(make_topic, 2)
    for number in range(roller.SMALL_OBJECTS):
        await append(log, new_batch(one, size_bytes=500, fill=number), new_batch(two, size_bytes=500, fill=number))
        await rolls.roll(**EVERYTHING)
    assert len(await objects(bucket)) == roller.SMALL_OBJECTS
    await rolls.sweep(grace_ms=0)
    assert await sql.fetchval("select count(distinct object_id) from chunk") == 1
    assert await rolls.sweep(grace_ms=0) == roller.SMALL_OBJECTS
    (whole,) = await objects(bucket)
    await log.delete_records(one, -1)
    await log.delete_records(two, 1)
    await retention.apply(database, [retention.RetentionPolicy(one, -1), retention.RetentionPolicy(two, -1)])
    await sql.execute("update log_object set size_bytes = 10000")
    await rolls.sweep(grace_ms=0)
    assert await rolls.sweep(grace_ms=0) == 1
    (rewritten,) = await objects(bucket)
    assert rewritten != whole
    assert offsets((await read(log, two, 1)).batches) == [(n, n) for n in range(roller.SMALL_OBJECTS)][1:]


async def test_objects_of_a_lost_history_are_removed_and_their_ids_are_not_given_out_again(
    database: Database, log: LogStore, bucket: Bucket, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    last = await sql.fetchval("select coalesce(last_value, 0) from pg_sequences where sequencename like 'log_object%'")
    assert last is not None
    left = last + 3
    await bucket.put(left, [b"of a history that was lost"])
    rolls = Roller(database, log, bucket)
    await rolls.sweep(grace_ms=3_600_000)
    await append(log, new_batch(key))
    await rolls.roll(**EVERYTHING)
    assert min(await objects(bucket) - {left}) > left
    assert await Roller(database, log, bucket).sweep(grace_ms=0) == 1
    assert left not in await objects(bucket)
    assert len((await read(log, key)).batches) == 1


async def test_no_object_is_removed_from_the_store_of_another_database(
    database: Database, log: LogStore, rolls: Roller, bucket: Bucket, key: PartitionKey
) -> None:
    await bucket.create_marker(b'{"store_id": "00000000-0000-0000-0000-000000000000"}')
    await bucket.put(2**40, [b"another database's"])
    assert await rolls.sweep(grace_ms=0) == 0
    assert await objects(bucket) == {2**40}


async def test_appends_and_reads_go_on_while_bytes_move(
    log: LogStore, rolls: Roller, bucket: Bucket, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    done = asyncio.Event()

    async def produce() -> None:
        for number in range(150):
            await append(log, new_batch(key, size_bytes=200, fill=number))
        done.set()

    async def consume() -> None:
        offset = 0
        while offset < 150:
            for batch in (await read(log, key, offset)).batches:
                assert batch.base_offset == offset
                assert batch.records[100] == offset
                offset += 1

    async def move() -> None:
        while not done.is_set():
            await rolls.roll(**EVERYTHING)
            await rolls.sweep(grace_ms=0)

    await asyncio.wait_for(asyncio.gather(produce(), consume(), move()), 60)
    await rolls.roll(**EVERYTHING)
    await rolls.roll(**EVERYTHING)
    assert await sql.fetchval("select count(*) from inline_records") == 0
    assert (await read(log, key)).state.size_bytes == 150 * 200
