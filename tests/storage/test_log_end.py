"""The end of a log, whose appends leave the partition's row alone: the cost of an open snapshot, and who moves the
row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from storage import retention
from storage.append_group import AppendGroup
from storage.compaction import CompactionPolicy, CompactionStore
from storage.log import LogStore
from storage.pool import SESSION_SETTINGS, Database
from storage.queries import statement
from storage.retention import RetentionPolicy
from storage.roller import Roller
from storage.segments import SegmentDirectory
from storage.types import Appended, NewBatch, PartitionKey, PartitionState
from tests.steps.waiting import until_blocked
from tests.storage.batches import EVERYTHING, append, append_each, new_batch, read
from tests.storage.conftest import MakeTopic
from tests.storage.pages import pages_touched

PRODUCER = 4000
ROW = "select next_offset, size_bytes, max_timestamp_ms from partition where partition_key = $1"
STATES = "select count(*) from producer_state"


def idempotent(key: PartitionKey, sequence: int) -> NewBatch:
    return new_batch(key, max_timestamp_ms=1_000 + sequence, producer=(PRODUCER, 0, sequence))


def arguments(*batches: NewBatch) -> tuple[object, ...]:
    """Arguments of an inline `append_chunks`."""
    group = AppendGroup(batches)
    return group.arguments(wait=False, records=[b"".join(group.buffers(i)) for i in range(len(group.candidates))])


async def state(log: LogStore, key: PartitionKey) -> PartitionState:
    return (await log.states([key]))[key]


# --- an open snapshot -----------------------------------------------------------------------------------------------


@pytest.fixture
async def snapshot(database_url: str) -> AsyncIterator[None]:
    """Hold a snapshot of the database open."""
    holder = await asyncpg.connect(database_url, server_settings=dict(SESSION_SETTINGS))
    await holder.execute("begin isolation level repeatable read; select count(*) from partition")
    yield
    await holder.close()


async def test_the_pages_of_an_append_and_a_read_do_not_grow_under_an_open_snapshot(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection, snapshot: None
) -> None:
    touched: list[list[int]] = []
    sequence = 0
    for count in (100, 1_000):
        for _ in range(count):
            await append(log, idempotent(key, sequence))
            sequence += 1
        touched.append(
            [
                await pages_touched(sql, statement("append_chunks"), *arguments(idempotent(key, sequence))),
                await pages_touched(sql, statement("append_chunks"), *arguments(new_batch(key))),
                await pages_touched(sql, statement("partition_states"), [key]),
                await pages_touched(
                    sql, statement("read_chunks"), [key], [sequence - 1], [1_000], [False], 1_000, 0, 10**6, True
                ),
            ]
        )
    assert all(after <= before + 20 for before, after in zip(*touched, strict=True)), touched
    assert touched[1][2] < 20


@pytest.mark.parametrize("name", ["append_chunks", "append_plain"])
async def test_the_pages_of_a_commit_to_several_partitions_do_not_grow_under_an_open_snapshot(
    log: LogStore, make_topic: MakeTopic, sql: asyncpg.Connection, snapshot: None, name: str
) -> None:
    """The statistics know a small table, so to the planner a look at all its rows seems cheap."""
    keys = [partition.partition_key for partition in (await make_topic("wide", 3)).partitions]
    await log.append([idempotent(key, 0) for key in keys])
    await sql.execute("vacuum analyze producer_state")
    touched: list[int] = []
    sequence = 1
    for count in (40, 400):
        for _ in range(count):
            await log.append([idempotent(key, sequence) for key in keys])
            sequence += 1
        batches = [idempotent(key, sequence) for key in keys]
        group = AppendGroup(batches)
        records = [b"".join(group.buffers(candidate)) for candidate in range(len(keys))]
        plain = group.plain_arguments(object_id=None, position=None, records=records)
        assert plain is not None
        touched.append(
            await pages_touched(sql, statement(name), *(plain if name == "append_plain" else arguments(*batches)))
        )
    assert touched[1] <= touched[0] + 20, touched


async def test_a_producer_keeps_one_row_and_its_duplicates_are_recognised_across_rows(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    for sequence in range(100):
        assert await log.append([idempotent(key, sequence)]) == [Appended(sequence, 0, 0)]
        if sequence >= 4:
            (outcome,) = await log.append([idempotent(key, sequence - 4)])
            assert outcome == Appended(sequence - 4, 0, 0, duplicate=True)
        assert await sql.fetchval(STATES) == 1
    since, updates = await sql.fetchrow("select since_offset, update_count from producer_state") or (0, 0)
    assert (since, updates) == (99, 0), "every 33rd append begins a row"


# --- who moves the row ----------------------------------------------------------------------------------------------


async def test_an_append_writes_no_new_version_of_its_partition_row(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append_each(log, *(new_batch(key, records=2, max_timestamp_ms=i) for i in range(5)))
    assert tuple(await sql.fetchrow(ROW, key) or ()) == (0, 0, -1)
    assert await state(log, key) == PartitionState(0, 10, 10, 0, 500)
    assert tuple(await sql.fetchrow("select next_offset, size_bytes, max_timestamp_ms from partition_log") or ()) == (
        10,
        500,
        4,
    )
    assert await sql.fetchval("select log_end_offset from topic_partition") == 10


@pytest.mark.parametrize("by", ["retention", "deletion"])
async def test_the_end_outlives_the_last_chunk(
    database: Database, log: LogStore, key: PartitionKey, sql: asyncpg.Connection, by: str
) -> None:
    await append_each(log, *(new_batch(key, max_timestamp_ms=1_000 + i) for i in range(5)))
    if by == "deletion":
        assert await log.delete_records(key, -1) == 5
        assert await state(log, key) == PartitionState(5, 5, 5, 0, 500)
    for _ in range(2):
        await retention.apply(database, [RetentionPolicy(key, 0, -1)])
        assert await sql.fetchval("select count(*) from chunk") == 0
        assert await state(log, key) == PartitionState(5, 5, 5, 0, 0)
    assert await append(log, new_batch(key, max_timestamp_ms=9)) == [5]
    assert await state(log, key) == PartitionState(5, 6, 6, 0, 100)
    assert await sql.fetchval("select running_max_timestamp_ms from chunk") == 1_004, "it never falls"


async def test_bytes_removed_from_the_middle_are_counted_once(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    """The log start rises below the end while appends continue, round after round."""
    for end in range(5, 30, 5):
        await append_each(log, *(new_batch(key) for _ in range(5)))
        assert await log.delete_records(key, end - 2) == end - 2
        assert await state(log, key) == PartitionState(end - 2, end, end, 0, 700 if end > 5 else 500)
        await retention.apply(database, [RetentionPolicy(key, -1, -1)])
        assert await state(log, key) == PartitionState(end - 2, end, end, 0, 200)


async def test_moving_chunks_leaves_the_end_and_the_size(
    database: Database, make_topic: MakeTopic, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """Chunks are joined with those before them. Some rows of the index began behind the partition's row."""
    directory = SegmentDirectory(tmp_path, segment_bytes=256 * 1024)
    log = LogStore(database, directory, inline_max_bytes=10_000)
    roller = Roller(database, log, directory)
    keys = [partition.partition_key for partition in (await make_topic(partition_count=3)).partitions]
    for i in range(4):
        for key in keys:
            await append_each(log, *(new_batch(key, max_timestamp_ms=i) for _ in range(3)))
        before = await log.states(keys)
        assert all(each.high_watermark == 3 * (i + 1) == each.size_bytes // 100 for each in before.values())
        await roller.roll(**EVERYTHING)
        assert await log.states(keys) == before
        assert await sql.fetchval("select bool_and(max_timestamp_ms = $1) from partition", i)
    await roller.close()
    await log.close()


async def test_the_end_outlives_a_log_emptied_by_compaction_and_retention(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    await append_each(log, *(new_batch(key) for _ in range(5)))
    compaction = CompactionStore(database, log)
    (dirty,) = await compaction.dirty_ranges([CompactionPolicy(key)])
    await compaction.replace(await compaction.begin(dirty), [0, 1, 2, 3], [])
    assert await state(log, key) == PartitionState(0, 5, 5, 0, 100)
    await retention.apply(database, [RetentionPolicy(key, 0, -1)])
    assert await state(log, key) == PartitionState(5, 5, 5, 0, 0)
    assert await append(log, new_batch(key)) == [5]


async def test_a_deletion_that_waits_for_an_append_sees_its_records(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection, database_url: str
) -> None:
    """A lock makes no new version of the row, so a transaction that has waited for it must read again."""
    await append(log, new_batch(key))
    watcher = await asyncpg.connect(database_url)
    try:
        async with sql.transaction():
            await sql.fetch(statement("append_chunks"), *arguments(new_batch(key)))
            deleting = asyncio.create_task(log.delete_records(key, -1))
            await until_blocked(watcher, 1)
        assert await deleting == 2
    finally:
        await watcher.close()


async def test_writers_that_mistake_an_old_row_for_the_end_are_refused(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append(log, new_batch(key))
    with pytest.raises(asyncpg.UniqueViolationError):
        await sql.execute("insert into chunk select (c).* from (select c from chunk c) copied")
    with pytest.raises(asyncpg.CheckViolationError):
        await sql.execute("update partition set log_start_offset = greatest(log_start_offset, 1)")
    assert (await read(log, key)).state == PartitionState(0, 1, 1, 0, 100)
