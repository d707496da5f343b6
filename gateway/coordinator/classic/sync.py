"""SyncGroup: held until the leader has assigned, then answered with exactly the leader's bytes.

The one idea: an assignment belongs to one generation and one member. Before the leader has sent it, none exists, so
followers wait. Afterwards the stored assignment is returned as often as the member asks. Errors change nothing.

Follows `classicGroupSync`.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.coordinator.classic.draft import Draft
from gateway.coordinator.classic.handoff import begin, held
from gateway.coordinator.classic.identity import generation_of, refusal
from gateway.coordinator.classic.model import Group, GroupState, Parked
from gateway.coordinator.facts import AssignmentGiven, GenerationAssigned, MemberId, MemberSynced
from gateway.coordinator.machine import RequestId, Step
from gateway.coordinator.protocols import names
from gateway.coordinator.requests import SyncGroup, SyncReply
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode


def sync_empty(group: Group, event: SyncGroup, _now_ms: int, _settings: Settings) -> Step[Group]:
    return _refuse(group, event, ErrorCode.UNKNOWN_MEMBER_ID)


def sync_preparing(group: Group, event: SyncGroup, _now_ms: int, _settings: Settings) -> Step[Group]:
    """Refuse the sync. The leader's sync of the generation that is ending is refused too, so that late joiners are
    not left out."""
    return _refuse(group, event, _error(group, event) or ErrorCode.REBALANCE_IN_PROGRESS)


def sync_completing(group: Group, event: SyncGroup, now_ms: int, settings: Settings) -> Step[Group]:
    error = _error(group, event)
    if error is not None:
        return _refuse(group, event, error)
    draft = Draft(group, now_ms, settings)
    member = draft.hear(draft.members[event.member_id], event.connection_id)
    draft.pending_sync.discard(member.member_id)
    draft.park_sync(member, Parked(event.request_id, event.connection_id))
    if member.member_id == draft.leader_id:
        _hand_out(draft, dict(event.assignments))
    return draft.seal()


def sync_stable(group: Group, event: SyncGroup, now_ms: int, settings: Settings) -> Step[Group]:
    """Return the same bytes for repeats; ignore a leader's second list. The session timer is not touched (as in
    upstream)."""
    error = _error(group, event)
    if error is not None:
        return _refuse(group, event, error)
    draft = Draft(group, now_ms, settings)
    member = draft.hear(draft.members[event.member_id], event.connection_id)
    first = member.member_id in draft.pending_sync
    draft.pending_sync.discard(member.member_id)
    _close_sync_phase(draft)
    if member.member_id in held(draft):
        draft.park_sync(member, Parked(event.request_id, event.connection_id))
        return draft.seal()
    if first:
        draft.tell(MemberSynced(member.member_id))
    _answer(draft, event.request_id, member.assignment, event.protocol_name)
    return draft.seal()


def sync_dead(group: Group, event: SyncGroup, _now_ms: int, _settings: Settings) -> Step[Group]:
    return _refuse(group, event, ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _refuse(group: Group, event: SyncGroup, error: ErrorCode) -> Step[Group]:
    return Step(group, ((event.request_id, SyncReply(error)),))


def _error(group: Group, event: SyncGroup) -> ErrorCode | None:
    error = refusal(group.members, event.member_id, event.group_instance_id)
    if error is not None:
        return error
    member = group.members[event.member_id]
    if event.generation_id != generation_of(group, member):
        return ErrorCode.ILLEGAL_GENERATION
    # While the group was a consumer group, each member received a protocol of its own, which need not be the elected
    # one.
    own = member.member_epoch > 0 and event.protocol_name in names(member.protocols)
    differs = not own and _differ(event.protocol_name, group.protocol_name)
    if differs or _differ(event.protocol_type, group.protocol_type):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    return None


def _differ(given: str | None, own: str | None) -> bool:
    """Return True if both sides name a value and the two differ. Only clients of version 5 and up name one, and a
    group that has not voted yet has none."""
    return given is not None and own is not None and given != own


def _hand_out(draft: Draft, assignments: dict[MemberId, bytes]) -> None:
    """Store each member's assignment. Members that the leader omitted get zero bytes; ids that it made up are
    ignored."""
    draft.transition(GroupState.STABLE)
    assert draft.leader_id is not None
    draft.tell(GenerationAssigned(draft.generation_id, draft.leader_id))
    for member in list(draft.members.values()):
        draft.put(replace(member, assignment=assignments.get(member.member_id, b"")))
        draft.tell(AssignmentGiven(member.member_id, draft.generation_id))
    begin(draft)
    still_held = held(draft)
    for member in list(draft.members.values()):
        if member.parked_sync is not None and member.member_id not in still_held:
            settled = replace(member, parked_sync=None)
            draft.put(settled)
            draft.arm_session(settled)
            draft.tell(MemberSynced(settled.member_id))
            _answer(draft, member.parked_sync.request_id, settled.assignment)
    _close_sync_phase(draft)


def _close_sync_phase(draft: Draft) -> None:
    if not draft.pending_sync:
        draft.phase_deadline_ms = None


def _answer(draft: Draft, request_id: RequestId, assignment: bytes, named: str | None = None) -> None:
    """Answer with the assignment. Java's consumer refuses an answer with another protocol than it named."""
    draft.answer(request_id, SyncReply(ErrorCode.NONE, draft.protocol_type, named or draft.protocol_name, assignment))
