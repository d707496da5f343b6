"""Heartbeat, OffsetCommit and TxnOffsetCommit: requests that tell the group at most that a member is alive.

The one idea: these are all the frequent requests, so they move one deadline and build nothing else. This module accepts
or refuses a commit by the member's identity, generation and the group's state; Postgres checks it once more. A commit
in a transaction comes from a producer: it keeps no member alive.

Follows `classicGroupHeartbeat` and `ClassicGroup.validateOffsetCommit`.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.coordinator.classic.draft import Draft, session_ms
from gateway.coordinator.classic.identity import NO_MEMBER_ID, generation_of, refusal
from gateway.coordinator.classic.model import Group, Member
from gateway.coordinator.facts import Fact, MemberId
from gateway.coordinator.handoff import Awaits
from gateway.coordinator.machine import ConnectionId, Step
from gateway.coordinator.requests import Heartbeat, HeartbeatReply, OffsetCommit, OffsetCommitReply, TxnOffsetCommit
from gateway.coordinator.settings import Settings
from gateway.coordinator.silence import silence
from protocol.errors import ErrorCode

GROUP_ID_NOT_FOUND_KNOWN = 9
"""OffsetCommit version from which on there is an error code for a missing group."""


def heartbeat_empty(group: Group, event: Heartbeat, _now_ms: int, _settings: Settings) -> Step[Group]:
    return _beat(group, event, ErrorCode.UNKNOWN_MEMBER_ID)


def heartbeat_preparing(group: Group, event: Heartbeat, now_ms: int, settings: Settings) -> Step[Group]:
    """Respond with REBALANCE_IN_PROGRESS, by which members learn that they must join again. It keeps them alive as
    any other heartbeat does."""
    error = _heartbeat_error(group, event)
    if error is not None:
        return _beat(group, event, error)
    group, facts = hear(group, event.member_id, event.connection_id, now_ms, settings)
    return _beat(group, event, ErrorCode.REBALANCE_IN_PROGRESS, facts)


def heartbeat_live(group: Group, event: Heartbeat, now_ms: int, settings: Settings) -> Step[Group]:
    """Respond with NONE. CompletingRebalance is no exception: the generation is the member's own."""
    error = _heartbeat_error(group, event)
    if error is not None:
        return _beat(group, event, error)
    group, facts = hear(group, event.member_id, event.connection_id, now_ms, settings)
    return _beat(group, event, ErrorCode.NONE, facts)


