"""Partitions that a member of the classic group that this one was had been told are its own, before their sources were
done with them.

The one idea: who believes that it owns a partition owns it, so that nobody else does; but as in the classic group
OffsetFetch does not tell it where to read on (UNSTABLE_OFFSET_COMMIT) until the source has committed, or has no more
time for it. If it lets go before that, the partition is one that its source has not drained, like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

from gateway.coordinator.consumer.model import ConsumerGroup, Moving, Unsettled
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, partitions_of, union
from gateway.coordinator.facts import MemberId
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
from gateway.coordinator.model import HandoffProgress

if TYPE_CHECKING:
    from gateway.coordinator.consumer.draft import Draft


def begun(unsettled: Iterable[Unsettled], generation_id: int, now_ms: int) -> Iterable[HandoffBegun]:
    """What is told of them when the group becomes a consumer group."""
    known = {(each.topic_id, each.partition): each for each in unsettled}
    pairs = by_pair((each.source, each.owner, *key) for key, each in known.items())
    for (source, owner), partitions in pairs.items():
        left_ms = min(each.deadline_ms for each in known.values() if (each.source, each.owner) == (source, owner))
        yield HandoffBegun(source, owner, generation_id, HandoffMode.DRAIN, max(left_ms - now_ms, 0), partitions)


def owned_by(draft: Draft, member_id: MemberId) -> Partitions:
    """What the member was told of too early: it has read nothing of it, so there is nothing that it could drain."""
    if not draft.unsettled:
        return NOTHING
    return partitions_of((each.topic_id, (each.partition,)) for each in draft.unsettled if each.owner == member_id)


# --- when a wait ends -------------------------------------------------------------------------------------------------


def follow_owners(draft: Draft) -> None:
    """At the end of a step: what became of the partitions, and of who is to drain them."""
    kept: list[Unsettled] = []
    for each in draft.unsettled:
        source = draft.members.get(each.source)
        owner = draft.owners.get(each.topic_id, {}).get(each.partition)
        if source is None or source.classic is None:
            # Who speaks the other protocol now is another process.
            _end(draft, each, HandoffEnd.SOURCE_LEFT)
        elif owner == each.source:
            _end(draft, each, HandoffEnd.SUPERSEDED)
        elif owner is not None:
            kept.append(each if owner == each.owner else replace(each, owner=owner))
        elif each.topic_id not in draft.cluster.by_id:
            _end(draft, each, HandoffEnd.PARTITION_DELETED)
        else:
            _end(draft, each, HandoffEnd.SUPERSEDED if each.owner in draft.members else HandoffEnd.TARGET_LEFT)
            _give_back(draft, each)
    _replace_all(draft, kept)


def owner_replaced(draft: Draft, old_id: MemberId, new_id: MemberId) -> None:
    """Another process is the static member now: it has what that one was told of."""
    draft.unsettled = tuple(replace(each, owner=new_id) if each.owner == old_id else each for each in draft.unsettled)


def _give_back(draft: Draft, each: Unsettled) -> None:
    """Its owner has let go of it: the source is to drain it before anybody else has it."""
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


def progressed(draft: Draft, event: HandoffProgress) -> bool:
    """Whether anything has changed: a source is done, or a client that cannot be told to ask again has read on."""
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


def expire(draft: Draft) -> None:
    """Part of a Tick."""
    kept: list[Unsettled] = []
    for each in draft.unsettled:
        if each.deadline_ms > draft.now_ms:
            kept.append(each)
        else:
            _end(draft, each, HandoffEnd.TIMEOUT)
    _replace_all(draft, kept)


def superseded(draft: Draft) -> None:
    """The group becomes a classic one."""
    for each in draft.unsettled:
        _end(draft, each, HandoffEnd.SUPERSEDED)


def take_over(draft: Draft) -> None:
    """A coordinator that has read the group gives every source its full time once more."""
    deadline_ms = draft.now_ms + draft.settings.handoff.timeout_ms
    draft.unsettled = tuple(replace(each, since_ms=draft.now_ms, deadline_ms=deadline_ms) for each in draft.unsettled)


def _replace_all(draft: Draft, kept: list[Unsettled]) -> None:
    """What is stored of them changes with whose they are, not with how far their sources have come."""
    before = draft.unsettled
    draft.unsettled = tuple(kept)
    if [(each.topic_id, each.partition, each.owner) for each in before] != [
        (each.topic_id, each.partition, each.owner) for each in kept
    ]:
        draft.tell(HandoffsChanged())


def _end(draft: Draft, each: Unsettled, reason: HandoffEnd) -> None:
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
    """What sources are to commit."""
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
    """Who joined on the connection."""
    return next((key for key, each in group.members.items() if each.connection_number == connection_number), None)


def awaited_by(
    group: ConsumerGroup, connection_number: int, client_id: str, client_host: str
) -> frozenset[tuple[UUID, int]]:
    """Partitions whose committed offsets are not settled for who asks on this connection: a member that is not their
    source. On a connection on which nobody joined it is known by client id and host."""
    if not group.unsettled:
        return frozenset()
    asker = member_on(group, connection_number)
    if asker is not None:
        askers = {asker}
    else:
        named = (client_id, client_host)
        askers = {key for key, each in group.members.items() if (each.client_id, each.client_host) == named}
    return frozenset((each.topic_id, each.partition) for each in group.unsettled if askers - {each.source})
