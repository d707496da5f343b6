"""The common part of OffsetCommit and TxnOffsetCommit: whether offsets may be stored, and storing them.

The one idea: the coordinator decides whether a commit may stand, and Postgres fences it again in the transaction that
stores it. Commits of a producer's transaction take the same path and stay pending until that transaction ends.

Commits of one connection are processed concurrently, so that consecutive ones share a transaction of Postgres. Each is
queued at its place in the connection's line: the later of two commits of a partition wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from uuid import UUID

from gateway.apis.groups.offset_topics import Named, allowed_topic, has_partition, resolve
from gateway.apis.services import FindsTopics, HasGroups, HasOffsets, HasSettings
from gateway.coordinator.facts import MemberId, OffsetsCommitted
from gateway.coordinator.machine import ConnectionId
from gateway.coordinator.requests import OffsetCommit as OffsetCommitEvent
from gateway.coordinator.requests import OffsetCommitReply
from gateway.coordinator.requests import TxnOffsetCommit as TxnOffsetCommitEvent
from gateway.net.context import RequestContext
from gateway.net.errors import REFUSAL_CODES
from gateway.net.pieces import in_pieces
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageConflict, StorageUnavailable
from storage.types import OffsetCommit, Refusal, Topic

FENCED = frozenset({Refusal.ILLEGAL_GENERATION, Refusal.UNKNOWN_MEMBER, Refusal.STALE_MEMBER_EPOCH})


class CommitServices(HasGroups, HasOffsets, HasSettings, Protocol): ...


class AskedPartition(Protocol):
    @property
    def partition_index(self) -> int: ...
    @property
    def committed_offset(self) -> int: ...
    @property
    def committed_leader_epoch(self) -> int: ...
    @property
    def committed_metadata(self) -> str | None: ...


@dataclass(slots=True)
class Commit:
    """One partition of a commit on its way to an answer. `error` is None while the commit may still be stored."""

    partition: AskedPartition
    topic_id: UUID | None
    error: ErrorCode | None


class AskedTopic(Named, Protocol):
    @property
    def partitions(self) -> Sequence[AskedPartition]: ...


class TopicCommits(NamedTuple):
    """The commits of one topic, which the request named by its name or its id."""

    name: str
    topic_id: UUID
    commits: list[Commit]


class Transaction(NamedTuple):
    transactional_id: str
    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Committer:
    """The member that commits, with the ids and the epoch from the request."""

    group_id: str
    member_id: str
    group_instance_id: str | None
    generation_id: int
    """The member's generation or epoch."""
    codes: Mapping[Refusal, ErrorCode]
    """Error codes that differ from `REFUSAL_CODES` at the version of the request."""
    retention_ms: int | None = None
    transaction: Transaction | None = None


async def commits_of(
    asked: Sequence[AskedTopic], by_id: bool, context: RequestContext[FindsTopics]
) -> tuple[list[TopicCommits], list[Commit]]:
    """Make a commit for each requested partition. Refuse topics that the client may not read, and topics and partitions
    that do not exist. Return all commits by topic, and those that may still be stored.
    """
    await resolve(
        asked, by_id, context.services.catalog, lambda topic: (each.partition_index for each in topic.partitions)
    )
    topics: list[TopicCommits] = []
    surviving: list[Commit] = []
    async for topic in in_pieces(asked):
        commits = await _commits_of_topic(topic.partitions, *allowed_topic(topic, by_id, context, AclOperation.READ))
        topics.append(TopicCommits(topic.name, topic.topic_id, commits))
        surviving += [one async for one in in_pieces(commits) if one.error is None]
    return topics, surviving


async def _commits_of_topic(asked: Sequence[AskedPartition], topic: Topic | None, unknown: ErrorCode) -> list[Commit]:
    """Make the commits of one topic. `unknown` is the error code for a missing topic."""
    if topic is None:
        return [Commit(partition, None, unknown) async for partition in in_pieces(asked)]
    return [
        Commit(
            partition,
            topic.topic_id,
            None if has_partition(topic, partition.partition_index) else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        )
        async for partition in in_pieces(asked)
    ]


async def commit(surviving: Sequence[Commit], committer: Committer, context: RequestContext[CommitServices]) -> None:
    """Give every commit in `surviving`, none of which has an error yet, its error or ErrorCode.NONE."""
    async with context.place:
        reply = await _ask(surviving, committer, context)
        queued = await _queue(surviving, reply, committer, context)
    fenced = await _store(queued, reply, committer, context)
    if not fenced:
        return
    # The group may have changed its protocol since the coordinator admitted the commit. Then generations became epochs,
    # or epochs generations, and Postgres compared the wrong one. Or the member's epoch has risen, and the commit may
    # still be accepted.
    again = await _ask(fenced, committer, context)
    is_other = (again.by_member_epoch, again.member_epoch) != (reply.by_member_epoch, reply.member_epoch)
    if again.error is ErrorCode.NONE and is_other:
        await _store(await _queue(fenced, again, committer, context, queued.number), again, committer, context)


async def set_all(commits: Iterable[Commit], error: ErrorCode) -> None:
    async for one in in_pieces(commits):
        one.error = error


