"""Fetch at handler level on a real Postgres: sizes, order, long poll, ranges, epochs, sessions, lost storage."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from gateway.apis.data.fetch import fetch
from gateway.log.tail import TailRead
from gateway.net import pieces
from gateway.net.holdings import Holdings
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from protocol.records import read_head
from storage.errors import StorageUnavailable
from storage.types import PartitionState, ReadRequest, ReadResult, Refusal, Topic
from tests.gateway.data_plane import (
    FETCH_VERSION,
    DataPlane,
    at,
    batch_of,
    batch_of_size,
    batches_in,
    data_plane,
    locked_partition,
    offsets_in,
    only,
    raw,
)

LONG_MS = 30_000
WITHIN_S = 20
"""In seconds: enough for a slow machine, and far below LONG_MS. A fetch that returns within this time was woken and did
not time out.
"""


@pytest.fixture(params=["tail", "cold"])
async def node(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[DataPlane]:
    """The rules are the same if records come from memory or from Postgres."""
    async with data_plane(database_url, tail_bytes={"tail": 2**24, "cold": 0}[request.param]) as node:
        yield node


@pytest.fixture(params=[2**24, 0, 1700], ids=["tail", "cold", "mixed"])
async def sized(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[DataPlane]:
    """A node as in `node`, with one more case: one answer has records from memory and from Postgres."""
    async with data_plane(database_url, tail_bytes=request.param) as node:
        yield node


@pytest.fixture
async def warm(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


def sizes(response: FetchResponse) -> list[list[int]]:
    """Return the sizes of each partition's batches, in the order of the answer."""
    return [[len(batch) for batch in batches_in(part)] for topic in response.responses for part in topic.partitions]


# --- sizes -----------------------------------------------------------------------------------------------------------


async def test_whole_batches_are_returned_up_to_the_partition_limit(sized: DataPlane) -> None:
    topic = await sized.create_topic("t")
    await sized.fill(topic, [300, 300, 300])
    for limit, count in [(900, 3), (899, 2), (600, 2), (599, 1), (300, 1)]:
        assert offsets_in(await sized.fetch_one(topic, 0, partition_max_bytes=limit)) == list(range(count))


@pytest.mark.parametrize("limits", [(1, 2**20), (2**20, 1), (0, 0), (-5, 2**20)])
async def test_first_batch_is_returned_above_the_limit(sized: DataPlane, limits: tuple[int, int]) -> None:
    """Otherwise a reader with small limits would never get past a large batch (KIP-74)."""
    topic = await sized.create_topic("t")
    await sized.fill(topic, [5000, 300])
    part = await sized.fetch_one(topic, 0, partition_max_bytes=limits[0], max_bytes=limits[1], min_bytes=0)
    assert offsets_in(part) == [0]


async def test_response_limit_is_used_in_the_order_of_the_request(sized: DataPlane) -> None:
    topic = await sized.create_topic("t", 3)
    for partition in range(3):
        await sized.fill(topic, [400, 400], partition=partition)
    for order in ([0, 1, 2], [2, 0, 1]):
        asked = [(topic, at(0, partition)) for partition in order]
        assert sizes(await sized.fetch(asked, max_bytes=1300)) == [[400, 400], [400], []]
        assert sizes(await sized.fetch(asked, max_bytes=10)) == [[400], [], []]
        assert sizes(await sized.fetch(asked, max_bytes=2400)) == [[400, 400]] * 3


