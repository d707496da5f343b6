"""Read-only views of a group for admin APIs: descriptions and refusals.

The one idea: questions, not events. Nothing here changes a group or keeps a member alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import Summary
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE, STREAMS_PROTOCOL_TYPE, metadata_of
from gateway.coordinator.share.machine import SHARE
from protocol.errors import ErrorCode

PROTOCOLS_WITH_TOPICS = (CONSUMER_PROTOCOL_TYPE, STREAMS_PROTOCOL_TYPE)
"""Protocol types whose groups reveal the topics their members subscribe to."""


@dataclass(frozen=True, slots=True)
class DescribedMember:
    member_id: MemberId
    group_instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    """The member's metadata for the chosen protocol. Empty if the group is not Stable."""
    assignment: bytes


@dataclass(frozen=True, slots=True)
class DescribedGroup:
    group_id: str
    state: str
    """The group's state. A missing group is "Dead" (from DescribeGroups 6 on it also gets GROUP_ID_NOT_FOUND)."""
    protocol_type: str
    protocol_data: str
    """The chosen protocol. Empty if the group is not Stable."""
    members: tuple[DescribedMember, ...]


def describe(group: Group) -> DescribedGroup:
    """Return the group's fields for DescribeGroups."""
    protocol_name = group.protocol_name if group.state is GroupState.STABLE else None
    return DescribedGroup(
        group_id=group.group_id,
        state=group.state.value if group.exists else GroupState.DEAD.value,
        protocol_type=group.protocol_type or "",
        protocol_data=protocol_name or "",
        members=tuple(
            DescribedMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                metadata_of(member, protocol_name),
                member.assignment,
            )
            for member in group.members.values()
        ),
    )


def offset_delete_refusal(group: Summary) -> ErrorCode | None:
    """Return why no offset of this group may be deleted (the top-level code of OffsetDelete). If that is None, the
    caller must check `subscribes_to` for each topic.
    """
    if not group.exists or group.group_type == SHARE.group_type:
        # A share group commits no offsets; as in upstream, OffsetDelete does not find it.
        return ErrorCode.GROUP_ID_NOT_FOUND
    if group.state != GroupState.EMPTY.value and group.protocol_type not in PROTOCOLS_WITH_TOPICS:
        return ErrorCode.NON_EMPTY_GROUP
    return None


def subscribes_to(group: Summary, topic: str) -> bool:
    """Return True if a member subscribes to the topic, so its offsets must stay. If subscriptions are unreadable,
    any topic counts."""
    if group.state == GroupState.EMPTY.value:
        return False
    return group.subscribed_topics is None or topic in group.subscribed_topics
