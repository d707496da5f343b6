"""Which records retention removes, and which it must keep."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from storage import retention
from storage.log import LogStore
from storage.pool import Database
from storage.queries import statement
from storage.retention import RetentionPolicy
from storage.types import PartitionKey, ReadRequest, ReadResult, Refusal
from tests.steps.waiting import until_blocked
from tests.storage.batches import append, append_each, new_batch, offsets, read
from tests.storage.conftest import MakeTopic
from tests.storage.pages import ABORTED, fill_unknown, pages_touched
from tests.storage.transactions import Producer, plain_batch, read_committed

MINUTE_MS = 60_000


@pytest.fixture
async def now_ms(sql: asyncpg.Connection) -> int:
    """The database's clock, which retention follows."""
    return int(await sql.fetchval("select (extract(epoch from clock_timestamp()) * 1000)::bigint") or 0)


async def kept(database: Database, log: LogStore, key: PartitionKey, **limits: int) -> list[int]:
    """Run a pass and return the base offsets of the readable batches. Assert that rows, sizes and log start agree."""
    moved: dict[PartitionKey, int] = {}
    outcome = await retention.apply(database, [RetentionPolicy(key, **limits)], moved=moved.__setitem__)
    assert outcome.complete
    state = (await log.states([key]))[key]
    result = await read(log, key, state.log_start_offset)
    assert state.size_bytes == sum(len(batch.records) for batch in result.batches)
    if moved:
        assert moved == {key: state.log_start_offset}
    rows = await database.cold.fetch("select base_offset from chunk where partition_key = $1 order by 1", key)
    assert [row["base_offset"] for row in rows] == [batch.base_offset for batch in result.batches]
    return [batch.base_offset for batch in result.batches]


async def test_retention_by_time_removes_the_batches_before_the_first_young_one(
    database: Database, log: LogStore, key: PartitionKey, now_ms: int
) -> None:
    ages = [50, 40, 5, 30, 1]  # Ages in minutes. The fourth batch is older than the third and stays after it.
    await append_each(log, *(new_batch(key, max_timestamp_ms=now_ms - age * MINUTE_MS) for age in ages))
    assert await kept(database, log, key, retention_ms=20 * MINUTE_MS) == [2, 3, 4]
    assert await kept(database, log, key, retention_ms=20 * MINUTE_MS) == [2, 3, 4]


