"""Coordinators of groups, and committed offsets that survive a takeover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from protocol.errors import ErrorCode
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic
from tests.frames.members import Member
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient


async def coordinator_of(group: str, nodes: Sequence[GatewayProcess]) -> GatewayProcess | None:
    """Return the coordinator according to the first node that answers."""
    for node in nodes:
        try:
            async with await WireClient.connect(node.bootstrap) as client:
                answer = await client.send(FindCoordinatorRequest(key=group, key_type=0), 3)
        except OSError:
            continue
        if answer.error_code == ErrorCode.NONE:
            return next((found for found in nodes if found.bootstrap == f"{answer.host}:{answer.port}"), None)
        return None
    return None


async def offset_of(group: str, topic: str, nodes: Sequence[GatewayProcess]) -> int:
    """Return the offset that the group's coordinator has committed for partition 0."""
    node = await coordinator_of(group, nodes)
    assert node is not None
    asked = OffsetFetchRequestTopic(name=topic, partition_indexes=(0,))
    async with await WireClient.connect(node.bootstrap) as client:
        answer = await client.send(OffsetFetchRequest(group_id=group, topics=(asked,)), 7)
    assert answer.error_code == ErrorCode.NONE, answer
    return int(answer.topics[0].partitions[0].committed_offset)


async def goes_on(one: Member, nodes: Sequence[GatewayProcess], within_s: float) -> float:
    """Wait until the member's heartbeat succeeds again, and return how many seconds that took."""
    started = time.monotonic()
    while True:
        node = await coordinator_of(one.group_id, nodes)
        if node is not None:
            try:
                async with await WireClient.connect(node.bootstrap) as client:
                    answer = await client.send(
                        HeartbeatRequest(
                            group_id=one.group_id, generation_id=one.generation_id, member_id=one.member_id
                        ),
                        4,
                    )
            except OSError:
                continue
            if answer.error_code == ErrorCode.NONE:
                return time.monotonic() - started
            assert answer.error_code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), answer
        assert time.monotonic() - started < within_s
        await asyncio.sleep(0.01)
