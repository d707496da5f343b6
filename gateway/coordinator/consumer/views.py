"""What others may know of a consumer group: its description, and what offsets must stay.

The one idea: questions, not events. Nothing here changes a group or keeps a member alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember, GroupState, MemberState
from gateway.coordinator.consumer.partitions import NOTHING, Partitions


@dataclass(frozen=True, slots=True)
class DescribedConsumer:
    member: ConsumerMember
    target: Partitions


@dataclass(frozen=True, slots=True)
class DescribedConsumerGroup:
    """As ConsumerGroupDescribe shows it."""

    group_id: str
    state: GroupState
    group_epoch: int
    assignment_epoch: int
    assignor: str
    members: tuple[DescribedConsumer, ...]


def state_of(group: ConsumerGroup) -> GroupState:
    if not group.members:
        return GroupState.EMPTY
    if group.group_epoch > group.assignment_epoch:
        return GroupState.ASSIGNING
    stable = all(
        member.state is MemberState.STABLE and member.member_epoch == group.assignment_epoch
        for member in group.members.values()
    )
    return GroupState.STABLE if stable else GroupState.RECONCILING


def describe(group: ConsumerGroup, default_assignor: str) -> DescribedConsumerGroup:
    return DescribedConsumerGroup(
        group_id=group.group_id,
        state=state_of(group),
        group_epoch=group.group_epoch,
        assignment_epoch=group.assignment_epoch,
        assignor=group.assignor or default_assignor,
        members=tuple(
            DescribedConsumer(member, group.target.get(member.member_id, NOTHING)) for member in group.members.values()
        ),
    )


def subscribed_topics(group: ConsumerGroup) -> frozenset[str]:
    """Topics that members read, by name or by pattern: their offsets must stay."""
    named = (name for names, _ in group.subscriptions for name in names)
    return frozenset(named).union(*(pattern.matched for pattern in group.patterns.values()))


def has_news(group: ConsumerGroup, cluster: Cluster) -> bool:
    """Whether these topics may be others than the group was last compared with."""
    return group.seen is None or group.seen.topics is not cluster.topics
