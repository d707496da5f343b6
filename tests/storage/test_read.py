"""Reads: limits, gaps, refusals, and a cost that follows the result."""

from __future__ import annotations

import asyncpg
import pytest

from storage.log import LogStore
from storage.pool import Database
from storage.queries import statement
from storage.topics import TopicStore
from storage.types import PartitionKey, PartitionState, ReadRequest, ReadResult, Refusal
from tests.storage.batches import append, append_each, new_batch, offsets, read
from tests.storage.conftest import MakeLog, MakeTopic
from tests.storage.pages import fill, fill_unknown, pages_touched


@pytest.fixture(params=["statement", "segment"])
def place(request: pytest.FixtureRequest) -> str:
    """Run every test of this module in each place of the bytes."""
    return request.param


@pytest.fixture
async def five(log: LogStore, key: PartitionKey) -> PartitionKey:
    """A partition of five batches of two records and 100 bytes: offsets 0-9."""
    for _ in range(5):
        await append(log, new_batch(key, records=2))
    return key


@pytest.mark.parametrize(("offset", "first"), [(0, 0), (1, 0), (2, 2), (3, 2), (9, 8)])
async def test_reading_begins_with_the_batch_that_holds_the_offset(
    log: LogStore, five: PartitionKey, offset: int, first: int
) -> None:
    assert (await read(log, five, offset)).batches[0].base_offset == first


@pytest.mark.parametrize(
    ("max_bytes", "count"), [(0, 1), (1, 1), (100, 1), (199, 1), (200, 2), (499, 4), (500, 5), (10**9, 5)]
)
async def test_a_read_returns_whole_batches_within_the_limit_and_the_first_always(
    log: LogStore, five: PartitionKey, max_bytes: int, count: int
) -> None:
    assert len((await read(log, five, 0, max_bytes)).batches) == count


async def test_a_batch_larger_than_every_limit_is_returned_whole(log: LogStore, key: PartitionKey) -> None:
    await append(log, new_batch(key, size_bytes=1_000_000), new_batch(key))
    result = await read(log, key, 0, 10)
    assert [len(batch.records) for batch in result.batches] == [1_000_000]


@pytest.mark.parametrize("most", [1, 2, 3, 100])
async def test_a_read_ends_at_the_batch_limit_and_the_next_continues(
    database: Database, make_log: MakeLog, make_topic: MakeTopic, most: int
) -> None:
    """Chunks hold one batch or several. A read may also begin within a chunk."""
    log = make_log(database, batches=most)
    keys = [part.partition_key for part in (await make_topic(partition_count=2)).partitions]
    for key in keys:
        await append_each(log, *(new_batch(key) for _ in range(4)))
        await append(log, *(new_batch(key) for _ in range(4)))
        await append_each(log, *(new_batch(key) for _ in range(4)))
    at, reads = dict.fromkeys(keys, 0), 0
    while set(at.values()) != {12}:
        results = await log.read([ReadRequest(key, at[key], 10**6) for key in keys], max_bytes=10**6)
        before = sum(at.values())
        for key, result in zip(keys, results, strict=True):
            assert isinstance(result, ReadResult)
            assert result.state.high_watermark == 12
            begun = [batch.base_offset for batch in result.batches]
            assert begun == list(range(at[key], at[key] + len(begun)))
            at[key] += len(begun)
        assert before < sum(at.values()) <= before + most + 4 + 3
        reads += 1
    assert (reads == 1) == (most == 100)


async def test_limits_count_over_partitions_in_the_order_asked(log: LogStore, make_topic: MakeTopic) -> None:
    topic = await make_topic(partition_count=3)
    one, two, three = (partition.partition_key for partition in topic.partitions)
    for key in (two, three):
        await append(log, *(new_batch(key) for _ in range(4)))
    requests = [ReadRequest(one, 0, 1000), ReadRequest(three, 0, 250), ReadRequest(two, 1, 1000)]
    results = await log.read(requests, max_bytes=350)
    counts = [len(result.batches) for result in results if isinstance(result, ReadResult)]
    assert counts == [0, 2, 1], "an empty partition takes nothing; 250 allows two; of 350 one is left"
    assert [result.state.high_watermark for result in results if isinstance(result, ReadResult)] == [0, 4, 4]


