"""What a group says of one of its members, as the journal needs it: who it is, and what it may own.

The one idea: functions of a group's value, for members that speak either protocol. What cannot be read is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from gateway.coordinator.consumer.model import ConsumerMember
from gateway.coordinator.facts import Fact, MemberId, TargetComputed
from gateway.coordinator.machine import Value
from gateway.coordinator.model import Group, Member
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE, metadata_of
from protocol.consumer import decode_assignment, decode_subscription
from protocol.errors import ProtocolError

OwnedPartition = tuple[str | UUID, int]
"""By the topic's name in a classic group, by its id in a consumer group."""


def member_of(group: Value, member_id: MemberId | None) -> Member | ConsumerMember | None:
    return None if member_id is None else group.members.get(member_id)


def holds(group: Group) -> bool:
    """Whether a member awaits its assignment because of what another has not let go of."""
    return any(group.members[each].parked_sync is not None for each in group.hold_deadlines)


def session_timeout_ms(member: Member | ConsumerMember) -> int:
    """0 where it is the group's."""
    if isinstance(member, Member):
        return member.session_timeout_ms
    return 0 if member.classic is None else member.classic.session_timeout_ms


def instance_of(member: Member | ConsumerMember | None) -> str | None:
    if isinstance(member, ConsumerMember):
        return member.instance_id
    return None if member is None else member.group_instance_id


def spoke(fact: Fact) -> Sequence[MemberId]:
    """Whose fact it is; a new target touches members that have not changed."""
    return () if isinstance(fact, TargetComputed) else fact.touches()


def held_by(member: ConsumerMember) -> set[OwnedPartition]:
    """What it may own: also what it was told to let go of, until it says that it did."""
    both = (*member.assigned.items(), *member.pending_revocation.items())
    return {(topic_id, index) for topic_id, indexes in both for index in indexes}


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
