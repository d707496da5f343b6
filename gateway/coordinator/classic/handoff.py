"""Partitions of a classic group that may not be delivered yet: which SyncGroups are held, and until when.

The one idea: the leader's assignment is stored at once, and every member is answered except those that gain partitions
another member has not released (or not drained). A member is not held while it is a source itself; otherwise two
members that swap partitions would wait for each other. Only OffsetFetch keeps such a member from its new partitions
(UNSTABLE_OFFSET_COMMIT).

Each source states what it still holds (`observer.claimants`). A cooperative member does so in its subscription. An
eager one has released everything by joining again. An absent static member holds what it was last assigned. A SyncGroup
is held for ten seconds, or half of the session, at most; the record outlives that, until its own deadline. The head of
`handoff.py` explains the whole handover.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol
from uuid import UUID

from gateway.coordinator.classic.model import Group, GroupState, Member, Watch
from gateway.coordinator.classic.observer import (
    Claims,
    Partition,
    claimants,
    claims_of,
    is_cooperative,
    partitions_or_none,
)
from gateway.coordinator.facts import Departure, Fact, MemberId, MemberSynced
from gateway.coordinator.handoff import (
    LONGEST_HOLD_MS,
    Awaits,
    Draining,
    Handoff,
    HandoffBegun,
    HandoffEnd,
    HandoffEnded,
    HandoffMode,
    HandoffsChanged,
    HandoffSettings,
    by_pair,
    released,
)
from gateway.coordinator.machine import Reply, RequestId
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE
from gateway.coordinator.requests import SyncReply
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode


class HandoffDraft(Protocol):
    """The part of a `Draft` that handoffs read and change."""

    now_ms: int
    settings: Settings
    group_id: str
    state: GroupState
    protocol_type: str | None
    protocol_name: str | None
    generation_id: int
    members: dict[MemberId, Member]
    watch: Watch
    handoffs: tuple[Handoff, ...]
    hold_deadlines: dict[MemberId, int]

    def put(self, member: Member) -> None: ...

    def arm_session(self, member: Member) -> None: ...

    def answer(self, request_id: RequestId, reply: Reply) -> None: ...

    def tell(self, fact: Fact) -> None: ...


# --- when the leader has assigned -------------------------------------------------------------------------------------


def begin(draft: HandoffDraft) -> None:
    """Determine, for the generation just assigned, which partitions must be waited for and which members wait.

    Groups of other protocol types are not affected. Members whose bytes cannot be parsed gain and lose nothing.
    """
    settings = draft.settings.handoff_of(draft.group_id)
    before = {(each.topic, each.partition): each for each in draft.handoffs}
    draft.handoffs = ()
    draft.hold_deadlines = {}
    if settings.mode is HandoffMode.OFF or draft.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return
    holders = _holders(draft, before)
    if not holders and not before and settings.mode is not HandoffMode.DRAIN:
        return
    given = {
        partition: member.member_id
        for member in draft.members.values()
        for partition in partitions_or_none(member.assignment)
    }
    sources = _sources(draft, holders, given, before, drain=settings.mode is HandoffMode.DRAIN)
    draft.handoffs = tuple(
        _record(draft, settings, partition, source, given.get(partition), awaits, before.get(partition))
        for partition, (source, awaits) in sorted(sources.items())
    )
    _tell_begun(draft, settings.mode)
    _hold_targets(draft)


def _holders(draft: HandoffDraft, before: Mapping[Partition, Handoff]) -> Mapping[Partition, set[MemberId]]:
    """Return the holders of each partition by the members' claims. A source that still claims a partition for which
    another member has waited holds it, however old its claim: the newer claim belongs to a member that was assigned
    the partition and has read nothing."""
    if not is_cooperative(draft.protocol_name):
        return claimants(draft, {}) if draft.watch.absent else {}
    claims = claims_of(draft)
    holders = claimants(draft, claims)
    for partition, known in before.items():
        claim = claims.get(known.source)
        if not known.forced and claim is not None and partition in claim.partitions:
            claimers = {key for key, each in claims.items() if partition in each.partitions}
            holders[partition] = holders.get(partition, set[MemberId]()) | claimers
    return holders


def _sources(
    draft: HandoffDraft,
    holders: Mapping[Partition, set[MemberId]],
    given: Mapping[Partition, MemberId],
    before: Mapping[Partition, Handoff],
    *,
    drain: bool,
) -> dict[Partition, tuple[MemberId, Awaits]]:
    """Return the source of each pending partition, and what the source must still do."""
    sources: dict[Partition, tuple[MemberId, Awaits]] = {}
    for partition, target in given.items():
        others = holders.get(partition, set[MemberId]()) - {target}
        known = before.get(partition)
        if others and known is not None and known.source in holders[partition]:
            # The other members that claim the partition have waited for this source and have read nothing.
            sources[partition] = known.source, Awaits.ACKNOWLEDGEMENT
        elif others:
            sources[partition] = min(others), Awaits.ACKNOWLEDGEMENT
    for partition, known in before.items():
        if partition in sources:
            continue
        if given.get(partition) == known.source:
            if known.behind is not None and drain and not known.forced:
                sources[partition] = known.behind, Awaits.DRAIN
        elif known.source in holders.get(partition, ()):
            sources[partition] = known.source, Awaits.ACKNOWLEDGEMENT
        elif drain and not known.forced:
            sources[partition] = known.source, Awaits.DRAIN
    if drain:
        for member in draft.members.values():
            for partition in partitions_or_none(member.last_assignment):
                if partition not in sources and given.get(partition) != member.member_id and partition not in before:
                    claims = member.member_id in holders.get(partition, ())
                    sources[partition] = member.member_id, Awaits.ACKNOWLEDGEMENT if claims else Awaits.DRAIN
    return sources


def _record(
    draft: HandoffDraft,
    settings: HandoffSettings,
    partition: Partition,
    source: MemberId,
    target: MemberId | None,
    awaits: Awaits,
    known: Handoff | None,
) -> Handoff:
    """Return the record of one handoff. Its time counts from the first generation in which the source had to
    release. A source that gets the partition back stays a source for a moment: another claimant does not know yet
    that it will not get the partition."""
    goes_on = known if known is not None and known.source == source and target != source else None
    since_ms = draft.now_ms if goes_on is None else goes_on.since_ms
    deadline_ms = since_ms + settings.timeout_ms
    return Handoff(
        topic=partition[0],
        partition=partition[1],
        source=source,
        target=None if target == source else target,
        generation_id=draft.generation_id,
        awaits=awaits,
        mark=None if goes_on is None else goes_on.mark,
        topic_id=None if goes_on is None else goes_on.topic_id,
        forced=(goes_on is not None and goes_on.forced) or deadline_ms <= draft.now_ms,
        since_ms=since_ms,
        deadline_ms=deadline_ms,
        behind=None if known is None or awaits is Awaits.DRAIN else _behind(known, source, settings.mode),
    )


def _behind(known: Handoff, source: MemberId, mode: HandoffMode) -> MemberId | None:
    """Return the member that must still commit after the source has released the partition."""
    if mode is not HandoffMode.DRAIN or known.forced:
        return None
    return known.source if known.awaits is Awaits.DRAIN and known.source != source else known.behind


def _tell_begun(draft: HandoffDraft, mode: HandoffMode) -> None:
    pending: dict[tuple[str | UUID, int], Handoff] = {
        (each.topic, each.partition): each for each in draft.handoffs if each.is_pending
    }
    pairs = by_pair((each.source, each.target, *key) for key, each in pending.items() if each.target is not None)
    for (source, target), partitions in pairs.items():
        left_ms = min(pending[each].deadline_ms for each in partitions) - draft.now_ms
        draft.tell(HandoffBegun(source, target, draft.generation_id, mode, left_ms, partitions))
    for each in draft.handoffs:
        if each.forced and each.target is not None:
            # The hold on this partition ended in an earlier generation, and the source still owns the partition.
            partitions = ((each.topic, each.partition),)
            draft.tell(HandoffBegun(each.source, each.target, draft.generation_id, mode, 0, partitions))
            tell_ended(draft, each, HandoffEnd.TIMEOUT)


def _hold_targets(draft: HandoffDraft) -> None:
    for each in draft.handoffs:
        if each.target is not None and each.is_pending:
            hold_ms = min(LONGEST_HOLD_MS, draft.members[each.target].session_timeout_ms // 2)
            draft.hold_deadlines[each.target] = draft.now_ms + hold_ms


# --- held members -----------------------------------------------------------------------------------------------------


def held(draft: HandoffDraft) -> set[MemberId]:
    """Return the members whose SyncGroup must not be answered yet. A source is answered, because it must commit or
    learn what to release."""
    pending = [each for each in draft.handoffs if each.is_pending]
    waiting = {each.target for each in pending} - {each.source for each in pending}
    return {key for key, deadline_ms in draft.hold_deadlines.items() if key in waiting and deadline_ms > draft.now_ms}


def _release(draft: HandoffDraft) -> None:
    """Answer the members that do not wait for any partition any more, or that have been held for the maximal time."""
    still_held = held(draft)
    for member_id in draft.hold_deadlines:
        member = draft.members.get(member_id)
        if member is not None and member.parked_sync is not None and member_id not in still_held:
            answered = replace(member, parked_sync=None)
            draft.put(answered)
            draft.arm_session(answered)
            draft.tell(MemberSynced(member_id))
            reply = SyncReply(ErrorCode.NONE, draft.protocol_type, draft.protocol_name, member.assignment)
            draft.answer(member.parked_sync.request_id, reply)


# --- when a wait ends -------------------------------------------------------------------------------------------------


def generation_begun(draft: HandoffDraft) -> None:
    """Record the end of the last generation's waits when a join phase ends with members. Remember what sources have
    still not released or not drained, for the next assignment."""
    settings = draft.settings.handoff_of(draft.group_id)
    drain = settings.mode is HandoffMode.DRAIN
    kept: list[Handoff] = []
    claims = claims_of(draft) if draft.handoffs and is_cooperative(draft.protocol_name) else {}
    for each in draft.handoffs:
        claim = claims.get(each.source)
        claimed = claim is not None and (each.topic, each.partition) in claim.partitions
        let_go = not claimed and draft.members[each.source].parked_join is not None
        if each.is_pending:
            acknowledged = let_go and each.awaits is Awaits.ACKNOWLEDGEMENT
            tell_ended(draft, each, HandoffEnd.ACKNOWLEDGED if acknowledged else HandoffEnd.SUPERSEDED)
        if settings.mode is not HandoffMode.OFF and (not let_go or (drain and not each.forced)):
            kept.append(replace(released(each) if let_go else each, target=None))
        elif heir := _heir(each, claims):
            # Several members waited for the partition. One of them becomes the source, and the others do not know that
            # yet.
            deadline_ms = draft.now_ms + settings.timeout_ms
            begins = replace(each, source=heir, target=None, mark=None, forced=False, since_ms=draft.now_ms)
            kept.append(replace(begins, awaits=Awaits.ACKNOWLEDGEMENT, deadline_ms=deadline_ms))
    draft.handoffs = tuple(kept)
    draft.hold_deadlines = {}


def _heir(handoff: Handoff, claims: Claims) -> MemberId | None:
    """Return the member with the newest claim to a partition that its source has released, if several claim it."""
    partition = handoff.topic, handoff.partition
    claimers = [key for key, claim in claims.items() if partition in claim.partitions and key != handoff.source]
    return max(claimers, key=lambda key: (claims[key].generation_id, key)) if len(claimers) > 1 else None


def last_assignment(draft: HandoffDraft, member: Member, *, was_assigned: bool) -> bytes:
    """Return what a new generation keeps of the member's assignment: in mode `drain` the next assignment is compared
    with it. A generation that was never assigned took nothing from any member."""
    if draft.settings.handoff_of(draft.group_id).mode is not HandoffMode.DRAIN:
        return b""
    if draft.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return b""
    return member.assignment if was_assigned else member.last_assignment


def joined_again(draft: HandoffDraft, member: Member) -> None:
    """Update handoffs after a member has re-joined a generation that continues: by joining again it releases what it
    does not claim."""
    if all(each.source != member.member_id for each in draft.handoffs):
        return
    claims = claims_of(draft) if is_cooperative(draft.protocol_name) else {}
    claim = claims.get(member.member_id)
    claimed = frozenset[Partition]() if claim is None else claim.partitions
    drain = draft.settings.handoff_of(draft.group_id).mode is HandoffMode.DRAIN

    def each_left() -> Iterator[Handoff | None]:
        for each in draft.handoffs:
            mine = each.source == member.member_id and each.awaits is Awaits.ACKNOWLEDGEMENT
            if not mine or (each.topic, each.partition) in claimed:
                yield each
            elif drain and not each.forced and (each.behind is None or each.behind != each.target):
                yield released(each)
            else:
                tell_if_pending(draft, each, HandoffEnd.ACKNOWLEDGED)

    replace_all(draft, each_left())


def member_gone(draft: HandoffDraft, member_id: MemberId, departure: Departure) -> None:
    """End the waits for a member that is gone. Partitions assigned to it have no target until the next assignment."""
    if not draft.handoffs:
        return
    left = departure in (Departure.LEFT, Departure.TURNED_AWAY)
    kept: list[Handoff] = []
    for each in draft.handoffs:
        if each.behind == member_id:
            each = replace(each, behind=None)
        if each.source == member_id:
            tell_if_pending(draft, each, HandoffEnd.SOURCE_LEFT if left else HandoffEnd.SOURCE_EXPIRED)
            if each.behind is not None:
                kept.append(replace(released(each), target=None))
        elif each.target == member_id:
            tell_if_pending(draft, each, HandoffEnd.TARGET_LEFT)
            kept.append(replace(each, target=None))
        else:
            kept.append(each)
    draft.handoffs = tuple(kept)


def member_replaced(draft: HandoffDraft, old_id: MemberId, new_id: MemberId) -> None:
    """Transfer handoffs to the new process of a static member. It holds none of the partitions that its predecessor
    had to release, and inherits the predecessor's waits."""
    kept: list[Handoff] = []
    for each in draft.handoffs:
        if each.behind == old_id:
            each = replace(each, behind=None)
        if each.source == old_id and each.behind not in (None, each.target):
            kept.append(released(each))
        elif each.source == old_id:
            tell_if_pending(draft, each, HandoffEnd.SOURCE_LEFT)
        elif each.target == old_id:
            tell_if_pending(draft, each, HandoffEnd.SUPERSEDED)
            moved = replace(each, target=new_id)
            kept.append(moved)
            if moved.is_pending:
                mode = draft.settings.handoff_of(draft.group_id).mode
                partitions = ((each.topic, each.partition),)
                left_ms = max(each.deadline_ms - draft.now_ms, 0)
                draft.tell(HandoffBegun(each.source, new_id, each.generation_id, mode, left_ms, partitions))
        else:
            kept.append(each)
    draft.handoffs = tuple(kept)
    if old_id in draft.hold_deadlines:
        draft.hold_deadlines[new_id] = draft.hold_deadlines.pop(old_id)
    _release_if_stable(draft)


