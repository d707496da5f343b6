"""Rights to commit or read offsets under a member's name (OffsetCommit, TxnOffsetCommit, OffsetFetch 9+).

The one idea: the member epoch is the fence, in any state of the group. A heartbeat may raise the epoch while a commit
is under way. So a commit at an older epoch is accepted if the member has held each of its partitions since that epoch
(KIP-1251, upstream's ConsumerGroup.validateOffsetCommit). A member whose commits are awaited may also commit at the
epoch before its release. A commit does not extend the member's session.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from uuid import UUID

from gateway.coordinator.classic.identity import NO_MEMBER_ID
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, partitions_of, union
from gateway.coordinator.facts import MemberId
from gateway.coordinator.member_epochs import FIRST_VERSION_WITH_MEMBER_EPOCH
from gateway.coordinator.requests import OffsetCommit, OffsetCommitReply, TxnOffsetCommit
from protocol.errors import ErrorCode


def commit_reply(group: ConsumerGroup, event: OffsetCommit) -> OffsetCommitReply:
    return OffsetCommitReply(
        _commit_refusal(group, event) or ErrorCode.NONE,
        event.generation_id >= 0,
        stale=_stale(group, event.member_id),
        member_epoch=_epoch_of(group, event),
    )


def txn_commit_reply(group: ConsumerGroup, event: TxnOffsetCommit) -> OffsetCommitReply:
    return OffsetCommitReply(
        _txn_commit_refusal(group, event) or ErrorCode.NONE,
        event.generation_id >= 0,
        by_producer=event.names_nobody,
        stale=ErrorCode.ILLEGAL_GENERATION,
        member_epoch=_epoch_of(group, event),
    )


def _epoch_of(group: ConsumerGroup, event: OffsetCommit | TxnOffsetCommit) -> int | None:
    member = group.members.get(event.member_id)
    return None if member is None else member.member_epoch


def _commit_refusal(group: ConsumerGroup, event: OffsetCommit) -> ErrorCode | None:
    """Return why the commit is refused. Commits from outside (epoch −1) are accepted while the group has no members."""
    if event.generation_id < 0 and not group.members:
        return None
    member = group.members.get(event.member_id)
    refusal = _refusal_of_commit(group, event)
    speaks_consumer = member is not None and member.classic is None
    if (
        event.version < FIRST_VERSION_WITH_MEMBER_EPOCH
        and speaks_consumer
        and refusal is not ErrorCode.FENCED_INSTANCE_ID
    ):
        return ErrorCode.UNSUPPORTED_VERSION  # at any epoch, because classic members send a generation
    return refusal


def _txn_commit_refusal(group: ConsumerGroup, event: TxnOffsetCommit) -> ErrorCode | None:
    """Return why the commit is refused. A request that names no member may commit at any time, because its producer
    is responsible for it. Members that commit in a transaction send their epoch as a generation in either protocol."""
    if event.names_nobody or (event.generation_id < 0 and not group.members):
        return None
    refusal = _refusal_of_commit(group, event)
    return ErrorCode.ILLEGAL_GENERATION if refusal is ErrorCode.STALE_MEMBER_EPOCH else refusal


def _refusal_of_commit(group: ConsumerGroup, event: OffsetCommit | TxnOffsetCommit) -> ErrorCode | None:
    epoch = event.generation_id
    refusal = _refusal(group, event.member_id, event.group_instance_id, epoch)
    if refusal in (ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.ILLEGAL_GENERATION):
        member = group.members[event.member_id]
        awaited = _awaited(group, member) if epoch == member.previous_member_epoch else NOTHING
        # A classic member may do so only while others wait for its commits, as in a classic group.
        may = member.classic is None or bool(awaited)
        if may and 0 <= epoch < member.member_epoch and _covers(member, epoch, awaited, event.partitions):
            return None
    return refusal


def _awaited(group: ConsumerGroup, member: ConsumerMember) -> Partitions:
    """Return the partitions that the member has released and must still commit."""
    early = ((each.topic_id, (each.partition,)) for each in group.unsettled if each.source == member.member_id)
    return union(member.undrained, partitions_of(early))


def _covers(member: ConsumerMember, epoch: int, awaited: Partitions, partitions: Collection[tuple[UUID, int]]) -> bool:
    """Return whether there are `partitions`, and each is awaited or has been held by the member since `epoch`."""
    held = reduce(union, (each for since, each in member.held_since if since <= epoch), awaited)
    return bool(partitions) and all(index in held.get(topic_id, ()) for topic_id, index in partitions)


def _stale(group: ConsumerGroup, member_id: MemberId) -> ErrorCode:
    """Return the error for a member that names another epoch than its current one."""
    member = group.members.get(member_id)
    speaks_classic = member is not None and member.classic is not None
    return ErrorCode.ILLEGAL_GENERATION if speaks_classic else ErrorCode.STALE_MEMBER_EPOCH


def fetch_refusal(group: ConsumerGroup, member_id: MemberId | None, member_epoch: int) -> ErrorCode | None:
    """Return why the fetch is refused. A request that names no member may read at any time."""
    if not member_id and member_epoch < 0:
        return None
    return _refusal(group, member_id or NO_MEMBER_ID, None, member_epoch)


def _refusal(group: ConsumerGroup, member_id: MemberId, instance_id: str | None, member_epoch: int) -> ErrorCode | None:
    # A request without an id is not fenced: see `gateway.coordinator.classic.identity.refusal`.
    if instance_id is not None and member_id and group.instances.get(instance_id, member_id) != member_id:
        return ErrorCode.FENCED_INSTANCE_ID
    member = group.members.get(member_id)
    if member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    if member.member_epoch != member_epoch:
        return _stale(group, member_id)
    return None
