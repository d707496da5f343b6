"""Partitions that a member may own now: the step from its current assignment towards its target.

The one idea: member in, member out (upstream's CurrentAssignmentBuilder). A partition is first revoked from its owner,
and assigned to another member only after the owner has acknowledged that. Partitions that others may still own are left
out, and the member asks again with its next heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from uuid import UUID

from gateway.coordinator.consumer.model import ConsumerMember, MemberState
from gateway.coordinator.consumer.partitions import (
    NOTHING,
    Partitions,
    contains,
    difference,
    intersection,
    meet,
    only_topics,
    union,
)
from gateway.coordinator.facts import MemberId
from gateway.coordinator.member_epochs import JOIN_EPOCH

Owners = Mapping[UUID, Mapping[int, MemberId]]
"""For each partition, the member that may own it."""


def reconcile(
    member: ConsumerMember,
    target: Partitions,
    target_epoch: int,
    owners: Owners,
    topic_ids: frozenset[UUID],
    owned: Partitions | None,
    doubted: Partitions,
    subscription_changed: bool,
) -> ConsumerMember:
    """Return the member after a heartbeat that reported `owned` (None if the request left it out). The member may still
    be about to take over partitions that are `doubted`, even if it must revoke them.

    `target` is the member's part of the target assignment. `topic_ids` are the topics it subscribes to now; the target
    may be older.
    """
    target = only_topics(target, topic_ids)
    match member.state:
        case MemberState.STABLE:
            if member.member_epoch != target_epoch:
                return _advance(member, member.member_epoch, target, target_epoch, owners, owned)
            if subscription_changed:
                return _trim(member, topic_ids, owned)
            return member
        case MemberState.UNREVOKED:
            keep = intersection(member.assigned, target)
            if not _has_let_go(member, member.pending_revocation, keep, owned, doubted):
                return _trim(member, topic_ids, owned) if subscription_changed else member
            epoch = min(member.member_epoch + 1, target_epoch)
            return _advance(member, epoch, target, target_epoch, owners, owned)
        case MemberState.UNRELEASED:
            return _advance(member, member.member_epoch, target, target_epoch, owners, owned)


def _advance(
    member: ConsumerMember,
    epoch: int,
    target: Partitions,
    target_epoch: int,
    owners: Owners,
    owned: Partitions | None,
) -> ConsumerMember:
    """Revoke the partitions that the member should no longer own, at `epoch`. Otherwise assign the free
    ones."""
    keep = intersection(member.assigned, target)
    revoke = difference(member.assigned, keep)
    if revoke and not _has_let_go(member, revoke, keep, owned, member.untaken):
        return _with(member, MemberState.UNREVOKED, epoch, keep, revoke)
    pending = difference(target, keep)
    free = _free(pending, member.member_id, owners)
    state = MemberState.STABLE if contains(free, pending) else MemberState.UNRELEASED
    return _with(member, state, target_epoch, union(keep, free), NOTHING)


def _trim(member: ConsumerMember, topic_ids: frozenset[UUID], owned: Partitions | None) -> ConsumerMember:
    """Revoke topics that the member has just unsubscribed from. Do this at once: a target without them need not exist
    yet.
    """
    keep = only_topics(member.assigned, topic_ids)
    if keep is member.assigned:
        return member
    revoke = union(member.pending_revocation, difference(member.assigned, keep))
    if not _has_let_go(member, revoke, keep, owned, member.untaken):
        return _with(member, MemberState.UNREVOKED, member.member_epoch, keep, revoke)
    return _with(member, member.state, member.member_epoch, keep, member.pending_revocation)


def _has_let_go(
    member: ConsumerMember, revoke: Partitions, keep: Partitions, owned: Partitions | None, doubted: Partitions
) -> bool:
    """Return whether a member that reports `owned` has released all of `revoke` and will not take any of it over later.

    A member whose application is slow to take over partitions sends a whole request with what it owned before them, and
    then still takes over all that it was assigned first (librdkafka, Java). A member that has not heard of a topic yet
    acknowledges the rest of its assignment, and takes over that topic later (Java). So a member that releases
    partitions must report what it keeps. A partition never reported as owned counts as released only when the member
    acknowledges a response without it. Neither a whole request nor a request sent before that response can be the
    acknowledgement. Only a classic member, and the new process of a static one, release everything by joining.
    (Upstream looks at `revoke` alone.)
    """
    if owned is None or meet(owned, revoke):
        return False
    if member.classic is not None or member.member_epoch == JOIN_EPOCH:
        return True
    return contains(owned, keep) and not meet(doubted, revoke)


def _free(wanted: Partitions, member_id: MemberId, owners: Owners) -> Partitions:
    """Return the part of `wanted` that no other member may own."""
    if not any(topic_id in owners for topic_id in wanted):
        return wanted

    def is_free(owned: Mapping[int, MemberId]) -> Callable[[int], bool]:
        return lambda index: owned.get(index, member_id) == member_id

    free: dict[UUID, frozenset[int]] = {}
    for topic_id, indexes in wanted.items():
        owned = owners.get(topic_id)
        left = indexes if owned is None else frozenset(filter(is_free(owned), indexes))
        if left:
            free[topic_id] = left
    return free


def _with(
    member: ConsumerMember, state: MemberState, epoch: int, assigned: Partitions, pending_revocation: Partitions
) -> ConsumerMember:
    """Return the changed member, or the same object if nothing changes."""
    if (
        state is member.state
        and epoch == member.member_epoch
        and assigned == member.assigned
        and pending_revocation == member.pending_revocation
    ):
        return member
    previous = member.member_epoch if epoch != member.member_epoch else member.previous_member_epoch
    return replace(
        member,
        state=state,
        member_epoch=epoch,
        previous_member_epoch=previous,
        assigned=assigned,
        pending_revocation=pending_revocation,
        untaken=_untaken(member, assigned, pending_revocation),
        held_since=_held_since(member, epoch, assigned, pending_revocation),
    )


def _held_since(
    member: ConsumerMember, epoch: int, assigned: Partitions, pending_revocation: Partitions
) -> tuple[tuple[int, Partitions], ...]:
    """Return since which epochs the member has held its partitions. It gains new ones at `epoch`."""
    gained = difference(assigned, union(member.assigned, member.pending_revocation))
    held = union(assigned, pending_revocation)
    kept = ((since, intersection(partitions, held)) for since, partitions in member.held_since)
    return tuple((since, partitions) for since, partitions in (*kept, (epoch, gained)) if partitions)


def _untaken(member: ConsumerMember, assigned: Partitions, pending_revocation: Partitions) -> Partitions:
    """Return the partitions sent but not reported. A member that joins gets its whole assignment in the response,
    even if an earlier process under its name was sent parts of it."""
    if member.classic is not None:
        return NOTHING
    if member.member_epoch == JOIN_EPOCH:
        return assigned
    untaken = union(member.untaken, difference(assigned, member.assigned))
    return intersection(untaken, union(assigned, pending_revocation))
