"""Defects of another gateway on Postgres that storage decides; none may occur here.

The defects: retention reads −1 or 30 days wrongly, or waits until a policy is set. Compaction drops records that were
written while it ran. Headers break a produce. Duplicates race or are refused. Sequences past 2^31 fail. A log never
reports an offset as out of range. Offsets are written before the fence is checked. ListOffsets returns 0 for "nothing".
"""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from storage import retention
from storage.compaction import CompactionPolicy, CompactionStore
from storage.groups import GroupStore
from storage.log import LogStore
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.retention import RetentionPolicy
from storage.types import Appended, CoordinatorLease, OffsetCommit, PartitionKey, ReadRequest, Refusal
from tests.storage.batches import append, append_each, new_batch, offsets, read
from tests.storage.conftest import MakeTopic
from tests.storage.groups import group, whole

DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture
async def now_ms(sql: asyncpg.Connection) -> int:
    return int(await sql.fetchval("select (extract(epoch from clock_timestamp()) * 1000)::bigint") or 0)


async def left(database: Database, log: LogStore, policy: RetentionPolicy) -> int:
    await retention.apply(database, [policy])
    state = (await log.states([policy.partition_key]))[policy.partition_key]
    return len((await read(log, policy.partition_key, state.log_start_offset)).batches)


