"""Producer ids, and forgetting idle producers."""

from __future__ import annotations

import asyncio

import asyncpg

from storage.log import LogStore
from storage.pool import Database
from storage.producers import BLOCK_SIZE, ProducerStore
from storage.types import Appended, PartitionKey
from tests.storage.batches import append, new_batch

HOUR_MS = 3_600_000


async def test_no_producer_id_is_given_twice(database: Database) -> None:
    stores = [ProducerStore(database) for _ in range(3)]
    calls = [store.allocate_producer_id() for store in stores for _ in range(BLOCK_SIZE + 5)]
    ids = await asyncio.gather(*calls)
    assert len(set(ids)) == len(ids)
    assert min(ids) >= 0
    assert await ProducerStore(database).allocate_producer_id() > max(ids)


async def test_concurrent_callers_reserve_one_block_of_ids(database: Database, sql: asyncpg.Connection) -> None:
    store = ProducerStore(database)
    first = await store.allocate_producer_id()
    before = await sql.fetchval("select next_producer_id from cluster")
    assert [await store.allocate_producer_id() for _ in range(5)] == [first + i for i in range(1, 6)]
    assert await sql.fetchval("select next_producer_id from cluster") == before


async def test_idle_producers_are_forgotten_in_bounded_passes(
    database: Database, log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    store = ProducerStore(database)
    await append(log, *(new_batch(key, producer=(i, 0, 0)) for i in range(6)))
    await sql.execute("update producer_state set appended_at = now() - interval '1 hour' where producer_id < 5")
    assert await store.expire(2 * HOUR_MS, 100) == 0
    assert await store.expire(HOUR_MS, 2) == 2
    assert await store.expire(HOUR_MS, 100) == 3
    assert await sql.fetchval("select array_agg(producer_id) from producer_state") == [5]


async def test_a_forgotten_producer_may_continue_with_any_sequence(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    await append(log, new_batch(key, producer=(1, 0, 0)))
    assert await ProducerStore(database).expire(0, 100) == 1
    assert await log.append([new_batch(key, producer=(1, 0, 9))]) == [Appended(1, 0, 0)]
