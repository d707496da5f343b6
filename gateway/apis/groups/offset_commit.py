"""OffsetCommit: a group's consumed offsets, into Postgres and into the journal.

The one idea: `committing.py` decides who may commit and stores offsets. This module translates requests and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from gateway.apis.groups.committing import Commit, CommitServices, Committer, TopicCommits, commit, commits_of
from gateway.apis.groups.offset_topics import BY_ID_FROM, has_partition
from gateway.apis.services import FindsTopics, HasTail
from gateway.groups.journal import JournaledCommit, summed_up
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces, mapped
from protocol.errors import ErrorCode
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from storage.types import Refusal


class OffsetCommitServices(CommitServices, FindsTopics, HasTail, Protocol): ...


async def offset_commit(
    request: OffsetCommitRequest, context: RequestContext[OffsetCommitServices]
) -> OffsetCommitResponse:
    """Commit offsets.

    Unknown topics and partitions are refused one by one, without asking the group. A refusal by the group is repeated
    on every other partition. Metadata over `offset.metadata.max.bytes` refuses only its own partition.

    Negative offsets are stored and returned as committed, as by upstream's classic groups.
    """
    by_id = context.version >= BY_ID_FROM
    unknown = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    topics, surviving = await commits_of(request.topics, by_id, context)
    if surviving:
        committer = Committer(
            group_id=request.group_id,
            member_id=request.member_id,
            group_instance_id=request.group_instance_id,
            generation_id=request.generation_id_or_member_epoch,
            codes={Refusal.UNKNOWN_TOPIC: unknown},
            retention_ms=request.retention_time_ms if request.retention_time_ms >= 0 else None,
        )
        await commit(surviving, committer, context)
    await _journal(request, topics, context.services)
    answered: list[OffsetCommitResponseTopic] = []
    async for name, topic_id, commits in in_pieces(topics):
        partitions = await mapped(_committed, commits)
        answered.append(OffsetCommitResponseTopic(name=name, topic_id=topic_id, partitions=tuple(partitions)))
    return OffsetCommitResponse(topics=tuple(answered))


async def _journal(
    request: OffsetCommitRequest, topics: Iterable[TopicCommits], services: OffsetCommitServices
) -> None:
    """Journal each commit with its outcome, and with the log's bounds as this node knows them.

    Commits for topics that do not exist, or that the client may not read, are summed up in one row per error: the
    client chose their names.
    """
    journal = services.groups.journal
    if journal is None:
        return
    now_s = asyncio.get_running_loop().time()
    journaled: list[JournaledCommit] = []
    elsewhere: list[JournaledCommit] = []
    async for name, asked_id, commits in in_pieces(topics):
        topic = None if not commits or commits[0].topic_id is None else services.catalog.get_by_id(commits[0].topic_id)
        shown = name or (str(asked_id) if topic is None else topic.name)
        async for one in in_pieces(commits):
            partition = one.partition
            known = None
            if topic is not None and has_partition(topic, partition.partition_index):
                known = services.tail.known(topic.partitions[partition.partition_index].partition_key, now_s)
            is_known = topic is not None and one.error is not ErrorCode.TOPIC_AUTHORIZATION_FAILED
            (journaled if is_known else elsewhere).append(
                JournaledCommit(
                    one.topic_id,
                    shown,
                    partition.partition_index,
                    partition.committed_offset,
                    None if known is None else known.log_start_offset,
                    None if known is None else known.high_watermark,
                    int(one.error or ErrorCode.NONE),
                )
            )
    journaled += await summed_up(elsewhere)
    await journal.committed(request.group_id, request.generation_id_or_member_epoch, request.member_id, journaled)


def _committed(one: Commit) -> OffsetCommitResponsePartition:
    return OffsetCommitResponsePartition(
        partition_index=one.partition.partition_index, error_code=one.error or ErrorCode.NONE
    )
