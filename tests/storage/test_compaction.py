"""Compaction: which partitions are worth cleaning, and how batches are replaced without changing offsets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from storage import retention
from storage.chunks import Chunk
from storage.compaction import AbortedSpan, CompactionPolicy, CompactionStore, DirtyRange
from storage.errors import StorageConflict, StorageError
from storage.log import LogStore
from storage.mover import Mover
from storage.pool import SESSION_SETTINGS, Database
from storage.topics import TopicStore
from storage.types import PartitionKey, StoredBatch
from tests.steps.waiting import until_blocked
from tests.storage.batches import append, append_each, batch_bytes, new_batch, offsets, read
from tests.storage.conftest import MakeTopic
from tests.storage.transactions import Producer, plain_batch

HOUR_MS = 3_600_000


@pytest.fixture(params=["statement", "segment"])
def place(request: pytest.FixtureRequest) -> str:
    """Run every test of this module in each place where records may be stored."""
    return request.param


@pytest.fixture
def compaction(database: Database, log: LogStore) -> CompactionStore:
    return CompactionStore(database, log)


@pytest.fixture
async def now_ms(sql: asyncpg.Connection) -> int:
    return int(await sql.fetchval("select (extract(epoch from clock_timestamp()) * 1000)::bigint") or 0)


@pytest.fixture
async def ten(log: LogStore, key: PartitionKey) -> PartitionKey:
    """Return a partition with ten batches of two records and 100 bytes each, at offsets 0 to 19 and
    times 1000 to 1009.
    """
    await append_each(log, *(new_batch(key, records=2, max_timestamp_ms=1000 + i) for i in range(10)))
    return key


def batch(base_offset: int, last_offset: int, size_bytes: int = 70, max_timestamp_ms: int = 1000) -> StoredBatch:
    records = bytes(batch_bytes(size_bytes, last_offset - base_offset + 1, max_timestamp_ms, base_offset=base_offset))
    return StoredBatch(base_offset, last_offset, max_timestamp_ms, records)


async def dirty_range(compaction: CompactionStore, key: PartitionKey, **limits: float) -> DirtyRange | None:
    ranges = await compaction.dirty_ranges([CompactionPolicy(key, **limits)])  # type: ignore[arg-type]
    return ranges[0] if ranges else None


async def test_a_new_log_is_dirty_up_to_its_last_batch(compaction: CompactionStore, ten: PartitionKey) -> None:
    assert await dirty_range(compaction, ten) == DirtyRange(ten, 0, 0, 18, 0, 1000)


async def test_an_empty_log_one_batch_and_an_unknown_partition_are_not_dirty(
    compaction: CompactionStore, log: LogStore, key: PartitionKey
) -> None:
    assert await dirty_range(compaction, key) is None
    await append(log, new_batch(key))
    assert await dirty_range(compaction, key) is None
    assert await dirty_range(compaction, PartitionKey(10**9)) is None


async def test_a_cleaned_log_is_dirty_again_by_ratio(
    compaction: CompactionStore, log: LogStore, ten: PartitionKey
) -> None:
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    run = await compaction.begin(dirty)
    await compaction.replace(run, list(range(0, 18, 2)), [batch(16, 17, 300)])
    await compaction.finish(run)
    assert await dirty_range(compaction, ten) is None, "300 clean bytes, 100 dirty ones"
    await append_each(log, *(new_batch(ten) for _ in range(2)))
    assert await dirty_range(compaction, ten) == DirtyRange(ten, 0, 18, 21, 300, 300)
    assert await dirty_range(compaction, ten, min_cleanable_dirty_ratio=0.51) is None


async def test_the_clean_end_of_each_partition_is_reported(
    compaction: CompactionStore, log: LogStore, ten: PartitionKey, make_topic: MakeTopic
) -> None:
    other = (await make_topic("payments")).partitions[0].partition_key
    await append_each(log, *(new_batch(other) for _ in range(2)))
    assert await compaction.cleaned_to([ten, other]) == {}
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    run = await compaction.begin(dirty)
    assert await compaction.cleaned_to([ten, other]) == {}, "only what is finished counts"
    await compaction.finish(run)
    assert await compaction.cleaned_to([ten, other]) == {ten: 18}
    assert await compaction.cleaned_to([other]) == {}


async def test_the_dirtiest_come_first_and_the_answer_is_bounded(
    compaction: CompactionStore, log: LogStore, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    keys = [partition.partition_key for partition in (await make_topic(partition_count=3)).partitions]
    for i, key in enumerate(keys):
        await append_each(log, *(new_batch(key) for _ in range(10)))
        await sql.execute("insert into compaction_state values ($1, 0, 2, $2)", key, [200, 0, 100][i])
    policies = [CompactionPolicy(key) for key in keys]
    assert [found.partition_key for found in await compaction.dirty_ranges(policies)] == [keys[1], keys[2], keys[0]]
    assert [found.partition_key for found in await compaction.dirty_ranges(policies, limit=1)] == [keys[1]]


async def test_the_range_ends_where_the_minimum_lag_begins(
    compaction: CompactionStore, log: LogStore, key: PartitionKey, now_ms: int
) -> None:
    ages = [5, 4, 0.5, 3, 0.1]
    await append_each(log, *(new_batch(key, max_timestamp_ms=now_ms - int(age * HOUR_MS)) for age in ages))
    dirty = await dirty_range(compaction, key, min_compaction_lag_ms=HOUR_MS)
    assert dirty is not None
    assert (dirty.first_dirty_offset, dirty.end_offset) == (0, 2)
    assert await dirty_range(compaction, key, min_compaction_lag_ms=6 * HOUR_MS) is None


async def test_the_minimum_lag_of_a_batch_without_timestamps_begins_with_its_append(
    compaction: CompactionStore, log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append_each(log, *(new_batch(key, max_timestamp_ms=-1) for _ in range(5)))
    age = "update chunk set append_timestamp_ms = append_timestamp_ms - $1::bigint where base_offset < 3"
    await sql.execute(age, 2 * HOUR_MS)
    dirty = await dirty_range(compaction, key, min_compaction_lag_ms=HOUR_MS)
    assert dirty is not None
    assert (dirty.first_dirty_offset, dirty.end_offset) == (0, 3)


async def test_the_maximum_lag_overrides_the_ratio(
    compaction: CompactionStore, log: LogStore, ten: PartitionKey, now_ms: int, sql: asyncpg.Connection
) -> None:
    await sql.execute("insert into compaction_state values ($1, 0, 4, 999)", ten)
    assert await dirty_range(compaction, ten) is None
    assert await dirty_range(compaction, ten, max_compaction_lag_ms=HOUR_MS) is not None
    assert await dirty_range(compaction, ten, max_compaction_lag_ms=now_ms) is None


async def test_replacing_batches_keeps_offsets_and_the_log_end(
    compaction: CompactionStore, log: LogStore, ten: PartitionKey
) -> None:
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    run = await compaction.begin(dirty)
    # Batch 0-1 is removed, 2-3 shrinks, 4-9 become one batch, 10-11 and 12-13 stay.
    await compaction.replace(run, [0, 2, 4, 6, 8], [batch(5, 9, 70, 1004), batch(2, 3, 65)])
    await compaction.finish(run)
    result = await read(log, ten)
    assert offsets(result.batches) == [(2, 3), (5, 9), (10, 11), (12, 13), (14, 15), (16, 17), (18, 19)]
    assert result.batches[1].records == batch(5, 9, 70, 1004).records, "stored as given"
    state = result.state
    assert (state.log_start_offset, state.high_watermark, state.size_bytes) == (0, 20, 635)
    assert offsets((await read(log, ten, 4)).batches)[0] == (5, 9)
    assert await append(log, new_batch(ten)) == [20]


async def test_lookups_by_time_stay_correct_after_replacing(
    compaction: CompactionStore, log: LogStore, key: PartitionKey
) -> None:
    for timestamp_ms in (5000, 9000, 3000, 7000, 8000, 9500):
        await append(log, new_batch(key, max_timestamp_ms=timestamp_ms))
    dirty = await dirty_range(compaction, key)
    assert dirty is not None
    await compaction.replace(
        await compaction.begin(dirty),
        [0, 1, 2, 3],
        [batch(0, 1, 61, 5000), batch(2, 2, 61, 3000), batch(3, 3, 61, 7000)],
    )
    times = {0: 5000, 2: 3000, 3: 7000, 4: 8000, 5: 9500}
    for timestamp_ms in range(0, 11_000, 500):
        found = await log.batch_at_timestamp(key, timestamp_ms)
        expected = next((base for base, time in times.items() if time >= timestamp_ms), None)
        assert (found.base_offset if found else None) == expected, timestamp_ms


async def test_a_new_run_ends_the_previous_one(compaction: CompactionStore, log: LogStore, ten: PartitionKey) -> None:
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    first, second = await compaction.begin(dirty), await compaction.begin(dirty)
    before = await read(log, ten)
    with pytest.raises(StorageConflict):
        await compaction.replace(first, [0], [])
    with pytest.raises(StorageConflict):
        await compaction.finish(first)
    assert await read(log, ten) == before
    await compaction.replace(second, [0], [])
    await compaction.finish(second)


async def test_a_chunk_may_hold_batches_that_stay_and_batches_that_go(
    compaction: CompactionStore, database: Database, log: LogStore, ten: PartitionKey
) -> None:
    """The roller joins chunks while compaction runs. It does not know where the compaction's range ends."""
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    run = await compaction.begin(dirty)

    async def pages() -> AsyncIterator[list[Chunk]]:
        yield await log.chunks_between(ten, 0, 19)

    assert await Mover(database, log, None).move(pages()) == 1000
    assert len(await log.chunks_between(ten, 0, 19)) == 1
    await compaction.replace(run, [0, 2, 16], [batch(2, 3, 65)])
    await compaction.finish(run)
    result = await read(log, ten)
    assert offsets(result.batches)[0] == (2, 3)
    assert offsets(result.batches)[-2:] == [(14, 15), (18, 19)]
    assert (result.state.high_watermark, result.state.size_bytes) == (20, 765)
    assert await append(log, new_batch(ten)) == [20]


