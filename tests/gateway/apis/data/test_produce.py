"""Produce at handler level on a real Postgres: order, idempotence, refusals, acks, LogAppendTime, lost storage."""

from __future__ import annotations

import asyncio
import importlib
import struct
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import crc32c
import pytest
import structlog

from gateway.apis.data.produce import MAX_LOGGED_REFUSALS, awaits_answer, produce
from gateway.log import batch_validation
from gateway.log.recompression import CODECS
from gateway.net import pieces
from protocol.api_keys import ApiKey
from protocol.compression import Compression
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.records import HEAD_BYTES, TimestampType, read_head, verify_crc
from storage.types import NewTopic, Topic
from tests.gateway.data_plane import (
    DataPlane,
    batch_of,
    batches_in,
    data_plane,
    locked_partition,
    offsets_in,
    only,
    produce_request,
    records_in,
    terminate_backends,
)
from tests.steps.waiting import until, until_blocked


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


async def values_of(node: DataPlane, topic: Topic, partition: int = 0) -> list[bytes | None]:
    return [record.value for record in records_in(await node.fetch_one(topic, 0, partition=partition))]


async def test_batches_are_appended_and_answered_with_their_offsets(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    first = await node.send(topic, batch_of(b"a", b"b", b"c"))
    second = await node.send(topic, batch_of(b"d"))
    assert (first.error_code, first.base_offset, first.log_start_offset, first.log_append_time_ms) == (0, 0, 0, -1)
    assert second.base_offset == 3
    assert await values_of(node, topic) == [b"a", b"b", b"c", b"d"]


async def test_stored_batch_differs_from_the_sent_one_in_offset_and_epoch_alone(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.send(topic, batch_of(b"first"))
    sent = batch_of(b"a", b"b")
    await node.send(topic, sent)
    for tail_forgotten in (False, True):
        if tail_forgotten:
            node.tail.forget(topic.partitions[0].partition_key)
        stored = batches_in(await node.fetch_one(topic, 1))[0]
        head = read_head(stored)
        assert (head.base_offset, head.partition_leader_epoch) == (1, 0)
        assert verify_crc(stored)
        assert bytes(stored[16:]) == sent[16:]
        assert bytes(stored[8:12]) == sent[8:12]


# --- refusals --------------------------------------------------------------------------------------------------------


async def test_unknown_targets(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    internal = await node.create_topic("__internal", internal=True)
    unknown = Topic(uuid4(), "unknown", False, {}, ())
    batch = batch_of(b"v")
    assert (await node.send("missing", batch)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await node.send("no/such name", batch)).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert (await node.send(unknown, batch, version=13)).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert (await node.send("t", batch, version=13)).error_code == ErrorCode.UNKNOWN_TOPIC_ID, "the zero id names none"
    assert (await node.send(internal, batch)).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    for partition in (1, -1):
        answer = await node.send(topic, batch, partition=partition)
        assert (answer.error_code, answer.base_offset) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1)
    assert (await node.send(topic, batch, version=13)).error_code == ErrorCode.NONE


async def test_invalid_partition_fails_alone(node: DataPlane) -> None:
    topic = await node.create_topic("t", 3)
    damaged = bytearray(batch_of(b"damaged"))
    damaged[-1] ^= 1
    answers = await node.send_all([(topic, 0, batch_of(b"a")), (topic, 1, damaged), (topic, 2, batch_of(b"c"))])
    assert [answer.error_code for answer in answers] == [ErrorCode.NONE, ErrorCode.CORRUPT_MESSAGE, ErrorCode.NONE]
    assert [await values_of(node, topic, partition) for partition in range(3)] == [[b"a"], [], [b"c"]]


async def test_a_partition_named_twice_is_refused_and_nothing_written(node: DataPlane) -> None:
    topic = await node.create_topic("t", 2)
    answers = await node.send_all([(topic, 0, batch_of(b"a")), (topic, 0, batch_of(b"b")), (topic, 1, batch_of(b"c"))])
    assert [answer.error_code for answer in answers] == [
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.NONE,
    ]
    assert await values_of(node, topic) == []


async def test_every_refusal_is_counted(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.send_all([(topic, 0, b""), ("missing", 0, b""), (topic, 7, b"")])
    await node.send(topic, batch_of(b"a", producer=(7, 0, 0)))
    await node.send(topic, batch_of(b"a", producer=(7, 0, 9)))
    counted = node.services.metrics.registry.get_sample_value
    for error, count in [
        ("INVALID_RECORD", 1),
        ("UNKNOWN_TOPIC_OR_PARTITION", 2),
        ("OUT_OF_ORDER_SEQUENCE_NUMBER", 1),
    ]:
        assert counted("sluice_refused_batches_total", {"error": error}) == count


async def test_unknown_acks_are_refused(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    with pytest.raises(KafkaError) as refused:
        await produce(produce_request([(topic, 0, batch_of(b"a"))], acks=2), node.context(ApiKey.PRODUCE, 9))
    assert refused.value.code == ErrorCode.INVALID_REQUIRED_ACKS
    assert await values_of(node, topic) == []


async def test_offending_records_are_named(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={"cleanup.policy": "compact"})
    answer = await node.send(topic, batch_of(b"a", b"b", b"c", keys=[b"k", None, None]))
    assert answer.error_code == ErrorCode.INVALID_RECORD
    assert [error.batch_index for error in answer.record_errors] == [1, 2]
    assert answer.error_message
    assert all(error.batch_index_error_message for error in answer.record_errors)


async def test_two_headers_with_one_key_are_accepted(node: DataPlane) -> None:
    """Another gateway refused such records, because its database had a unique constraint on header keys."""
    from protocol.records import Record, build_batch

    topic = await node.create_topic("t")
    headers = (("h", b"1"), ("h", b"2"), ("", None))
    await node.send(topic, build_batch([Record(0, 1, b"k", b"v", headers)]))
    assert records_in(await node.fetch_one(topic, 0))[0].headers == headers


async def test_a_body_that_does_not_decode_is_refused_and_its_neighbours_written(node: DataPlane) -> None:
    """If a batch that cannot be decoded were written, every consumer of the partition would stop at its offset."""
    topic = await node.create_topic("t", 2)
    damaged = bytearray(batch_of(b"damaged", compression=Compression.ZSTD)[:HEAD_BYTES] + b"not zstd at all")
    struct.pack_into(">i", damaged, 8, len(damaged) - 12)
    struct.pack_into(">I", damaged, 17, crc32c.crc32c(memoryview(damaged)[21:]))
    answers = await node.send_all([(topic, 0, damaged), (topic, 1, batch_of(b"b"))])
    assert [answer.error_code for answer in answers] == [ErrorCode.INVALID_RECORD, ErrorCode.NONE]
    assert [await values_of(node, topic, partition) for partition in range(2)] == [[], [b"b"]]


async def test_a_batch_that_takes_long_to_judge_keeps_its_place(node: DataPlane) -> None:
    """Large and small requests of one connection alternate. A small batch is validated at once, and still waits for its
    turn.
    """
    topic = await node.create_topic("t")
    values = [b"large %d" % n + bytes(300_000) if n % 3 == 0 else b"small %d" % n for n in range(12)]
    sent = [asyncio.create_task(node.send(topic, batch_of(value))) for value in values]
    assert [(await task).base_offset for task in sent] == list(range(12))


async def test_another_connection_does_not_wait_for_slow_validation(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t", 2)
    let_go = threading.Event()

    def validate(*given: Any, **rest: Any) -> object:
        if threading.current_thread() is not threading.main_thread():
            assert let_go.wait(10)
        return batch_validation.validate(*given, **rest)

    monkeypatch.setattr("gateway.log.validator.validate", validate)
    large = asyncio.create_task(node.send(topic, batch_of(bytes(300_000))))
    try:
        await asyncio.sleep(0)
        context = node.context(ApiKey.PRODUCE, 9, "another")
        assert await produce(produce_request([(topic, 1, batch_of(b"small"))]), context) is not None
        assert not large.done()
    finally:
        let_go.set()
    assert (await large).error_code == ErrorCode.NONE


@pytest.mark.parametrize("step", ["_plan_partition", "_submit_partition", "_answer"])
async def test_request_of_very_many_partitions_gives_way(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The request yields to other requests in each step, and all of its batches are written."""
    monkeypatch.setattr(pieces, "TURN_S", 0.0)
    topic = await node.create_topic("t", 500)
    module = importlib.import_module("gateway.apis.data.produce")
    original = getattr(module, step)
    turns = 0
    seen: list[int] = []

    def watched(*given: Any) -> Any:
        seen.append(turns)
        return original(*given)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(module, step, watched)
    counting = asyncio.create_task(count_turns())
    answers = await node.send_all([(topic, partition, batch_of(b"%d" % partition)) for partition in range(500)])
    counting.cancel()
    assert [answer.error_code for answer in answers] == [0] * 500
    assert len(seen) == 500
    assert len(set(seen)) > 1, "the work was done in one go"
    assert await values_of(node, topic, 499) == [b"499"]


# --- acks ------------------------------------------------------------------------------------------------------------


async def test_acks_0_is_written_without_an_answer(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    request = produce_request([(topic, 0, batch_of(b"a"))], acks=0)
    assert not awaits_answer(request)
    await produce(request, node.context(ApiKey.PRODUCE, 9))
    assert await values_of(node, topic) == [b"a"]


async def test_a_batch_of_acks_0_that_is_refused_refuses_the_request(node: DataPlane) -> None:
    request = produce_request([("missing", 0, batch_of(b"a"))], acks=0)
    with pytest.raises(KafkaError) as refused:
        await produce(request, node.context(ApiKey.PRODUCE, 9))
    assert refused.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("acks", [1, -1])
async def test_an_ack_waits_for_the_durable_commit(node: DataPlane, database_url: str, acks: int) -> None:
    topic = await node.create_topic("t")
    key = topic.partitions[0].partition_key
    request = produce_request([(topic, 0, batch_of(b"a"))], acks=acks)
    async with locked_partition(database_url, key) as connection:
        sending = asyncio.create_task(produce(request, node.context(ApiKey.PRODUCE, 9)))
        await until_blocked(connection)
        assert not sending.done()
        assert node.tail.known(key, 0.0) is None, "the tail knows nothing that is not durable"
    assert await sending is not None
    assert await values_of(node, topic) == [b"a"]


async def test_commit_that_does_not_end_is_answered_at_the_timeout(
    node: DataPlane, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("gateway.apis.data.produce"), "MIN_TIMEOUT_MS", 50)
    topic = await node.create_topic("t")
    request = produce_request([(topic, 0, batch_of(b"a"))], timeout_ms=50)
    async with locked_partition(database_url, topic.partitions[0].partition_key):
        response = await produce(request, node.context(ApiKey.PRODUCE, 9))
    assert response is not None
    assert only(response.responses[0].partition_responses).error_code == ErrorCode.REQUEST_TIMED_OUT


async def test_timed_out_batch_is_not_written_behind_its_repeat(
    node: DataPlane, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the timeout, all attempts that a producer made during a stall of Postgres would be written in the end."""
    monkeypatch.setattr(importlib.import_module("gateway.apis.data.produce"), "MIN_TIMEOUT_MS", 50)
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        first = asyncio.create_task(node.send(topic, batch_of(b"first")))
        await until_blocked(connection)
        request = produce_request([(topic, 0, batch_of(b"second"))], timeout_ms=50)
        for _ in range(3):
            response = await produce(request, node.context(ApiKey.PRODUCE, 9))
            assert response is not None
            assert only(response.responses[0].partition_responses).error_code == ErrorCode.REQUEST_TIMED_OUT
        repeat = asyncio.create_task(node.send(topic, batch_of(b"second")))
    assert [(await sent).base_offset for sent in (first, repeat)] == [0, 1]
    assert node.appender.queued_bytes == 0


# --- idempotence -----------------------------------------------------------------------------------------------------


async def test_cancelled_request_gives_up_its_batch(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        first = asyncio.create_task(node.send(topic, batch_of(b"first")))
        await until_blocked(connection)
        second = asyncio.create_task(node.send(topic, batch_of(b"second")))
        await asyncio.sleep(0)
        assert node.appender.queued_bytes == len(batch_of(b"first")) + len(batch_of(b"second"))
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
    assert (await first).base_offset == 0
    assert (await node.send(topic, batch_of(b"third"))).base_offset == 1
    assert await values_of(node, topic) == [b"first", b"third"]


async def test_a_repeated_batch_is_answered_with_its_first_offset(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.send(topic, batch_of(b"other"))
    batch = batch_of(b"a", b"b", producer=(7, 0, 0))
    assert (await node.send(topic, batch)).base_offset == 1
    await node.send(topic, batch_of(b"c", producer=(7, 0, 2)))
    for forgotten in (False, True):
        if forgotten:
            node.tail.forget(topic.partitions[0].partition_key)
        again = await node.send(topic, batch)
        assert (again.error_code, again.base_offset) == (ErrorCode.NONE, 1)
        assert offsets_in(await node.fetch_one(topic, 1)) == [1, 2, 3]
    assert await values_of(node, topic) == [b"other", b"a", b"b", b"c"]


async def test_two_copies_in_flight_become_one_batch(node: DataPlane) -> None:
    """In another gateway both copies passed the duplicate check."""
    topic = await node.create_topic("t")
    batch = batch_of(b"a", producer=(7, 0, 0))
    answers = await asyncio.gather(*(node.send(topic, batch, connection_id=str(copy)) for copy in range(8)))
    assert {(answer.error_code, answer.base_offset) for answer in answers} == {(0, 0)}
    assert await values_of(node, topic) == [b"a"]


async def test_wrong_sequence_or_epoch_is_refused(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    last = 2**31 - 1
    assert (await node.send(topic, batch_of(b"a", b"b", producer=(7, 0, last - 1)))).error_code == ErrorCode.NONE
    gap = await node.send(topic, batch_of(b"x", producer=(7, 0, 5)))
    assert gap.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (await node.send(topic, batch_of(b"c", producer=(7, 0, 0)))).error_code == ErrorCode.NONE, "wraps at 2^31"
    not_zero = await node.send(topic, batch_of(b"x", producer=(7, 1, 1)))
    assert not_zero.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (await node.send(topic, batch_of(b"d", producer=(7, 1, 0)))).error_code == ErrorCode.NONE
    fenced = await node.send(topic, batch_of(b"x", producer=(7, 0, 1)))
    assert fenced.error_code == ErrorCode.INVALID_PRODUCER_EPOCH
    assert await values_of(node, topic) == [b"a", b"b", b"c", b"d"]


async def test_a_batch_across_the_wrap_is_recognised(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    batch = batch_of(b"a", b"b", b"c", producer=(7, 0, 2**31 - 2))
    assert (await node.send(topic, batch)).base_offset == 0
    assert (await node.send(topic, batch)).base_offset == 0
    assert (await node.send(topic, batch_of(b"d", producer=(7, 0, 1)))).base_offset == 3


# --- LogAppendTime ---------------------------------------------------------------------------------------------------


async def test_log_append_time_agrees_everywhere(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={"message.timestamp.type": "LogAppendTime"})
    batch = batch_of(b"a", b"b", timestamps=[5, 6], producer=(7, 0, 0))
    answer = await node.send(topic, batch)
    stamp = answer.log_append_time_ms
    assert stamp > 10**12
    fetched = await node.fetch_one(topic, 0)
    head = read_head(batches_in(fetched)[0])
    assert (head.timestamp_type, head.max_timestamp) == (TimestampType.LOG_APPEND_TIME, stamp)
    assert verify_crc(batches_in(fetched)[0])
    assert [record.timestamp for record in records_in(fetched)] == [stamp, stamp]
    found = await node.list_offset(topic, stamp)
    assert (found.offset, found.timestamp) == (0, stamp)
    assert (await node.list_offset(topic, stamp + 1)).offset == -1
    await until(lambda: time.time_ns() // 1_000_000 > stamp, "the clock has gone on")
    again = await node.send(topic, batch)
    assert (again.base_offset, again.log_append_time_ms) == (0, stamp), "a repeat tells when the first was stamped"


# --- order -----------------------------------------------------------------------------------------------------------


async def test_requests_of_one_connection_keep_their_order_in_the_log(node: DataPlane) -> None:
    """The first request must query Postgres for its topic. No later request may overtake it."""
    known = await node.create_topic("known")
    (hidden,) = await node.topics.create([NewTopic("hidden", 1, {})])
    assert isinstance(hidden, Topic)
    targets = [("hidden",), ("hidden", "known"), ("known",), ("hidden",), ("known", "hidden")]
    sends = [
        asyncio.create_task(
            produce(
                produce_request([(name, 0, batch_of(b"%d" % number)) for name in names]),
                node.context(ApiKey.PRODUCE, 9),
            )
        )
        for number, names in enumerate(targets)
    ]
    for response in await asyncio.gather(*sends):
        assert response is not None
        assert {p.error_code for topic in response.responses for p in topic.partition_responses} == {0}
    assert await values_of(node, hidden) == [b"0", b"1", b"3", b"4"]
    assert await values_of(node, known) == [b"1", b"2", b"4"]


async def test_another_connection_does_not_wait_for_a_lookup(node: DataPlane) -> None:
    await node.create_topic("known")
    async with node.context(ApiKey.PRODUCE, 9, "slow").place:
        behind = asyncio.create_task(node.send("known", batch_of(b"behind"), connection_id="slow"))
        answer = await node.send("known", batch_of(b"other"), connection_id="other")
        assert answer.base_offset == 0
        assert not behind.done()
    assert (await behind).base_offset == 1


# --- others change the world -----------------------------------------------------------------------------------------


async def test_produce_to_a_topic_deleted_on_another_node_is_refused(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.topics.delete(topic.topic_id)
    by_name = await node.send(topic, batch_of(b"a"))
    assert by_name.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await node.send(topic, batch_of(b"a"), version=13)).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    await node.catalog.refresh_if_changed()
    assert node.catalog.get("t") is None


async def test_produce_to_a_recreated_topic_goes_to_the_new_one(node: DataPlane) -> None:
    old = await node.create_topic("t")
    await node.send(old, batch_of(b"old"))
    await node.delete_topic(old)
    new = await node.create_topic("t")
    assert new.topic_id != old.topic_id
    assert (await node.send(old, batch_of(b"x"), version=13)).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert (await node.send(new, batch_of(b"new"))).base_offset == 0
    assert await values_of(node, new) == [b"new"]


async def test_storage_lost_during_a_commit_is_retriable(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        sending = asyncio.create_task(node.send(topic, batch_of(b"a")))
        await until_blocked(connection)
        await terminate_backends(connection)
        answer = await sending
        assert answer.error_code == ErrorCode.REQUEST_TIMED_OUT, "retriable, and possibly persisted"
    assert (await node.send(topic, batch_of(b"b"))).error_code == ErrorCode.NONE
    assert offsets_in(await node.fetch_one(topic, 0)) == [0]
    assert await values_of(node, topic) == [b"b"]


async def test_topics_are_matched_by_the_field_of_the_version(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    request = ProduceRequest(
        acks=-1,
        topic_data=(
            TopicProduceData(topic_id=topic.topic_id, partition_data=(PartitionProduceData(index=0, records=b""),)),
        ),
    )
    by_id = await produce(request, node.context(ApiKey.PRODUCE, 13))
    assert by_id is not None
    assert by_id.responses[0].topic_id == topic.topic_id
    assert by_id.responses[0].partition_responses[0].error_code == ErrorCode.INVALID_RECORD
    by_name = await produce(
        replace(request, topic_data=(replace(request.topic_data[0], name="t"),)), node.context(ApiKey.PRODUCE, 12)
    )
    assert by_name is not None
    assert by_name.responses[0].name == "t"


async def test_one_request_logs_few_of_its_refusals_and_counts_all(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    with structlog.testing.capture_logs() as logged:
        answers = await node.send_all([(topic, partition, b"rubbish") for partition in range(1, 101)])
    assert {answer.error_code for answer in answers} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert sum(entry["event"] == "record batch refused" for entry in logged) == MAX_LOGGED_REFUSALS
    counted = node.services.metrics.registry.get_sample_value
    assert counted("sluice_refused_batches_total", {"error": "UNKNOWN_TOPIC_OR_PARTITION"}) == 100


# --- compression.type ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CODECS))
async def test_batches_are_stored_in_their_topics_codec(node: DataPlane, name: str) -> None:
    topic = await node.create_topic("t", configs={"compression.type": name, "message.timestamp.type": "LogAppendTime"})
    for count, codec in enumerate(Compression):
        batch = batch_of(b"a" * 500, b"b" * 500, compression=codec, producer=(7, 0, 2 * count))
        assert (await node.send(topic, batch)).base_offset == 2 * count
        assert (await node.send(topic, batch)).base_offset == 2 * count, "repeated by its producer"
    assert await values_of(node, topic) == [b"a" * 500, b"b" * 500] * len(Compression)
    for stored in batches_in(await node.fetch_one(topic, 0)):
        assert verify_crc(stored)
        assert read_head(stored).compression is CODECS[name]
    assert node.recompressor.claimed_bytes == 0


async def test_requests_keep_their_order_with_recompression(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={"compression.type": "zstd", "compression.zstd.level": "19"})
    sizes = [400_000, 1, 200_000, 1, 1]
    answers = await asyncio.gather(
        *(node.send(topic, batch_of(b"%d" % n * size, producer=(7, 0, n))) for n, size in enumerate(sizes))
    )
    assert [answer.base_offset for answer in answers] == list(range(len(sizes)))


async def test_a_batch_that_its_codec_makes_too_large_is_refused(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={"compression.type": "uncompressed", "max.message.bytes": "1000"})
    refused = await node.send(topic, batch_of(b"a" * 1000, compression=Compression.ZSTD))
    assert refused.error_code == ErrorCode.MESSAGE_TOO_LARGE
    assert (await node.send(topic, batch_of(b"a" * 100, compression=Compression.ZSTD))).base_offset == 0
    assert node.recompressor.claimed_bytes == 0


@pytest.mark.parametrize("version", [9, 10])
async def test_old_fetch_versions_receive_zstd(node: DataPlane, version: int) -> None:
    """Kafka's own FetchRequestTest requires this of Kafka 4. Earlier Kafka releases refused it for
    versions below 10.
    """
    topic = await node.create_topic("t", configs={"compression.type": "zstd"})
    await node.send(topic, batch_of(b"a"))
    answer = await node.fetch_one(topic, 0, version=version)
    assert answer.error_code == ErrorCode.NONE
    assert records_in(answer)
