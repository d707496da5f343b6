"""Tasks that a member may own now: the step from its current tasks towards its target.

The one idea: member in, member out (upstream's CurrentAssignmentBuilder). Tasks are first revoked from their owner. An
active task is assigned to another member only after its owner has acknowledged that. No task is ever held twice in one
process, in any role, because its copies would share a directory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gateway.coordinator.member_epochs import JOIN_EPOCH, STATIC_LEAVE_EPOCH
from gateway.coordinator.streams.model import MemberState, StreamsMember
from gateway.coordinator.streams.tasks import NO_TASKS, Task, Tasks


@dataclass(frozen=True, slots=True)
class HeldByOthers:
    """The tasks that all other members may own."""

    active: frozenset[Task]
    """Active tasks in any process."""
    in_process: frozenset[Task]
    """Tasks in the member's own process, in any role."""


def held_by_others(member: StreamsMember, members: Iterable[StreamsMember]) -> HeldByOthers:
    others = [each for each in members if each.member_id != member.member_id]
    active = frozenset[Task]().union(*(each.held.active for each in others))
    alike = [each.held for each in others if each.process == member.process]
    return HeldByOthers(active, frozenset[Task]().union(*(held.active | held.standby for held in alike)))


def reconcile(
    member: StreamsMember, target: Tasks, target_epoch: int, others: HeldByOthers, owned: Tasks | None
) -> StreamsMember:
    """Return the member after a heartbeat that reported `owned` (None if the request left it out); the same object
    if nothing changes."""
    match member.state:
        case MemberState.STABLE:
            if member.member_epoch == target_epoch:
                return member
            return _advance(member, member.member_epoch, target, target_epoch, others, owned)
        case MemberState.UNREVOKED:
            if not _has_let_go(member, member.pending_revocation, member.assigned & target, owned):
                return member
            epoch = min(member.member_epoch + 1, target_epoch)
            return _advance(member, epoch, target, target_epoch, others, owned)
        case MemberState.UNRELEASED:
            return _advance(member, member.member_epoch, target, target_epoch, others, owned)


def left_for_a_while(member: StreamsMember) -> StreamsMember:
    """Return the static member that keeps its tasks, and has released those it had to release."""
    away = _with(member, MemberState.STABLE, STATIC_LEAVE_EPOCH, member.assigned, NO_TASKS)
    return replace(away, previous_member_epoch=STATIC_LEAVE_EPOCH)


def _advance(
    member: StreamsMember,
    epoch: int,
    target: Tasks,
    target_epoch: int,
    others: HeldByOthers,
    owned: Tasks | None,
) -> StreamsMember:
    """Revoke the tasks that the member should no longer own, at `epoch`. If all are revoked, assign the free ones."""
    keep = member.assigned & target
    revoke = member.assigned - keep
    if revoke and not _has_let_go(member, revoke, keep, owned):
        return _with(member, MemberState.UNREVOKED, epoch, keep, revoke)
    pending = target - keep
    free = Tasks(pending.active - others.active - others.in_process, pending.standby - others.in_process)
    state = MemberState.STABLE if free == pending else MemberState.UNRELEASED
    return _with(member, state, target_epoch, keep | free, NO_TASKS)


def _has_let_go(member: StreamsMember, revoke: Tasks, keep: Tasks, owned: Tasks | None) -> bool:
    """Return whether a member that reports `owned` has released all of `revoke`.

    Java reports its tasks in the first heartbeat after it has joined, and in each one after an error, even if its
    application has not accepted the assignment yet. Such a report lacks tasks that the member keeps, and the member may
    still accept those of `revoke`. Only a member that joins releases everything.
    """
    if owned is None or owned & revoke:
        return False
    return member.member_epoch == JOIN_EPOCH or not keep - owned


def _with(
    member: StreamsMember, state: MemberState, epoch: int, assigned: Tasks, pending_revocation: Tasks
) -> StreamsMember:
    changed = replace(
        member,
        state=state,
        member_epoch=epoch,
        assigned=assigned,
        pending_revocation=pending_revocation,
        active_since=_active_since(member, epoch, assigned, pending_revocation),
    )
    if changed == member:
        return member
    return changed if epoch == member.member_epoch else replace(changed, previous_member_epoch=member.member_epoch)


def _active_since(
    member: StreamsMember, epoch: int, assigned: Tasks, pending_revocation: Tasks
) -> tuple[tuple[int, frozenset[Task]], ...]:
    gained = assigned.active - member.held.active
    lost = member.held.active - assigned.active - pending_revocation.active
    if not gained and not lost:
        return member.active_since
    kept = ((since, tasks - lost) for since, tasks in member.active_since)
    return tuple((since, tasks) for since, tasks in (*kept, (epoch, gained)) if tasks)