async def test_a_batch_removed_by_retention_ends_the_replacing(
    compaction: CompactionStore, database: Database, log: LogStore, ten: PartitionKey
) -> None:
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    run = await compaction.begin(dirty)
    await log.delete_records(ten, 2)
    await retention.apply(database, [retention.RetentionPolicy(ten, -1)])
    with pytest.raises(StorageConflict):
        await compaction.replace(run, [0, 2], [batch(0, 3)])
    assert offsets((await read(log, ten, 2)).batches)[0] == (2, 3)


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        ([18], []),  # The last batch.
        ([0], [batch(0, 2)]),  # Into the next batch.
        ([2], [batch(1, 3)]),  # Into the previous batch.
        ([0], [batch(4, 5)]),  # Elsewhere.
        ([0, 4], [batch(0, 5)]),  # Over a batch that stays.
        ([0, 2], [batch(0, 2), batch(2, 3)]),  # Over each other.
        ([0], [batch(1, 0)]),
        ([], [batch(0, 1)]),
    ],
)
async def test_replacements_that_do_not_fit_are_refused_as_a_whole(
    compaction: CompactionStore,
    log: LogStore,
    ten: PartitionKey,
    removed: list[int],
    added: list[StoredBatch],
) -> None:
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    before = await read(log, ten)
    run = await compaction.begin(dirty)
    with pytest.raises(StorageError):
        await compaction.replace(run, removed, added)
    assert await read(log, ten) == before


