"""Fetch with a leader epoch that has already ended: the answer contains the end of that epoch (KIP-320, KIP-595).
Postgres is not involved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from gateway.apis.data.fetch import fetch
from gateway.log.tail import Tail
from gateway.net.context import ConnectionInfo, RequestContext
from gateway.quotas.limits import Quotas
from gateway.quotas.throttles import Throttles
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.fetch import EpochEndOffset, FetchPartition, FetchRequest, FetchTopic, PartitionData
from storage.errors import StorageUnavailable
from storage.types import Partition, PartitionKey, PartitionState, ReadResult, Topic
from tests.steps.waiting import until

TOPIC, KEY = UUID(int=1), PartitionKey(7)
EPOCH, END = 5, 10
BEGAN = [(3, 4), (EPOCH, 8)]
"""Epoch 3 begins at offset 4 and epoch 5 at offset 8. The log ends at offset 10."""
WITHIN_S = 20


def topic_of(topic_id: UUID, key: PartitionKey) -> Topic:
    return Topic(topic_id, "t", internal=False, configs={}, partitions=(Partition(0, key, EPOCH, None, topic_id, 1),))


def append(tail: Tail, key: PartitionKey, offset: int) -> None:
    tail.record_append(
        key,
        base_offset=offset,
        last_offset=offset,
        records=b"a batch",
        log_start_offset=0,
        leader_epoch=EPOCH,
        now_s=asyncio.get_running_loop().time(),
    )


def context(*, storage: bool = True, version: int = 17) -> Any:
    tail = Tail(2**20)
    now_s = asyncio.get_running_loop().time()
    state = PartitionState(0, END, END, EPOCH, 100)
    tail.observe(KEY, state, now_s)
    topic = topic_of(TOPIC, KEY)

    async def known(asked: object) -> None:
        """Return the known topic without a query."""

    async def epochs(keys: Iterable[PartitionKey]) -> dict[PartitionKey, list[tuple[int, int]]]:
        if not storage:
            raise StorageUnavailable("gone")
        return dict.fromkeys(keys, BEGAN)

    async def read(asked: list[object], max_bytes: int) -> list[ReadResult]:
        return [ReadResult(state, ()) for _ in asked]

    services = SimpleNamespace(
        authorizer=None,
        internal_logs=None,
        catalog=SimpleNamespace(
            get={topic.name: topic}.get,
            get_by_id={TOPIC: topic}.get,
            resolve_all=known,
            resolve_all_ids=known,
            broker=SimpleNamespace(fetch_max_bytes=2**20),
        ),
        history=SimpleNamespace(epochs=epochs),
        log=SimpleNamespace(read=read),
        idle_owners=None,
        marks=None,
        membership=SimpleNamespace(is_registered=True),
        metrics=SimpleNamespace(count_topic_bytes_out=lambda _topic, _bytes: None),
        tail=tail,
        throttles=Throttles(Quotas),
    )
    connection = ConnectionInfo("connection", "/127.0.0.1")
    return RequestContext(ApiKey.FETCH, version, 1, "c", connection, services)


async def fetched(
    offset: int,
    last_fetched_epoch: int,
    *,
    max_wait_ms: int = 600_000,
    storage: bool = True,
    within: Any = None,
) -> PartitionData:
    part = FetchPartition(
        partition=0,
        current_leader_epoch=EPOCH,
        fetch_offset=offset,
        last_fetched_epoch=last_fetched_epoch,
        partition_max_bytes=2**20,
    )
    request = FetchRequest(
        max_wait_ms=max_wait_ms, min_bytes=1, topics=(FetchTopic(topic="t", topic_id=TOPIC, partitions=(part,)),)
    )
    async with asyncio.timeout(WITHIN_S):
        answer = await fetch(request, within or context(storage=storage))
    (found,) = answer.responses[0].partitions
    assert isinstance(found, PartitionData)
    return found


@pytest.mark.parametrize(
    ("offset", "last_fetched_epoch", "ended"),
    [
        (END, 3, (3, 8)),
        (END + 3, 3, (3, 8)),
        (END, 0, (0, 4)),
        (END, 4, (3, 8)),
        (8, 4, (3, 8)),
    ],
)
async def test_diverged_reader_is_answered_at_once(
    offset: int, last_fetched_epoch: int, ended: tuple[int, int]
) -> None:
    part = await fetched(offset, last_fetched_epoch)
    assert part.error_code == ErrorCode.NONE
    assert part.diverging_epoch == EpochEndOffset(epoch=ended[0], end_offset=ended[1])
    assert part.records == b""
    assert part.high_watermark == END


@pytest.mark.parametrize(("offset", "last_fetched_epoch"), [(END, -1), (END, EPOCH), (8, 3), (4, 0)])
async def test_reader_within_its_epoch_is_served(offset: int, last_fetched_epoch: int) -> None:
    part = await fetched(offset, last_fetched_epoch, max_wait_ms=1)
    assert (part.error_code, part.diverging_epoch) == (ErrorCode.NONE, EpochEndOffset())


async def test_unknown_epoch_is_out_of_range() -> None:
    part = await fetched(END, EPOCH + 1)
    assert (part.error_code, part.diverging_epoch) == (ErrorCode.OFFSET_OUT_OF_RANGE, EpochEndOffset())


async def test_divergence_is_not_reported_without_postgres() -> None:
    part = await fetched(END, 3, storage=False)
    assert part.error_code != ErrorCode.NONE
    assert part.diverging_epoch == EpochEndOffset()


async def test_append_during_the_look_at_ended_epochs_wakes_the_fetch() -> None:
    """A reader at the end of the log may name an epoch that has ended. It does so until the next record arrives."""
    services = (known := context()).services
    asked = asyncio.Event()

    async def epochs(keys: Iterable[PartitionKey]) -> dict[PartitionKey, list[tuple[int, int]]]:
        if not asked.is_set():
            asked.set()
            append(services.tail, KEY, END)
        return {key: [(3, 4), (EPOCH, END)] for key in keys}

    services.history.epochs = epochs
    part = await fetched(END, 3, within=known)
    assert asked.is_set()
    assert part.high_watermark == END + 1
    assert part.records


async def test_append_to_a_topic_made_anew_wakes_the_fetch_that_waited_for_the_former() -> None:
    anew, key = UUID(int=2), PartitionKey(8)
    services = (known := context(version=12)).services
    tail: Tail = services.tail
    fetching = asyncio.create_task(fetched(END, -1, within=known))
    await until(lambda: tail.parked_count == 1)

    looked = asyncio.Event()

    def get(_name: str) -> Topic:
        looked.set()
        return topic_of(anew, key)

    services.catalog.get = get
    tail.observe(key, PartitionState(0, END, END, EPOCH, 100), asyncio.get_running_loop().time())
    tail.forget(KEY)
    await looked.wait()
    append(tail, key, END)
    assert (await fetching).high_watermark == END + 1
