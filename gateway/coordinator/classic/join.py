"""JoinGroup: which members are admitted, which wait at the join barrier, which are answered at once.

The one idea: after the checks that apply to every join (session timeout, capacity, protocols), the result is one cell
of `ANSWERS`, state × standing, as the error matrix of the classic protocol lists it. A refusal leaves the group
unchanged. The one exception is upstream's: a member that returns to a group that has become too large is removed.

Follows `classicGroupJoinNewMember` and `classicGroupJoinExistingMember` (KIP-345, KIP-394, KIP-814).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.coordinator.classic.draft import Draft
from gateway.coordinator.classic.handoff import joined_again
from gateway.coordinator.classic.identity import NO_MEMBER_ID, Requester, Standing, identify
from gateway.coordinator.classic.model import Group, GroupState, Member, Parked, PendingMember
from gateway.coordinator.classic.rebalance import joined, rebalance
from gateway.coordinator.facts import (
    AssignmentGiven,
    Departure,
    MemberId,
    MemberJoined,
    MemberRejoined,
    Trigger,
    shortened,
)
from gateway.coordinator.machine import Step
from gateway.coordinator.protocols import compatible, offered_bytes, select_protocol, subscribed_topics
from gateway.coordinator.requests import JoinGroup, JoinReply
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode

KNOWN_MEMBER_ID_REQUIRED = 4
"""JoinGroup version from which a dynamic member must be given its id before it joins (KIP-394)."""
SKIP_ASSIGNMENT = 9
"""JoinGroup version that lets a returning static leader see the members without assigning (KIP-814)."""

MAX_OFFERED_BYTES = 32 * 1024 * 1024
"""Bytes of metadata that the members of a group may offer together. Each generation stores them all, and the answer to
the leader contains them. Kafka accepts a megabyte by default."""

JoinAnswer = Callable[[Draft, JoinGroup, MemberId], None]
"""Function that changes the draft for one accepted join. The member id is the one that `identify` found."""


def join(group: Group, event: JoinGroup, now_ms: int, settings: Settings) -> Step[Group]:
    if not settings.group_min_session_timeout_ms <= event.session_timeout_ms <= settings.group_max_session_timeout_ms:
        return refuse(group, event, ErrorCode.INVALID_SESSION_TIMEOUT)
    if not group.exists and event.member_id != NO_MEMBER_ID:
        return refuse(group, event, ErrorCode.UNKNOWN_MEMBER_ID)
    requester = identify(group, event)
    if not _has_room(group, requester, settings.group_max_size):
        return _turn_away(group, event, requester, now_ms, settings)
    if not _fits(group, requester, event):
        # Kafka returns this error if its offsets topic refuses the record of the group.
        return refuse(group, event, ErrorCode.UNKNOWN_SERVER_ERROR)
    if not compatible(group, event.protocol_type, event.protocols):
        return refuse(group, event, ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    answer = ANSWERS[group.state][requester.standing]
    if isinstance(answer, ErrorCode):
        return refuse(group, event, answer)
    if requester.standing is Standing.PENDING and event.group_instance_id is not None:
        # The coordinator gives ids to dynamic members only. Upstream throws an exception here.
        return refuse(group, event, ErrorCode.UNKNOWN_SERVER_ERROR)
    draft = Draft(group, now_ms, settings)
    draft.exists = True
    answer(draft, event, requester.member_id)
    return draft.seal()


def refuse(group: Group, event: JoinGroup, error: ErrorCode) -> Step[Group]:
    return Step(group, ((event.request_id, JoinReply(error, event.member_id)),))


def refuse_dead(group: Group, event: JoinGroup, _now_ms: int, _settings: Settings) -> Step[Group]:
    return refuse(group, event, ErrorCode.COORDINATOR_NOT_AVAILABLE)


# --- capacity -------------------------------------------------------------------------------------------------------


def _has_room(group: Group, requester: Requester, max_size: int) -> bool:
    """Return whether `group.max.size` admits the requester. Members may stay; while everyone re-joins, the first to
    join stay."""
    member = group.members.get(requester.member_id)
    match group.state:
        case GroupState.PREPARING_REBALANCE:
            return (member is not None and member.parked_join is not None) or group.awaiting_join < max_size
        case GroupState.COMPLETING_REBALANCE | GroupState.STABLE:
            return member is not None or len(group.members) < max_size
        case GroupState.EMPTY | GroupState.DEAD:
            return True


def _fits(group: Group, requester: Requester, event: JoinGroup) -> bool:
    """Return whether the metadata of all members stays within its bound. Each member may offer as much as before."""
    member = group.members.get(requester.member_id)
    more_bytes = offered_bytes(event.protocols) - (0 if member is None else offered_bytes(member.protocols))
    return more_bytes <= 0 or group.offered_bytes + more_bytes <= MAX_OFFERED_BYTES


def _turn_away(group: Group, event: JoinGroup, requester: Requester, now_ms: int, settings: Settings) -> Step[Group]:
    """Refuse with GROUP_MAX_SIZE_REACHED, without an id to return with. The requester loses its place or pending id."""
    reply = JoinReply(ErrorCode.GROUP_MAX_SIZE_REACHED, NO_MEMBER_ID)
    member_id = requester.member_id
    if member_id not in group.members and member_id not in group.pending:
        return Step(group, ((event.request_id, reply),))
    draft = Draft(group, now_ms, settings)
    draft.answer(event.request_id, reply)
    if draft.pending.pop(member_id, None) is None:
        draft.remove(member_id, Departure.TURNED_AWAY)
    if draft.state is GroupState.PREPARING_REBALANCE:
        rebalance(draft, Trigger.TOO_MANY_MEMBERS, member_id)
    return draft.seal()


# --- results of accepted joins --------------------------------------------------------------------------------------


def require_member_id(draft: Draft, event: JoinGroup, pending_id: MemberId) -> None:
    """Give a dynamic newcomer its id first; a retry on the same connection gets the same id. Admit it at once if its
    version predates MEMBER_ID_REQUIRED."""
    if event.version < KNOWN_MEMBER_ID_REQUIRED:
        admit(draft, event, pending_id)
        return
    member_id = pending_id or event.new_member_id
    deadline_ms = draft.now_ms + event.session_timeout_ms
    draft.pending[member_id] = PendingMember(member_id, event.connection_id, deadline_ms)
    draft.answer(event.request_id, JoinReply(ErrorCode.MEMBER_ID_REQUIRED, member_id))


def admit(draft: Draft, event: JoinGroup, pending_id: MemberId) -> None:
    """Add a new member, under its pending id if it has one. Its first join starts a rebalance or takes part in one."""
    draft.pending.pop(pending_id, None)
    member = Member(
        member_id=pending_id or event.new_member_id,
        group_instance_id=event.group_instance_id,
        client_id=event.client_id,
        client_host=event.client_host,
        session_timeout_ms=event.session_timeout_ms,
        rebalance_timeout_ms=rebalance_timeout_ms(event),
        protocols=event.protocols,
        is_new=True,
        connection_id=event.connection_id,
        connection_number=event.connection_number,
    )
    if not draft.members:
        draft.protocol_type = event.protocol_type
        draft.leader_id = member.member_id
    draft.park_join(member, _parked(event))
    if draft.initial_delay_remaining_ms is not None:
        draft.new_member_added = True
    draft.tell(MemberJoined(member.member_id, member.group_instance_id, shortened(event.reason)))
    rebalance(draft, Trigger.MEMBER_JOINED, member.member_id)


def return_to_barrier(draft: Draft, event: JoinGroup, old_id: MemberId) -> None:
    """Re-admit a restarted static member. If it restarted in the join phase, it has joined; if later, it cannot sync
    under its old id."""
    member = _replace_static(draft, event, old_id, park=True)
    rebalance(draft, Trigger.MEMBER_RETURNED, member.member_id)


def return_while_stable(draft: Draft, event: JoinGroup, old_id: MemberId) -> None:
    """Let a restarted static member take over its own assignment without a rebalance, unless its new protocols change
    the vote, or it subscribes to other topics. The new id is stored before it is revealed.

    Upstream returns the old assignment even to a member that subscribes to other topics (KAFKA-12759). A leader may
    notice, but no one checks a follower's topics: Java's consumer refuses such an assignment and joins again, over and
    over.
    """
    old_leader_id, before = draft.leader_id, draft.members[old_id]
    member = _replace_static(draft, event, old_id, park=False)
    assert draft.leader_id is not None
    leader = draft.members[draft.leader_id]
    stays = select_protocol(draft.members, draft.protocol_support, leader) == draft.protocol_name
    if not stays or _reads(draft, member) != _reads(draft, before):
        draft.park_join(replace(member, assignment=b"", last_assignment=b""), _parked(event))
        rebalance(draft, Trigger.MEMBER_RETURNED, member.member_id)
        return
    draft.tell(AssignmentGiven(member.member_id, draft.generation_id))
    if event.version >= SKIP_ASSIGNMENT:
        reply = joined(draft, member, skip_assignment=member.member_id == draft.leader_id)
    else:
        # An older client that saw itself as the leader would assign anew; with its former id as the leader it acts as a
        # follower.
        reply = replace(joined(draft, member), leader=old_leader_id or "", members=())
    draft.answer(event.request_id, reply)


def _reads(draft: Draft, member: Member) -> frozenset[str] | None:
    assert draft.protocol_name is not None
    return subscribed_topics(draft.protocol_type, draft.protocol_name, (member,))


def rejoin_while_preparing(draft: Draft, event: JoinGroup, member_id: MemberId) -> None:
    _wait_at_barrier(draft, event, member_id)


def rejoin_while_completing(draft: Draft, event: JoinGroup, member_id: MemberId) -> None:
    """Answer a member that joins again before it has synced. If its protocols are unchanged, it only missed the
    reply to its join. If they changed, the generation is outdated before it began."""
    if draft.members[member_id].protocols == event.protocols:
        _answer_at_once(draft, event, member_id)
    else:
        _wait_at_barrier(draft, event, member_id)


def rejoin_while_stable(draft: Draft, event: JoinGroup, member_id: MemberId) -> None:
    """Answer a member that rejoins in Stable. A leader that rejoins wants to assign again because it has seen new
    partitions, even if its metadata is the same.
    """
    if member_id == draft.leader_id or draft.members[member_id].protocols != event.protocols:
        _wait_at_barrier(draft, event, member_id)
    else:
        _answer_at_once(draft, event, member_id)


def _answer_at_once(draft: Draft, event: JoinGroup, member_id: MemberId) -> None:
    member = draft.hear(draft.members[member_id], event.connection_id)
    if event.connection_number > member.connection_number:
        # Only the connection is new. In a consumer group, a request that arrives later from an older connection is
        # stale.
        member = replace(member, connection_number=event.connection_number)
        draft.put(member)
    draft.arm_session(member)
    joined_again(draft, member)
    draft.answer(event.request_id, joined(draft, member))


def _wait_at_barrier(draft: Draft, event: JoinGroup, member_id: MemberId) -> None:
    member = replace(
        draft.hear(draft.members[member_id], event.connection_id),
        protocols=event.protocols,
        session_timeout_ms=event.session_timeout_ms,
        rebalance_timeout_ms=rebalance_timeout_ms(event),
        connection_number=max(event.connection_number, draft.members[member_id].connection_number),
    )
    draft.park_join(member, _parked(event))
    draft.tell(MemberRejoined(member_id, shortened(event.reason)))
    rebalance(draft, Trigger.MEMBER_REJOINED, member_id)


def _replace_static(draft: Draft, event: JoinGroup, old_id: MemberId, *, park: bool) -> Member:
    """Give the restarted process a new id, so that a process that still uses the old id is fenced. A process that
    parks has received no assignment: no other member waits for its commits."""
    former = draft.members[old_id]
    member = replace(
        former,
        member_id=event.new_member_id,
        client_id=event.client_id,
        client_host=event.client_host,
        session_timeout_ms=event.session_timeout_ms,
        rebalance_timeout_ms=rebalance_timeout_ms(event),
        protocols=event.protocols,
        assignment=b"" if park else former.assignment,
        last_assignment=b"" if park else former.last_assignment,
        is_new=False,
        parked_join=_parked(event) if park else None,
        parked_sync=None,
        connection_id=event.connection_id,
        connection_number=event.connection_number,
    )
    draft.rename(old_id, member, event.reason)
    draft.arm_session(member)
    return member


def _parked(event: JoinGroup) -> Parked:
    return Parked(event.request_id, event.connection_id)


def rebalance_timeout_ms(event: JoinGroup) -> int:
    """Return the rebalance timeout. Version 0 has no such field; the session timeout replaces it, as in upstream."""
    return event.rebalance_timeout_ms if event.rebalance_timeout_ms > 0 else event.session_timeout_ms


# --- the matrix -----------------------------------------------------------------------------------------------------

_NOBODY_THERE: Mapping[Standing, JoinAnswer | ErrorCode] = {
    Standing.NEWCOMER: require_member_id,
    Standing.NEW_INSTANCE: admit,
    Standing.PENDING: admit,
    # A group without members has no instances, so these two cases cannot occur.
    Standing.RETURNING_INSTANCE: ErrorCode.UNKNOWN_MEMBER_ID,
    Standing.FENCED: ErrorCode.UNKNOWN_MEMBER_ID,
    Standing.MEMBER: ErrorCode.UNKNOWN_MEMBER_ID,
    Standing.UNKNOWN: ErrorCode.UNKNOWN_MEMBER_ID,
    Standing.UNKNOWN_INSTANCE: ErrorCode.UNKNOWN_MEMBER_ID,
}

_MEMBERS_THERE: Mapping[Standing, JoinAnswer | ErrorCode] = {
    **_NOBODY_THERE,
    Standing.FENCED: ErrorCode.FENCED_INSTANCE_ID,
}

ANSWERS: Mapping[GroupState, Mapping[Standing, JoinAnswer | ErrorCode]] = {
    GroupState.EMPTY: _NOBODY_THERE,
    GroupState.PREPARING_REBALANCE: {
        **_MEMBERS_THERE,
        Standing.RETURNING_INSTANCE: return_to_barrier,
        Standing.MEMBER: rejoin_while_preparing,
    },
    GroupState.COMPLETING_REBALANCE: {
        **_MEMBERS_THERE,
        Standing.RETURNING_INSTANCE: return_to_barrier,
        Standing.MEMBER: rejoin_while_completing,
    },
    GroupState.STABLE: {
        **_MEMBERS_THERE,
        Standing.RETURNING_INSTANCE: return_while_stable,
        Standing.MEMBER: rejoin_while_stable,
    },
}
"""Answers to a join that passed the checks, by state of the group and standing of the requester. Dead groups refuse
before."""