def expire(draft: HandoffDraft) -> None:
    """Force the handoffs whose maximal time is over. This is a part of a Tick."""

    def each_in_time() -> Iterator[Handoff | None]:
        for each in draft.handoffs:
            # No partition is delivered while the next assignment is made.
            early = each.target is None and draft.state is not GroupState.STABLE
            if each.forced or early or each.deadline_ms > draft.now_ms:
                yield each
            else:
                tell_if_pending(draft, each, HandoffEnd.TIMEOUT)
                yield replace(each, forced=True)

    if draft.handoffs:
        replace_all(draft, each_in_time())
        _release_if_stable(draft)


def deadlines(group: Group) -> Iterator[int]:
    """Return when Ticks are due because of pending handoffs."""
    if group.state is not GroupState.STABLE:
        return
    for each in group.handoffs:
        if not each.forced:
            yield each.deadline_ms
    for member_id, deadline_ms in group.hold_deadlines.items():
        member = group.members.get(member_id)
        if member is not None and member.parked_sync is not None:
            yield deadline_ms


def postponed(handoffs: Iterable[Handoff], by_ms: int) -> tuple[Handoff, ...]:
    return tuple(replace(each, deadline_ms=each.deadline_ms + by_ms) for each in handoffs)


def take_over(draft: HandoffDraft, clock_lead_ms: int | None, shortest_ms: int) -> None:
    """Continue the waits in a coordinator that has read the group, because members that its predecessor answered do
    not ask again. Each wait gets what is left of its time, but at least `shortest_ms`, within which a source finds
    the new coordinator. It gets all of its time if the start of the predecessor's wait is unknown."""
    now_ms, timeout_ms = draft.now_ms, draft.settings.handoff_of(draft.group_id).timeout_ms
    earliest_end_ms = now_ms + min(timeout_ms, shortest_ms)

    def goes_on(handoff: Handoff) -> Handoff:
        # The clock of another node may be ahead of ours. So no wait may begin in the future.
        since_ms = now_ms if clock_lead_ms is None else min(handoff.since_ms + clock_lead_ms, now_ms)
        return replace(handoff, since_ms=since_ms, deadline_ms=max(since_ms + timeout_ms, earliest_end_ms))

    draft.handoffs = tuple(goes_on(each) for each in draft.handoffs)
    if draft.state is GroupState.STABLE:
        _hold_targets(draft)