async def test_a_batch_does_not_grow_into_a_gap(compaction: CompactionStore, log: LogStore, ten: PartitionKey) -> None:
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    run = await compaction.begin(dirty)
    await compaction.replace(run, [2, 4], [])
    for added in (batch(0, 2), batch(0, 5)):
        with pytest.raises(StorageError):
            await compaction.replace(run, [0], [added])
    with pytest.raises(StorageError):
        await compaction.replace(run, [6], [batch(5, 7)])


async def test_the_dirty_ratio_stays_correct_after_retention_of_cleaned_batches(
    compaction: CompactionStore, database: Database, log: LogStore, ten: PartitionKey
) -> None:
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    run = await compaction.begin(dirty)
    await compaction.finish(run)
    await log.delete_records(ten, 16)
    await retention.apply(database, [retention.RetentionPolicy(ten, -1)])
    await append(log, new_batch(ten))
    assert await dirty_range(compaction, ten) == DirtyRange(ten, 16, 18, 20, 100, 200)


async def test_the_dirty_ratio_stays_correct_if_retention_removes_cleaned_batches_while_a_run_finishes(
    compaction: CompactionStore, log: LogStore, ten: PartitionKey, database_url: str, sql: asyncpg.Connection
) -> None:
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    run = await compaction.begin(dirty)
    await log.delete_records(ten, 16)
    removing = await asyncpg.connect(database_url, server_settings=dict(SESSION_SETTINGS))
    try:
        await removing.execute("begin")
        await removing.execute("select delete_below_log_start($1, 1000)", ten)
        finishing = asyncio.create_task(compaction.finish(run))
        await until_blocked(sql, 1)
        await removing.execute("commit")
        await finishing
    finally:
        await removing.close()
    await append(log, new_batch(ten))
    assert await dirty_range(compaction, ten) == DirtyRange(ten, 16, 18, 20, 100, 200)


