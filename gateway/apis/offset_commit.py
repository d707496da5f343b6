"""OffsetCommit: what a group has consumed, into Postgres.

The one idea: the coordinator is asked whether a commit may stand, and Postgres fences it again in the transaction that
stores it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from gateway.apis.offset_topics import BY_ID_FROM, has_partition, resolve, topic_of
from gateway.coordinator.facts import OffsetsCommitted
from gateway.coordinator.model import ConnectionId, MemberId, OffsetCommitReply
from gateway.coordinator.model import OffsetCommit as OffsetCommitEvent
from gateway.groups.journal import JournaledCommit
from gateway.net.context import RequestContext, Services
from gateway.net.errors import REFUSAL_CODES, storage_code
from gateway.net.pieces import in_pieces, mapped
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from storage.errors import StorageConflict, StorageUnavailable
from storage.types import OffsetCommit, Refusal

FENCED = frozenset({Refusal.ILLEGAL_GENERATION, Refusal.UNKNOWN_MEMBER, Refusal.STALE_MEMBER_EPOCH})


@dataclass(slots=True)
class _Commit:
    """One partition of a commit on its way to an answer; `error` None while it may still be stored."""

    partition: OffsetCommitRequestPartition
    topic_id: UUID | None
    error: ErrorCode | None


async def offset_commit(request: OffsetCommitRequest, context: RequestContext) -> OffsetCommitResponse:
    """Unknown topics and partitions are refused one by one, without the group being asked; a refusal by the group is
    repeated on every other partition. Metadata over `offset.metadata.max.bytes` costs its own partition alone.

    Negative offsets are stored and come back as committed, as upstream's classic groups do.
    """
    by_id = context.version >= BY_ID_FROM
    unknown = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    catalog = context.services.catalog
    await resolve(request.topics, by_id, catalog)
    topics: list[tuple[str, UUID, list[_Commit]]] = []
    async for asked in in_pieces(request.topics):
        topic = topic_of(asked, by_id, catalog)
        if topic is None:
            commits = [_Commit(partition, None, unknown) async for partition in in_pieces(asked.partitions)]
        else:
            commits = [
                _Commit(
                    partition,
                    topic.topic_id,
                    None if has_partition(topic, partition.partition_index) else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                )
                async for partition in in_pieces(asked.partitions)
            ]
        topics.append((asked.name, asked.topic_id, commits))
    surviving: list[_Commit] = []
    async for _, _, commits in in_pieces(topics):
        surviving += [commit async for commit in in_pieces(commits) if commit.error is None]
    if surviving:
        await _commit(surviving, request, unknown, context)
    await _journal(request, topics, context.services)
    answered: list[OffsetCommitResponseTopic] = []
    async for name, topic_id, commits in in_pieces(topics):
        partitions = await mapped(_committed, commits)
        answered.append(OffsetCommitResponseTopic(name=name, topic_id=topic_id, partitions=tuple(partitions)))
    return OffsetCommitResponse(topics=tuple(answered))


async def _journal(
    request: OffsetCommitRequest, topics: Iterable[tuple[str, UUID, list[_Commit]]], services: Services
) -> None:
    """Writes down what was asked for and what became of it, with the log's bounds as this node knows them."""
    journal = services.groups.journal
    if journal is None:
        return
    now_s = asyncio.get_running_loop().time()
    journaled: list[JournaledCommit] = []
    async for name, asked_id, commits in in_pieces(topics):
        topic = None if not commits or commits[0].topic_id is None else services.catalog.get_by_id(commits[0].topic_id)
        shown = name or (str(asked_id) if topic is None else topic.name)
        async for commit in in_pieces(commits):
            partition = commit.partition
            known = None
            if topic is not None and has_partition(topic, partition.partition_index):
                known = services.tail.known(topic.partitions[partition.partition_index].partition_key, now_s)
            journaled.append(
                JournaledCommit(
                    commit.topic_id,
                    shown,
                    partition.partition_index,
                    partition.committed_offset,
                    None if known is None else known.log_start_offset,
                    None if known is None else known.high_watermark,
                    int(commit.error or ErrorCode.NONE),
                )
            )
    journal.committed(request.group_id, request.generation_id_or_member_epoch, request.member_id, journaled)


def _committed(commit: _Commit) -> OffsetCommitResponsePartition:
    return OffsetCommitResponsePartition(
        partition_index=commit.partition.partition_index, error_code=commit.error or ErrorCode.NONE
    )


