"""Facts about one member of a group that the journal needs: its identity, and what it may own.

The one idea: functions of a group's value, for groups of every type. Unreadable contents count as empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

from gateway.coordinator.classic.model import Group, Member
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember, MemberState
from gateway.coordinator.facts import Fact, MemberId, TargetComputed
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE, metadata_of
from gateway.coordinator.share.model import ShareGroup, ShareMember
from gateway.coordinator.streams.model import MemberState as StreamsMemberState
from gateway.coordinator.streams.model import StreamsGroup, StreamsMember
from gateway.coordinator.streams.topology import Topology, partitions_read
from gateway.groups.kinds import AnyGroup, AnyMember
from protocol.consumer import decode_assignment, decode_subscription
from protocol.errors import ProtocolError

OwnedPartition = tuple[str | UUID, int]
"""A topic and a partition index. The topic is an id in a consumer group, and a name in other groups."""


class Topics(Protocol):
    """Topics that this node knows. Another thread asks, so the answers come from memory."""

    def name_of(self, topic_id: UUID) -> str: ...

    def id_of(self, name: str) -> UUID | None: ...

    def partition_count_of(self, name: str) -> int:
        """Return the topic's number of partitions; 0 if the topic is unknown."""
        ...


def member_of(group: AnyGroup, member_id: MemberId | None) -> AnyMember | None:
    return None if member_id is None else group.members.get(member_id)


def holds(group: Group) -> bool:
    """Return whether a member's assignment is held because another member has not released a partition."""
    return any(group.members[each].parked_sync is not None for each in group.hold_deadlines)


def session_timeout_ms(member: AnyMember) -> int:
    """Return the session timeout of a member; 0 if all members have the session timeout of the group."""
    match member:
        case Member():
            return member.session_timeout_ms
        case ConsumerMember() if member.classic is not None:
            return member.classic.session_timeout_ms
        case _:
            return 0


def instance_of(member: AnyMember | None) -> str | None:
    match member:
        case Member():
            return member.group_instance_id
        case ConsumerMember() | StreamsMember():
            return member.instance_id
        case _:
            return None


def rebalance_timeout_ms(member: AnyMember) -> int:
    """Return the timeout, or 0 if no member waits for this one to release partitions."""
    return 0 if isinstance(member, ShareMember) else member.rebalance_timeout_ms


def spoke(fact: Fact) -> Sequence[MemberId]:
    """Return the member that the fact is about. A new target touches members that have not changed."""
    return () if isinstance(fact, TargetComputed) else fact.touches()


def has_caught_up(group: AnyGroup, member_id: MemberId) -> bool:
    """Return whether the member has reached its target, in groups whose members have epochs."""
    match group:
        case ConsumerGroup():
            is_settled = group.members[member_id].state is MemberState.STABLE
        case StreamsGroup():
            is_settled = group.members[member_id].state is StreamsMemberState.STABLE
        case ShareGroup():
            is_settled = True
        case _:
            return False
    return is_settled and group.members[member_id].member_epoch == group.group_epoch


def assignor_of(group: AnyGroup) -> str | None:
    """Return the assignor of a consumer group. In other groups the members do not choose it."""
    return group.assignor or None if isinstance(group, ConsumerGroup) else None


def owned_by(group: AnyGroup, member_id: MemberId, topics: Topics) -> set[OwnedPartition]:
    """Return the partitions that the member may own, including those that it must revoke and has not yet
    acknowledged. Members of a share group own nothing: several read one partition."""
    match group:
        case ConsumerGroup():
            member = group.members[member_id]
            both = (*member.assigned.items(), *member.pending_revocation.items())
            return {(topic_id, index) for topic_id, indexes in both for index in indexes}
        case StreamsGroup():
            sources_of = (group.topology or Topology()).sources_of
            read = partitions_read(group.members[member_id].held.active, sources_of, topics.partition_count_of)
            return {(name, index) for name, indexes in read.items() for index in indexes}
        case Group():
            return assigned_to(group, member_id)
        case _:
            return set()


def assigned_to(group: Group, member_id: MemberId) -> set[OwnedPartition]:
    """Return the leader's assignment for the member, empty if it cannot be read."""
    member = group.members.get(member_id)
    if member is None or not member.assignment or group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return set()
    try:
        topics = decode_assignment(member.assignment).assigned_partitions
    except ProtocolError:
        return set()
    return {(topic, index) for topic, indexes in topics for index in indexes}


def claimed_by(group: Group, member_id: MemberId) -> set[OwnedPartition]:
    """Return the partitions that the member claims to own, from the first protocol that lists them. An eager member
    claims none."""
    member = group.members.get(member_id)
    if member is None or group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return set()
    for name, _ in member.protocols:
        try:
            owned = decode_subscription(metadata_of(member, name)).owned_partitions
        except ProtocolError:
            continue
        if owned:
            return {(topic, index) for topic, indexes in owned for index in indexes}
    return set()
