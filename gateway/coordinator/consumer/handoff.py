"""Partitions of a consumer group that move from one member to another, and the offsets to be committed for them.

The one idea: `owners` already ensures that no partition is assigned before its owner has released it. So in mode `ack`
the records here are reported and decide nothing. In mode `drain` a member that has released a partition stays its owner
until it has drained it (`ConsumerMember.undrained`, stored with the member). If that member leaves, its undrained
partitions go with it and no member waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol
from uuid import UUID

from gateway.coordinator.consumer import unsettled
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember, Moving
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, difference, partitions_of, size, union
from gateway.coordinator.facts import Departure, MemberId
from gateway.coordinator.handoff import (
    Draining,
    Handoff,
    HandoffAcknowledged,
    HandoffBegun,
    HandoffEnd,
    HandoffEnded,
    HandoffMode,
    by_pair,
    settled,
)
from gateway.coordinator.requests import HandoffProgress


class HandoffDraft(unsettled.UnsettledDraft, Protocol):
    """The part of a `Draft` that handoffs read and change."""

    drain_deadlines: dict[MemberId, int]


# --- when the target moves --------------------------------------------------------------------------------------------


def target_moved(draft: HandoffDraft, gained: Iterable[tuple[MemberId, Partitions]]) -> None:
    """Begin to move partitions that members gain from other owners by a new target. End moves to members that are no
    longer to have the partition. Partitions that no member gains stay as they are."""
    mode = draft.settings.handoff.mode
    for (topic_id, index), moving in list(draft.moving.items()):
        if moving.target is None or index in draft.target.get(moving.target, NOTHING).get(topic_id, ()):
            continue
        gone = topic_id not in draft.cluster.by_id
        _end(draft, topic_id, index, moving, HandoffEnd.PARTITION_DELETED if gone else HandoffEnd.SUPERSEDED)
        _forget_target(draft, topic_id, index, moving)
    if mode is HandoffMode.OFF:
        return
    begun: list[tuple[MemberId, MemberId, UUID, int]] = []
    for target, partitions in gained:
        for topic_id, indexes in partitions.items():
            owned = draft.owners.get(topic_id)
            if owned is None:
                continue
            for index in indexes:
                source = owned.get(index)
                known = draft.moving.get((topic_id, index))
                if source is None or source == target:
                    continue
                if known is None or known.source != source:
                    known = Moving(source, None, draft.group_epoch, draft.now_ms)
                draft.moving[topic_id, index] = replace(known, target=target, epoch=draft.group_epoch)
                begun.append((source, target, topic_id, index))
    for (source, target), moved in by_pair(begun).items():
        left_ms = draft.members[source].rebalance_timeout_ms
        draft.tell(HandoffBegun(source, target, draft.group_epoch, mode, max(left_ms, 0), moved))


# --- when a source releases -------------------------------------------------------------------------------------------


def retained(draft: HandoffDraft, before: ConsumerMember, after: ConsumerMember) -> ConsumerMember:
    """Keep the member the owner of partitions that it releases in this step, until it has drained them. A partition
    assigned to it again is no longer undrained. The drain timeout counts from here."""
    undrained = difference(before.undrained, after.assigned)
    if draft.settings.handoff.mode is HandoffMode.DRAIN:
        held = union(before.assigned, before.pending_revocation)
        released = difference(difference(held, after.assigned), after.pending_revocation)
        released = difference(released, unsettled.owned_by(draft, before.member_id))
        released = {topic_id: each for topic_id, each in released.items() if topic_id in draft.cluster.by_id}
        if released:
            undrained = union(undrained, released)
            draft.tell(HandoffAcknowledged(after.member_id, size(released)))
            deadline_ms = draft.now_ms + draft.settings.handoff.timeout_ms
            for topic_id, index in _each(released):
                known = draft.moving.get((topic_id, index))
                if known is None or known.source != after.member_id:
                    known = Moving(after.member_id, None, draft.group_epoch, draft.now_ms)
                draft.moving[topic_id, index] = replace(known, deadline_ms=deadline_ms)
    return after if undrained == after.undrained else replace(after, undrained=undrained)


def member_changed(
    draft: HandoffDraft, before: ConsumerMember, after: ConsumerMember | None, reason: HandoffEnd
) -> None:
    """End the moves of partitions that the member no longer owns. `after` is None if the member has left."""
    if not draft.moving:
        return
    for held in (before.assigned, before.pending_revocation, before.undrained):
        for topic_id, index in _each(held):
            moving = draft.moving.get((topic_id, index))
            if moving is None or moving.source != before.member_id:
                continue
            if after is None or not _owns(after, topic_id, index):
                _end(draft, topic_id, index, moving, reason)
                del draft.moving[topic_id, index]
            elif moving.target is None and index in after.assigned.get(topic_id, ()):
                del draft.moving[topic_id, index]
    arm(draft, before.member_id, after)


def member_gone(draft: HandoffDraft, member_id: MemberId) -> None:
    """End the moves to a member that has left. The owner must still drain undrained partitions, for any new owner."""
    for (topic_id, index), moving in list(draft.moving.items()):
        if moving.target == member_id:
            _end(draft, topic_id, index, moving, HandoffEnd.TARGET_LEFT)
            _forget_target(draft, topic_id, index, moving)


def left(departure: Departure) -> HandoffEnd:
    return HandoffEnd.SOURCE_LEFT if departure is Departure.LEFT else HandoffEnd.SOURCE_EXPIRED


# --- how far sources are, and time ------------------------------------------------------------------------------------


def progressed(draft: HandoffDraft, event: HandoffProgress) -> bool:
    """Apply news from sources about partitions that they still drain. Return whether anything has changed."""
    changed = False
    for found in event.found:
        if not isinstance(found.topic, UUID):
            continue
        key = found.topic, found.partition
        moving, member = draft.moving.get(key), draft.members.get(found.source)
        if moving is None or member is None or moving.source != found.source or not _undrained(member, *key):
            continue
        end, mark = settled(found, moving.mark)
        draft.moving[key] = replace(moving, mark=mark)
        changed = changed or mark != moving.mark or end is not None
        if end is not None:
            _drained(draft, member, partitions_of([(key[0], (key[1],))]), end)
    return unsettled.progressed(draft, event) or changed


def expire(draft: HandoffDraft) -> None:
    """Stop waiting for members that have not committed in time."""
    for member_id, deadline_ms in list(draft.drain_deadlines.items()):
        member = draft.members.get(member_id)
        if member is None or deadline_ms > draft.now_ms:
            continue
        late = partitions_of(
            (topic_id, (index,))
            for topic_id, index in _each(member.undrained)
            if draft.moving[topic_id, index].deadline_ms <= draft.now_ms
        )
        _drained(draft, member, late, HandoffEnd.TIMEOUT)
    unsettled.expire(draft)


def arm(draft: HandoffDraft, member_id: MemberId, member: ConsumerMember | None) -> None:
    """Set the time at which the member's first undrained partition is released in any case."""
    draft.drain_deadlines.pop(member_id, None)
    if member is not None and member.undrained:
        deadlines = (draft.moving[key].deadline_ms for key in _each(member.undrained))
        draft.drain_deadlines[member_id] = min(deadlines)


