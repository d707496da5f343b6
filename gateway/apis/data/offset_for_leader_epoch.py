"""OffsetForLeaderEpoch: where a leader epoch ended."""

from __future__ import annotations

from typing import Protocol

from gateway.apis.partition_lookup import (
    Epochs,
    end_of_epoch,
    epochs_of,
    find_served,
    look_up_topics,
    read_epochs,
    read_states,
    state_of,
)
from gateway.apis.services import FindsTopics, HasHistory, HasLog
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces, mapped
from gateway.security.authorizer import may
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import ErrorCode
from protocol.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)
from storage.types import Partition, PartitionState

UNDEFINED_EPOCH = -1
UNDEFINED_OFFSET = -1


class EpochServices(FindsTopics, HasHistory, HasLog, Protocol): ...


async def offset_for_leader_epoch(
    request: OffsetForLeaderEpochRequest, context: RequestContext[EpochServices]
) -> OffsetForLeaderEpochResponse:
    """Return where epochs ended. An epoch ends where the next began.

    Epochs rise when the database continues from another history. Records that a client has read beyond the end of its
    epoch are not in this history (KIP-320).
    """
    is_replica = may(context, AclOperation.CLUSTER_ACTION, ResourceType.CLUSTER, told=False)
    operation = None if is_replica else AclOperation.DESCRIBE
    known = await look_up_topics((topic.topic for topic in request.topics), context, operation)
    found = [
        await mapped(
            lambda part, topic=known[topic.topic]: find_served(topic, part.partition, part.current_leader_epoch),
            topic.partitions,
        )
        async for topic in in_pieces(request.topics)
    ]
    states = await read_states([part for row in found for part in row if isinstance(part, Partition)], context)
    epochs = await read_epochs((part for row in found for part in row if isinstance(part, Partition)), states, context)
    topics: list[OffsetForLeaderTopicResult] = []
    async for topic, row in in_pieces(zip(request.topics, found, strict=True)):
        answers = [
            _answer(part, state_of(partition, states), epochs_of(partition, epochs))
            async for part, partition in in_pieces(zip(topic.partitions, row, strict=True))
        ]
        topics.append(OffsetForLeaderTopicResult(topic=topic.topic, partitions=tuple(answers)))
    return OffsetForLeaderEpochResponse(topics=tuple(topics))


def _answer(
    part: OffsetForLeaderPartition, state: PartitionState | ErrorCode, epochs: Epochs | ErrorCode
) -> EpochEndOffset:
    if isinstance(state, ErrorCode):
        return EpochEndOffset(partition=part.partition, error_code=state)
    if not 0 <= part.leader_epoch <= state.leader_epoch:
        return EpochEndOffset(partition=part.partition, leader_epoch=UNDEFINED_EPOCH, end_offset=UNDEFINED_OFFSET)
    if isinstance(epochs, ErrorCode):
        return EpochEndOffset(partition=part.partition, error_code=epochs)
    epoch, end_offset = end_of_epoch(part.leader_epoch, epochs, state.high_watermark)
    return EpochEndOffset(partition=part.partition, leader_epoch=epoch, end_offset=end_offset)
