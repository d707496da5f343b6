"""Appends: offsets, stored bytes, and idempotence by upstream's rules, for both ways of writing."""

from __future__ import annotations

import asyncio
import random
import struct

import asyncpg
import crc32c
import pytest

from storage.log import LogStore
from storage.pool import Database
from storage.topics import TopicStore
from storage.types import Appended, NewBatch, PartitionKey, Refusal
from tests.steps.waiting import until_blocked
from tests.storage.batches import append, batch_bytes, new_batch, offsets, read
from tests.storage.conftest import MakeLog, MakeTopic

PRODUCER = 4000
LAST_SEQUENCE = 2**31 - 1


@pytest.fixture(params=["statement", "copy", "segment"])
def place(request: pytest.FixtureRequest) -> str:
    """Run every test of this module with each way of writing to the log."""
    return request.param


def idempotent(
    key: PartitionKey, sequence: int, records: int = 1, epoch: int = 0, producer: int = PRODUCER
) -> NewBatch:
    return new_batch(key, records=records, producer=(producer, epoch, sequence))


async def test_offsets_follow_record_counts_and_the_order_given(log: LogStore, key: PartitionKey) -> None:
    assert await append(log, new_batch(key, records=3), new_batch(key, records=1)) == [0, 3]
    assert await append(log, new_batch(key, records=10)) == [4]
    result = await read(log, key)
    assert offsets(result.batches) == [(0, 2), (3, 3), (4, 13)]
    assert (result.state.log_start_offset, result.state.high_watermark, result.state.size_bytes) == (0, 14, 300)


