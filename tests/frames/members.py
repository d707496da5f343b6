"""A group member as frames: one connection, one member id, every step taken explicitly.

The member retries nothing and judges no answer. A test chooses each step and checks the answer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from protocol.errors import ErrorCode
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.describe_groups import DescribedGroup, DescribeGroupsRequest
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment, SyncGroupResponse
from tests.steps.waiting import until
from tests.wire import ANSWER_SECONDS, WireClient

RANGE = (("range", b"subscription"),)
SESSION_MS = 10_000
REBALANCE_MS = 20_000
NO_TOPIC_ID = UUID(int=0)
_serial = itertools.count(1)


def fresh(name: str) -> str:
    """Return a group or topic name that no other test of this process uses."""
    return f"{name}-{next(_serial)}"


class Member:
    """One member of one group on one connection. `member_id` and `generation_id` follow the answers to joins."""

    def __init__(
        self,
        client: WireClient,
        group_id: str,
        *,
        protocols: tuple[tuple[str, bytes], ...] = RANGE,
        protocol_type: str = "consumer",
        group_instance_id: str | None = None,
        session_timeout_ms: int = SESSION_MS,
        rebalance_timeout_ms: int = REBALANCE_MS,
        version: int = 9,
    ) -> None:
        self.client = client
        self.group_id = group_id
        self.protocols = protocols
        self.protocol_type = protocol_type
        self.group_instance_id = group_instance_id
        self.session_timeout_ms = session_timeout_ms
        self.rebalance_timeout_ms = rebalance_timeout_ms
        self.version = version
        self.member_id = ""
        self.generation_id = -1
        self.members: tuple[str, ...] = ()

    def join_nowait(self) -> asyncio.Task[JoinGroupResponse]:
        """Send one JoinGroup frame before returning, without a second step."""
        answer = self.client.send_nowait(
            JoinGroupRequest(
                group_id=self.group_id,
                session_timeout_ms=self.session_timeout_ms,
                rebalance_timeout_ms=self.rebalance_timeout_ms,
                member_id=self.member_id,
                group_instance_id=self.group_instance_id,
                protocol_type=self.protocol_type,
                protocols=tuple(
                    JoinGroupRequestProtocol(name=name, metadata=metadata) for name, metadata in self.protocols
                ),
            ),
            self.version,
        )
        return asyncio.create_task(self._joined(answer))

    async def _joined(self, answer: asyncio.Future[JoinGroupResponse]) -> JoinGroupResponse:
        response = await asyncio.wait_for(answer, 30)
        if response.error_code in (ErrorCode.NONE, ErrorCode.MEMBER_ID_REQUIRED):
            self.member_id = response.member_id
            self.generation_id = response.generation_id
            self.members = tuple(member.member_id for member in response.members)
        return response

    async def knock(self) -> None:
        """Take the first step of KIP-394: send JoinGroup without a member id, and receive one."""
        response = await self.join_nowait()
        assert response.error_code == ErrorCode.MEMBER_ID_REQUIRED, response

    async def join(self) -> JoinGroupResponse:
        """Join with a member id. If the version requires an id and the member has none, ask for one first. The gateway
        holds the answer until the join phase ends.
        """
        if not self.member_id and self.version >= 4 and self.group_instance_id is None:
            await self.knock()
        return await self.join_nowait()

    def sync_nowait(
        self, assignments: Mapping[str, bytes] | None = None, *, version: int = 5, protocol_name: str | None = "range"
    ) -> asyncio.Future[SyncGroupResponse]:
        return self.client.send_nowait(
            SyncGroupRequest(
                group_id=self.group_id,
                generation_id=self.generation_id,
                member_id=self.member_id,
                group_instance_id=self.group_instance_id,
                protocol_type=self.protocol_type,
                protocol_name=protocol_name,
                assignments=tuple(
                    SyncGroupRequestAssignment(member_id=member_id, assignment=assignment)
                    for member_id, assignment in (assignments or {}).items()
                ),
            ),
            version,
        )

    async def sync(self, assignments: Mapping[str, bytes] | None = None, *, version: int = 5) -> SyncGroupResponse:
        return await asyncio.wait_for(self.sync_nowait(assignments, version=version), 30)

    async def heartbeat(self, *, generation_id: int | None = None, version: int = 4) -> int:
        response = await self.client.send(
            HeartbeatRequest(
                group_id=self.group_id,
                generation_id=self.generation_id if generation_id is None else generation_id,
                member_id=self.member_id,
                group_instance_id=self.group_instance_id,
            ),
            version,
        )
        return int(response.error_code)

    async def leave(self, *, version: int = 5) -> LeaveGroupResponse:
        identity = MemberIdentity(member_id=self.member_id, group_instance_id=self.group_instance_id)
        return await self.client.send(
            LeaveGroupRequest(group_id=self.group_id, member_id=self.member_id, members=(identity,)), version
        )

    async def commit(
        self,
        topic: str,
        offset: int,
        *,
        partition: int = 0,
        version: int = 9,
        topic_id: UUID = NO_TOPIC_ID,
        seconds: float = ANSWER_SECONDS,
    ) -> int:
        """Commit an offset of one partition and return its error code."""
        response = await self.client.send(
            OffsetCommitRequest(
                group_id=self.group_id,
                generation_id_or_member_epoch=self.generation_id,
                member_id=self.member_id,
                group_instance_id=self.group_instance_id,
                topics=(
                    OffsetCommitRequestTopic(
                        name=topic,
                        topic_id=topic_id,
                        partitions=(
                            OffsetCommitRequestPartition(
                                partition_index=partition, committed_offset=offset, committed_metadata=""
                            ),
                        ),
                    ),
                ),
            ),
            version,
            seconds=seconds,
        )
        return int(response.topics[0].partitions[0].error_code)


@asynccontextmanager
async def member(
    bootstrap: str, group_id: str, *, client_id: str = "wire", **given: Any
) -> AsyncGenerator[Member, None]:
    client = await WireClient.connect(bootstrap, client_id=client_id)
    try:
        yield Member(client, group_id, **given)
    finally:
        await client.close()


async def join_all(*members: Member) -> list[JoinGroupResponse]:
    """Bring all members into one generation, in as many rounds as it takes, and return their last join answers.

    The first member may be answered alone before the others arrive. A member that receives REBALANCE_IN_PROGRESS joins
    again.
    """
    for one in members:
        if not one.member_id and one.version >= 4 and one.group_instance_id is None:
            await one.knock()
    joins = {one: one.join_nowait() for one in members}
    while True:
        await asyncio.wait(joins.values(), return_when=asyncio.FIRST_COMPLETED)
        for one, join in joins.items():
            if join.done() and await one.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS:
                joins[one] = one.join_nowait()
        if all(join.done() for join in joins.values()):
            answers = [join.result() for join in joins.values()]
            assert all(answer.error_code == ErrorCode.NONE for answer in answers), answers
            if len({answer.generation_id for answer in answers}) == 1:
                return answers


def leader_of(*members: Member) -> Member:
    """Return the member to which the last join answers gave the member list."""
    (leader,) = [one for one in members if one.members]
    return leader


async def settle(*members: Member) -> dict[str, bytes]:
    """Bring all members into one Stable generation, each with its own assignment. Return the
    assignments by member id.
    """
    await join_all(*members)
    leader = leader_of(*members)
    assignments = {member_id: f"assignment of {member_id}".encode() for member_id in leader.members}
    syncs = [one.sync_nowait(assignments if one is leader else None) for one in members]
    for one, answer in zip(members, await asyncio.gather(*syncs), strict=True):
        assert (answer.error_code, answer.assignment) == (ErrorCode.NONE, assignments[one.member_id])
    return assignments


async def describe(client: WireClient, group_id: str, version: int = 6) -> DescribedGroup:
    response = await client.send(DescribeGroupsRequest(groups=(group_id,)), version)
    return response.groups[0]


async def create_topic(client: WireClient, name: str, partitions: int = 1) -> UUID:
    response = await client.send(
        CreateTopicsRequest(
            topics=(CreatableTopic(name=name, num_partitions=partitions, replication_factor=1),), timeout_ms=10_000
        ),
        7,
    )
    assert response.topics[0].error_code == ErrorCode.NONE, response
    return response.topics[0].topic_id


async def topic_id_of(client: WireClient, name: str) -> UUID:
    response = await client.send(MetadataRequest(topics=(MetadataRequestTopic(name=name),)), 12)
    return response.topics[0].topic_id


async def in_state(client: WireClient, group_id: str, state: str, *, seconds: float = 10.0) -> DescribedGroup:
    """Wait until the group shows `state`, and return the group. Only the state shows to a client that the gateway holds
    a request.
    """
    return await until(
        lambda: describe(client, group_id), state, holds=lambda group: group.group_state == state, seconds=seconds
    )
