"""The join barrier: when a rebalance starts, how long it waits and for which members, and what its end does.

The one idea: the generation rises once, when the barrier falls. Until then every member still belongs to the old
generation (its heartbeats get REBALANCE_IN_PROGRESS, its commits are accepted). Follows `prepareRebalance`,
`maybeCompleteJoinPhase` and `completeClassicGroupJoin` of upstream's GroupMetadataManager.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.coordinator.classic.draft import Draft
from gateway.coordinator.classic.handoff import generation_begun, last_assignment
from gateway.coordinator.classic.model import GroupState, Member
from gateway.coordinator.facts import Departure, GenerationStarted, MemberId, RebalanceBegun, Trigger
from gateway.coordinator.protocols import metadata_of, select_protocol, subscribed_topics
from gateway.coordinator.requests import JoinedMember, JoinReply, SyncReply
from protocol.errors import ErrorCode

SHORTEST_WAIT_MS = 1_000
"""Shortest time after which a join phase without a joined member begins again, because that costs a step."""


def rebalance(draft: Draft, trigger: Trigger, member_id: MemberId | None = None) -> None:
    """Open the barrier after a change of membership or metadata, or check whether an open one can fall."""
    if draft.state is GroupState.PREPARING_REBALANCE:
        maybe_complete_join_phase(draft)
    else:
        prepare_rebalance(draft, trigger, member_id)


def prepare_rebalance(draft: Draft, trigger: Trigger, member_id: MemberId | None = None) -> None:
    draft.tell(RebalanceBegun(trigger, member_id))
    waiting = {member.member_id for member in draft.members.values() if member.parked_sync is not None}
    draft.untold = frozenset(draft.pending_sync | waiting)
    if draft.state is GroupState.COMPLETING_REBALANCE or draft.hold_deadlines:
        _refuse_parked_syncs(draft)
        draft.hold_deadlines = {}
    was_empty = draft.state is GroupState.EMPTY
    draft.transition(GroupState.PREPARING_REBALANCE)
    draft.pending_sync.clear()
    if was_empty:
        _start_initial_delay(draft)
    else:
        draft.phase_deadline_ms = draft.now_ms + draft.rebalance_timeout_ms()
        maybe_complete_join_phase(draft)


def _refuse_parked_syncs(draft: Draft) -> None:
    for member in [member for member in draft.members.values() if member.parked_sync is not None]:
        assert member.parked_sync is not None
        draft.answer(member.parked_sync.request_id, SyncReply(ErrorCode.REBALANCE_IN_PROGRESS))
        draft.put(replace(member, parked_sync=None))
        draft.arm_session(member)


def _start_initial_delay(draft: Draft) -> None:
    """Start the initial delay: a group's first members tend to start together, so the first join of an Empty group
    waits for the others."""
    delay_ms = draft.settings.group_initial_rebalance_delay_ms
    draft.new_member_added = False
    draft.initial_delay_remaining_ms = max(draft.rebalance_timeout_ms() - delay_ms, 0)
    draft.phase_deadline_ms = draft.now_ms + delay_ms
    if delay_ms <= 0:
        complete_join_phase(draft)


def end_initial_delay(draft: Draft, remaining_ms: int) -> None:
    """End or extend the initial delay. New members extend it by its own length, up to the rebalance timeout; pending
    members do not."""
    if draft.new_member_added and remaining_ms > 0:
        next_ms = min(draft.settings.group_initial_rebalance_delay_ms, remaining_ms)
        draft.new_member_added = False
        draft.initial_delay_remaining_ms = remaining_ms - next_ms
        draft.phase_deadline_ms = draft.now_ms + next_ms
    else:
        complete_join_phase(draft)


def maybe_complete_join_phase(draft: Draft) -> None:
    """Complete the join phase once every member has joined, but never before the initial delay is over."""
    if draft.initial_delay_remaining_ms is not None:
        return
    everyone_joined = draft.awaiting_join == len(draft.members) and not draft.pending
    if everyone_joined or not draft.members:
        complete_join_phase(draft)


def complete_join_phase(draft: Draft) -> None:
    """Complete the join phase, even if members are missing. Dynamic members that have not re-joined are removed;
    static ones stay."""
    for member in list(draft.members.values()):
        if member.parked_join is None and member.group_instance_id is None:
            draft.remove(member.member_id, Departure.NOT_REJOINED)
    draft.initial_delay_remaining_ms = None
    draft.new_member_added = False
    if draft.members and draft.awaiting_join == 0:
        # Only absent static members are left and none can lead, so wait until they join or expire. A client may have
        # chosen a rebalance timeout of a millisecond.
        draft.phase_deadline_ms = draft.now_ms + max(draft.rebalance_timeout_ms(), SHORTEST_WAIT_MS)
        return
    draft.generation_id += 1
    if draft.members:
        _begin_generation(draft)
    else:
        draft.transition(GroupState.EMPTY)
        draft.protocol_name = None
        draft.leader_id = None
        draft.subscribed_topics = frozenset()
        draft.phase_deadline_ms = None
        draft.tell(GenerationStarted(draft.generation_id, None, ()))


def _begin_generation(draft: Draft) -> None:
    leader = _elect_leader(draft)
    draft.leader_id = leader.member_id
    draft.protocol_name = select_protocol(draft.members, draft.protocol_support, leader)
    draft.subscribed_topics = subscribed_topics(draft.protocol_type, draft.protocol_name, draft.members.values())
    draft.transition(GroupState.COMPLETING_REBALANCE)
    draft.tell(GenerationStarted(draft.generation_id, draft.protocol_name, tuple(draft.members)))
    generation_begun(draft)
    was_assigned = any(member.assignment for member in draft.members.values())
    for member in list(draft.members.values()):
        # The assignment of the last generation must not be returned in this generation.
        last = last_assignment(draft, member, was_assigned=was_assigned)
        settled = replace(member, parked_join=None, is_new=False, assignment=b"", last_assignment=last, member_epoch=0)
        draft.put(settled)
        # An absent static member has not been heard from, so its session continues to run.
        if member.parked_join is not None:
            draft.answer(member.parked_join.request_id, joined(draft, settled))
            draft.arm_session(settled)
    draft.pending_sync = set(draft.members)
    draft.untold = frozenset()
    draft.phase_deadline_ms = draft.now_ms + draft.rebalance_timeout_ms()


def _elect_leader(draft: Draft) -> Member:
    """Elect the old leader if it has re-joined, else the member that joined first of those that have."""
    leader = draft.members.get(draft.leader_id or MemberId(""))
    if leader is not None and leader.parked_join is not None:
        return leader
    return next(member for member in draft.members.values() if member.parked_join is not None)


def joined(draft: Draft, member: Member, *, skip_assignment: bool = False) -> JoinReply:
    """Return the success reply. The leader, who assigns, also gets all members with the chosen protocol's metadata."""
    is_leader = member.member_id == draft.leader_id
    return JoinReply(
        ErrorCode.NONE,
        member.member_id,
        draft.generation_id,
        draft.protocol_type,
        draft.protocol_name,
        draft.leader_id or "",
        skip_assignment,
        tuple(
            JoinedMember(each.member_id, each.group_instance_id, metadata_of(each, draft.protocol_name))
            for each in draft.members.values()
        )
        if is_leader
        else (),
    )