async def test_retention_of_minus_one_keeps_records_for_ever(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    await append_each(log, new_batch(key, max_timestamp_ms=0), new_batch(key, max_timestamp_ms=1))
    assert await left(database, log, RetentionPolicy(key, retention_ms=-1, retention_bytes=-1)) == 2


@pytest.mark.parametrize("retention_ms", [30 * DAY_MS, 2**31, 2**63 - 1])
async def test_retention_of_thirty_days_and_more_fits(
    database: Database, log: LogStore, key: PartitionKey, now_ms: int, retention_ms: int
) -> None:
    age_ms = min(retention_ms, 60 * DAY_MS)
    await append_each(
        log,
        new_batch(key, max_timestamp_ms=now_ms - age_ms - DAY_MS),
        new_batch(key, max_timestamp_ms=now_ms - age_ms + DAY_MS),
    )
    policy = RetentionPolicy(key, retention_ms=retention_ms, retention_bytes=2**63 - 1)
    assert await left(database, log, policy) == (2 if retention_ms == 2**63 - 1 else 1)


async def test_one_partitions_odd_policy_does_not_stop_the_others(
    database: Database, log: LogStore, make_topic: MakeTopic
) -> None:
    keys = [partition.partition_key for partition in (await make_topic(partition_count=3)).partitions]
    for key in keys:
        await append(log, new_batch(key))
    policies = [
        RetentionPolicy(keys[0], 2**63 - 1, 2**63 - 1),
        RetentionPolicy(PartitionKey(10**9), 0, 0),
        RetentionPolicy(keys[2], 0),
    ]
    await retention.apply(database, policies)
    states = await log.states(keys)
    assert [states[key].log_start_offset for key in keys] == [0, 0, 1]


async def test_the_default_policy_deletes_after_seven_days(
    database: Database, log: LogStore, key: PartitionKey, now_ms: int
) -> None:
    ages_days = [30, 8, 6, 0]
    await append_each(log, *(new_batch(key, max_timestamp_ms=now_ms - days * DAY_MS) for days in ages_days))
    assert await left(database, log, RetentionPolicy(key)) == 2


async def test_compaction_keeps_records_appended_since_it_looked(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    store = CompactionStore(database, log)
    await append_each(log, *(new_batch(key) for _ in range(3)))
    (dirty,) = await store.dirty_ranges([CompactionPolicy(key)])
    run = await store.begin(dirty)
    await append(log, new_batch(key))
    await store.replace(run, [0, 1], [])
    await store.finish(run)
    assert offsets((await read(log, key)).batches) == [(2, 2), (3, 3)]


async def test_the_database_does_not_read_the_inside_of_a_batch(log: LogStore, key: PartitionKey) -> None:
    every_byte = bytes(range(256)) * 20
    batches = [new_batch(key), new_batch(key, size_bytes=5120), new_batch(key, size_bytes=5120)]
    for batch in batches:
        batch.records[61:] = every_byte[61 : len(batch.records)]
    await append(log, *batches)
    stored = (await read(log, key)).batches
    assert [one.records[61:] for one in stored] == [every_byte[61:100], every_byte[61:], every_byte[61:]]


async def test_many_concurrent_copies_of_one_batch_are_stored_once(
    database_url: str, key: PartitionKey, log: LogStore
) -> None:
    databases = [await Database.open(database_url, hot_connections=2, cold_connections=1) for _ in range(2)]
    try:
        for sequence in range(15):
            copies = [
                LogStore(database).append([new_batch(key, producer=(9, 0, sequence))])
                for database in databases
                for _ in range(2)
            ]
            outcomes = [outcome for (outcome,) in await asyncio.gather(*copies)]
            assert {outcome.base_offset for outcome in outcomes if isinstance(outcome, Appended)} == {sequence}
            assert [isinstance(outcome, Appended) and outcome.duplicate for outcome in outcomes].count(False) == 1
    finally:
        for database in databases:
            await database.close()
    assert (await read(log, key)).state.high_watermark == 15


async def test_sequences_continue_past_the_greatest_int(log: LogStore, key: PartitionKey) -> None:
    sequence = 2**31 - 2
    for i in range(4):
        (outcome,) = await log.append([new_batch(key, producer=(9, 0, (sequence + i) % 2**31))])
        assert outcome == Appended(i, 0, 0)


async def test_an_offset_out_of_range_differs_from_the_end_of_the_log(log: LogStore, key: PartitionKey) -> None:
    await append_each(log, *(new_batch(key) for _ in range(5)))
    await log.delete_records(key, 2)
    for offset in (0, 1, 5, 6):
        result = await read(log, key, offset)
        assert (result.state.log_start_offset, result.state.high_watermark, result.batches) == (2, 5, ())


async def test_a_zombie_writes_no_offset_before_it_is_refused(
    database: Database, leases: list[CoordinatorLease], make_topic: MakeTopic
) -> None:
    topic = await make_topic()
    offset_store, groups = OffsetStore(database), GroupStore(database)
    await groups.save([whole(group(generation_id=1), leases[0])])
    await offset_store.commit([OffsetCommit(leases[0], "g", 1, topic.topic_id, 0, 10, -1, "")])
    await groups.save([whole(group(generation_id=2), leases[0])])
    zombie = OffsetCommit(leases[0], "g", 1, topic.topic_id, 0, 99, -1, "")
    assert await offset_store.commit([zombie]) == [Refusal.ILLEGAL_GENERATION]
    assert [offset.committed_offset for offset in await offset_store.fetch("g")] == [10]


async def test_the_latest_offset_stays_after_the_newest_records_are_removed(
    database: Database, log: LogStore, key: PartitionKey
) -> None:
    await append_each(log, *(new_batch(key) for _ in range(5)))
    await log.delete_records(key, -1)
    await retention.apply(database, [RetentionPolicy(key, 0)])
    assert (await log.states([key]))[key].high_watermark == 5
    assert await log.batch_at_timestamp(key, 0) is None
    assert await log.batches_of_max_timestamp(key) == []


async def test_a_lookup_past_the_last_time_finds_no_record(log: LogStore, key: PartitionKey) -> None:
    await append(log, new_batch(key, max_timestamp_ms=1000))
    assert await log.batch_at_timestamp(key, 1001) is None


async def test_a_record_larger_than_the_fetch_limit_does_not_stop_a_consumer(log: LogStore, key: PartitionKey) -> None:
    await append_each(log, new_batch(key, size_bytes=5000), new_batch(key))
    (result,) = await log.read([ReadRequest(key, 0, 100)], max_bytes=100)
    assert not isinstance(result, Refusal)
    assert offsets(result.batches) == [(0, 0)]
