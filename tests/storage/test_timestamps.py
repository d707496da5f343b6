"""Look-ups of ListOffsets: by time, and for the greatest time."""

from __future__ import annotations

import asyncpg
import pytest

from storage import retention
from storage.log import LogStore
from storage.pool import Database
from storage.types import PartitionKey
from tests.storage.batches import append, append_each, new_batch

TIMES_MS = (5_000, 4_000, 9_000, 3_000, 9_000, 7_000)


@pytest.fixture(params=["statement", "segment"])
def place(request: pytest.FixtureRequest) -> str:
    """Run every test of this module in each place of the bytes."""
    return request.param


@pytest.fixture
async def timed(log: LogStore, key: PartitionKey) -> PartitionKey:
    """Six batches of one record whose times are out of order."""
    await append_each(log, *(new_batch(key, max_timestamp_ms=timestamp_ms) for timestamp_ms in TIMES_MS))
    return key


async def base_offset(log: LogStore, key: PartitionKey, timestamp_ms: int) -> int | None:
    batch = await log.batch_at_timestamp(key, timestamp_ms)
    return None if batch is None else batch.base_offset


@pytest.mark.parametrize(
    ("timestamp_ms", "expected"),
    [(0, 0), (5_000, 0), (5_001, 2), (9_000, 2), (9_001, None), (2**62, None)],
)
async def test_a_lookup_by_time_finds_the_first_batch_in_offset_order(
    log: LogStore, timed: PartitionKey, timestamp_ms: int, expected: int | None
) -> None:
    assert await base_offset(log, timed, timestamp_ms) == expected


async def test_a_lookup_of_every_time_equals_a_plain_scan(log: LogStore, timed: PartitionKey) -> None:
    for log_start in range(7):
        assert await log.delete_records(timed, log_start) == log_start
        for timestamp_ms in range(0, 10_000, 500):
            expected = next(
                (i for i, time_ms in enumerate(TIMES_MS) if i >= log_start and time_ms >= timestamp_ms), None
            )
            assert await base_offset(log, timed, timestamp_ms) == expected, (log_start, timestamp_ms)


async def test_a_lookup_begins_at_the_given_offset(log: LogStore, timed: PartitionKey) -> None:
    found = [await log.batch_at_timestamp(timed, 5_000, from_offset) for from_offset in range(7)]
    assert [None if batch is None else batch.base_offset for batch in found] == [0, 2, 2, 4, 4, 5, None]


async def test_lookups_by_time_skip_records_before_the_log_start(
    log: LogStore, timed: PartitionKey, database: Database
) -> None:
    await log.delete_records(timed, 5)
    assert await base_offset(log, timed, 6_000) == 5
    (greatest,) = await log.batches_of_max_timestamp(timed)
    assert (greatest.base_offset, greatest.max_timestamp_ms) == (5, 7_000)
    await retention.apply(database, [retention.RetentionPolicy(timed, -1)])
    assert await base_offset(log, timed, 6_000) == 5
    await append(log, new_batch(timed, max_timestamp_ms=8_000))
    assert await base_offset(log, timed, 7_500) == 6, "below the greatest time of batches that are gone"
    (greatest,) = await log.batches_of_max_timestamp(timed)
    assert greatest.base_offset == 6


async def test_the_greatest_time_is_that_of_its_first_batch(log: LogStore, timed: PartitionKey) -> None:
    (greatest,) = await log.batches_of_max_timestamp(timed)
    assert (greatest.base_offset, greatest.max_timestamp_ms) == (2, 9_000)


async def test_an_empty_partition_and_an_unknown_one_have_no_times(log: LogStore, key: PartitionKey) -> None:
    for partition_key in (key, PartitionKey(10**9)):
        assert await log.batch_at_timestamp(partition_key, 0) is None
        assert await log.batches_of_max_timestamp(partition_key) == []


async def test_batches_without_timestamps_are_never_found_by_time(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append(log, new_batch(key, max_timestamp_ms=-1))
    assert await log.batch_at_timestamp(key, 0) is None
    assert await log.batch_at_timestamp(key, -1) is None
    assert await log.batches_of_max_timestamp(key) == []
    await append_each(log, new_batch(key, max_timestamp_ms=10), new_batch(key, max_timestamp_ms=-1))
    assert await base_offset(log, key, 0) == 1
    assert await sql.fetch("select running_max_timestamp_ms from chunk order by base_offset") == [(-1,), (10,), (10,)]
