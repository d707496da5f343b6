"""Requests of members of a consumer group."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from protocol.errors import ErrorCode
from protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.gateway.group_node import GroupNode

G = "g"


async def beat(
    node: GroupNode,
    member_id: str,
    epoch: int,
    owned: dict[UUID, tuple[int, ...]] | None = None,
    *,
    version: int = 1,
    **more: Any,
) -> ConsumerGroupHeartbeatResponse:
    listed = None
    if owned is not None:
        listed = tuple(TopicPartitions(topic_id=each, partitions=held) for each, held in owned.items())
    request = ConsumerGroupHeartbeatRequest(
        group_id=G,
        member_id=member_id,
        member_epoch=epoch,
        topic_partitions=listed,
        **more,
    )
    return await node.ask(request, version)


async def join(node: GroupNode, member_id: str, *topics: str, **more: Any) -> ConsumerGroupHeartbeatResponse:
    given: dict[str, Any] = {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": topics or ("t",)}
    answer = await beat(node, member_id, 0, {}, **(given | more))
    assert answer.error_code == ErrorCode.NONE, answer
    return answer


def told(answer: ConsumerGroupHeartbeatResponse) -> tuple[int, dict[UUID, tuple[int, ...]] | None]:
    assert answer.error_code == ErrorCode.NONE, answer
    if answer.assignment is None:
        return answer.member_epoch, None
    return answer.member_epoch, {each.topic_id: each.partitions for each in answer.assignment.topic_partitions}


async def rows(node: GroupNode) -> dict[str, tuple[int, Any, str]]:
    """Return the epoch, the document and the row's version of each member."""
    found = await node.database.hot.fetch(
        "select member_id, member_epoch, document, xmin::text as xmin from group_member"
    )
    return {row["member_id"]: (row["member_epoch"], json.loads(row["document"]), row["xmin"]) for row in found}


async def commit(node: GroupNode, topic: UUID, member_id: str, epoch: int, version: int = 10) -> int:
    request = OffsetCommitRequest(
        group_id=G,
        member_id=member_id,
        generation_id_or_member_epoch=epoch,
        topics=(
            OffsetCommitRequestTopic(
                name="t" if version < 10 else "",
                topic_id=topic if version >= 10 else UUID(int=0),
                partitions=(OffsetCommitRequestPartition(partition_index=0, committed_offset=7),),
            ),
        ),
    )
    answer = await node.ask(request, version)
    return answer.topics[0].partitions[0].error_code