async def test_a_log_older_than_its_retention_becomes_empty_and_accepts_appends(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    await append_each(log, *(new_batch(key, records=4) for _ in range(3)))
    assert await kept(database, log, key, retention_ms=MINUTE_MS) == []
    state = (await log.states([key]))[key]
    assert (state.log_start_offset, state.high_watermark, state.size_bytes) == (12, 12, 0)
    assert await append(log, new_batch(key)) == [12]


async def test_retention_by_size_leaves_at_least_the_limit(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    await append_each(log, *(new_batch(key) for _ in range(10)))
    assert await kept(database, log, key, retention_ms=-1, retention_bytes=10_000) == list(range(10))
    assert await kept(database, log, key, retention_ms=-1, retention_bytes=350) == [6, 7, 8, 9]
    assert await kept(database, log, key, retention_ms=-1, retention_bytes=0) == []


async def test_retention_by_time_and_size_removes_what_either_allows(
    database: Database, log: LogStore, key: PartitionKey, now_ms: int
) -> None:
    await append_each(log, new_batch(key), *(new_batch(key, max_timestamp_ms=now_ms) for _ in range(4)))
    assert await kept(database, log, key, retention_ms=MINUTE_MS, retention_bytes=450) == [1, 2, 3, 4]
    assert await kept(database, log, key, retention_ms=MINUTE_MS, retention_bytes=200) == [3, 4]


async def test_a_batch_without_timestamps_ages_from_its_append(
    database: Database, log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append_each(log, new_batch(key, max_timestamp_ms=-1), new_batch(key, max_timestamp_ms=-1, size_bytes=600_000))
    assert await kept(database, log, key, retention_ms=MINUTE_MS) == [0, 1]
    await sql.execute(
        "update chunk set append_timestamp_ms = append_timestamp_ms - $1 where base_offset = 0", MINUTE_MS
    )
    assert await kept(database, log, key, retention_ms=MINUTE_MS) == [1]


async def test_delete_records_moves_the_log_start_before_retention_removes_the_rows(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    await append_each(log, *(new_batch(key, records=10) for _ in range(3)))
    assert await log.delete_records(key, 15) == 15
    assert await log.delete_records(key, 3) == 15, "never back"
    assert await kept(database, log, key, retention_ms=-1) == [10, 20], "the batch of the log start stays whole"
    assert await log.delete_records(key, 31) is Refusal.OFFSET_OUT_OF_RANGE
    assert await log.delete_records(key, -2) is Refusal.OFFSET_OUT_OF_RANGE
    assert await log.delete_records(key, 30) == 30
    assert await log.delete_records(key, -1) == 30
    assert await kept(database, log, key, retention_ms=-1) == []
    assert await log.delete_records(PartitionKey(10**9), -1) is Refusal.UNKNOWN_PARTITION


async def test_a_pass_is_bounded_and_reports_that_more_is_due(
    database: Database, log: LogStore, make_topic: MakeTopic
) -> None:
    keys = [partition.partition_key for partition in (await make_topic(partition_count=2)).partitions]
    for key in keys:
        await append_each(log, *(new_batch(key) for _ in range(10)))
    policies = [RetentionPolicy(key, MINUTE_MS) for key in keys]

    moved: dict[PartitionKey, int] = {}
    first = await retention.apply(database, policies, max_chunks=4, moved=moved.__setitem__)
    assert (first.deleted_batches, first.deleted_bytes, first.complete) == (4, 400, False)
    assert moved == {keys[0]: 4, keys[1]: 4}, "partitions take turns"
    rest = await retention.apply(database, policies)
    assert (rest.deleted_batches, rest.complete) == (16, True)
    states = await log.states(keys)
    assert [(states[key].log_start_offset, states[key].size_bytes) for key in keys] == [(10, 0), (10, 0)]


async def test_rows_below_a_log_start_count_neither_as_size_nor_twice(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    await append_each(log, *(new_batch(key) for _ in range(10)))
    await log.delete_records(key, 5)
    assert await kept(database, log, key, retention_ms=-1, retention_bytes=500) == [5, 6, 7, 8, 9]


async def test_concurrent_passes_and_appends_agree(
    database: Database, log: LogStore, key: PartitionKey, now_ms: int
) -> None:
    await append_each(log, *(new_batch(key) for _ in range(200)))

    async def produce() -> None:
        for _ in range(20):
            await append(log, new_batch(key, max_timestamp_ms=now_ms))

    policy = RetentionPolicy(key, MINUTE_MS)
    passes = [retention.apply(database, [policy], max_chunks=150) for _ in range(3)]
    outcomes = await asyncio.gather(produce(), *passes)
    deleted = sum(outcome.deleted_batches for outcome in outcomes if outcome is not None)
    assert deleted == 200
    assert await kept(database, log, key, retention_ms=MINUTE_MS) == list(range(200, 220))


async def test_partitions_with_nothing_due_are_not_changed(
    database: Database, log: LogStore, key: PartitionKey, now_ms: int, sql: asyncpg.Connection
) -> None:
    await append(log, new_batch(key, max_timestamp_ms=now_ms))
    before = await sql.fetchval("select xmin::text from partition where partition_key = $1", key)
    moved: dict[PartitionKey, int] = {}
    policies = [RetentionPolicy(key), RetentionPolicy(PartitionKey(10**9))]
    outcome = await retention.apply(database, policies, moved=moved.__setitem__)
    assert (moved, outcome.deleted_batches, outcome.complete) == ({}, 0, True)
    assert await sql.fetchval("select xmin::text from partition where partition_key = $1", key) == before


def test_policies_default_to_kafkas_defaults(key: PartitionKey) -> None:
    policy = RetentionPolicy(key)
    assert (policy.retention_ms, policy.retention_bytes) == (604_800_000, -1)


# --- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [5_000, 45_000])
async def test_removing_the_oldest_rows_costs_the_same_in_a_deep_partition_unknown_to_the_statistics(
    sql: asyncpg.Connection, make_topic: MakeTopic, depth: int
) -> None:
    """If the planner assumed that the partition has a single row, it would begin with all of its rows, and would search
    the oldest again for each."""
    topic = await make_topic(partition_count=11)
    new = await fill_unknown(sql, [partition.partition_key for partition in topic.partitions], depth)
    await sql.execute("update partition set log_start_offset = 400 where partition_key = $1", new)
    assert await pages_touched(sql, statement("delete_below_log_start"), new, 100) < 1_000
    assert await pages_touched(sql, statement("retention_candidates"), [new], [1], [1]) < 20
    assert await pages_touched(sql, statement("retention_boundary"), new, 1, 1, 100) < 300


async def test_a_chunk_that_was_joined_across_the_log_start_stays(
    database: Database, log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    """Neighbours are joined between the look for removable chunks and their removal. The first of them now belongs to a
    chunk with records that must stay."""
    await append_each(log, *(new_batch(key) for _ in range(3)))
    chunks = await log.chunks_between(key, 0, 2)
    batches = (await read(log, key)).batches
    await log.delete_records(key, 2)
    async with database.hot.connection() as mover, database.hot.connection() as between:
        await mover.execute("begin")
        refusal = await mover.fetchval(
            statement("replace_chunks"),
            key,
            None,
            None,
            [chunk.base_offset for chunk in chunks],
            [chunk.object_id for chunk in chunks],
            [chunk.position for chunk in chunks],
            [0],
            [2],
            [1_000],
            [3],
            [0],
            [300],
            None,
            None,
            [b"".join(batch.records for batch in batches)],
        )
        assert refusal is None
        # The search ignores this lock. The removal waits for the lock until the other transaction's work is visible.
        await between.execute("begin")
        locking = asyncio.create_task(between.execute("lock table chunk in share mode"))
        await until_blocked(sql, 1)
        removing = asyncio.create_task(retention.apply(database, [RetentionPolicy(key, -1)]))
        await until_blocked(sql, 2)
        await mover.execute("commit")
        await locking
        await between.execute("commit")
        await removing
    assert offsets((await read(log, key, 2)).batches) == [(2, 2)]


# --- transactions ----------------------------------------------------------------------------------------------------


async def aborted_rows(sql: asyncpg.Connection, key: PartitionKey) -> list[tuple[int, int]]:
    rows = await sql.fetch(
        "select first_offset, last_offset from aborted_transaction where partition_key = $1 order by 2", key
    )
    return [tuple(row) for row in rows]


async def test_an_aborted_transaction_is_forgotten_once_its_marker_is_removed(
    database: Database, log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    producer = Producer(database, log, 1)
    for _ in range(3):
        await producer.append(key, (b"a", b"1"))
        await producer.append(key, (b"b", b"1"))
        await producer.end(committed=False)
    rows = [(0, 2), (3, 5), (6, 8)]
    for log_start_offset, kept_rows in ((1, rows), (2, rows), (3, rows[1:]), (5, rows[1:]), (9, [])):
        await log.delete_records(key, log_start_offset)
        await kept(database, log, key, retention_ms=-1)
        assert await aborted_rows(sql, key) == kept_rows, log_start_offset
        assert (await read_committed(log, key))[0] == []


async def test_a_long_log_forgets_no_aborted_transaction_before_its_time(
    database: Database, log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    """Rows of chunks are removed in bounded pieces, the oldest first."""
    producer = Producer(database, log, 1)
    for _ in range(5):
        await producer.append(key, (b"a", b"1"))
        await producer.end(committed=False)
    await log.delete_records(key, 6)
    outcome = await retention.apply(database, [RetentionPolicy(key, -1)], max_chunks=2)
    assert not outcome.complete
    assert await aborted_rows(sql, key) == [(6, 7), (8, 9)], "none is of use to a reader from the log start on"


async def test_many_aborted_transactions_are_forgotten_in_bounded_steps(
    database: Database, log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    """One statement for some million of them would reach its time limit, again and again."""
    await append(log, new_batch(key, records=5_000))
    await sql.execute(ABORTED, key, 5_000)
    await log.delete_records(key, 4_500)
    assert await pages_touched(sql, statement("delete_below_log_start"), key, 100) < 3_000
    await log.delete_records(key, -1)
    await retention.apply(database, [RetentionPolicy(key, -1)], max_chunks=1)
    assert await aborted_rows(sql, key) == []
    assert await kept(database, log, key, retention_ms=-1) == []


async def test_the_last_stable_offset_is_never_below_the_log_start(
    database: Database, log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append_each(log, *(plain_batch(key, (b"p", b"1")) for _ in range(2)))
    producer = Producer(database, log, 1)
    await producer.append(key, (b"a", b"1"))
    await append_each(log, *(plain_batch(key, (b"p", b"1")) for _ in range(3)))

    async def stable() -> int:
        state = (await log.states([key]))[key]
        assert (await read(log, key, state.log_start_offset)).state == state
        return state.last_stable_offset

    assert await stable() == 2
    await log.delete_records(key, 4)
    assert await stable() == 4
    assert await kept(database, log, key, retention_ms=-1) == [4, 5]
    assert await stable() == 4
    await producer.end(committed=False)
    assert await stable() == 7
    assert await aborted_rows(sql, key) == [(2, 6)], "it may have appended behind the log start, too"
    assert [record.offset for record in (await read_committed(log, key))[0]] == [4, 5]


async def test_records_removed_during_a_read_are_not_delivered_as_committed(
    database: Database, log: LogStore, key: PartitionKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader reads first the batches and then the list of aborted transactions. Retention may have removed from the
    list what the batches need."""
    producer = Producer(database, log, 1)
    await producer.append(key, (b"a", b"1"))
    await producer.end(committed=False)
    await producer.append(key, (b"a", b"2"))
    await producer.end(committed=True)
    fetch = database.cold.fetch

    async def overtaken(query: str, *arguments: object) -> object:
        if query == statement("aborted_between"):
            await log.delete_records(key, 2)
            await kept(database, log, key, retention_ms=-1)
        return await fetch(query, *arguments)

    monkeypatch.setattr(type(database.cold), "fetch", lambda _, query, *arguments: overtaken(query, *arguments))
    (result,) = await log.read([ReadRequest(key, 0, 10**6, committed=True)], max_bytes=10**6)
    assert isinstance(result, ReadResult)
    assert (result.state.log_start_offset, result.batches, result.aborted) == (2, (), ())
