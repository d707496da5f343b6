"""Members of a share group acknowledge and release records, vanish and return, while the gateway is killed.

Acknowledged records are not delivered again, and in the end every record is acknowledged.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from uuid import UUID

import pytest

from protocol.errors import ErrorCode
from protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
)
from tests.frames.handoff import configure
from tests.frames.members import create_topic, fresh
from tests.frames.share import ACCEPT, NONE, RELEASE, Reader, part_of, send
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.seeds import first_always
from tests.wire import WireClient

RECORDS = 400
MEMBERS = 3
KILLS = 3
LIMITS = {"group.share.delivery.count.limit": "10"}
SETTLED_S = 60.0
GONE = (ConnectionError, TimeoutError, OSError)
PASSING = frozenset({ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR})


class Books:
    """Records that members received, and records that the gateway confirmed as acknowledged."""

    def __init__(self) -> None:
        self.settled: set[int] = set()
        self.in_doubt: set[int] = set()
        """Offsets whose acknowledgement got no answer: the gateway may or may not have processed it."""

    def given(self, offsets: range) -> None:
        again = self.settled.intersection(offsets)
        assert not again, f"acknowledged, and delivered again: {sorted(again)}"

    @property
    def accounted(self) -> int:
        return len(self.settled | self.in_doubt)


class Worker:
    """A member that is replaced when it ends, and that reconnects when it loses its connection."""

    def __init__(self, gateway: GatewayProcess, group_id: str, topic: str, books: Books, seed: str) -> None:
        self._gateway = gateway
        self._group_id = group_id
        self._topic = topic
        self._books = books
        self._chance = random.Random(seed)

    async def run(self, topic_id: UUID) -> None:
        while True:
            with suppress(*GONE):
                async with await WireClient.connect(self._gateway.bootstrap) as client:
                    reader = Reader(client, self._group_id, self._topic, topic_id)
                    await self._work(reader)
            await asyncio.sleep(0.02)

    async def _work(self, reader: Reader) -> None:
        for _ in range(self._chance.randint(3, 30)):
            part = part_of(await reader.ask(max_wait_ms=50, max_records=20))
            if part is None or part.error_code in PASSING:
                continue
            assert part.error_code == NONE, part
            for each in part.acquired_records:
                offsets = range(each.first_offset, each.last_offset + 1)
                self._books.given(offsets)
                await self._acknowledge(reader, offsets)

    async def _acknowledge(self, reader: Reader, offsets: range) -> None:
        # Releases are rare, so that no record reaches the delivery limit.
        accepts = self._chance.random() < 0.9
        if accepts:
            self._books.in_doubt.update(offsets)
        code = await reader.acknowledge((offsets[0], offsets[-1], ACCEPT if accepts else RELEASE))
        if accepts and code == NONE:
            self._books.settled.update(offsets)
        assert code in (NONE, ErrorCode.INVALID_RECORD_STATE, *PASSING), code


async def lag(client: WireClient, group_id: str) -> int:
    group = DescribeShareGroupOffsetsRequestGroup(group_id=group_id, topics=None)
    answer = await client.send(DescribeShareGroupOffsetsRequest(groups=(group,)), 1)
    return sum(part.lag for topic in answer.groups[0].topics for part in topic.partitions)


@pytest.mark.parametrize("seed", first_always([1, 2], 1))
async def test_an_acknowledged_record_is_not_delivered_again(gateway_factory: GatewayFactory, seed: int) -> None:
    gateway = gateway_factory(LIMITS)
    chance, books = random.Random(seed), Books()
    group_id, topic = fresh("share"), fresh("topic")
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic_id = await create_topic(client, topic, 1)
        assert await configure(client, group_id, share_auto_offset_reset="earliest") == [NONE]
        for _ in range(RECORDS // 4):
            await send(client, topic, *[b"value"] * 4)
        await Reader(client, group_id, topic, topic_id).join()
    workers = [Worker(gateway, group_id, topic, books, f"{seed} {number}") for number in range(MEMBERS)]
    running = [asyncio.create_task(worker.run(topic_id)) for worker in workers]
    try:
        for kill in range(1, KILLS + 1):
            async with asyncio.timeout(SETTLED_S):
                while True:
                    if books.accounted >= RECORDS * kill // (KILLS + 1) or any(each.done() for each in running):
                        break
                    await asyncio.sleep(chance.random() / 50)
            gateway.kill()
            gateway.restart()
        async with asyncio.timeout(SETTLED_S), await WireClient.connect(gateway.bootstrap) as client:
            while True:
                if not await lag(client, group_id) or any(each.done() for each in running):
                    break
                await asyncio.sleep(0.1)
    finally:
        for each in running:
            each.cancel()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
    assert books.settled | books.in_doubt == set(range(RECORDS))