# --- queries ----------------------------------------------------------------------------------------------------------


def draining(group: Group) -> tuple[Draining, ...]:
    """Return what sources must commit, while the group is Stable."""
    if group.state is not GroupState.STABLE:
        return ()
    return tuple(
        Draining(
            each.topic,
            each.partition,
            each.source,
            source.client_id,
            source.client_host,
            source.connection_id,
            each.mark,
            each.since_ms,
            asked_by_rebalance=not is_cooperative(group.protocol_name),
        )
        for each in group.handoffs
        if each.awaits is Awaits.DRAIN and not each.forced and (source := group.members.get(each.source)) is not None
    )


def member_on(group: Group, connection_id: str) -> MemberId | None:
    """Return the member that uses the connection."""
    return next((key for key, each in group.members.items() if each.connection_id == connection_id), None)


def awaited_by(
    group: Group, connection_id: str, client_id: str, client_host: str, member_id: str = ""
) -> frozenset[Partition]:
    """Return the partitions whose committed offsets are not settled for the requester on this connection: any member
    that is not their source. It is the target, or was one and does not know yet that another assignment is being
    made. A member is known by the connection that speaks for it; on a connection that speaks for no member, by
    client id and host. A request that names a member, as an administrator's does, gets the partitions pending for
    that member."""
    awaited = [each for each in group.handoffs if not each.forced]
    if not awaited:
        return frozenset()
    if member_id:
        return frozenset((each.topic, each.partition) for each in awaited if each.target == member_id)
    asker = member_on(group, connection_id)
    if asker is not None:
        askers = {asker}
    else:
        named = (client_id, client_host)
        askers = {key for key, each in group.members.items() if (each.client_id, each.client_host) == named}
    return frozenset(
        (each.topic, each.partition) for each in awaited if (askers if each.behind else askers - {each.source})
    )


