"""Questions about a consumer group: its description, and the topics whose offsets must stay.

The one idea: questions, not events. Nothing here changes a group or keeps a member alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.model import (
    ConsumerGroup,
    ConsumerMember,
    GroupState,
    MemberState,
    Subscription,
    read_as,
)
from gateway.coordinator.consumer.partitions import NOTHING, Partitions


@dataclass(frozen=True, slots=True)
class DescribedConsumer:
    member: ConsumerMember
    target: Partitions


@dataclass(frozen=True, slots=True)
class DescribedConsumerGroup:
    """A consumer group with the fields of ConsumerGroupDescribe."""

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
    return names_read(group, group.subscriptions)


def names_read(group: ConsumerGroup, subscriptions: Iterable[Subscription]) -> frozenset[str]:
    """Return the topics that these subscriptions name, and those that their patterns show."""
    describing = None if group.seen is None else group.seen.describing
    read = {read_as(subscription, describing) for subscription in subscriptions}
    names = {name for subscribed, _, _ in read for name in subscribed}
    for text, reader in {(text, reader) for _, text, reader in read}:
        if text in group.patterns:
            shown = None if reader is None else group.shown.get((text, reader))
            names |= group.patterns[text].matched if shown is None else shown.names
    return frozenset(names)


def has_news(group: ConsumerGroup, cluster: Cluster) -> bool:
    """Return whether these topics may differ from those that the group was last compared with, whether they may be
    shown to other readers, or whether a pattern has not been compared with them yet."""
    seen = group.seen
    return (
        seen is None
        or seen.topics is not cluster.topics
        or seen.describing is not cluster.describing
        or group.postponed != ""
    )