@pytest.mark.parametrize("committed", [False, True])
async def test_limit_is_filled_with_a_part_of_a_batch_in_memory(warm: DataPlane, committed: bool) -> None:
    topic = await warm.create_topic("t", 3)
    for partition in range(3):
        await warm.fill(topic, [400, 400, 400], partition=partition)
    logs = [raw(await warm.fetch_one(topic, 0, partition=partition)) for partition in range(3)]

    async def lengths(max_bytes: int, partition_max_bytes: int) -> list[int]:
        asked = [(topic, at(0, partition, max_bytes=partition_max_bytes)) for partition in range(3)]
        response = await warm.fetch(asked, max_bytes=max_bytes, isolation_level=int(committed))
        parts = [raw(part) for topic in response.responses for part in topic.partitions]
        assert parts == [log[: len(part)] for part, log in zip(parts, logs, strict=True)]
        return [len(part) for part in parts]

    assert await lengths(10_000, 399) == [400, 0, 0], "what does not begin with a whole batch is left out (KIP-74)"
    assert await lengths(10_000, 400) == [400, 400, 400]
    assert await lengths(10_000, 799) == [799, 799, 799]
    assert await lengths(2_000, 799) == [799, 799, 402]
    assert await lengths(1_997, 799) == [799, 799, 0]
    assert await lengths(2_500, 10_000) == [1_200, 1_200, 0]
    assert await lengths(1_700, 10_000) == [1_200, 500, 0]
    assert await lengths(500, 10_000) == [500, 0, 0]
    assert await lengths(300, 10_000) == [400, 0, 0]


