"""Conversion of a classic group to and from its stored form.

The one idea: the dataclasses declare what is stored, so nothing here names a field twice. Members get a full session in
which to return, so a restart of the gateway is not a rebalance. They get it only once: while some members have not
returned, further restarts continue the session that was running. Losing what is not stored does no harm: a join phase
in progress (its members ask again), pending ids, parked requests, connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.coordinator.classic import handoff
from gateway.coordinator.classic.draft import Draft
from gateway.coordinator.classic.model import Group, GroupState, Member
from gateway.coordinator.classic.observer import FOLLOW_UP_MS
from gateway.coordinator.classic.rebalance import prepare_rebalance
from gateway.coordinator.document import dump, load
from gateway.coordinator.facts import MemberId, Trigger
from gateway.coordinator.machine import Document, StoredGroup, StoredMember
from gateway.coordinator.protocols import subscribed_topics
from gateway.coordinator.settings import Settings

SHORTEST_SESSION_MS = 10_000
"""Time that a member has to return after every restart, however often the node restarts: it must find the node again.
"""

_COLUMNS = ("state", "protocol_type", "generation_id")
"""Fields that Postgres also reads. They are stored beside the document."""


def stored(group: Group) -> StoredGroup:
    document = dump(group)
    for name in _COLUMNS:
        del document[name]
    return StoredGroup(
        group.state.value, group.protocol_type, group.generation_id, document, all_heard=not group.unheard
    )


def stored_member(group: Group, member_id: MemberId) -> StoredMember | None:
    member = group.members.get(member_id)
    return None if member is None else StoredMember(dump(member), member.member_epoch)


def restore(
    group_id: str,
    stored: StoredGroup,
    members: Mapping[MemberId, Document],
    silent_ms: int | None,
    now_ms: int,
    settings: Settings,
) -> Group:
    """Return the group from its stored form. A group larger than `group.max.size` opens a rebalance at once, which
    turns latecomers away."""
    columns = {name: getattr(stored, name) for name in _COLUMNS}
    group = load(Group, {**stored.document, **columns}, group_id=group_id, exists=True)
    draft = Draft(group, now_ms, settings)
    for member in sorted((load(Member, document) for document in members.values()), key=_position):
        draft.put(member)
        draft.session_deadlines[member.member_id] = now_ms + session_left_ms(member.session_timeout_ms, silent_ms)
        draft.unheard.add(member.member_id)
    if group.protocol_name is not None:
        draft.subscribed_topics = subscribed_topics(group.protocol_type, group.protocol_name, draft.members.values())
    if group.state is GroupState.COMPLETING_REBALANCE:
        draft.pending_sync = set(draft.members)
        draft.phase_deadline_ms = now_ms + draft.rebalance_timeout_ms()
    elif group.state is GroupState.PREPARING_REBALANCE:
        # A group is stored in this state if it was a consumer group before, or if one write stored several steps. Its
        # parked requests are lost, and the members send them again.
        draft.phase_deadline_ms = now_ms + draft.rebalance_timeout_ms()
    if group.handoffs:
        handoff.take_over(draft, stored.clock_lead_ms, SHORTEST_SESSION_MS)
    if group.watch.withheld:
        draft.watch = replace(group.watch, follow_up_ms=now_ms + FOLLOW_UP_MS)
    if len(draft.members) > settings.group_max_size and draft.state is not GroupState.PREPARING_REBALANCE:
        prepare_rebalance(draft, Trigger.TOO_MANY_MEMBERS)
    return draft.seal().group


def _position(member: Member) -> int:
    return member.position


def session_left_ms(session_timeout_ms: int, silent_ms: int | None) -> int:
    """Return how long a member has to return. `silent_ms` is the time since the start of a coordinator that some
    members have not reached since."""
    if silent_ms is None:
        return session_timeout_ms
    return max(session_timeout_ms - silent_ms, min(session_timeout_ms, SHORTEST_SESSION_MS))
