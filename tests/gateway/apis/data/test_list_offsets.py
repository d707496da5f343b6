"""ListOffsets, OffsetForLeaderEpoch, DeleteRecords and InitProducerId at handler level on a real Postgres."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import asyncpg
import crc32c
import pytest

from gateway.apis.data.delete_records import delete_records
from gateway.apis.data.list_offsets import list_offsets
from gateway.apis.data.offset_for_leader_epoch import offset_for_leader_epoch
from gateway.apis.partition_lookup import end_of_epoch
from gateway.apis.transactions.init_producer_id import init_producer_id
from protocol.api_keys import ApiKey
from protocol.compression import Compression, compress
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from protocol.records import Record, build_batch, read_head, split_batches, verify_crc
from storage.types import NewBatch, PartitionKey, PartitionState, Topic
from tests.gateway.data_plane import DataPlane, batch_of, data_plane, offsets_in, only, raw

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING = -1, -2, -3, -4, -5, -6


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


async def place(node: DataPlane, topic: Topic, timestamp: int, version: int = 11) -> tuple[int, int]:
    """Return timestamp and offset of the answer."""
    answer = await node.list_offset(topic, timestamp, version=version)
    assert answer.error_code == ErrorCode.NONE, answer
    assert answer.leader_epoch == (0 if answer.offset >= 0 else -1)
    return answer.timestamp, answer.offset


async def delete_before(node: DataPlane, topic: Topic, offset: int, partition: int = 0) -> DeleteRecordsPartitionResult:
    response = await delete_records(
        DeleteRecordsRequest(
            topics=(
                DeleteRecordsTopic(
                    name=topic.name, partitions=(DeleteRecordsPartition(partition_index=partition, offset=offset),)
                ),
            )
        ),
        node.context(ApiKey.DELETE_RECORDS, 2),
    )
    return only(only(response.topics).partitions)


# --- ListOffsets -----------------------------------------------------------------------------------------------------


async def test_an_empty_log(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    assert await place(node, topic, LATEST) == (-1, 0)
    assert await place(node, topic, EARLIEST) == (-1, 0)
    for timestamp in (MAX_TIMESTAMP, LATEST_TIERED, EARLIEST_PENDING, 0, 10**15):
        assert await place(node, topic, timestamp) == (-1, -1)


@pytest.mark.parametrize("codec", list(Compression))
async def test_timestamps_are_found_by_record(node: DataPlane, codec: Compression) -> None:
    topic = await node.create_topic("t")
    await node.send(topic, batch_of(b"a", b"b", b"c", timestamps=[1000, 1010, 1020], compression=codec))
    await node.send(topic, batch_of(b"d", b"e", timestamps=[900, 1015], compression=codec))
    await node.send(topic, batch_of(b"f", b"g", b"h", timestamps=[2000, 3000, 2500], compression=codec))
    for asked, found in [
        (0, (1000, 0)),
        (1000, (1000, 0)),
        (1001, (1010, 1)),
        (1020, (1020, 2)),
        (1021, (2000, 5)),
        (2001, (3000, 6)),
        (3000, (3000, 6)),
        (3001, (-1, -1)),
    ]:
        assert await place(node, topic, asked) == found, asked
    assert await place(node, topic, MAX_TIMESTAMP) == (3000, 6)
    assert await place(node, topic, LATEST) == (-1, 8)


@pytest.mark.parametrize("codec", [Compression.NONE, Compression.LZ4])
async def test_the_records_and_not_the_head_give_a_batch_its_greatest_timestamp(
    node: DataPlane, codec: Compression
) -> None:
    """kafka-go's Conn writes the last record's timestamp into the head. Kafka corrects it."""
    topic = await node.create_topic("t")
    for timestamps, in_head in (([1000], 9000), ([3000, 2000], 2000), ([2500], 2500)):
        records = [Record(offset, timestamp, b"k", b"v") for offset, timestamp in enumerate(timestamps)]
        await node.send(topic, build_batch(records, max_timestamp=in_head, compression=codec))
    for asked, found in [(1500, (3000, 1)), (2800, (3000, 1)), (3001, (-1, -1)), (MAX_TIMESTAMP, (3000, 1))]:
        assert await place(node, topic, asked) == found, asked
    batches = split_batches(raw(await node.fetch_one(topic, 0)))
    assert [read_head(batch).max_timestamp for batch in batches] == [1000, 3000, 2500]
    assert all(verify_crc(batch) for batch in batches)


@pytest.mark.parametrize(("times", "found"), [([5000], (5000, 3)), ([1500], (2000, 2)), ([2000], (2000, 2))])
async def test_greatest_timestamp_of_a_batch_does_not_count_if_its_record_is_deleted(
    node: DataPlane, times: list[int], found: tuple[int, int]
) -> None:
    topic = await node.create_topic("t")
    await node.send(topic, batch_of(b"a", b"b", b"c", timestamps=[9000, 1000, 2000]))
    await node.send(topic, batch_of(b"d", timestamps=times))
    await delete_before(node, topic, 1)
    assert await place(node, topic, MAX_TIMESTAMP) == found


async def test_end_is_returned_after_the_last_records_are_deleted(node: DataPlane) -> None:
    """Another gateway answered 0 for LATEST after DeleteRecords, and 0 if no timestamp matched."""
    topic = await node.create_topic("t")
    await node.send(topic, batch_of(b"a", b"b", timestamps=[1000, 1001]))
    assert (await delete_before(node, topic, -1)).low_watermark == 2
    assert await place(node, topic, LATEST) == (-1, 2)
    assert await place(node, topic, EARLIEST) == (-1, 2)
    assert await place(node, topic, EARLIEST_LOCAL) == (-1, 2)
    assert await place(node, topic, 0) == (-1, -1)
    assert await place(node, topic, MAX_TIMESTAMP) == (-1, -1)


async def test_read_committed_log_ends_at_the_last_stable_offset(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    await node.send(topic, batch_of(b"a", b"b", b"c", b"d", timestamps=[1000, 2000, 3000, 4000]))
    states = node.log.states

    async def with_an_open_transaction(keys: Iterable[PartitionKey]) -> dict[PartitionKey, PartitionState]:
        return {key: replace(state, last_stable_offset=2) for key, state in (await states(keys)).items()}

    monkeypatch.setattr(node.log, "states", with_an_open_transaction)
    for timestamp, everything, committed in (
        (LATEST, 4, 2),
        (EARLIEST, 0, 0),
        (1500, 1, 1),
        (2500, 2, -1),
        (MAX_TIMESTAMP, 3, -1),
    ):
        for isolation_level, offset in ((0, everything), (1, committed)):
            answer = await node.list_offset(topic, timestamp, isolation_level=isolation_level)
            assert (answer.error_code, answer.offset) == (ErrorCode.NONE, offset), (timestamp, isolation_level)


async def test_timestamp_below_the_log_start_is_not_found(node: DataPlane) -> None:
    """The batch that holds the record of that time still exists, because its later records were not deleted."""
    topic = await node.create_topic("t")
    await node.send(topic, batch_of(b"a", b"b", b"c", timestamps=[5000, 1000, 1001]))
    await node.send(topic, batch_of(b"d", timestamps=[2000]))
    await node.send(topic, batch_of(b"e", timestamps=[6000]))
    assert await place(node, topic, 3000) == (5000, 0)
    await delete_before(node, topic, 1)
    assert await place(node, topic, 1000) == (1000, 1)
    assert await place(node, topic, 1500) == (2000, 3)
    assert await place(node, topic, 3000) == (6000, 4)
    assert await place(node, topic, 6001) == (-1, -1)


async def test_search_by_time_is_fast_if_a_head_claims_too_late_a_time(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    # Produce corrects such a head.
    claiming = bytearray(build_batch([Record(0, 1000, b"k", b"v")], max_timestamp=5000))
    await node.log.append([NewBatch(topic.partitions[0].partition_key, claiming, 1, 5000)])
    for _ in range(20):
        await node.send(topic, batch_of(b"v", timestamps=[1000]))
    asked = 0
    fetch_row, fetch_rows = node.database.cold.fetch_row, node.database.cold.fetch

    async def count_row(query: str, *arguments: object) -> object:
        nonlocal asked
        asked += 1
        return await fetch_row(query, *arguments)

    async def count_rows(query: str, *arguments: object) -> object:
        nonlocal asked
        asked += 1
        return await fetch_rows(query, *arguments)

    monkeypatch.setattr(node.database.cold, "fetch_row", count_row)
    monkeypatch.setattr(node.database.cold, "fetch", count_rows)
    assert await place(node, topic, 3000) == (-1, -1)
    assert asked == 2
    await node.send(topic, batch_of(b"v", timestamps=[4000]))
    assert await place(node, topic, 3000) == (4000, 21)


@pytest.mark.parametrize(
    ("timestamp", "first_version"),
    [(LATEST, 1), (EARLIEST, 1), (MAX_TIMESTAMP, 7), (EARLIEST_LOCAL, 8), (LATEST_TIERED, 9), (EARLIEST_PENDING, 11)],
)
async def test_special_timestamps_have_a_first_version(node: DataPlane, timestamp: int, first_version: int) -> None:
    topic = await node.create_topic("t")
    for version in range(1, 12):
        answer = await node.list_offset(topic, timestamp, version=version)
        assert (answer.error_code == ErrorCode.UNSUPPORTED_VERSION) == (version < first_version)


async def test_unknown_negative_timestamps_are_refused(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    for timestamp in (-7, -(2**63)):
        answer = await node.list_offset(topic, timestamp, version=11)
        assert (answer.error_code, answer.offset) == (ErrorCode.UNSUPPORTED_VERSION, -1)


async def test_refusals_of_list_offsets(node: DataPlane) -> None:
    topic = await node.create_topic("t", 2)
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await node.list_offset("missing", LATEST)).error_code == unknown
    assert (await node.list_offset(topic, LATEST, partition=2)).error_code == unknown
    assert (await node.list_offset(topic, LATEST, partition=-1)).error_code == unknown
    ahead = await node.list_offset(topic, LATEST, current_leader_epoch=1)
    assert ahead.error_code == ErrorCode.UNKNOWN_LEADER_EPOCH
    assert (await node.list_offset(topic, LATEST, current_leader_epoch=0)).error_code == ErrorCode.NONE
    twice = ListOffsetsPartition(partition_index=0, timestamp=LATEST)
    once = ListOffsetsPartition(partition_index=1, timestamp=LATEST)
    response = await list_offsets(
        ListOffsetsRequest(topics=(ListOffsetsTopic(name="t", partitions=(twice, once, twice)),)),
        node.context(ApiKey.LIST_OFFSETS, 7),
    )
    assert [part.error_code for part in only(response.topics).partitions] == [
        ErrorCode.INVALID_REQUEST,
        ErrorCode.NONE,
        ErrorCode.INVALID_REQUEST,
    ]


async def test_a_deleted_topic_is_unknown_even_before_this_node_hears_of_it(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.topics.delete(topic.topic_id)
    assert (await node.list_offset(topic, LATEST)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_end_is_read_from_postgres(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    await node.fill(topic, [300])
    async with data_plane(database_url, name="node-2") as other:
        await other.fill(topic, [300] * 2)
        assert await place(node, topic, LATEST) == (-1, 3)


async def test_unreadable_batch_is_matched_as_a_whole(node: DataPlane) -> None:
    """Produce refuses a batch that it cannot read, but an earlier release may have written one."""
    topic = await node.create_topic("t")
    records = bytearray(batch_of(b"a", b"b", timestamps=[1000, 1001]))
    records[61] = 0x7F
    await append(node, topic, records)
    assert await place(node, topic, 1001) == (1001, 0)
    assert await place(node, topic, MAX_TIMESTAMP) == (1001, 0)
    assert await place(node, topic, 1002) == (-1, -1)


async def append(node: DataPlane, topic: Topic, records: bytearray) -> None:
    """Append the batch to the log as it is, although Produce would refuse it."""
    struct.pack_into(">I", records, 17, crc32c.crc32c(memoryview(records)[21:]))
    head = read_head(records)
    await node.appender.submit(
        NewBatch(
            partition_key=topic.partitions[0].partition_key,
            records=memoryview(records),
            record_count=head.records_count,
            max_timestamp_ms=head.max_timestamp,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=-1,
        )
    )


@pytest.mark.parametrize("codec", list(Compression))
async def test_search_by_time_stops_at_its_match(node: DataPlane, codec: Compression) -> None:
    """The search must not read the bytes after the match. Otherwise it would only know the batch and not the record."""
    topic = await node.create_topic("t")
    timestamps = [1000 + n for n in range(3000)]
    body = bytearray(batch_of(*[bytes(100)] * 3000, timestamps=timestamps))
    body[-1] = 0x7F
    records = body[:61] + compress(codec, body[61:])
    struct.pack_into(">i", records, 8, len(records) - 12)
    struct.pack_into(">h", records, 21, codec)
    await append(node, topic, records)
    assert await place(node, topic, 1700) == (1700, 700)
    assert await place(node, topic, 3999) == (3999, 0), "this one reads to the end and cannot"


async def test_lost_storage_is_retriable(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.database.hot.close(1.0)
    assert (await node.list_offset(topic, LATEST)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (await node.list_offset("missing", LATEST)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


def timed(*records: tuple[int, bytes]) -> bytes:
    return build_batch([Record(offset, timestamp, None, value) for offset, (timestamp, value) in enumerate(records)])


async def raise_epochs(database_url: str, how_often: int = 1) -> None:
    """Let the database continue with another history, so that every partition begins a new leader epoch at the end of
    its log.
    """
    sql = await asyncpg.connect(database_url)
    try:
        await sql.execute("set search_path = sluice")
        schema = await sql.fetchval("select nspname from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$'")
        await sql.execute("update cluster set history_identity = 'the first'")
        for _ in range(how_often):
            await sql.execute(f"select {schema}.adopt_history(gen_random_uuid()::text, -1)")
    finally:
        await sql.close()


async def test_a_record_has_the_epoch_in_which_it_was_appended(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    key = topic.partitions[0].partition_key

    async def epochs(*timestamps: int) -> list[tuple[int, int]]:
        answers = [await node.list_offset(topic, timestamp, version=11) for timestamp in timestamps]
        assert not any(answer.error_code for answer in answers)
        return [(answer.offset, answer.leader_epoch) for answer in answers]

    await node.send(topic, timed((1_000, b"a")))
    await raise_epochs(database_url)
    first = (await node.log.states([key]))[key].leader_epoch
    assert await epochs(EARLIEST, EARLIEST_LOCAL, MAX_TIMESTAMP, 0, LATEST) == [*[(0, 0)] * 4, (1, first)]
    await raise_epochs(database_url)
    await node.send(topic, timed((3_000, b"b"), (2_000, b"c")))
    second = (await node.log.states([key]))[key].leader_epoch
    assert 0 < first < second
    assert await epochs(EARLIEST, 1_000, 1_001, 2_500) == [(0, 0), (0, 0), (1, second), (1, second)]
    assert await epochs(MAX_TIMESTAMP, LATEST, LATEST_TIERED) == [(1, second), (3, second), (-1, -1)]
    await delete_before(node, topic, 1)
    assert await epochs(EARLIEST, EARLIEST_LOCAL) == [(1, second)] * 2
    await delete_before(node, topic, 3)
    assert await epochs(EARLIEST, LATEST, MAX_TIMESTAMP) == [(3, second), (3, second), (-1, -1)]
    for epoch, ended in ((0, 1), (first, 1), (second, 3)):
        found = await ask_epoch(node, "t", 0, epoch, -1)
        assert (found.error_code, found.leader_epoch, found.end_offset) == (ErrorCode.NONE, epoch, ended)


async def test_an_empty_partition_has_the_present_epoch(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    await raise_epochs(database_url, 2)
    key = topic.partitions[0].partition_key
    present = (await node.log.states([key]))[key].leader_epoch
    for timestamp in (EARLIEST, EARLIEST_LOCAL, LATEST):
        answer = await node.list_offset(topic, timestamp, version=11)
        assert (answer.error_code, answer.offset, answer.leader_epoch) == (ErrorCode.NONE, 0, present)


@pytest.mark.parametrize(
    ("asked", "expected"), [(0, (0, 4)), (2, (0, 4)), (3, (3, 8)), (4, (3, 8)), (5, (5, 10)), (9, (5, 10))]
)
def test_unknown_epoch_ends_with_the_previous_epoch(asked: int, expected: tuple[int, int]) -> None:
    assert end_of_epoch(asked, [(3, 4), (5, 8)], 10) == expected


# --- OffsetForLeaderEpoch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leader_epoch", "current", "expected"),
    [
        (0, -1, (ErrorCode.NONE, 0, 3)),
        (0, 0, (ErrorCode.NONE, 0, 3)),
        (1, 0, (ErrorCode.NONE, -1, -1)),
        (-1, 0, (ErrorCode.NONE, -1, -1)),
        (0, 1, (ErrorCode.UNKNOWN_LEADER_EPOCH, -1, -1)),
    ],
)
async def test_offset_for_leader_epoch(
    node: DataPlane, leader_epoch: int, current: int, expected: tuple[ErrorCode, int, int]
) -> None:
    topic = await node.create_topic("t")
    await node.send(topic, batch_of(b"a", b"b", b"c"))
    found = await ask_epoch(node, "t", 0, leader_epoch, current)
    assert (found.error_code, found.leader_epoch, found.end_offset) == expected


async def test_offset_for_leader_epoch_of_unknown_partitions_is_refused(node: DataPlane) -> None:
    await node.create_topic("t")
    for name, partition in (("missing", 0), ("t", 1)):
        found = await ask_epoch(node, name, partition, 0, -1)
        assert (found.error_code, found.partition) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, partition)


async def ask_epoch(node: DataPlane, name: str, partition: int, leader_epoch: int, current: int) -> EpochEndOffset:
    response = await offset_for_leader_epoch(
        OffsetForLeaderEpochRequest(
            topics=(
                OffsetForLeaderTopic(
                    topic=name,
                    partitions=(
                        OffsetForLeaderPartition(
                            partition=partition, leader_epoch=leader_epoch, current_leader_epoch=current
                        ),
                    ),
                ),
            )
        ),
        node.context(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4),
    )
    return only(only(response.topics).partitions)


# --- DeleteRecords ---------------------------------------------------------------------------------------------------


async def test_delete_records(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    for value in (b"a", b"b", b"c"):
        await node.send(topic, batch_of(value))
    done = await delete_before(node, topic, 2)
    assert (done.error_code, done.low_watermark) == (ErrorCode.NONE, 2)
    assert (await delete_before(node, topic, 1)).low_watermark == 2, "never back"
    assert (await node.fetch_one(topic, 1)).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert offsets_in(await node.fetch_one(topic, 2)) == [2]
    assert (await delete_before(node, topic, -1)).low_watermark == 3


async def test_refusals_of_delete_records(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.send(topic, batch_of(b"a"))
    for offset in (2, -2, 2**62):
        refused = await delete_before(node, topic, offset)
        assert (refused.error_code, refused.low_watermark) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
    assert (await delete_before(node, topic, 0, partition=1)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    compacted = await node.create_topic("compacted", configs={"cleanup.policy": "compact"})
    assert (await delete_before(node, compacted, 0)).error_code == ErrorCode.POLICY_VIOLATION
    both = await node.create_topic("both", configs={"cleanup.policy": "compact,delete"})
    assert (await delete_before(node, both, 0)).error_code == ErrorCode.NONE


# --- InitProducerId --------------------------------------------------------------------------------------------------


async def test_producer_ids_are_unique(node: DataPlane, database_url: str) -> None:
    async with data_plane(database_url, name="node-2") as other:
        ids: list[int] = []
        for at in (node, other) * 3:
            for request in (
                InitProducerIdRequest(transactional_id=None),
                InitProducerIdRequest(transactional_id=None, producer_id=5, producer_epoch=0),
            ):
                response = await init_producer_id(request, at.context(ApiKey.INIT_PRODUCER_ID, 4))
                assert (response.error_code, response.producer_epoch) == (ErrorCode.NONE, 0)
                ids.append(response.producer_id)
    assert len(set(ids)) == len(ids)
    assert min(ids) >= 0


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (InitProducerIdRequest(transactional_id=""), ErrorCode.INVALID_REQUEST),
        (InitProducerIdRequest(transactional_id="tx"), ErrorCode.INVALID_TRANSACTION_TIMEOUT),
        (
            InitProducerIdRequest(transactional_id="tx", transaction_timeout_ms=900_001),
            ErrorCode.INVALID_TRANSACTION_TIMEOUT,
        ),
        (
            InitProducerIdRequest(transactional_id="tx", transaction_timeout_ms=1, producer_id=5),
            ErrorCode.INVALID_REQUEST,
        ),
        (InitProducerIdRequest(transactional_id=None, producer_id=5), ErrorCode.INVALID_REQUEST),
        (InitProducerIdRequest(transactional_id=None, producer_epoch=0), ErrorCode.INVALID_REQUEST),
    ],
)
async def test_refusals_of_init_producer_id(node: DataPlane, request_: InitProducerIdRequest, code: ErrorCode) -> None:
    with pytest.raises(KafkaError) as raised:
        await init_producer_id(request_, node.context(ApiKey.INIT_PRODUCER_ID, 4))
    assert raised.value.code is code
