"""What a group says of one of its members, as the journal needs it: who it is, and what it may own.

The one idea: functions of a group's value, for groups of every type. What cannot be read is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember, MemberState
from gateway.coordinator.facts import Fact, MemberId, TargetComputed
from gateway.coordinator.machine import Value
from gateway.coordinator.model import Group, Member
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE, metadata_of
from gateway.coordinator.share.model import ShareGroup, ShareMember
from gateway.coordinator.streams.model import MemberState as StreamsMemberState
from gateway.coordinator.streams.model import StreamsGroup, StreamsMember
from gateway.coordinator.streams.topology import Topology, partitions_read
from protocol.consumer import decode_assignment, decode_subscription
from protocol.errors import ProtocolError

OwnedPartition = tuple[str | UUID, int]
"""By the topic's id in a consumer group, by its name in others."""

AnyMember = Member | ConsumerMember | StreamsMember | ShareMember


class Topics(Protocol):
    """What is known of topics. Asked from another thread: answers come from what is in memory."""

    def name_of(self, topic_id: UUID) -> str: ...

    def id_of(self, name: str) -> UUID | None: ...

    def partition_count_of(self, name: str) -> int:
        """0 where the topic is not known."""
        ...


def member_of(group: Value, member_id: MemberId | None) -> AnyMember | None:
    return None if member_id is None else group.members.get(member_id)


def holds(group: Group) -> bool:
    """Whether a member awaits its assignment because of what another has not let go of."""
    return any(group.members[each].parked_sync is not None for each in group.hold_deadlines)


def session_timeout_ms(member: AnyMember) -> int:
    """0 where it is the group's."""
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
    """0 where nobody waits for the member to let go of anything."""
    return 0 if isinstance(member, ShareMember) else member.rebalance_timeout_ms


def spoke(fact: Fact) -> Sequence[MemberId]:
    """Whose fact it is; a new target touches members that have not changed."""
    return () if isinstance(fact, TargetComputed) else fact.touches()


def has_caught_up(group: Value, member_id: MemberId) -> bool:
    """Whether the member is where the group wants it; of groups in which members have epochs."""
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


def assignor_of(group: Value) -> str | None:
    """Of a consumer group: what decides who owns what in others is no choice of their members."""
    return group.assignor or None if isinstance(group, ConsumerGroup) else None


def owned_by(group: Value, member_id: MemberId, topics: Topics) -> set[OwnedPartition]:
    """What the member may own: also what it was told to let go of, until it says that it did. Members of a share group
    own nothing: several read one partition."""
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
    """What the leader gave; nothing where that cannot be read."""
    member = group.members.get(member_id)
    if member is None or not member.assignment or group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return set()
    try:
        topics = decode_assignment(member.assignment).assigned_partitions
    except ProtocolError:
        return set()
    return {(topic, index) for topic, indexes in topics for index in indexes}


def claimed_by(group: Group, member_id: MemberId) -> set[OwnedPartition]:
    """What the member says that it still owns, in the first protocol that says so. An eager one says nothing."""
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