@pytest.mark.parametrize("at_once", [1, 2, 3, 500])
async def test_limits_count_over_all_statements_of_a_call(
    database: Database, make_log: MakeLog, make_topic: MakeTopic, at_once: int
) -> None:
    log = make_log(database, requests=at_once)
    keys = [partition.partition_key for partition in (await make_topic(partition_count=5)).partitions]
    for _ in range(4):
        await append(log, *(new_batch(key) for key in keys))
    requests = [ReadRequest(key, 0, 250) for key in keys]
    requests.insert(1, ReadRequest(PartitionKey(10**9), 0, 250))
    results = await log.read(requests, max_bytes=500)
    assert results.pop(1) is Refusal.UNKNOWN_PARTITION
    read_of = [result for result in results if isinstance(result, ReadResult)]
    assert [len(result.batches) for result in read_of] == [2, 2, 1, 0, 0]
    assert [result.state.high_watermark for result in read_of] == [4] * 5


async def test_only_the_first_partition_with_records_may_exceed_its_limit(log: LogStore, make_topic: MakeTopic) -> None:
    one, two = (partition.partition_key for partition in (await make_topic(partition_count=2)).partitions)
    await append(log, new_batch(one), new_batch(two))
    results = await log.read([ReadRequest(one, 0, 10), ReadRequest(two, 0, 10)], max_bytes=1000)
    assert [len(result.batches) for result in results if isinstance(result, ReadResult)] == [1, 0]


async def test_a_call_may_name_one_partition_twice(log: LogStore, five: PartitionKey) -> None:
    results = await log.read([ReadRequest(five, 8, 100), ReadRequest(five, 0, 100)], max_bytes=1000)
    assert [offsets(result.batches) for result in results if isinstance(result, ReadResult)] == [[(8, 9)], [(0, 1)]]


@pytest.mark.parametrize("offset", [-1, 10, 11, 2**62])
async def test_an_offset_outside_the_log_returns_only_the_state(log: LogStore, five: PartitionKey, offset: int) -> None:
    assert await read(log, five, offset) == ReadResult(PartitionState(0, 10, 10, 0, 500), ())


async def test_an_offset_below_the_log_start_returns_only_the_state(log: LogStore, five: PartitionKey) -> None:
    assert await log.delete_records(five, 5) == 5
    result = await read(log, five, 4)
    assert (result.state.log_start_offset, result.batches) == (5, ())
    assert (await read(log, five, 5)).batches[0].base_offset == 4, "the batch that holds the log start is still whole"


async def test_unknown_and_deleted_partitions_are_refused_in_their_place(
    log: LogStore, five: PartitionKey, topics: TopicStore, make_topic: MakeTopic
) -> None:
    gone = await make_topic("gone")
    await append(log, new_batch(gone.partitions[0].partition_key))
    await topics.delete(gone.topic_id)
    results = await log.read(
        [
            ReadRequest(PartitionKey(10**9), 0, 1000),
            ReadRequest(five, 0, 1000),
            ReadRequest(gone.partitions[0].partition_key, 0, 1000),
        ],
        max_bytes=1000,
    )
    assert results[0] is Refusal.UNKNOWN_PARTITION
    assert isinstance(results[1], ReadResult)
    assert results[2] is Refusal.UNKNOWN_PARTITION
    assert await log.states([five, gone.partitions[0].partition_key, PartitionKey(10**9)]) == {
        five: PartitionState(0, 10, 10, 0, 500)
    }


async def test_a_read_from_a_gap_begins_with_the_next_batch(
    log: LogStore, five: PartitionKey, sql: asyncpg.Connection
) -> None:
    await sql.execute("delete from chunk where partition_key = $1 and base_offset in (0, 4, 6)", five)
    assert offsets((await read(log, five, 0)).batches) == [(2, 3), (8, 9)]
    assert offsets((await read(log, five, 5)).batches) == [(8, 9)]


async def test_a_read_of_no_partitions_returns_nothing(log: LogStore) -> None:
    assert await log.read([], max_bytes=1) == []


