"""JoinGroup, SyncGroup, Heartbeat and LeaveGroup: messages to coordinator events, replies to messages.

The one idea: each handler is a translation and one call of `Groups.submit`; which member may do what is decided in
`gateway/coordinator`. Held requests are futures of the group, so a handler may wait here for minutes.
"""

from __future__ import annotations

import asyncio
import uuid

from gateway.apis.groups.leave_delay import delay_leave
from gateway.apis.services import HasGroups
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId
from gateway.coordinator.requests import Heartbeat, JoinGroup, LeaveGroup, LeavingMember, SyncGroup
from gateway.net.context import RequestContext
from gateway.net.refusals import DerivedRefusal
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse, JoinGroupResponseMember
from protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberResponse
from protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

FIRST_VERSION_WITH_NULL_PROTOCOL = 7
FIRST_VERSION_WITH_MEMBER_LIST = 3
FIRST_VERSION_WITH_PROTOCOL_FIELDS = 5
MAX_MEMBER_ID_PREFIX_BYTES = 255
"""Bytes of the client or instance id in a member id. The member id is a key in Postgres, and clients send it back."""
MAX_STORED_BYTES = 2 * 1024 * 1024
"""Bytes that a member may offer, and that a leader may assign. They are kept in memory and written in one piece,
which takes ten milliseconds. Kafka's brokers accept a megabyte for a whole group by default, and answer the same
way."""


async def join_group(request: JoinGroupRequest, context: RequestContext[HasGroups]) -> JoinGroupResponse:
    """Answer JoinGroup; the request is held until the join phase ends.

    A refused join changes nothing, and its answer names the member id of the request.
    """
    if not request.group_id:
        return JoinGroupResponse(
            error_code=ErrorCode.INVALID_GROUP_ID,
            member_id=request.member_id,
            protocol_name=_absent_protocol(context.version),
        )
    client_id = context.client_id or ""
    if _offered_bytes(request) > MAX_STORED_BYTES:
        return JoinGroupResponse(
            error_code=ErrorCode.UNKNOWN_SERVER_ERROR,
            member_id=request.member_id,
            protocol_name=_absent_protocol(context.version),
        )
    groups = context.services.groups
    reply = groups.submit(
        request.group_id,
        JoinGroup(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            version=context.version,
            client_id=client_id,
            client_host=context.connection.client_host,
            member_id=MemberId(request.member_id),
            group_instance_id=request.group_instance_id,
            protocol_type=request.protocol_type,
            protocols=tuple((protocol.name, protocol.metadata) for protocol in request.protocols),
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            new_member_id=_new_member_id(request.group_instance_id or client_id),
            reason=request.reason,
            connection_number=context.connection.number,
        ),
    )
    if isinstance(reply, asyncio.Future):
        reply = await reply
    return JoinGroupResponse(
        error_code=reply.error,
        generation_id=reply.generation_id,
        protocol_type=reply.protocol_type,
        protocol_name=_absent_protocol(context.version) if reply.protocol_name is None else reply.protocol_name,
        leader=reply.leader,
        skip_assignment=reply.skip_assignment,
        member_id=reply.member_id,
        members=tuple(
            JoinGroupResponseMember(
                member_id=member.member_id, group_instance_id=member.group_instance_id, metadata=member.metadata
            )
            for member in reply.members
        ),
    )


refuse_join_group = DerivedRefusal(
    ApiKey.JOIN_GROUP, values={"protocol_name": None}, answers={"member_id": "member_id"}
)


def _offered_bytes(request: JoinGroupRequest) -> int:
    """Return the bytes that the group keeps of a member's offer. The ids are bounded for every request."""
    offers = sum(len(protocol.name.encode()) + len(protocol.metadata) for protocol in request.protocols)
    return offers + len(request.protocol_type.encode())


def _new_member_id(prefix: str) -> MemberId:
    cut = prefix.encode()[:MAX_MEMBER_ID_PREFIX_BYTES].decode(errors="ignore")
    return MemberId(f"{cut}-{uuid.uuid4()}")


