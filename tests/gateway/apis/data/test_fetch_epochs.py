"""A Fetch beyond the end of an epoch is answered with that end (KIP-320, KIP-595), by values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from gateway.apis.data.fetch import fetch
from gateway.log.tail import Tail
from gateway.net.context import ConnectionInfo
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.fetch import EpochEndOffset, FetchPartition, FetchRequest, FetchTopic, PartitionData
from storage.errors import StorageUnavailable
from storage.types import Partition, PartitionKey, PartitionState, ReadResult, Topic

TOPIC, KEY = UUID(int=1), PartitionKey(7)
EPOCH, END = 5, 10
BEGAN = [(3, 4), (EPOCH, 8)]
"""Epoch 3 began at offset 4, epoch 5 at 8; the log ends at 10."""
WITHIN_S = 10


def context(*, storage: bool = True) -> Any:
    tail = Tail(2**20)
    now_s = asyncio.get_running_loop().time()
    state = PartitionState(0, END, END, EPOCH, 100)
    tail.observe(KEY, state, now_s)
    topic = Topic(TOPIC, "t", internal=False, configs={}, partitions=(Partition(0, KEY, EPOCH, None, TOPIC, 1),))

    async def known(asked: object) -> None:
        """Postgres is not queried."""

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
            get_by_id={TOPIC: topic}.get,
            resolve_all=known,
            resolve_all_ids=known,
            broker=SimpleNamespace(fetch_max_bytes=2**20),
        ),
        history=SimpleNamespace(epochs=epochs),
        log=SimpleNamespace(read=read),
        idle_owners=None,
        marks=None,
        tail=tail,
    )
    connection = ConnectionInfo("connection", "/127.0.0.1")
    return SimpleNamespace(services=services, connection=connection, api_key=ApiKey.FETCH, version=17, client_id="c")


async def fetched(offset: int, last_fetched_epoch: int, *, max_wait_ms: int = 600_000, storage: bool = True):
    part = FetchPartition(
        partition=0,
        current_leader_epoch=EPOCH,
        fetch_offset=offset,
        last_fetched_epoch=last_fetched_epoch,
        partition_max_bytes=2**20,
    )
    request = FetchRequest(
        max_wait_ms=max_wait_ms, min_bytes=1, topics=(FetchTopic(topic_id=TOPIC, partitions=(part,)),)
    )
    async with asyncio.timeout(WITHIN_S):
        answer = await fetch(request, context(storage=storage))
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