def refuse_offset_commit(
    request: OffsetCommitRequest, version: int, code: ErrorCode, message: str | None
) -> OffsetCommitResponse:
    return OffsetCommitResponse(
        topics=tuple(
            OffsetCommitResponseTopic(
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=tuple(
                    OffsetCommitResponsePartition(partition_index=partition.partition_index, error_code=code)
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        )
    )


async def _commit(
    surviving: list[_Commit], request: OffsetCommitRequest, unknown: ErrorCode, context: RequestContext
) -> None:
    """Gives every commit in `surviving` its error or ErrorCode.NONE."""
    reply = await _ask(surviving, request, context)
    fenced = await _store(surviving, reply, request, unknown, context)
    if not fenced:
        return
    # The group may have changed its protocol since it was asked: its members' generations became epochs, or epochs
    # generations, and the commit that it let through was fenced by the wrong one.
    again = await _ask(fenced, request, context)
    if again.error is ErrorCode.NONE and again.by_member_epoch is not reply.by_member_epoch:
        await _store(fenced, again, request, unknown, context)


async def _ask(surviving: list[_Commit], request: OffsetCommitRequest, context: RequestContext) -> OffsetCommitReply:
    groups = context.services.groups
    reply = groups.submit(
        request.group_id,
        OffsetCommitEvent(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            version=context.version,
            member_id=MemberId(request.member_id),
            group_instance_id=request.group_instance_id,
            generation_id=request.generation_id_or_member_epoch,
            partitions=tuple(
                [
                    (commit.topic_id, commit.partition.partition_index)
                    async for commit in in_pieces(surviving)
                    if commit.topic_id is not None
                ]
            ),
        ),
    )
    return await reply if isinstance(reply, asyncio.Future) else reply


async def _store(
    surviving: list[_Commit],
    reply: OffsetCommitReply,
    request: OffsetCommitRequest,
    unknown: ErrorCode,
    context: RequestContext,
) -> list[_Commit]:
    """Gives every commit its error or ErrorCode.NONE. Those that are given back were refused for who they come from."""
    groups = context.services.groups
    error = reply.error
    lease = groups.lease_for(request.group_id)
    if error is ErrorCode.NONE and lease is None:
        error = ErrorCode.NOT_COORDINATOR
    if error is not ErrorCode.NONE or lease is None:
        await _set_all(surviving, error)
        return []

    max_metadata = context.services.settings.broker.offset_metadata_max_bytes
    retention_ms = request.retention_time_ms if request.retention_time_ms >= 0 else None
    storing: list[_Commit] = []
    rows: list[OffsetCommit] = []
    async for commit in in_pieces(surviving):
        metadata = commit.partition.committed_metadata or ""
        if len(metadata) > max_metadata:
            commit.error = ErrorCode.OFFSET_METADATA_TOO_LARGE
        elif commit.topic_id is not None:
            storing.append(commit)
            rows.append(
                OffsetCommit(
                    lease=lease,
                    group_id=request.group_id,
                    generation_id=max(request.generation_id_or_member_epoch, -1),
                    topic_id=commit.topic_id,
                    partition_index=commit.partition.partition_index,
                    committed_offset=commit.partition.committed_offset,
                    leader_epoch=commit.partition.committed_leader_epoch,
                    metadata=metadata,
                    retention_ms=retention_ms,
                    member_id=request.member_id if reply.by_member_epoch else None,
                )
            )
    if not rows:
        return []
    try:
        results = await groups.offset_committer.submit(rows)
    except (StorageUnavailable, StorageConflict) as error:
        await _set_all(storing, storage_code(context.api_key, error))
    except KafkaError as full:
        await _set_all(storing, full.code)
    else:
        async for commit, refusal in in_pieces(zip(storing, results, strict=True)):
            commit.error = _commit_error(refusal, request.generation_id_or_member_epoch, unknown, reply.stale)
        committed = tuple(
            [
                (row.topic_id, row.partition_index, row.committed_offset)
                async for row, refusal in in_pieces(zip(rows, results, strict=True))
                if refusal is None
            ]
        )
        if committed and groups.readers:
            epoch = request.generation_id_or_member_epoch
            groups.told(request.group_id, (OffsetsCommitted(MemberId(request.member_id), epoch, committed),))
        refused = in_pieces(zip(storing, results, strict=True))
        return [commit async for commit, refusal in refused if refusal in FENCED]
    return []


async def _set_all(commits: Iterable[_Commit], error: ErrorCode) -> None:
    async for commit in in_pieces(commits):
        commit.error = error


def _commit_error(refusal: Refusal | None, generation_id: int, unknown: ErrorCode, stale: ErrorCode) -> ErrorCode:
    """What the fence in Postgres said of a commit that the coordinator had let through a moment before."""
    if refusal is None:
        return ErrorCode.NONE
    if refusal is Refusal.UNKNOWN_TOPIC:
        return unknown
    if refusal is Refusal.STALE_MEMBER_EPOCH:
        return stale
    if refusal is Refusal.ILLEGAL_GENERATION and generation_id < 0:
        # The group has gained members since: a commit from outside lacks an identity, not a generation.
        return ErrorCode.UNKNOWN_MEMBER_ID
    return REFUSAL_CODES[refusal]
