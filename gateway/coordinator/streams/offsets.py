"""Whether an offset may be committed or read under a streams member's name (OffsetCommit, TxnOffsetCommit, OffsetFetch
9+).

The one idea: the member epoch is the fence, as in a consumer group. Only who has come as far as the coordinator says
may commit, in whatever state the group is.
"""

from __future__ import annotations

from gateway.coordinator.facts import MemberId
from gateway.coordinator.identity import NO_MEMBER_ID
from gateway.coordinator.member_epochs import FIRST_VERSION_WITH_MEMBER_EPOCH
from gateway.coordinator.model import OffsetCommit, TxnOffsetCommit
from gateway.coordinator.streams.model import StreamsGroup
from protocol.errors import ErrorCode


def commit_refusal(group: StreamsGroup, event: OffsetCommit) -> ErrorCode | None:
    """Commits from outside (epoch −1) are taken while the group has no members."""
    if event.generation_id < 0 and not group.members:
        return None
    refusal = _refusal(group, event.member_id, event.generation_id)
    if event.version < FIRST_VERSION_WITH_MEMBER_EPOCH and refusal is not ErrorCode.UNKNOWN_MEMBER_ID:
        return ErrorCode.UNSUPPORTED_VERSION  # whatever epoch it names: that number is a generation
    return refusal


def txn_commit_refusal(group: StreamsGroup, event: TxnOffsetCommit) -> ErrorCode | None:
    """Whoever names no member may commit at any time: its producer answers for it."""
    if event.names_nobody or (event.generation_id < 0 and not group.members):
        return None
    refusal = _refusal(group, event.member_id, event.generation_id)
    return ErrorCode.ILLEGAL_GENERATION if refusal is ErrorCode.STALE_MEMBER_EPOCH else refusal


def fetch_refusal(group: StreamsGroup, member_id: MemberId | None, member_epoch: int) -> ErrorCode | None:
    """Whoever names no member may read at any time."""
    if not member_id and member_epoch < 0:
        return None
    return _refusal(group, member_id or NO_MEMBER_ID, member_epoch)


def _refusal(group: StreamsGroup, member_id: MemberId, member_epoch: int) -> ErrorCode | None:
    member = group.members.get(member_id)
    if member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    return None if member.member_epoch == member_epoch else ErrorCode.STALE_MEMBER_EPOCH