def take_over(draft: HandoffDraft) -> None:
    """Give every source its full time again after a coordinator has read the group back."""
    unsettled.take_over(draft)
    undrained = {key: each.member_id for each in draft.members.values() for key in _each(each.undrained)}
    if not undrained:
        return
    targets = {key: member_id for member_id, share in draft.target.items() for key in _each(share) if key in undrained}
    deadline_ms = draft.now_ms + draft.settings.handoff.timeout_ms
    for key, source in undrained.items():
        target = targets.get(key)
        draft.moving[key] = Moving(
            source, target if target != source else None, draft.group_epoch, draft.now_ms, deadline_ms
        )
    for source in set(undrained.values()):
        arm(draft, source, draft.members[source])


def drains_on(draft: HandoffDraft, source: MemberId, undrained: Mapping[tuple[UUID, int], Handoff]) -> None:
    """Continue the drains that began for the member while the group was a classic one."""
    for key, known in undrained.items():
        draft.moving[key] = Moving(source, None, draft.group_epoch, known.since_ms, known.deadline_ms, known.mark)
    arm(draft, source, draft.members[source])


def superseded(draft: HandoffDraft) -> None:
    """End all moves, because the group becomes a classic one and its leader assigns all partitions anew."""
    for (topic_id, index), moving in draft.moving.items():
        _end(draft, topic_id, index, moving, HandoffEnd.SUPERSEDED)
    unsettled.superseded(draft)


def draining(group: ConsumerGroup) -> tuple[Draining, ...]:
    """Return the partitions that sources must still commit."""
    return unsettled.draining(group) + tuple(
        Draining(
            topic_id,
            index,
            member.member_id,
            member.client_id,
            member.client_host,
            member.connection_id,
            group.moving[key].mark,
            group.moving[key].since_ms,
        )
        for source in group.drain_deadlines
        for member in (group.members[source],)
        for key in _each(member.undrained)
        for topic_id, index in (key,)
    )


# --- records ----------------------------------------------------------------------------------------------------------


def _drained(draft: HandoffDraft, member: ConsumerMember, partitions: Partitions, reason: HandoffEnd) -> None:
    if partitions:
        draft.put(replace(member, undrained=difference(member.undrained, partitions)), reason)


def _end(draft: HandoffDraft, topic_id: UUID, index: int, moving: Moving, reason: HandoffEnd) -> None:
    if moving.target is None:
        return
    mode = draft.settings.handoff.mode
    draft.tell(
        HandoffEnded(
            moving.source,
            moving.target,
            moving.epoch,
            HandoffMode.DRAIN if moving.deadline_ms else (HandoffMode.ACK if mode is HandoffMode.OFF else mode),
            topic_id,
            index,
            reason,
            max(draft.now_ms - moving.since_ms, 0),
            moving.mark,
        )
    )


def _forget_target(draft: HandoffDraft, topic_id: UUID, index: int, moving: Moving) -> None:
    source = draft.members.get(moving.source)
    if source is not None and _undrained(source, topic_id, index):
        draft.moving[topic_id, index] = replace(moving, target=None)
    else:
        del draft.moving[topic_id, index]


def _undrained(member: ConsumerMember, topic_id: UUID, index: int) -> bool:
    return index in member.undrained.get(topic_id, ())


def _owns(member: ConsumerMember, topic_id: UUID, index: int) -> bool:
    return any(
        index in held.get(topic_id, ()) for held in (member.assigned, member.pending_revocation, member.undrained)
    )


def _each(partitions: Partitions) -> Iterable[tuple[UUID, int]]:
    return ((topic_id, index) for topic_id, indexes in partitions.items() for index in indexes)