async def test_stored_bytes_differ_from_the_given_only_in_base_offset_and_leader_epoch(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await sql.execute("update partition set leader_epoch = 7, next_offset = 258 where partition_key = $1", key)
    given = batch_bytes(5000, records=2)
    given[61:] = random.Random(1).randbytes(5000 - 61)
    struct.pack_into(">I", given, 17, crc32c.crc32c(memoryview(given)[21:]))
    batch = NewBatch(key, memoryview(bytearray(given)), 2, 1_000)
    (outcome,) = await log.append([batch])
    assert outcome == Appended(base_offset=258, log_start_offset=0, leader_epoch=7)
    expected = struct.pack(">q", 258) + given[8:12] + struct.pack(">i", 7) + given[16:]
    (stored,) = (await read(log, key, 258)).batches
    assert stored.records == expected
    assert bytes(batch.records) == expected, "the caller's bytes are the stored ones"


async def test_one_call_appends_to_many_partitions(log: LogStore, make_topic: MakeTopic) -> None:
    keys = [partition.partition_key for partition in (await make_topic(partition_count=3)).partitions]
    order = [keys[2], keys[0], keys[2], keys[1]]
    assert await append(log, *(new_batch(key, fill=i) for i, key in enumerate(order))) == [0, 0, 1, 0]
    assert [batch.records[70] for batch in (await read(log, keys[2])).batches] == [0, 2]


async def test_an_append_of_no_batches_returns_nothing(log: LogStore) -> None:
    assert await log.append([]) == []


async def test_unknown_and_deleted_partitions_are_refused_and_leave_the_others(
    log: LogStore, make_topic: MakeTopic, topics: TopicStore
) -> None:
    kept, gone = await make_topic("kept"), await make_topic("gone")
    await append(log, new_batch(gone.partitions[0].partition_key))
    assert await topics.delete(gone.topic_id)
    outcomes = await log.append(
        [
            new_batch(PartitionKey(10**9)),
            new_batch(kept.partitions[0].partition_key),
            new_batch(gone.partitions[0].partition_key),
        ]
    )
    assert outcomes == [Refusal.UNKNOWN_PARTITION, Appended(0, 0, 0), Refusal.UNKNOWN_PARTITION]


async def test_a_created_again_topic_starts_an_empty_log(
    log: LogStore, make_topic: MakeTopic, topics: TopicStore
) -> None:
    first = await make_topic("orders")
    await append(log, idempotent(first.partitions[0].partition_key, 5))
    await topics.delete(first.topic_id)
    second = await make_topic("orders")
    assert second.topic_id != first.topic_id
    assert second.partitions[0].partition_key != first.partitions[0].partition_key
    assert await append(log, idempotent(second.partitions[0].partition_key, 0)) == [0]


# --- idempotence: kafka-protocol.md §5.8, row by row ----------------------------------------------------------------


async def test_the_next_sequence_is_accepted(log: LogStore, key: PartitionKey) -> None:
    assert await append(log, idempotent(key, 0, 3)) == [0]
    assert await append(log, idempotent(key, 3, 2)) == [3]


@pytest.mark.parametrize("sequence", [0, 17, LAST_SEQUENCE])
async def test_any_sequence_is_accepted_of_an_unknown_producer(log: LogStore, key: PartitionKey, sequence: int) -> None:
    assert await append(log, idempotent(key, sequence)) == [0]


@pytest.mark.parametrize("sequence", [0, 2, 4, LAST_SEQUENCE])
async def test_a_gap_or_a_step_back_is_out_of_order(log: LogStore, key: PartitionKey, sequence: int) -> None:
    await append(log, idempotent(key, 0, 3))
    assert await log.append([idempotent(key, sequence)]) == [Refusal.OUT_OF_ORDER_SEQUENCE]
    assert (await read(log, key)).state.high_watermark == 3


async def test_a_duplicate_returns_its_first_offset_and_writes_nothing(log: LogStore, key: PartitionKey) -> None:
    await append(log, idempotent(key, 0, 3), idempotent(key, 3, 4), new_batch(key))
    assert await log.append([idempotent(key, 3, 4)]) == [Appended(3, 0, 0, duplicate=True)]
    state = (await read(log, key)).state
    assert (state.high_watermark, state.size_bytes) == (8, 300)


async def test_the_last_five_batches_are_recognised_and_older_ones_are_out_of_order(
    log: LogStore, key: PartitionKey
) -> None:
    for sequence in range(12):
        await append(log, idempotent(key, sequence))
    outcomes = [(await log.append([idempotent(key, sequence)]))[0] for sequence in range(12)]
    assert outcomes[:7] == [Refusal.OUT_OF_ORDER_SEQUENCE] * 7
    assert outcomes[7:] == [Appended(sequence, 0, 0, duplicate=True) for sequence in range(7, 12)]


async def test_the_ring_is_kept_over_calls_of_any_length(log: LogStore, key: PartitionKey) -> None:
    await append(log, *(idempotent(key, sequence) for sequence in range(3)))
    await append(log, *(idempotent(key, sequence) for sequence in range(3, 10)))
    outcomes = await log.append([idempotent(key, sequence) for sequence in range(4, 10)])
    assert outcomes[0] is Refusal.OUT_OF_ORDER_SEQUENCE
    assert outcomes[1:] == [Appended(sequence, 0, 0, duplicate=True) for sequence in range(5, 10)]


async def test_a_duplicate_must_match_first_and_last_sequence(log: LogStore, key: PartitionKey) -> None:
    await append(log, idempotent(key, 0, 3))
    assert await log.append([idempotent(key, 0, 2)]) == [Refusal.OUT_OF_ORDER_SEQUENCE]
    assert await log.append([idempotent(key, 1, 2)]) == [Refusal.OUT_OF_ORDER_SEQUENCE]


async def test_a_duplicate_within_one_call_is_appended_once(log: LogStore, key: PartitionKey) -> None:
    outcomes = await log.append([idempotent(key, 0, 2), idempotent(key, 0, 2), idempotent(key, 2)])
    assert outcomes == [Appended(0, 0, 0), Appended(0, 0, 0, duplicate=True), Appended(2, 0, 0)]
    assert offsets((await read(log, key)).batches) == [(0, 1), (2, 2)]


async def test_a_refused_batch_does_not_stop_the_next_of_its_producer(log: LogStore, key: PartitionKey) -> None:
    outcomes = await log.append([idempotent(key, 0), idempotent(key, 5), idempotent(key, 1)])
    assert outcomes == [Appended(0, 0, 0), Refusal.OUT_OF_ORDER_SEQUENCE, Appended(1, 0, 0)]


async def test_a_lower_epoch_is_fenced_even_for_a_duplicate(log: LogStore, key: PartitionKey) -> None:
    await append(log, idempotent(key, 0, epoch=1))
    await append(log, idempotent(key, 0, epoch=2))
    assert await log.append([idempotent(key, 0, epoch=1)]) == [Refusal.INVALID_PRODUCER_EPOCH]
    assert await log.append([idempotent(key, 1, epoch=1)]) == [Refusal.INVALID_PRODUCER_EPOCH]


async def test_a_higher_epoch_begins_at_sequence_zero_and_forgets_the_five(log: LogStore, key: PartitionKey) -> None:
    await append(log, idempotent(key, 0), idempotent(key, 1))
    assert await log.append([idempotent(key, 2, epoch=1)]) == [Refusal.OUT_OF_ORDER_SEQUENCE]
    assert await append(log, idempotent(key, 0, epoch=1)) == [2], "not taken for epoch 0's sequence 0"
    assert await log.append([idempotent(key, 1, epoch=1)]) == [Appended(3, 0, 0)], "nor this for its sequence 1"
    assert await log.append([idempotent(key, 0, epoch=1)]) == [Appended(2, 0, 0, duplicate=True)]


async def test_sequences_wrap_to_zero_after_the_greatest_int(log: LogStore, key: PartitionKey) -> None:
    assert await append(log, idempotent(key, LAST_SEQUENCE - 1, 2)) == [0]
    assert await log.append([idempotent(key, 1)]) == [Refusal.OUT_OF_ORDER_SEQUENCE]
    assert await append(log, idempotent(key, 0)) == [2]


async def test_a_batch_whose_sequences_wrap_is_accepted(log: LogStore, key: PartitionKey) -> None:
    assert await append(log, idempotent(key, LAST_SEQUENCE, 3)) == [0]  # The producer's sequences are 2^31-1, 0 and 1.
    assert await log.append([idempotent(key, LAST_SEQUENCE, 3)]) == [Appended(0, 0, 0, duplicate=True)]
    assert await append(log, idempotent(key, 2)) == [3]


async def test_sequences_are_separate_for_each_producer_and_partition(log: LogStore, make_topic: MakeTopic) -> None:
    one, two = (partition.partition_key for partition in (await make_topic(partition_count=2)).partitions)
    batches = [
        idempotent(one, 0, producer=1),
        idempotent(one, 0, producer=2),
        idempotent(two, 0, producer=1),
        idempotent(one, 1, producer=2),
    ]
    assert await append(log, *batches) == [0, 1, 0, 2]
    assert await log.append([idempotent(two, 1, producer=2)]) == [Appended(1, 0, 0)], "unknown there: any sequence"


# --- concurrency ----------------------------------------------------------------------------------------------------


async def test_two_copies_of_one_batch_in_flight_are_appended_once(
    database_url: str, log: LogStore, make_log: MakeLog, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append(log, idempotent(key, 0))
    other = await Database.open(database_url, hot_connections=1, cold_connections=1)
    try:
        async with sql.transaction():
            await sql.execute("select from partition where partition_key = $1 for update", key)
            copies = [asyncio.create_task(store.append([idempotent(key, 1)])) for store in (log, make_log(other))]
            await _until_blocked_elsewhere(database_url, 2)
        outcomes = [(await copy)[0] for copy in copies]
    finally:
        await other.close()
    assert sorted(outcomes, key=lambda outcome: isinstance(outcome, Appended) and outcome.duplicate) == [
        Appended(1, 0, 0),
        Appended(1, 0, 0, duplicate=True),
    ]
    assert (await read(log, key)).state.high_watermark == 2


async def _until_blocked_elsewhere(database_url: str, backends: int) -> None:
    watcher = await asyncpg.connect(database_url)
    try:
        await until_blocked(watcher, backends)
    finally:
        await watcher.close()


async def test_overlapping_committers_neither_deadlock_nor_leave_gaps(
    database_url: str, make_topic: MakeTopic, make_log: MakeLog, log: LogStore, sql: asyncpg.Connection
) -> None:
    topic = await make_topic(partition_count=6)
    keys = [partition.partition_key for partition in topic.partitions]
    appended: dict[PartitionKey, list[tuple[int, int]]] = {key: [] for key in keys}
    databases = [await Database.open(database_url, hot_connections=1, cold_connections=1) for _ in range(3)]

    async def commit(store: LogStore, seed: int) -> None:
        random_ = random.Random(seed)
        sequences = dict.fromkeys(keys, 0)
        for _ in range(40):
            group = []
            for key in random_.choices(keys, k=8):
                records = random_.randint(1, 5)
                group.append(idempotent(key, sequences[key], records, producer=seed))
                sequences[key] += records
            for batch, outcome in zip(group, await store.append(group), strict=True):
                assert isinstance(outcome, Appended)
                appended[batch.partition_key].append((outcome.base_offset, batch.record_count))

    try:
        await asyncio.gather(*(commit(make_log(database), seed) for seed, database in enumerate(databases)))
    finally:
        for database in databases:
            await database.close()

    for key in keys:
        expected = 0
        for base_offset, records in sorted(appended[key]):
            assert base_offset == expected
            expected += records
        result = await read(log, key)
        assert result.state.high_watermark == expected
        assert offsets(result.batches) == [(base, base + count - 1) for base, count in sorted(appended[key])]
    assert await sql.fetchval("select deadlocks from pg_stat_database where datname = current_database()") == 0