async def test_a_deleted_partition_is_not_compacted(
    compaction: CompactionStore, topics: TopicStore, log: LogStore, make_topic: MakeTopic
) -> None:
    topic = await make_topic("gone")
    key = topic.partitions[0].partition_key
    await append_each(log, new_batch(key), new_batch(key))
    dirty = await dirty_range(compaction, key)
    assert dirty is not None
    await topics.delete(topic.topic_id)
    assert await dirty_range(compaction, key) is None
    with pytest.raises(StorageConflict):
        await compaction.begin(dirty)


# --- transactions ----------------------------------------------------------------------------------------------------


async def test_a_range_ends_before_the_first_open_transaction(
    compaction: CompactionStore, database: Database, log: LogStore, ten: PartitionKey
) -> None:
    early, late, silent = [Producer(database, log, producer_id) for producer_id in (1, 2, 3)]
    await silent.take_in(ten)
    assert await dirty_range(compaction, ten) == DirtyRange(ten, 0, 0, 18, 0, 1000), "it has appended nothing"
    assert await early.append(ten, (b"a", b"1")) == 20
    assert await late.append(ten, (b"a", b"2")) == 21
    await append_each(log, *(new_batch(ten) for _ in range(3)))

    async def end_offset() -> int:
        found = await dirty_range(compaction, ten)
        assert found is not None
        return found.end_offset

    assert await end_offset() == 20
    await early.end(committed=True)
    assert await end_offset() == 21
    await append_each(log, *(new_batch(ten) for _ in range(2)))
    await late.end(committed=False)
    assert await end_offset() == 28, "the newest batch, the marker"


async def test_a_range_that_begins_at_an_open_transaction_is_empty(
    compaction: CompactionStore, database: Database, log: LogStore, ten: PartitionKey
) -> None:
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    await compaction.finish(await compaction.begin(dirty))
    producer = Producer(database, log, 1)
    await producer.append(ten, (b"a", b"1"))
    await append_each(log, *(new_batch(ten) for _ in range(10)))
    assert await dirty_range(compaction, ten) == DirtyRange(ten, 0, 18, 20, 900, 1170)
    await compaction.finish(await compaction.begin(DirtyRange(ten, 0, 18, 20, 0, 0)))
    assert await dirty_range(compaction, ten) is None
    await producer.end(committed=True)
    assert await dirty_range(compaction, ten) is not None


