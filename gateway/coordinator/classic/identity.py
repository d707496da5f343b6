"""The member that a request stands for: the columns of the error matrix.

The one idea: a request names itself by member id, instance id and connection; its result depends only on its standing
and the group's state. Dynamic members are also known by their connection: a second JoinGroup without an id on one
connection is the same member, never a phantom beside it. Static members are known by their instance id alone. The
client id never counts. Nothing here changes a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from gateway.coordinator.classic.model import Group, Member
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId
from gateway.coordinator.requests import JoinGroup
from protocol.errors import ErrorCode

Members = Mapping[MemberId, Member]

NO_MEMBER_ID = MemberId("")


class Standing(Enum):
    """Relation of the sender of a JoinGroup to the group."""

    NEWCOMER = "no id"
    NEW_INSTANCE = "new instance, no id"
    RETURNING_INSTANCE = "known instance, no id"
    PENDING = "pending id"
    UNKNOWN = "unknown id"
    MEMBER = "member's id"
    FENCED = "instance of another id"
    UNKNOWN_INSTANCE = "unknown instance, some id"


class Requester(NamedTuple):
    standing: Standing
    member_id: MemberId
    """The member or pending id for which the request is sent, even if the request does not name it. Empty if no such id
    exists.
    """


def identify(group: Group, event: JoinGroup) -> Requester:
    member_id, instance_id = event.member_id, event.group_instance_id
    if member_id in group.pending:
        return Requester(Standing.PENDING, member_id)
    if member_id == NO_MEMBER_ID:
        return _identify_nameless(group, event)
    if instance_id is not None:
        owner = static_member(group.members, instance_id)
        if owner is None:
            return Requester(Standing.UNKNOWN_INSTANCE, NO_MEMBER_ID)
        if owner.member_id != member_id:
            return Requester(Standing.FENCED, NO_MEMBER_ID)
    if member_id in group.members:
        return Requester(Standing.MEMBER, member_id)
    return Requester(Standing.UNKNOWN, NO_MEMBER_ID)


def _identify_nameless(group: Group, event: JoinGroup) -> Requester:
    if event.group_instance_id is not None:
        owner = static_member(group.members, event.group_instance_id)
        if owner is None:
            return Requester(Standing.NEW_INSTANCE, NO_MEMBER_ID)
        return Requester(Standing.RETURNING_INSTANCE, owner.member_id)
    speaker = dynamic_member(group.members, event.connection_id)
    if speaker is not None:
        return Requester(Standing.MEMBER, speaker.member_id)
    for pending in group.pending.values():
        if pending.connection_id == event.connection_id:
            return Requester(Standing.NEWCOMER, pending.member_id)
    return Requester(Standing.NEWCOMER, NO_MEMBER_ID)


def static_member(members: Members, instance_id: str) -> Member | None:
    for member in members.values():
        if member.group_instance_id == instance_id:
            return member
    return None


def dynamic_member(members: Members, connection_id: ConnectionId) -> Member | None:
    """Return the dynamic member that speaks through this connection; the first to have joined if there are several."""
    for member in members.values():
        if member.connection_id == connection_id and member.group_instance_id is None:
            return member
    return None


def generation_of(group: Group, member: Member) -> int:
    """Return the generation that the member must name."""
    return member.member_epoch or group.generation_id


def refusal(members: Members, member_id: MemberId, instance_id: str | None) -> ErrorCode | None:
    """Return why this identity may not speak for a member, or None if it may (upstream's `validateMember`).

    UNKNOWN_MEMBER_ID, or FENCED_INSTANCE_ID if the instance belongs to another member id. Unlike upstream, a request
    without an id is never fenced. librdkafka drops its id when its session ends without an answer. If it still commits
    then, its instance belongs to the id that it has dropped, and a fenced client of librdkafka stops for good.
    """
    member = members.get(member_id)
    if instance_id is None or (member is not None and member.group_instance_id == instance_id):
        return ErrorCode.UNKNOWN_MEMBER_ID if member is None else None
    if member_id == NO_MEMBER_ID:
        return ErrorCode.UNKNOWN_MEMBER_ID
    owner = static_member(members, instance_id)
    return ErrorCode.UNKNOWN_MEMBER_ID if owner is None else ErrorCode.FENCED_INSTANCE_ID