@pytest.mark.parametrize("place", ["statement"])
async def test_a_damaged_small_chunk_hides_neither_those_before_it_nor_those_behind_it(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append_each(log, *(new_batch(key) for _ in range(5)))
    await sql.execute("update inline_records set records = set_byte(records, 16, 9) where base_offset = 2")
    assert offsets((await read(log, key, 0)).batches) == [(0, 0), (1, 1)]
    assert await log.read([ReadRequest(key, 2, 10**6)], max_bytes=10**6) == [Refusal.DAMAGED]
    assert offsets((await read(log, key, 3)).batches) == [(3, 3), (4, 4)]


# --- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
async def test_a_fetch_touches_as_many_pages_in_a_deep_log_as_in_a_shallow_one(
    sql: asyncpg.Connection, make_topic: MakeTopic, place: float
) -> None:
    topic = await make_topic(partition_count=2)
    shallow, deep = (partition.partition_key for partition in topic.partitions)
    costs = []
    for key, depth in ((shallow, 1_000), (deep, 100_000)):
        await fill(sql, key, depth)
        offset = int(depth * place) * 2
        # The limit is about ten batches. The plans were made while the table was small, and Postgres keeps them.
        costs.append(
            await pages_touched(
                sql, statement("read_chunks"), [key], [offset], [1000], [False], 1000, 10**6, 10**6, True
            ),
        )
    assert costs[0] < 60
    assert costs[1] < 75, "a level more of the indexes, for each of ten chunks, and nothing else"


@pytest.mark.parametrize("place", ["statement"])
async def test_small_chunks_of_one_epoch_that_follow_each_other_are_one_row(
    sql: asyncpg.Connection, log: LogStore, key: PartitionKey
) -> None:
    await append_each(log, *(new_batch(key) for _ in range(3)))
    await append(log, new_batch(key, size_bytes=100_000))
    await append_each(log, *(new_batch(key) for _ in range(3)))
    await sql.execute("update partition set leader_epoch = leader_epoch + 1 where partition_key = $1", key)
    await append_each(log, *(new_batch(key) for _ in range(4)))
    await sql.execute("delete from chunk where partition_key = $1 and base_offset = 9", key)
    arguments = ([key], [0], [10**6], [False], 10**6, 10**6, 10**6)
    rows = await sql.fetch(statement("read_chunks"), *arguments, True)
    assert [(row["base_offset"], row["last_offset"], row["batch_count"], row["leader_epoch"]) for row in rows[1:]] == [
        (0, 2, 3, 0),
        (3, 3, 1, 0),
        (4, 6, 3, 0),
        (7, 8, 2, 1),
        (10, 10, 1, 1),
    ]
    assert len(await sql.fetch(statement("read_chunks"), *arguments, False)) == 11
    batches = (await read(log, key, 1)).batches
    assert offsets(batches) == [(each, each) for each in (1, 2, 3, 4, 5, 6, 7, 8, 10)]
    assert [int.from_bytes(batch.records[12:16]) for batch in batches] == [0, 0, 0, 0, 0, 0, 1, 1, 1]


async def test_bytes_of_batches_that_are_not_returned_are_not_fetched(
    sql: asyncpg.Connection, log: LogStore, key: PartitionKey
) -> None:
    for _ in range(8):
        await append(log, new_batch(key, size_bytes=1_000_000))
    one = await pages_touched(
        sql, statement("read_chunks"), [key], [0], [1_000_000], [False], 1_000_000, 10**6, 10**6, True
    )
    assert one < 60, "a batch of 1 MB has more than 100 pages, and even the one returned is not read before it is sent"


@pytest.mark.parametrize("depth", [1_000, 45_000, 60_000, 70_000, 100_000])
async def test_reads_touch_few_pages_of_a_partition_unknown_to_the_statistics(
    sql: asyncpg.Connection, make_topic: MakeTopic, depth: int
) -> None:
    """If the planner assumed that the partition has a single row, it would sort instead of scanning the index. A search
    by time halves the offsets: some seventeen look-ups of four pages each."""
    topic = await make_topic(partition_count=11)
    new = await fill_unknown(sql, [partition.partition_key for partition in topic.partitions], depth)
    last_ms = 999 + depth
    for timestamp_ms in (1_010, last_ms // 2, last_ms):
        assert await pages_touched(sql, statement("chunk_at_timestamp"), new, timestamp_ms, 0) < 120
        assert await pages_touched(sql, "select first_offset_after($1, 0, $2)", new, timestamp_ms - 1) < 120
    assert await pages_touched(sql, statement("greatest_timestamp"), new) < 120
    assert (
        await pages_touched(sql, statement("read_chunks"), [new], [depth], [1000], [False], 1000, 10**6, 10**6, True)
        < 70
    )