async def test_no_part_of_a_batch_behind_the_last_stable_offset_is_returned(
    warm: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await warm.create_topic("t")
    await warm.fill(topic, [400, 400])
    key = topic.partitions[0].partition_key
    read = warm.tail.read

    def with_one_open(*args: Any, **options: Any) -> TailRead | None:
        partition = warm.tail._partitions[key]  # noqa: SLF001
        assert partition.known is not None
        partition.known = partition.known._replace(last_stable_offset=1)
        return read(*args, **options)

    monkeypatch.setattr(warm.tail, "read", with_one_open)
    part = await warm.fetch_one(topic, 0, partition_max_bytes=700, isolation_level=1)
    assert len(raw(part)) == 400
    part = await warm.fetch_one(topic, 0, partition_max_bytes=700)
    assert len(raw(part)) == 700


async def test_no_batch_is_read_from_postgres_for_a_part_of_it(database_url: str) -> None:
    async with data_plane(database_url, tail_bytes=0) as node:
        topic = await node.create_topic("t")
        await node.fill(topic, [400, 400])
        assert len(raw(await node.fetch_one(topic, 0, partition_max_bytes=700))) == 400


async def test_full_node_answers_batch_by_batch(sized: DataPlane) -> None:
    """The clients' own limits do not protect a node: sixty megabytes for each of many clients is
    more than its memory.
    """
    topic = await sized.create_topic("t")
    await sized.fill(topic, [200, 300, 400])
    holdings = Holdings(1000)
    sized.context(ApiKey.FETCH, 12).connection.holdings = holdings
    ask = [(topic, at(0))]
    holdings.take(450)
    response = await sized.fetch(ask, min_bytes=900)
    assert len(raw(only(only(response.responses).partitions))) == 500, "no part of a batch, which is of no use"
    holdings.take(50)
    assert sizes(await sized.fetch(ask, min_bytes=900)) == [[200, 300]]
    holdings.take(500)
    assert sizes(await sized.fetch(ask, min_bytes=900)) == [[200]]
    holdings.give_back(1000)
    assert sizes(await sized.fetch(ask, min_bytes=900)) == [[200, 300, 400]]
    holdings.take(1000)
    waiting = await parked(sized, sized.fetch([(topic, at(3))], max_wait_ms=LONG_MS))
    await settle()
    assert not waiting.done(), "a full node is no reason to answer with nothing"
    await sized.fill(topic, [200])
    assert sizes(await answer_of(waiting)) == [[200]]


async def test_concurrent_reads_from_postgres_share_the_room(database_url: str) -> None:
    """Each request checks the free memory when it begins. Promised bytes must be counted, or all requests together
    would take many times the limit.
    """
    async with data_plane(database_url, tail_bytes=0) as node:
        topic = await node.create_topic("t", 4)
        for partition in range(4):
            await node.fill(topic, [900_000] * 3, partition=partition)
        holdings = Holdings(5_000_000)
        node.context(ApiKey.FETCH, 12).connection.holdings = holdings
        asked = [[(topic, at(0, partition, max_bytes=3_000_000))] for partition in range(4)]
        answers = await asyncio.gather(*(node.fetch(ask) for ask in asked))
        counts = [len(only(sizes(answer))) for answer in answers]
        assert counts == [3, 2, 1, 1], "what is left is two batches; then one at a time"
        assert holdings.held_bytes == 0


async def test_a_later_partitions_first_batch_must_fit(sized: DataPlane) -> None:
    topic = await sized.create_topic("t", 3)
    await sized.fill(topic, [300], partition=0)
    await sized.fill(topic, [5000], partition=1)
    await sized.fill(topic, [300], partition=2)
    asked = [(topic, at(0, partition)) for partition in range(3)]
    assert sizes(await sized.fetch(asked, max_bytes=1000)) == [[300], [], [300]]
    asked = [(topic, at(0, 0)), (topic, at(0, 1, max_bytes=4000)), (topic, at(0, 2))]
    assert sizes(await sized.fetch(asked)) == [[300], [], [300]]


async def test_records_read_from_postgres_use_up_the_first_batch_for_those_in_memory(warm: DataPlane) -> None:
    topic = await warm.create_topic("t", 2)
    await warm.fill(topic, [300], partition=0)
    await warm.fill(topic, [5000], partition=1)
    warm.tail.forget(topic.partitions[0].partition_key)
    assert sizes(await warm.fetch([(topic, at(0, 0)), (topic, at(0, 1))], max_bytes=1000)) == [[300], []]


async def test_an_empty_partition_does_not_use_up_the_first_batch(sized: DataPlane) -> None:
    topic = await sized.create_topic("t", 2)
    await sized.fill(topic, [5000], partition=1)
    asked = [(topic, at(0, partition, max_bytes=100)) for partition in range(2)]
    assert sizes(await sized.fetch(asked)) == [[], [5000]]


async def test_an_offset_inside_a_batch_gives_that_batch_from_its_beginning(sized: DataPlane) -> None:
    topic = await sized.create_topic("t")
    await sized.send(topic, batch_of(b"a", b"b", b"c"))
    await sized.send(topic, batch_of(b"d"))
    assert offsets_in(await sized.fetch_one(topic, 2)) == [0, 1, 2, 3]
    assert offsets_in(await sized.fetch_one(topic, 3)) == [3]


async def test_repeated_fetches_reach_the_end(sized: DataPlane) -> None:
    topic = await sized.create_topic("t")
    await sized.fill(topic, [250 + size for size in range(40)])
    offset, answers = 0, 0
    while offset < 40:
        part = await sized.fetch_one(topic, offset, partition_max_bytes=700)
        found = offsets_in(part)
        assert found == list(range(offset, found[-1] + 1))
        assert len(raw(part)) <= 700
        offset, answers = found[-1] + 1, answers + 1
    assert answers == 20


# --- what is said of the partition -----------------------------------------------------------------------------------


async def test_offsets_of_the_partition_are_filled_in(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.fill(topic, [300, 300])
    for isolation_level, aborted in [(0, None), (1, ())]:
        part = await node.fetch_one(topic, 0, isolation_level=isolation_level)
        assert (part.error_code, part.high_watermark, part.last_stable_offset, part.log_start_offset) == (0, 2, 2, 0)
        assert part.aborted_transactions == aborted
        assert part.preferred_read_replica == -1
    end = await node.fetch_one(topic, 2)
    assert (end.error_code, end.high_watermark, raw(end)) == (ErrorCode.NONE, 2, b"")
    assert end.records is not None, "a null where nothing is would be a torn response to some clients"


async def test_last_stable_offset_differs_from_the_high_watermark(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage reports the last stable offset, both for reads from the tail and for cold reads. This
    offset never falls.
    """
    topic = await node.create_topic("t")
    key = topic.partitions[0].partition_key
    other = await node.create_topic("other")
    for state, expected in (
        (PartitionState(0, 5, 3, 0, 0), (5, 3)),
        (PartitionState(0, 5, 1, 0, 0), (5, 3)),
        (PartitionState(0, 9, 9, 0, 0), (9, 9)),
    ):
        node.tail.observe(key, state, asyncio.get_running_loop().time())
        end = await node.fetch_one(topic, expected[0])
        assert (end.high_watermark, end.last_stable_offset) == expected
    read = node.log.read

    async def with_an_open_transaction(
        requests: Sequence[ReadRequest], *, max_bytes: int
    ) -> list[ReadResult | Refusal]:
        results = await read(requests, max_bytes=max_bytes)
        return [
            replace(each, state=replace(each.state, last_stable_offset=1)) if isinstance(each, ReadResult) else each
            for each in results
        ]

    await node.fill(other, [300] * 3)
    node.tail.reset()
    monkeypatch.setattr(node.log, "read", with_an_open_transaction)
    part = await node.fetch_one(other, 0)
    assert (part.high_watermark, part.last_stable_offset) == (3, 1)


async def test_fetch_out_of_range_is_refused(node: DataPlane) -> None:
    """Another gateway never returned OFFSET_OUT_OF_RANGE, so auto.offset.reset never took effect."""
    topic = await node.create_topic("t")
    await node.fill(topic, [300] * 4)
    await node.log.delete_records(topic.partitions[0].partition_key, 2)
    node.tail.log_start_moved(topic.partitions[0].partition_key, 2)
    for offset in (1, 5, -1, 2**62):
        part = await asyncio.wait_for(node.fetch_one(topic, offset, max_wait_ms=LONG_MS), WITHIN_S)
        assert part.error_code == ErrorCode.OFFSET_OUT_OF_RANGE, offset
        assert (part.high_watermark, part.last_stable_offset, part.log_start_offset) == (4, 4, 2)
        assert raw(part) == b""
    assert offsets_in(await node.fetch_one(topic, 2)) == [2, 3]


async def test_unknown_targets_are_answered_at_once_and_alone(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.fill(topic, [300])
    response = await asyncio.wait_for(
        node.fetch([("missing", at(0)), (topic, at(0)), (topic, at(0, 7))], max_wait_ms=LONG_MS, min_bytes=10**6),
        WITHIN_S,
    )
    codes = [part.error_code for row in response.responses for part in row.partitions]
    assert codes == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert sizes(response) == [[], [300], []]
    ghost = Topic(uuid4(), "ghost", False, {}, ())
    by_id = await node.fetch([(ghost, at(0)), (topic, at(0))], version=13)
    assert [only(row.partitions).error_code for row in by_id.responses] == [
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.NONE,
    ]
    assert [row.topic_id for row in by_id.responses] == [ghost.topic_id, topic.topic_id]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (at(0, current_leader_epoch=0), ErrorCode.NONE),
        (at(0, current_leader_epoch=1), ErrorCode.UNKNOWN_LEADER_EPOCH),
        (at(0, last_fetched_epoch=0), ErrorCode.NONE),
        (at(0, last_fetched_epoch=1), ErrorCode.OFFSET_OUT_OF_RANGE),
    ],
)
async def test_leader_epochs(node: DataPlane, asked: FetchPartition, code: ErrorCode) -> None:
    topic = await node.create_topic("t")
    await node.fill(topic, [300])
    response = await node.fetch([(topic, asked)], version=12)
    part = only(only(response.responses).partitions)
    assert part.error_code == code
    assert bool(raw(part)) == (code is ErrorCode.NONE)
    assert part.diverging_epoch.epoch == -1


@pytest.mark.parametrize(("session", "refused"), [((0, -1), False), ((0, 0), False), ((9, 0), False), ((9, -1), False),
                                                  ((9, 1), True), ((0, 1), True)])  # fmt: skip
async def test_sessions_are_declined(warm: DataPlane, session: tuple[int, int], refused: bool) -> None:
    topic = await warm.create_topic("t")
    await warm.fill(topic, [300])
    response = await warm.fetch([(topic, at(0))], session=session)
    assert response.session_id == 0
    assert response.error_code == (ErrorCode.FETCH_SESSION_ID_NOT_FOUND if refused else ErrorCode.NONE)
    assert sizes(response) == ([] if refused else [[300]])


# --- the long poll ---------------------------------------------------------------------------------------------------


async def parked(node: DataPlane, fetching: Coroutine[Any, Any, FetchResponse]) -> asyncio.Task[FetchResponse]:
    """Start a fetch that has read once and now waits for records. Return its task."""
    before = node.tail.parked_count
    task = asyncio.create_task(fetching)
    deadline = time.monotonic() + WITHIN_S
    while node.tail.parked_count == before and not task.done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
    await settle()
    assert not task.done(), "it should wait"
    return task


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def answer_of(task: asyncio.Task[FetchResponse]) -> FetchResponse:
    return await asyncio.wait_for(task, WITHIN_S)


async def test_an_append_ends_the_wait(node: DataPlane) -> None:
    topic = await node.create_topic("t", 2)
    await node.fill(topic, [300])
    task = await parked(node, node.fetch([(topic, at(1, 0)), (topic, at(0, 1))], max_wait_ms=LONG_MS))
    await node.fill(topic, [250], partition=1)
    response = await answer_of(task)
    assert sizes(response) == [[], [250]]
    assert response.responses[1].partitions[0].high_watermark == 1


async def test_an_append_during_a_long_look_ends_the_wait(warm: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append arrives in a partition that the fetch has already read."""
    fetch_module = importlib.import_module("gateway.apis.data.fetch")
    monkeypatch.setattr(fetch_module, "AT_ONCE_PARTS", 1)
    monkeypatch.setattr(pieces, "TURN_S", 0.0)
    topic = await warm.create_topic("t", 2)
    await warm.fill(topic, [300], partition=0)
    await warm.fill(topic, [300], partition=1)
    looked, go_on = asyncio.Event(), asyncio.Event()

    original = fetch_module.in_pieces

    async def long_look(items: Any) -> AsyncIterator[Any]:
        topics = False
        async for item in original(items):
            topics = topics or isinstance(item, FetchTopic)
            yield item
        if topics and not looked.is_set():
            looked.set()
            await go_on.wait()

    monkeypatch.setattr(fetch_module, "in_pieces", long_look)
    task = asyncio.create_task(warm.fetch([(topic, at(1, 0)), (topic, at(1, 1))], max_wait_ms=LONG_MS))
    await asyncio.wait_for(looked.wait(), WITHIN_S)
    await warm.fill(topic, [250], partition=0)
    go_on.set()
    assert sizes(await answer_of(task)) == [[250], []]


async def test_fetch_woken_without_records_waits_again(warm: DataPlane) -> None:
    topic = await warm.create_topic("t")
    await warm.fill(topic, [300])
    task = await parked(warm, warm.fetch([(topic, at(1))], max_wait_ms=LONG_MS))
    for _ in range(10):
        warm.tail.log_start_moved(topic.partitions[0].partition_key, 0)
        await asyncio.sleep(0)
        assert warm.tail.parked_count == 1
    assert not task.done()
    await warm.fill(topic, [250])
    assert sizes(await answer_of(task)) == [[250]]


async def test_fetch_does_not_wait_without_a_reason(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    for options in ({"max_wait_ms": 0}, {"max_wait_ms": LONG_MS, "min_bytes": 0}):
        part = await asyncio.wait_for(node.fetch_one(topic, 0, **options), WITHIN_S)
        assert (part.error_code, raw(part)) == (ErrorCode.NONE, b"")
    nothing_asked = await asyncio.wait_for(node.fetch([], max_wait_ms=LONG_MS), WITHIN_S)
    assert nothing_asked.responses == ()


async def test_the_wait_ends_at_max_wait(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.fill(topic, [300])
    loop = asyncio.get_running_loop()
    started = loop.time()
    part = await node.fetch_one(topic, 0, min_bytes=5000, max_wait_ms=150)
    assert loop.time() - started > 0.149, "the loop counts in whole milliseconds"
    assert offsets_in(part) == [0], "what there is comes with the end of the wait"


async def test_min_bytes_are_summed_over_partitions(node: DataPlane) -> None:
    topic = await node.create_topic("t", 2)
    await node.fill(topic, [300])
    task = await parked(node, node.fetch([(topic, at(0, 0)), (topic, at(0, 1))], min_bytes=1000, max_wait_ms=LONG_MS))
    await node.fill(topic, [300], partition=1)
    await settle()
    assert not task.done()
    await node.fill(topic, [400], partition=1)
    assert sizes(await answer_of(task)) == [[300], [300, 400]]


async def test_min_bytes_above_max_bytes_do_not_wait_for_ever(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.fill(topic, [300] * 3)
    part = await asyncio.wait_for(
        node.fetch_one(topic, 0, min_bytes=10**6, max_bytes=300, max_wait_ms=LONG_MS), WITHIN_S
    )
    assert offsets_in(part) == [0]


async def test_deleting_the_topic_ends_the_wait(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    by_name = await parked(node, node.fetch([(topic, at(0))], max_wait_ms=LONG_MS))
    by_id = await parked(node, node.fetch([(topic, at(0))], version=13, max_wait_ms=LONG_MS))
    await node.delete_topic(topic)
    codes = [only(only((await answer_of(task)).responses).partitions).error_code for task in (by_name, by_id)]
    assert codes == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID]


async def test_deletion_of_records_ends_the_wait_of_their_reader(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    key = topic.partitions[0].partition_key
    await node.fill(topic, [300] * 2)
    task = await parked(node, node.fetch([(topic, at(0))], min_bytes=10**6, max_wait_ms=LONG_MS))
    await node.log.delete_records(key, -1)
    node.tail.log_start_moved(key, 2)
    part = only(only((await answer_of(task)).responses).partitions)
    assert (part.error_code, part.log_start_offset) == (ErrorCode.OFFSET_OUT_OF_RANGE, 2)


async def test_drain_answers_waiting_fetches(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    task = await parked(node, node.fetch([(topic, at(0))], max_wait_ms=LONG_MS))
    node.tail.drain()
    assert sizes(await answer_of(task)) == [[]]
    assert sizes(await asyncio.wait_for(node.fetch([(topic, at(0))], max_wait_ms=LONG_MS), WITHIN_S)) == [[]]


async def test_cancelled_fetch_leaves_no_watch(warm: DataPlane) -> None:
    topic = await warm.create_topic("t")
    task = await parked(warm, warm.fetch([(topic, at(0))], max_wait_ms=LONG_MS))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert warm.tail.watched() == []


# --- other nodes, lost storage ---------------------------------------------------------------------------------------


async def test_a_topic_created_on_another_node_is_found(warm: DataPlane, database_url: str) -> None:
    async with data_plane(database_url, name="node-2") as other:
        topic = await other.create_topic("t")
        await other.fill(topic, [300])
        assert sizes(await warm.fetch([("t", at(0))])) == [[300]]
        assert sizes(await warm.fetch([(topic, at(0))], version=13)) == [[300]]


@pytest.mark.parametrize("isolation_level", [0, 1])
async def test_offset_that_another_node_has_just_appended_is_in_range(
    warm: DataPlane, database_url: str, isolation_level: int
) -> None:
    """The consumer has read the record at the other node, whose announcement has not arrived here."""
    topic = await warm.create_topic("t")
    await warm.fill(topic, [300])
    assert sizes(await warm.fetch([(topic, at(1))], isolation_level=isolation_level)) == [[]]
    async with data_plane(database_url, name="node-2") as other:
        await other.catalog.refresh_if_changed()
        await other.fill(topic, [300])
        response = await warm.fetch([(topic, at(2))], isolation_level=isolation_level)
    (part,) = response.responses[0].partitions
    assert (part.error_code, part.high_watermark) == (ErrorCode.NONE, 2)


async def test_append_of_another_node_during_a_first_read_wakes_the_fetch(
    warm: DataPlane, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await warm.create_topic("t")
    read = warm.log.read
    reads = 0

    async with data_plane(database_url, name="node-2") as other:

        async def append_behind(requests: Sequence[ReadRequest], *, max_bytes: int) -> list[ReadResult | Refusal]:
            nonlocal reads
            reads += 1
            results = await read(requests, max_bytes=max_bytes)
            if reads == 1:
                await other.fill(topic, [300])
                warm.tail.heard(topic.partitions[0].partition_key, 1, asyncio.get_running_loop().time())
            return results

        monkeypatch.setattr(warm.log, "read", append_behind)
        part = await asyncio.wait_for(warm.fetch_one(topic, 0, max_wait_ms=LONG_MS), WITHIN_S)
    assert offsets_in(part) == [0]
    assert reads == 2


async def test_a_topic_deleted_on_another_node_is_noticed(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.topics.delete(topic.topic_id)
    node.tail.forget(topic.partitions[0].partition_key)
    assert (await node.fetch_one(topic, 0)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    await node.catalog.refresh_if_changed()
    assert node.catalog.get("t") is None


async def test_a_node_without_a_registration_looks_for_deletions_before_it_serves_from_memory(warm: DataPlane) -> None:
    topic = await warm.create_topic("t")
    await warm.fill(topic, [300])
    await warm.topics.delete(topic.topic_id)
    assert sizes(await warm.fetch([(topic, at(0, 0))])) == [[300]]
    warm.membership.lapse()
    assert (await warm.fetch_one(topic, 0)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_node_without_a_registration_serves_nothing_from_memory_during_an_outage(warm: DataPlane) -> None:
    topic = await warm.create_topic("t")
    await warm.fill(topic, [300])
    await warm.database.control.close(1.0)
    assert sizes(await warm.fetch([(topic, at(0, 0))])) == [[300]]
    warm.membership.lapse()
    with pytest.raises(StorageUnavailable):
        await warm.fetch_one(topic, 0)


async def test_lost_storage_fails_cold_partitions_alone(warm: DataPlane) -> None:
    topic = await warm.create_topic("t", 3)
    for partition in range(2):
        await warm.fill(topic, [300], partition=partition)
    warm.tail.forget(topic.partitions[1].partition_key)
    await warm.database.cold.close(1.0)
    response = await asyncio.wait_for(
        warm.fetch([(topic, at(0, 0)), (topic, at(0, 1)), (topic, at(0, 2))], max_wait_ms=LONG_MS), WITHIN_S
    )
    codes = [part.error_code for row in response.responses for part in row.partitions]
    assert codes == [ErrorCode.NONE, ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.NOT_LEADER_OR_FOLLOWER]
    assert sizes(response) == [[300], [], []]


async def test_a_reader_at_the_end_does_not_notice_an_outage(warm: DataPlane) -> None:
    topic = await warm.create_topic("t")
    await warm.fill(topic, [300])
    warm.tail.doubt(asyncio.get_running_loop().time() + 3600)
    await warm.database.cold.close(1.0)
    part = await warm.fetch_one(topic, 1, max_wait_ms=1500)
    assert (part.error_code, raw(part)) == (ErrorCode.NONE, b"")


async def test_slow_cold_read_does_not_delay_records_of_the_tail(
    warm: DataPlane, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The timeout is far below the 5 s after which Postgres itself gives up on the lock.
    monkeypatch.setattr(importlib.import_module("gateway.apis.data.fetch"), "COLD_PATIENCE_S", 0.1)
    topic = await warm.create_topic("t", 2)
    for partition in range(2):
        await warm.fill(topic, [300], partition=partition)
    warm.tail.forget(topic.partitions[1].partition_key)
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        await connection.execute("lock table sluice.chunk in access exclusive mode")
        response = await asyncio.wait_for(warm.fetch([(topic, at(0, 0)), (topic, at(0, 1))]), 4)
    assert sizes(response) == [[300], []]
    assert response.responses[1].partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_records_are_returned_without_a_copy(warm: DataPlane) -> None:
    topic = await warm.create_topic("t")
    await warm.send(topic, batch_of_size(100_000))
    part = await warm.fetch_one(topic, 0)
    assert isinstance(part.records, tuple)
    assert isinstance(part.records[0], memoryview)
    assert read_head(part.records[0]).base_offset == 0


async def test_cost_of_a_crowded_request_is_linear(warm: DataPlane) -> None:
    """A request names many partitions of one unknown topic. A single partition must not cost as much as the whole
    topic.
    """
    crowd = FetchTopic(topic="ghost", partitions=tuple(at(0, index) for index in range(5_000)))
    started = time.process_time()
    response = await fetch(FetchRequest(topics=(crowd,)), warm.context(ApiKey.FETCH, FETCH_VERSION))
    assert time.process_time() - started < 1, (
        "seconds: a fraction of one is enough, and looking at the whole topic for each partition takes five"
    )
    assert {part.error_code for part in only(response.responses).partitions} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
