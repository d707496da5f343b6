"""Partitions assigned early: while this group was classic, members got them before the previous owner had committed.

The one idea: a member that believes it owns a partition does own it, so no other member may. But as in the classic
group, OffsetFetch returns no offset to it (UNSTABLE_OFFSET_COMMIT) until the source has committed or its time is over.
If the member releases the partition before that, the partition is undrained by its source, like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol
from uuid import UUID

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember, Moving, Unsettled
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, partitions_of, union
from gateway.coordinator.facts import Fact, MemberId
from gateway.coordinator.handoff import (
    Draining,
    HandoffAcknowledged,
    HandoffBegun,
    HandoffEnd,
    HandoffEnded,
    HandoffMode,
    HandoffsChanged,
    by_pair,
    settled,
)
from gateway.coordinator.requests import HandoffProgress
from gateway.coordinator.settings import ConsumerSettings


class UnsettledDraft(Protocol):
    """The part of a `Draft` that these partitions read and change."""

    now_ms: int
    settings: ConsumerSettings
    cluster: Cluster
    group_epoch: int
    topics_revision: int
    members: dict[MemberId, ConsumerMember]
    target: dict[MemberId, Partitions]
    owners: dict[UUID, Mapping[int, MemberId]]
    moving: dict[tuple[UUID, int], Moving]
    unsettled: tuple[Unsettled, ...]

    def put(self, member: ConsumerMember, reason: HandoffEnd = HandoffEnd.ACKNOWLEDGED) -> None: ...

    def tell(self, fact: Fact) -> None: ...


def begun(unsettled: Iterable[Unsettled], generation_id: int, now_ms: int) -> Iterable[HandoffBegun]:
    """Return the facts that report these partitions when the group becomes a consumer group."""
    known: dict[tuple[str | UUID, int], Unsettled] = {(each.topic_id, each.partition): each for each in unsettled}
    pairs = by_pair((each.source, each.owner, *key) for key, each in known.items())
    for (source, owner), partitions in pairs.items():
        left_ms = min(known[each].deadline_ms for each in partitions)
        yield HandoffBegun(source, owner, generation_id, HandoffMode.DRAIN, max(left_ms - now_ms, 0), partitions)


def owned_by(draft: UnsettledDraft, member_id: MemberId) -> Partitions:
    """Return the partitions that the member received too early. It has read no records of these, so it has nothing to
    drain.
    """
    if not draft.unsettled:
        return NOTHING
    return partitions_of((each.topic_id, (each.partition,)) for each in draft.unsettled if each.owner == member_id)


# --- when a wait ends -------------------------------------------------------------------------------------------------


def follow_owners(draft: UnsettledDraft) -> None:
    """Update these partitions at the end of a step: follow them to their owners, or end the wait for their sources."""
    kept: list[Unsettled] = []
    for each in draft.unsettled:
        source = draft.members.get(each.source)
        owner = draft.owners.get(each.topic_id, {}).get(each.partition)
        if source is None or source.classic is None:
            # A member that has switched to the other protocol is a new process.
            _end(draft, each, HandoffEnd.SOURCE_LEFT)
        elif owner == each.source:
            _end(draft, each, HandoffEnd.SUPERSEDED)
        elif owner is not None:
            kept.append(each if owner == each.owner else replace(each, owner=owner))
        elif each.topic_id not in draft.cluster.by_id and draft.cluster.revision >= draft.topics_revision:
            _end(draft, each, HandoffEnd.PARTITION_DELETED)
        else:
            _end(draft, each, HandoffEnd.SUPERSEDED if each.owner in draft.members else HandoffEnd.TARGET_LEFT)
            _give_back(draft, each)
    _replace_all(draft, kept)


def owner_replaced(draft: UnsettledDraft, old_id: MemberId, new_id: MemberId) -> None:
    """Transfer the partitions of a static member to the process that replaces it."""
    draft.unsettled = tuple(replace(each, owner=new_id) if each.owner == old_id else each for each in draft.unsettled)


def _give_back(draft: UnsettledDraft, each: Unsettled) -> None:
    """Make the source drain the partition before any other member gets it, because its owner has released it."""
    key = each.topic_id, each.partition
    source = draft.members[each.source]
    shares = draft.target.items()
    target = next((key for key, share in shares if each.partition in share.get(each.topic_id, ())), None)
    if target == each.source:
        target = None
    draft.moving[key] = Moving(each.source, target, draft.group_epoch, each.since_ms, each.deadline_ms, each.mark)
    draft.put(replace(source, undrained=union(source.undrained, partitions_of([(key[0], (key[1],))]))))
    draft.tell(HandoffAcknowledged(each.source, 1))
    if target is not None:
        left_ms = max(each.deadline_ms - draft.now_ms, 0)
        draft.tell(HandoffBegun(each.source, target, draft.group_epoch, HandoffMode.DRAIN, left_ms, (key,)))


def progressed(draft: UnsettledDraft, event: HandoffProgress) -> bool:
    """Return whether anything has changed. Either a source has finished, or a client has continued to read although it
    cannot be asked to retry.
    """
    if not draft.unsettled:
        return False
    found = {(each.topic, each.partition, each.source): each for each in event.found}
    passed: dict[tuple[UUID, int], MemberId] = {}
    for target, name, partition in event.passed:
        topic = draft.cluster.topics.get(name)
        if topic is not None:
            passed[topic.topic_id, partition] = target
    before, kept = draft.unsettled, list[Unsettled]()
    for each in draft.unsettled:
        news = found.get((each.topic_id, each.partition, each.source))
        end, mark = (None, each.mark) if news is None else settled(news, each.mark)
        if passed.get((each.topic_id, each.partition)) == each.owner:
            end = HandoffEnd.CLIENT_CAP
        known = each if mark == each.mark else replace(each, mark=mark)
        if end is None:
            kept.append(known)
        else:
            _end(draft, known, end)
    _replace_all(draft, kept)
    return draft.unsettled != before


def expire(draft: UnsettledDraft) -> None:
    """End the waits whose time is over. This is a part of a Tick."""
    kept: list[Unsettled] = []
    for each in draft.unsettled:
        if each.deadline_ms > draft.now_ms:
            kept.append(each)
        else:
            _end(draft, each, HandoffEnd.TIMEOUT)
    _replace_all(draft, kept)


def superseded(draft: UnsettledDraft) -> None:
    """End all waits, because the group becomes a classic one."""
    for each in draft.unsettled:
        _end(draft, each, HandoffEnd.SUPERSEDED)


def take_over(draft: UnsettledDraft) -> None:
    """Give every source its full time again after a coordinator has read the group back."""
    deadline_ms = draft.now_ms + draft.settings.handoff.timeout_ms
    draft.unsettled = tuple(replace(each, since_ms=draft.now_ms, deadline_ms=deadline_ms) for each in draft.unsettled)


def _replace_all(draft: UnsettledDraft, kept: list[Unsettled]) -> None:
    """Replace the partitions. Their stored form changes with their owners, not with the progress of their sources."""
    before = draft.unsettled
    draft.unsettled = tuple(kept)
    if [(each.topic_id, each.partition, each.owner) for each in before] != [
        (each.topic_id, each.partition, each.owner) for each in kept
    ]:
        draft.tell(HandoffsChanged())


def _end(draft: UnsettledDraft, each: Unsettled, reason: HandoffEnd) -> None:
    waited_ms = max(draft.now_ms - each.since_ms, 0)
    draft.tell(
        HandoffEnded(
            each.source,
            each.owner,
            draft.group_epoch,
            HandoffMode.DRAIN,
            each.topic_id,
            each.partition,
            reason,
            waited_ms,
            each.mark,
        )
    )


# --- what others ask --------------------------------------------------------------------------------------------------


def draining(group: ConsumerGroup) -> tuple[Draining, ...]:
    """Return the partitions that sources must still commit."""
    return tuple(
        Draining(
            each.topic_id,
            each.partition,
            each.source,
            group.members[each.source].client_id,
            group.members[each.source].client_host,
            group.members[each.source].connection_id,
            each.mark,
        )
        for each in group.unsettled
    )


def member_on(group: ConsumerGroup, connection_number: int) -> MemberId | None:
    """Return the member that joined on the connection."""
    return next((key for key, each in group.members.items() if each.connection_number == connection_number), None)


def awaited_by(
    group: ConsumerGroup, connection_number: int, client_id: str, client_host: str
) -> frozenset[tuple[UUID, int]]:
    """Return the partitions whose committed offsets are not settled for the caller on this connection: a member that
    is not their source. If no member joined on the connection, client id and host identify the caller."""
    if not group.unsettled:
        return frozenset()
    asker = member_on(group, connection_number)
    if asker is not None:
        askers = {asker}
    else:
        named = (client_id, client_host)
        askers = {key for key, each in group.members.items() if (each.client_id, each.client_host) == named}
    return frozenset((each.topic_id, each.partition) for each in group.unsettled if askers - {each.source})
