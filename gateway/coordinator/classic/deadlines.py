"""Time and lost connections: the deadlines of a group, and what happens once they have passed.

The one idea: a deadline is re-read when it fires. A Tick knows nothing but the time, so a late, early or repeated Tick
does exactly what is due. First, pending ids and members (session, connection grace) are removed. Then the consequences
of their loss happen once. Last comes the phase that is then current.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gateway.coordinator.classic import handoff
from gateway.coordinator.classic.draft import Draft
from gateway.coordinator.classic.model import Group, GroupState, Member, Parked
from gateway.coordinator.classic.rebalance import (
    complete_join_phase,
    end_initial_delay,
    maybe_complete_join_phase,
    prepare_rebalance,
    rebalance,
)
from gateway.coordinator.facts import Departure, MemberDisconnected, PendingMemberExpired, Trigger
from gateway.coordinator.machine import ConnectionClosed, ConnectionId, Step, Tick
from gateway.coordinator.settings import Settings


def next_deadline(group: Group) -> int | None:
    """Return the earliest time at which a Tick is due. Return None if the group waits only for requests."""
    return min(_deadlines(group), default=None)


def postponed(group: Group, by_ms: int) -> Group:
    """Return the same group with every deadline later by the time in which no member could reach the coordinator or
    get a reply."""
    later = object.__new__(Group)
    attributes = later.__dict__
    # Every write of a group ends here, so the attributes are copied at once, as in `Group.with_session_deadline`.
    attributes.update(group.__dict__)
    attributes["session_deadlines"] = {key: at_ms + by_ms for key, at_ms in group.session_deadlines.items()}
    attributes["connection_deadlines"] = {key: at_ms + by_ms for key, at_ms in group.connection_deadlines.items()}
    attributes["hold_deadlines"] = {key: at_ms + by_ms for key, at_ms in group.hold_deadlines.items()}
    attributes["pending"] = {
        key: replace(pending, deadline_ms=pending.deadline_ms + by_ms) for key, pending in group.pending.items()
    }
    attributes["handoffs"] = handoff.postponed(group.handoffs, by_ms)
    if group.phase_deadline_ms is not None:
        attributes["phase_deadline_ms"] = group.phase_deadline_ms + by_ms
    if group.watch.follow_up_ms is not None:
        attributes["watch"] = replace(group.watch, follow_up_ms=group.watch.follow_up_ms + by_ms)
    return later


def _deadlines(group: Group) -> Iterator[int]:
    if group.phase_deadline_ms is not None:
        yield group.phase_deadline_ms
    if group.watch.follow_up_ms is not None:
        yield group.watch.follow_up_ms
    yield from group.session_deadlines.values()
    yield from group.connection_deadlines.values()
    for pending in group.pending.values():
        yield pending.deadline_ms
    yield from handoff.deadlines(group)


def tick(group: Group, _event: Tick, now_ms: int, settings: Settings) -> Step[Group]:
    earliest_ms = next_deadline(group)
    if earliest_ms is None or earliest_ms > now_ms:
        return Step(group)
    draft = Draft(group, now_ms, settings)
    pending_went = _expire_pending(draft)
    if _expire_members(draft):
        rebalance(draft, Trigger.MEMBER_LEFT)
    elif pending_went and draft.state is GroupState.PREPARING_REBALANCE:
        maybe_complete_join_phase(draft)
    if draft.phase_deadline_ms is not None and draft.phase_deadline_ms <= now_ms:
        _end_phase(draft)
    handoff.expire(draft)
    _follow_up(draft, later=draft.handoffs != group.handoffs)
    return draft.seal()


def _follow_up(draft: Draft, *, later: bool) -> None:
    """Start a rebalance if partitions were withheld and no member has joined again since, so that members state
    their claims once more. Wait for a step `later` if this one has changed handoffs: these are stored, but a join
    phase in progress is not."""
    follow_up_ms = draft.watch.follow_up_ms
    if follow_up_ms is not None and follow_up_ms <= draft.now_ms:
        if later and draft.state is GroupState.STABLE:
            draft.watch = replace(draft.watch, follow_up_ms=draft.now_ms + 1)
            return
        draft.watch = replace(draft.watch, follow_up_ms=None)
        if draft.state is GroupState.STABLE:
            prepare_rebalance(draft, Trigger.GUARDED)


def _expire_pending(draft: Draft) -> bool:
    expired = [pending for pending in draft.pending.values() if pending.deadline_ms <= draft.now_ms]
    for pending in expired:
        del draft.pending[pending.member_id]
        draft.tell(PendingMemberExpired(pending.member_id))
    return bool(expired)


def _expire_members(draft: Draft) -> bool:
    """Remove expired members; return True if there was one."""
    before = len(draft.members)
    for member in list(draft.members.values()):
        if draft.connection_deadlines.get(member.member_id, draft.now_ms + 1) <= draft.now_ms:
            draft.remove(member.member_id, Departure.CONNECTION_CLOSED)
        elif draft.session_deadlines.get(member.member_id, draft.now_ms + 1) <= draft.now_ms:
            if _waits_on_us(member):
                # The member is silent because its request is parked; its session starts again with the reply.
                del draft.session_deadlines[member.member_id]
                continue
            draft.remove(member.member_id, Departure.SESSION_EXPIRED)
    return len(draft.members) < before


def _waits_on_us(member: Member) -> bool:
    """Return True for members whose request is parked, because they are alive. A new member's timeout, though, must
    end the parking of its join."""
    return not member.is_new and (member.parked_join is not None or member.parked_sync is not None)


def _end_phase(draft: Draft) -> None:
    if draft.state is GroupState.PREPARING_REBALANCE:
        if draft.initial_delay_remaining_ms is not None:
            end_initial_delay(draft, draft.initial_delay_remaining_ms)
        else:
            complete_join_phase(draft)
        return
    silent = [member_id for member_id in draft.members if member_id in draft.pending_sync]
    for member_id in silent:
        draft.remove(member_id, Departure.NEVER_SYNCED)
    prepare_rebalance(draft, Trigger.MEMBER_LEFT)


def connection_closed(group: Group, event: ConnectionClosed, now_ms: int, settings: Settings) -> Step[Group]:
    """Drop the requests parked for this connection, which cannot be answered any more. The member may return on
    another one. A dynamic member that has not returned within the grace period counts as failed. This is the last
    event of a connection."""
    closed = event.connection_id
    touched = [member for member in group.members.values() if _uses(member, closed)]
    if not touched:
        return Step(group)
    draft = Draft(group, now_ms, settings)
    for member in touched:
        _disconnect(draft, member, closed)
    return draft.seal()


def _uses(member: Member, connection_id: ConnectionId) -> bool:
    return member.connection_id == connection_id or connection_id in (
        parked.connection_id for parked in (member.parked_join, member.parked_sync) if parked is not None
    )


def _disconnect(draft: Draft, member: Member, closed: ConnectionId) -> None:
    parked_join = _unless_on(closed, member.parked_join)
    parked_sync = _unless_on(closed, member.parked_sync)
    if member.parked_sync is not None and parked_sync is None and draft.state is GroupState.COMPLETING_REBALANCE:
        draft.pending_sync.add(member.member_id)
    connection_id = member.connection_id
    if connection_id == closed:
        held = parked_join or parked_sync
        connection_id = held.connection_id if held is not None else None
    disconnected = replace(member, parked_join=parked_join, parked_sync=parked_sync, connection_id=connection_id)
    draft.put(disconnected)
    first_join_dropped = member.is_new and member.parked_join is not None and parked_join is None
    if first_join_dropped or member.member_id not in draft.session_deadlines:
        # The member's session did not run while its request was parked. The request is gone, so the session starts.
        draft.arm_session(disconnected)
    grace_ms = draft.settings.group_connection_grace_ms
    if connection_id is None and member.group_instance_id is None and grace_ms >= 0:
        draft.connection_deadlines[member.member_id] = draft.now_ms + grace_ms
        draft.tell(MemberDisconnected(member.member_id))


def _unless_on(closed: ConnectionId, parked: Parked | None) -> Parked | None:
    return None if parked is not None and parked.connection_id == closed else parked