def _absent_protocol(version: int) -> str | None:
    return None if version >= FIRST_VERSION_WITH_NULL_PROTOCOL else ""


async def sync_group(request: SyncGroupRequest, context: RequestContext[HasGroups]) -> SyncGroupResponse:
    """Answer SyncGroup; the request is held until the leader's assignment is stored. The code is 27 if a new rebalance
    begins first."""
    if context.version >= FIRST_VERSION_WITH_PROTOCOL_FIELDS and None in (request.protocol_type, request.protocol_name):
        return SyncGroupResponse(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    if not request.group_id:
        return SyncGroupResponse(error_code=ErrorCode.INVALID_GROUP_ID)
    if sum(len(each.member_id.encode()) + len(each.assignment) for each in request.assignments) > MAX_STORED_BYTES:
        return SyncGroupResponse(error_code=ErrorCode.UNKNOWN_SERVER_ERROR)
    groups = context.services.groups
    reply = groups.submit(
        request.group_id,
        SyncGroup(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            member_id=MemberId(request.member_id),
            group_instance_id=request.group_instance_id,
            generation_id=request.generation_id,
            protocol_type=request.protocol_type,
            protocol_name=request.protocol_name,
            assignments=tuple(
                (MemberId(assignment.member_id), assignment.assignment) for assignment in request.assignments
            ),
        ),
    )
    if isinstance(reply, asyncio.Future):
        reply = await reply
    return SyncGroupResponse(
        error_code=reply.error,
        protocol_type=reply.protocol_type,
        protocol_name=reply.protocol_name,
        assignment=reply.assignment,
    )


async def heartbeat(request: HeartbeatRequest, context: RequestContext[HasGroups]) -> HeartbeatResponse:
    """Answer from memory, without a task switch, unless the group is being read or stored."""
    if not request.group_id:
        return HeartbeatResponse(error_code=ErrorCode.INVALID_GROUP_ID)
    groups = context.services.groups
    reply = groups.submit(
        request.group_id,
        Heartbeat(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            member_id=MemberId(request.member_id),
            group_instance_id=request.group_instance_id,
            generation_id=request.generation_id,
        ),
    )
    if isinstance(reply, asyncio.Future):
        reply = await reply
    response = _BEATS.get(reply.error)
    if response is None:
        response = _BEATS[reply.error] = HeartbeatResponse(error_code=reply.error)
    return response


_BEATS: dict[ErrorCode, HeartbeatResponse] = {}
"""One shared response object per code, because no other request is as frequent."""


async def leave_group(request: LeaveGroupRequest, context: RequestContext[HasGroups]) -> LeaveGroupResponse:
    """Remove members. Versions 0-2 name one member, and its code is the response's own code. Later versions have a code
    per member.
    """
    if not request.group_id:
        return LeaveGroupResponse(error_code=ErrorCode.INVALID_GROUP_ID)
    batch = context.version >= FIRST_VERSION_WITH_MEMBER_LIST
    if batch:
        leaving = tuple(
            LeavingMember(MemberId(member.member_id), member.group_instance_id, member.reason)
            for member in request.members
        )
    else:
        leaving = (LeavingMember(MemberId(request.member_id), None),)
    await delay_leave()
    groups = context.services.groups
    reply = groups.submit(
        request.group_id,
        LeaveGroup(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            members=leaving,
        ),
    )
    if isinstance(reply, asyncio.Future):
        reply = await reply
    if not batch:
        only = reply.members[0].error if reply.members else ErrorCode.NONE
        return LeaveGroupResponse(error_code=reply.error or only)
    return LeaveGroupResponse(
        error_code=reply.error,
        members=tuple(
            MemberResponse(
                member_id=member.member_id, group_instance_id=member.group_instance_id, error_code=member.error
            )
            for member in reply.members
        ),
    )