async def test_a_range_ends_before_the_chunk_in_which_a_transaction_begins(
    compaction: CompactionStore, database: Database, log: LogStore, ten: PartitionKey
) -> None:
    """One commit may contain transactional and other batches."""
    producer = Producer(database, log, 1)
    await producer.take_in(ten)
    plain, opening = plain_batch(ten, (b"a", b"1")), producer.batch(ten, (b"a", b"2"))
    assert await append(log, plain, opening) == [20, 21]
    await append_each(log, *(new_batch(ten) for _ in range(3)))
    assert [chunk.base_offset for chunk in await log.chunks_between(ten, 18, 22)] == [18, 20, 22]
    dirty = await dirty_range(compaction, ten)
    assert dirty is not None
    assert dirty.end_offset == 20


@pytest.mark.parametrize("before_offset", [21, 22])
async def test_a_transaction_whose_first_records_were_deleted_holds_the_range_at_the_log_start(
    compaction: CompactionStore, database: Database, log: LogStore, ten: PartitionKey, before_offset: int
) -> None:
    producer = Producer(database, log, 1)
    await producer.append(ten, (b"a", b"1"))
    await append_each(log, *(new_batch(ten) for _ in range(2)))
    await producer.append(ten, (b"a", b"2"))
    await append_each(log, *(new_batch(ten) for _ in range(2)))
    await log.delete_records(ten, before_offset)
    assert await dirty_range(compaction, ten) is None
    await retention.apply(database, [retention.RetentionPolicy(ten, -1)])
    assert await dirty_range(compaction, ten) is None
    assert (await log.states([ten]))[ten].last_stable_offset == before_offset
    await producer.end(committed=True)
    assert await dirty_range(compaction, ten) is not None


async def test_the_aborted_transactions_of_a_range_are_returned(
    compaction: CompactionStore, database: Database, log: LogStore, key: PartitionKey, make_topic: MakeTopic
) -> None:
    other = (await make_topic("payments")).partitions[0].partition_key
    first, second, third = [Producer(database, log, producer_id) for producer_id in (11, 12, 13)]
    await first.append(key, (b"a", b"1"))  # 0
    await second.append(key, (b"a", b"2"))  # 1
    await first.end(committed=False)  # 2
    await first.append(key, (b"a", b"3"))  # 3
    await first.append(other, (b"a", b"3"))
    await third.append(key, (b"a", b"4"))  # 4
    await first.end(committed=False)  # 5
    await third.end(committed=True)  # 6
    await append(log, plain_batch(key, (b"a", b"5")))  # 7
    await second.end(committed=False)  # 8
    await third.append(key, (b"a", b"6"))  # 9
    spans = [AbortedSpan(11, 0, 2), AbortedSpan(12, 1, 8), AbortedSpan(11, 3, 5)]
    for begin in range(11):
        for end in range(begin + 1, 11):
            expected = [span for span in spans if span.first_offset < end and span.last_offset >= begin]
            assert await compaction.aborted_between(key, begin, end) == expected, (begin, end)
    assert await compaction.aborted_between(other, 0, 100) == [AbortedSpan(11, 0, 1)]


async def test_an_aborted_transaction_without_records_leaves_a_marker_and_no_row(
    compaction: CompactionStore, database: Database, log: LogStore, key: PartitionKey
) -> None:
    producer = Producer(database, log, 1)
    await producer.take_in(key)
    await producer.end(committed=False)
    assert offsets((await read(log, key)).batches) == [(0, 0)]
    assert await compaction.aborted_between(key, 0, 100) == []