# --- records ----------------------------------------------------------------------------------------------------------


def replace_all(draft: HandoffDraft, handoffs: Iterable[Handoff | None]) -> None:
    """Replace the records. None stands for a handoff that has ended."""
    after = tuple(each for each in handoffs if each is not None)
    if after != draft.handoffs:
        draft.handoffs = after
        if draft.state is GroupState.STABLE:
            draft.tell(HandoffsChanged())
            _release(draft)


def _release_if_stable(draft: HandoffDraft) -> None:
    if draft.state is GroupState.STABLE:
        _release(draft)


def tell_if_pending(draft: HandoffDraft, handoff: Handoff, reason: HandoffEnd) -> None:
    if handoff.is_pending:
        tell_ended(draft, handoff, reason)


def tell_ended(draft: HandoffDraft, handoff: Handoff, reason: HandoffEnd) -> None:
    assert handoff.target is not None
    mode = HandoffMode.DRAIN if handoff.awaits is Awaits.DRAIN else draft.settings.handoff_of(draft.group_id).mode
    draft.tell(
        HandoffEnded(
            handoff.source,
            handoff.target,
            handoff.generation_id,
            HandoffMode.ACK if mode is HandoffMode.OFF else mode,
            handoff.topic,
            handoff.partition,
            reason,
            max(draft.now_ms - handoff.since_ms, 0),
            handoff.mark,
        )
    )