async def _ask(
    surviving: Sequence[Commit], committer: Committer, context: RequestContext[HasGroups]
) -> OffsetCommitReply:
    groups = context.services.groups
    request_id = groups.next_request_id()
    connection_id = ConnectionId(context.connection.connection_id)
    member_id = MemberId(committer.member_id)
    partitions = tuple(
        [
            (one.topic_id, one.partition.partition_index)
            async for one in in_pieces(surviving)
            if one.topic_id is not None
        ]
    )
    if committer.transaction is not None:
        event = TxnOffsetCommitEvent(
            request_id=request_id,
            connection_id=connection_id,
            member_id=member_id,
            group_instance_id=committer.group_instance_id,
            generation_id=committer.generation_id,
            partitions=partitions,
        )
    else:
        event = OffsetCommitEvent(
            request_id=request_id,
            connection_id=connection_id,
            version=context.version,
            member_id=member_id,
            group_instance_id=committer.group_instance_id,
            generation_id=committer.generation_id,
            partitions=partitions,
        )
    reply = groups.submit(committer.group_id, event)
    return await reply if isinstance(reply, asyncio.Future) else reply


@dataclass(frozen=True, slots=True)
class _Queued:
    """Commits that were queued for Postgres."""

    commits: Sequence[Commit] = ()
    rows: Sequence[OffsetCommit] = ()
    results: Awaitable[Sequence[Refusal | None]] | None = None
    number: int = 0


async def _queue(
    surviving: Sequence[Commit],
    reply: OffsetCommitReply,
    committer: Committer,
    context: RequestContext[CommitServices],
    number: int | None = None,
) -> _Queued:
    """Queue every commit that may be stored, and give all others their errors. `number` is the number that the commit
    got at its first try.
    """
    groups = context.services.groups
    error = reply.error
    lease = groups.lease_for(committer.group_id)
    if error is ErrorCode.NONE and lease is None:
        error = ErrorCode.NOT_COORDINATOR
    if error is not ErrorCode.NONE or lease is None:
        await set_all(surviving, error)
        return _Queued()

    epoch = committer.generation_id if reply.member_epoch is None else reply.member_epoch
    max_metadata = context.services.settings.broker.offset_metadata_max_bytes
    storing: list[Commit] = []
    rows: list[OffsetCommit] = []
    async for one in in_pieces(surviving):
        metadata = one.partition.committed_metadata or ""
        # Kafka counts UTF-16 units here, although the setting's name says bytes.
        if len(metadata) > max_metadata or len(metadata.encode("utf-16-le", "surrogatepass")) > 2 * max_metadata:
            one.error = ErrorCode.OFFSET_METADATA_TOO_LARGE
        elif one.topic_id is not None:
            storing.append(one)
            rows.append(
                OffsetCommit(
                    lease=lease,
                    group_id=committer.group_id,
                    generation_id=None if reply.by_producer else max(epoch, -1),
                    topic_id=one.topic_id,
                    partition_index=one.partition.partition_index,
                    committed_offset=one.partition.committed_offset,
                    leader_epoch=one.partition.committed_leader_epoch,
                    metadata=metadata,
                    retention_ms=committer.retention_ms,
                    member_id=committer.member_id if reply.by_member_epoch else None,
                )
            )
    if not rows:
        return _Queued()
    if committer.transaction is not None:
        results = context.services.offsets.commit_in_transaction(rows, *committer.transaction)
        return _Queued(storing, rows, results)
    again = number is not None
    if number is None:
        number = groups.offset_committer.next_number()
    try:
        results = groups.offset_committer.submit(rows, number, again=again)
    except KafkaError as full:
        await set_all(storing, full.code)
        return _Queued()
    return _Queued(storing, rows, results, number)


async def _store(
    queued: _Queued, reply: OffsetCommitReply, committer: Committer, context: RequestContext[HasGroups]
) -> list[Commit]:
    """Give every queued commit its error or ErrorCode.NONE. Return the commits that were refused because of their
    committer."""
    groups = context.services.groups
    if queued.results is None:
        return []
    try:
        results = await queued.results
    except (StorageUnavailable, StorageConflict) as failed:
        await set_all(queued.commits, context.storage_failed(context.api_key, failed))
        return []
    async for one, refusal in in_pieces(zip(queued.commits, results, strict=True)):
        one.error = _error(refusal, committer, reply.stale)
    if groups.readers and committer.transaction is None:
        await _tell(queued.rows, results, committer, context)
    refused = in_pieces(zip(queued.commits, results, strict=True))
    return [one async for one, refusal in refused if refusal in FENCED]


async def _tell(
    rows: Sequence[OffsetCommit],
    results: Sequence[Refusal | None],
    committer: Committer,
    context: RequestContext[HasGroups],
) -> None:
    committed = tuple(
        [
            (row.topic_id, row.partition_index, row.committed_offset)
            async for row, refusal in in_pieces(zip(rows, results, strict=True))
            if refusal is None
        ]
    )
    if committed:
        fact = OffsetsCommitted(MemberId(committer.member_id), committer.generation_id, committed)
        context.services.groups.told(committer.group_id, (fact,))


def _error(refusal: Refusal | None, committer: Committer, stale: ErrorCode) -> ErrorCode:
    """Return the error for a commit that the coordinator had admitted a moment before and that Postgres then fenced."""
    if refusal is None:
        return ErrorCode.NONE
    if refusal is Refusal.STALE_MEMBER_EPOCH:
        return stale
    if refusal is Refusal.ILLEGAL_GENERATION and committer.generation_id < 0:
        # The group has gained members since, so a commit from outside lacks an identity, not a generation.
        return ErrorCode.UNKNOWN_MEMBER_ID
    return committer.codes.get(refusal, REFUSAL_CODES[refusal])
