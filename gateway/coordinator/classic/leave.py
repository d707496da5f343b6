"""LeaveGroup and DeleteGroups: the requests that remove members or the group.

The one idea: a batch is one event. Each entry gets its own code. All removals of the batch cost one rebalance and, only
if the leader left, one election. Follows `classicGroupLeaveToClassicGroup` (KIP-345, KIP-800).
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.coordinator.classic.draft import Draft
from gateway.coordinator.classic.identity import NO_MEMBER_ID
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.classic.rebalance import maybe_complete_join_phase, rebalance
from gateway.coordinator.facts import Departure, GroupDeleted, MemberId, Trigger
from gateway.coordinator.machine import Step
from gateway.coordinator.requests import DeleteGroup, DeleteReply, LeaveGroup, LeaveReply, LeavingMember, LeftMember
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode


def leave(group: Group, event: LeaveGroup, now_ms: int, settings: Settings) -> Step[Group]:
    """Remove the named members. The top-level code is always NONE, also if entries fail; LeaveGroup 0-2 lifts its
    only entry's code."""
    draft = Draft(group, now_ms, settings)
    # A search among the members for each entry would take seconds.
    instances = {each.group_instance_id: each.member_id for each in group.members.values()}
    left = tuple(_leave_one(draft, leaving, instances) for leaving in event.members)
    reply = LeaveReply(ErrorCode.NONE, left)
    if all(each.error is not ErrorCode.NONE for each in left):
        return Step(group, ((event.request_id, reply),))
    draft.answer(event.request_id, reply)
    if len(draft.members) < len(group.members):
        rebalance(draft, Trigger.MEMBER_LEFT)
    elif draft.state is GroupState.PREPARING_REBALANCE:
        maybe_complete_join_phase(draft)
    return draft.seal()


def leave_dead(group: Group, event: LeaveGroup, _now_ms: int, _settings: Settings) -> Step[Group]:
    return Step(group, ((event.request_id, LeaveReply(ErrorCode.COORDINATOR_NOT_AVAILABLE)),))


def _leave_one(draft: Draft, leaving: LeavingMember, instances: Mapping[str | None, MemberId]) -> LeftMember:
    error = _take_out(draft, leaving, instances)
    return LeftMember(leaving.member_id, leaving.group_instance_id, error)


def _take_out(draft: Draft, leaving: LeavingMember, instances: Mapping[str | None, MemberId]) -> ErrorCode:
    if draft.pending.pop(leaving.member_id, None) is not None:
        return ErrorCode.NONE
    member_id, instance_id = leaving.member_id, leaving.group_instance_id
    if instance_id is not None:
        # An administrator removes a static member by its instance id alone.
        member_id = instances.get(instance_id, NO_MEMBER_ID)
    if member_id not in draft.members:
        return ErrorCode.UNKNOWN_MEMBER_ID
    if leaving.member_id not in (NO_MEMBER_ID, member_id):
        return ErrorCode.FENCED_INSTANCE_ID
    draft.remove(member_id, Departure.LEFT, leaving.reason)
    return ErrorCode.NONE


def delete_empty(group: Group, event: DeleteGroup, _now_ms: int, _settings: Settings) -> Step[Group]:
    """Delete an empty group. Pending ids are deleted with it: a client that returns with one gets UNKNOWN_MEMBER_ID."""
    if not group.exists:
        return _answer(group, event, ErrorCode.GROUP_ID_NOT_FOUND)
    deleted = Group(group.group_id, GroupState.DEAD)
    return Step(deleted, ((event.request_id, DeleteReply(ErrorCode.NONE)),), (GroupDeleted(),))


def delete_live(group: Group, event: DeleteGroup, _now_ms: int, _settings: Settings) -> Step[Group]:
    return _answer(group, event, ErrorCode.NON_EMPTY_GROUP)


def delete_dead(group: Group, event: DeleteGroup, _now_ms: int, _settings: Settings) -> Step[Group]:
    return _answer(group, event, ErrorCode.GROUP_ID_NOT_FOUND)


def _answer(group: Group, event: DeleteGroup, error: ErrorCode) -> Step[Group]:
    return Step(group, ((event.request_id, DeleteReply(error)),))
