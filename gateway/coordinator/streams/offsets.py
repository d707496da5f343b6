"""Rights to commit or read offsets under a streams member's name (OffsetCommit, TxnOffsetCommit, OffsetFetch 9+).

The one idea: the member epoch is the fence, as in a consumer group. A heartbeat may raise the epoch while a commit is
under way, and the tasks go on in the meantime. So a commit at an older epoch is accepted if each of its partitions is
read by an active task that the member has held since that epoch (upstream's StreamsGroup.validateOffsetCommit).
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from gateway.coordinator.classic.identity import NO_MEMBER_ID
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.facts import MemberId
from gateway.coordinator.member_epochs import FIRST_VERSION_WITH_MEMBER_EPOCH
from gateway.coordinator.requests import OffsetCommit, OffsetCommitReply, TxnOffsetCommit
from gateway.coordinator.streams.model import StreamsGroup, StreamsMember
from gateway.coordinator.streams.topology import Topology
from protocol.errors import ErrorCode


def commit_reply(group: StreamsGroup, event: OffsetCommit, cluster: Cluster) -> OffsetCommitReply:
    return OffsetCommitReply(
        _commit_refusal(group, event, cluster) or ErrorCode.NONE,
        event.generation_id >= 0,
        stale=ErrorCode.STALE_MEMBER_EPOCH,
        member_epoch=_epoch_of(group, event),
    )


def txn_commit_reply(group: StreamsGroup, event: TxnOffsetCommit, cluster: Cluster) -> OffsetCommitReply:
    return OffsetCommitReply(
        _txn_commit_refusal(group, event, cluster) or ErrorCode.NONE,
        event.generation_id >= 0,
        by_producer=event.names_nobody,
        stale=ErrorCode.ILLEGAL_GENERATION,
        member_epoch=_epoch_of(group, event),
    )


def fetch_refusal(group: StreamsGroup, member_id: MemberId | None, member_epoch: int) -> ErrorCode | None:
    """Return why the fetch is refused. A request that names no member may read at any time."""
    if not member_id and member_epoch < 0:
        return None
    member = group.members.get(member_id or NO_MEMBER_ID)
    if member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    return None if member.member_epoch == member_epoch else ErrorCode.STALE_MEMBER_EPOCH


def _commit_refusal(group: StreamsGroup, event: OffsetCommit, cluster: Cluster) -> ErrorCode | None:
    """Return why the commit is refused. Commits from outside (epoch −1) are accepted while the group has no members."""
    if event.generation_id < 0 and not group.members:
        return None
    refusal = _refusal(group, event, cluster)
    if event.version < FIRST_VERSION_WITH_MEMBER_EPOCH and refusal is not ErrorCode.UNKNOWN_MEMBER_ID:
        return ErrorCode.UNSUPPORTED_VERSION  # at any epoch, because classic members send a generation
    return refusal


def _txn_commit_refusal(group: StreamsGroup, event: TxnOffsetCommit, cluster: Cluster) -> ErrorCode | None:
    """Return why the commit is refused. A request that names no member may commit at any time, because its producer
    is responsible for it."""
    if event.names_nobody or (event.generation_id < 0 and not group.members):
        return None
    refusal = _refusal(group, event, cluster)
    return ErrorCode.ILLEGAL_GENERATION if refusal is ErrorCode.STALE_MEMBER_EPOCH else refusal


def _refusal(group: StreamsGroup, event: OffsetCommit | TxnOffsetCommit, cluster: Cluster) -> ErrorCode | None:
    member = group.members.get(event.member_id)
    if member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    epoch = event.generation_id
    if epoch == member.member_epoch:
        return None
    topology = group.topology or Topology()
    is_held = 0 <= epoch < member.member_epoch and _holds(member, epoch, event.partitions, topology, cluster)
    return None if is_held else ErrorCode.STALE_MEMBER_EPOCH


def _holds(
    member: StreamsMember, epoch: int, partitions: Iterable[tuple[UUID, int]], topology: Topology, cluster: Cluster
) -> bool:
    """Return whether the member has held since `epoch` the active tasks that read all of `partitions`."""
    held = frozenset(task for since, tasks in member.active_since if since <= epoch for task in tasks)
    readers: dict[str, list[str]] = {}
    for each in topology.subtopologies:
        for name in each.sources:
            readers.setdefault(name, []).append(each.subtopology_id)
    for topic_id, index in partitions:
        topic = cluster.by_id.get(topic_id)
        names = () if topic is None else readers.get(topic.name, ())
        if not any((subtopology_id, index) in held for subtopology_id in names):
            return False
    return True


def _epoch_of(group: StreamsGroup, event: OffsetCommit | TxnOffsetCommit) -> int | None:
    member = group.members.get(event.member_id)
    return None if member is None else member.member_epoch