def heartbeat_dead(group: Group, event: Heartbeat, _now_ms: int, _settings: Settings) -> Step[Group]:
    return _beat(group, event, ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _heartbeat_error(group: Group, event: Heartbeat) -> ErrorCode | None:
    error = refusal(group.members, event.member_id, event.group_instance_id)
    if error is None and event.generation_id != generation_of(group, group.members[event.member_id]):
        return ErrorCode.ILLEGAL_GENERATION
    return error


def _beat(group: Group, event: Heartbeat, error: ErrorCode, facts: tuple[Fact, ...] = ()) -> Step[Group]:
    reply = _REPLIES.get(error)
    if reply is None:
        reply = _REPLIES[error] = HeartbeatReply(error)
    return Step(group, ((event.request_id, reply),), facts)


_REPLIES: dict[ErrorCode, HeartbeatReply] = {}
"""One shared reply per error code."""


def commit_empty(group: Group, event: OffsetCommit, _now_ms: int, _settings: Settings) -> Step[Group]:
    """Accept commits of simple consumers and admin tools. The first one creates the group, which then has no
    protocol type."""
    if event.generation_id < 0:
        return _commit(group if group.exists else replace(group, exists=True), event, ErrorCode.NONE)
    if group.exists:
        return _commit(group, event, ErrorCode.UNKNOWN_MEMBER_ID)
    if event.version >= GROUP_ID_NOT_FOUND_KNOWN:
        return _commit(group, event, ErrorCode.GROUP_ID_NOT_FOUND)
    return _commit(group, event, ErrorCode.ILLEGAL_GENERATION)


def commit_live(group: Group, event: OffsetCommit, now_ms: int, settings: Settings) -> Step[Group]:
    """Accept a member's commit. PreparingRebalance is no exception: members commit the old generation while they
    revoke.

    Unlike upstream, while a new owner waits for a member's commits, the member's commit of the generation just ended is
    accepted too. The member sent it before it knew of the new generation. If it were refused, the new owner would
    repeat that work.
    """
    error = _commit_error(group, event)
    member_epoch = None
    if error is ErrorCode.ILLEGAL_GENERATION and _is_awaited(group, event):
        error, member_epoch = None, group.generation_id
    if error is not None:
        return _commit(group, event, error)
    group, facts = hear(group, event.member_id, event.connection_id, now_ms, settings)
    return _commit(group, event, ErrorCode.NONE, facts, member_epoch)


def commit_completing(group: Group, event: OffsetCommit, _now_ms: int, _settings: Settings) -> Step[Group]:
    """Refuse the commit, because partitions may have moved, and the member cannot know before it has synced."""
    return _commit(group, event, _commit_error(group, event) or ErrorCode.REBALANCE_IN_PROGRESS)


def commit_dead(group: Group, event: OffsetCommit | TxnOffsetCommit, _now_ms: int, _settings: Settings) -> Step[Group]:
    return _commit(group, event, ErrorCode.COORDINATOR_NOT_AVAILABLE)


def txn_commit_empty(group: Group, event: TxnOffsetCommit, _now_ms: int, _settings: Settings) -> Step[Group]:
    if event.generation_id < 0:
        return _commit(group if group.exists else replace(group, exists=True), event, ErrorCode.NONE)
    return _commit(group, event, ErrorCode.UNKNOWN_MEMBER_ID if group.exists else ErrorCode.ILLEGAL_GENERATION)


def txn_commit_live(group: Group, event: TxnOffsetCommit, _now_ms: int, _settings: Settings) -> Step[Group]:
    """Accept the commit. CompletingRebalance is no exception: the transaction contains the results of the records,
    so it must contain their offsets."""
    return _commit(group, event, None if event.names_nobody else _identity_error(group, event))


def _commit_error(group: Group, event: OffsetCommit) -> ErrorCode | None:
    if event.generation_id < 0 and event.member_id == NO_MEMBER_ID and event.group_instance_id is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    return _identity_error(group, event)


def _identity_error(group: Group, event: OffsetCommit | TxnOffsetCommit) -> ErrorCode | None:
    error = refusal(group.members, event.member_id, event.group_instance_id)
    if error is None and event.generation_id != generation_of(group, group.members[event.member_id]):
        return ErrorCode.ILLEGAL_GENERATION
    return error


def _is_awaited(group: Group, event: OffsetCommit) -> bool:
    """Return True if the commit names the generation just ended and its member still has to commit what it has
    released."""
    return event.generation_id == group.generation_id - 1 and any(
        event.member_id == (each.source if each.awaits is Awaits.DRAIN else each.behind) and not each.forced
        for each in group.handoffs
    )


def _commit(
    group: Group,
    event: OffsetCommit | TxnOffsetCommit,
    error: ErrorCode | None,
    facts: tuple[Fact, ...] = (),
    member_epoch: int | None = None,
) -> Step[Group]:
    member = group.members.get(event.member_id)
    by_member_epoch = member is not None and member.member_epoch > 0
    reply = OffsetCommitReply(
        error or ErrorCode.NONE,
        by_member_epoch,
        by_producer=isinstance(event, TxnOffsetCommit) and event.names_nobody,
        stale=ErrorCode.ILLEGAL_GENERATION,
        member_epoch=member_epoch,
    )
    return Step(group, ((event.request_id, reply),), facts)


def hear(
    group: Group, member_id: MemberId, connection_id: ConnectionId, now_ms: int, settings: Settings
) -> tuple[Group, tuple[Fact, ...]]:
    """Return the group after a sign of life from a member: its session starts again on this connection."""
    member = group.members[member_id]
    timeout_ms = session_ms(member, settings)
    silent = silence(member_id, timeout_ms, group.session_deadlines.get(member_id), now_ms)
    if silent and (_is_held(member) or member_id in group.unheard):
        # A member that waits for our reply, or has not found this coordinator before, has missed no heartbeat.
        silent = ()
    if member.connection_id == connection_id:
        return group.with_session_deadline(member_id, now_ms + timeout_ms), silent
    draft = Draft(group, now_ms, settings)
    draft.facts += silent
    draft.arm_session(draft.hear(member, connection_id))
    heard = draft.seal()
    return heard.group, heard.facts


def _is_held(member: Member) -> bool:
    return member.parked_join is not None or member.parked_sync is not None
