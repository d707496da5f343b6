"""Requests that commit and fetch offsets."""

from __future__ import annotations

import uuid
from typing import Any

from protocol.errors import ErrorCode
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from storage.types import Topic
from tests.gateway.group_node import (
    GroupNode,
)

G = "g"
NONE = ErrorCode.NONE


def partition(index: int, offset: int, *, epoch: int = 3, metadata: str | None = "m") -> OffsetCommitRequestPartition:
    return OffsetCommitRequestPartition(
        partition_index=index,
        committed_offset=offset,
        committed_leader_epoch=epoch,
        committed_metadata=metadata,
    )


def commit_request(
    topic: Topic, *partitions: OffsetCommitRequestPartition, group_id: str = G, **given: Any
) -> OffsetCommitRequest:
    return OffsetCommitRequest(
        group_id=group_id,
        topics=(OffsetCommitRequestTopic(name=topic.name, topic_id=topic.topic_id, partitions=partitions),),
        **given,
    )


def codes(answer: Any) -> list[tuple[int, int]]:
    return [(part.partition_index, part.error_code) for topic in answer.topics for part in topic.partitions]


async def fetched(
    node: GroupNode, version: int, topics: list[tuple[Topic, tuple[int, ...]]] | None, group_id: str = G
) -> dict[tuple[str | uuid.UUID, int], tuple[int, int, str | None, int]]:
    """Return offset, leader epoch, metadata and error code by topic (name, or id if the version has
    ids) and partition.
    """
    if version >= 8:
        asked = None
        if topics is not None:
            asked = tuple(
                OffsetFetchRequestTopics(name=t.name, topic_id=t.topic_id, partition_indexes=indexes)
                for t, indexes in topics
            )
        groups = (OffsetFetchRequestGroup(group_id=group_id, topics=asked),)
        answer = await node.ask(OffsetFetchRequest(groups=groups, require_stable=True), version)
        (group,) = answer.groups
        assert (group.group_id, group.error_code) == (group_id, NONE)
        answered = group.topics
    else:
        only = (
            None
            if topics is None
            else tuple(OffsetFetchRequestTopic(name=t.name, partition_indexes=indexes) for t, indexes in topics)
        )
        answer = await node.ask(OffsetFetchRequest(group_id=group_id, topics=only), version)
        assert answer.error_code == NONE
        answered = answer.topics
    return {
        (topic.topic_id if version >= 10 else topic.name, part.partition_index): (
            part.committed_offset,
            part.committed_leader_epoch,
            part.metadata,
            part.error_code,
        )
        for topic in answered
        for part in topic.partitions
    }
