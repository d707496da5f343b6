"""DescribeShareGroupOffsets, AlterShareGroupOffsets and DeleteShareGroupOffsets: positions of share groups (KIP-932).

The one idea: a group's position is read from Postgres. It is changed there while the group is held and has no members.
The change raises the row's epoch, so nodes read the partition again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol
from uuid import UUID

from gateway.apis.admin.features import SHARE, ChecksFeatures, require_protocol
from gateway.apis.groups.epoch_groups import of_type
from gateway.apis.groups.group_views import group_views
from gateway.apis.partition_lookup import look_up_topics, read_states, state_of
from gateway.apis.services import FindsTopics, HasGroups, HasLog, HasShare, HasShareStore
from gateway.coordinator.machine import Value
from gateway.coordinator.share.model import BeginShareGroup, ShareGroup
from gateway.coordinator.share.partition import NOT_DELIVERED_AGAIN
from gateway.net.context import RequestContext
from gateway.net.pieces import first_of_each, in_pieces, mapped
from gateway.security.authorizer import may_topic
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import alter_share_group_offsets as altering
from protocol.messages import delete_share_group_offsets as deleting
from protocol.messages import describe_share_group_offsets as describing
from protocol.messages.alter_share_group_offsets import AlterShareGroupOffsetsRequest, AlterShareGroupOffsetsResponse
from protocol.messages.delete_share_group_offsets import DeleteShareGroupOffsetsRequest, DeleteShareGroupOffsetsResponse
from protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsResponse,
)
from protocol.schema import ZERO_UUID
from storage.share import ShareKey, ShareStand
from storage.types import Partition, PartitionKey, PartitionState, Topic

UNKNOWN = -1
_SETTLED = tuple(state.value for state in NOT_DELIVERED_AGAIN)

# --- DescribeShareGroupOffsets ------------------------------------------------------------------------------------


class ShareOffsetsServices(ChecksFeatures, FindsTopics, HasGroups, HasLog, HasShare, HasShareStore, Protocol): ...


async def describe_share_group_offsets(
    request: DescribeShareGroupOffsetsRequest, context: RequestContext[ShareOffsetsServices]
) -> DescribeShareGroupOffsetsResponse:
    """Describe positions. Null topics means all topics in which the group has a position. If it has none, the offset is
    −1.
    """
    require_protocol(SHARE, context)
    asked = {group.group_id: group for group in request.groups}
    answers: list[describing.DescribeShareGroupOffsetsResponseGroup] = []
    async for group_id, group in group_views(context, list(asked)):
        try:
            of_type(ShareGroup, group_id, group)
            answers.append(await _described(asked[group_id], context))
        except KafkaError as error:
            answers.append(
                describing.DescribeShareGroupOffsetsResponseGroup(
                    group_id=group_id, error_code=error.code, error_message=error.message
                )
            )
    return DescribeShareGroupOffsetsResponse(groups=tuple(answers))


async def _described(
    asked: describing.DescribeShareGroupOffsetsRequestGroup, context: RequestContext[ShareOffsetsServices]
) -> describing.DescribeShareGroupOffsetsResponseGroup:
    catalog = context.services.catalog
    stands = await context.services.share_store.offsets(asked.group_id, _SETTLED)
    wanted: dict[str, Sequence[int]] = {}
    if asked.topics is not None:
        wanted = {topic.topic_name: topic.partitions for topic in asked.topics}
    else:
        await catalog.resolve_all_ids(await first_of_each(topic_id for topic_id, _ in stands))
        wanted = await _wanted(stands, context)
    topics = await look_up_topics(wanted, context, AclOperation.DESCRIBE)
    known: list[Partition] = []
    async for name, topic in in_pieces(topics.items()):
        if isinstance(topic, Topic):
            known += [
                topic.partitions[index] async for index in in_pieces(wanted[name]) if 0 <= index < len(topic.partitions)
            ]
    states = await read_states(known, context)
    answers: list[describing.DescribeShareGroupOffsetsResponseTopic] = []
    async for name, topic in in_pieces(topics.items()):
        partitions: list[describing.DescribeShareGroupOffsetsResponsePartition] = []
        async for index in in_pieces(wanted[name]):
            if not isinstance(topic, Topic) or not 0 <= index < len(topic.partitions):
                error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if isinstance(topic, Topic) else topic
                partitions.append(
                    describing.DescribeShareGroupOffsetsResponsePartition(
                        partition_index=index, start_offset=UNKNOWN, error_code=error
                    )
                )
                continue
            partition, stand = topic.partitions[index], stands.get((topic.topic_id, index))
            partitions.append(_partition(partition, index, stand, states))
        answers.append(
            describing.DescribeShareGroupOffsetsResponseTopic(
                topic_name=name,
                topic_id=topic.topic_id if isinstance(topic, Topic) else ZERO_UUID,
                partitions=tuple(partitions),
            )
        )
    return describing.DescribeShareGroupOffsetsResponseGroup(group_id=asked.group_id, topics=tuple(answers))


async def _wanted(stands: Iterable[tuple[UUID, int]], context: RequestContext[FindsTopics]) -> dict[str, Sequence[int]]:
    """Return partitions by the names of their topics, without topics that the client may not see."""
    catalog = context.services.catalog
    wanted: defaultdict[str, list[int]] = defaultdict(list)
    async for topic_id, index in in_pieces(stands):
        topic = catalog.get_by_id(topic_id)
        if topic is not None and may_topic(context, AclOperation.DESCRIBE, topic.name, told=False):
            wanted[topic.name].append(index)
    return dict(wanted)


def _partition(
    partition: Partition, index: int, stand: ShareStand | None, states: dict[PartitionKey, PartitionState] | ErrorCode
) -> describing.DescribeShareGroupOffsetsResponsePartition:
    if stand is None:
        return describing.DescribeShareGroupOffsetsResponsePartition(partition_index=index, start_offset=UNKNOWN)
    state = state_of(partition, states)
    if isinstance(state, ErrorCode):
        return describing.DescribeShareGroupOffsetsResponsePartition(
            partition_index=index, start_offset=UNKNOWN, error_code=state
        )
    start_offset = max(stand.start_offset, state.log_start_offset)
    settled = stand.settled if start_offset == stand.start_offset else 0
    return describing.DescribeShareGroupOffsetsResponsePartition(
        partition_index=index,
        start_offset=start_offset,
        leader_epoch=state.leader_epoch,
        lag=max(state.high_watermark - start_offset - settled, 0),
    )


# --- AlterShareGroupOffsets ---------------------------------------------------------------------------------------


async def alter_share_group_offsets(
    request: AlterShareGroupOffsetsRequest, context: RequestContext[ShareOffsetsServices]
) -> AlterShareGroupOffsetsResponse:
    """Set positions of a share group without members: all records from the given offsets on are delivered (again). As
    in Kafka, this creates the group if no member has joined it yet.
    """
    require_protocol(SHARE, context)
    services = context.services
    await begin_share_group(request.group_id, services)
    topics = await look_up_topics((topic.topic_name for topic in request.topics), context, AclOperation.READ)
    starts: dict[tuple[UUID, int], int] = {}
    answers: list[altering.AlterShareGroupOffsetsResponseTopic] = []
    async for asked in in_pieces(request.topics):
        topic = topics[asked.topic_name]
        partitions: list[altering.AlterShareGroupOffsetsResponsePartition] = []
        async for part in in_pieces(asked.partitions):
            error = ErrorCode.NONE
            if not isinstance(topic, Topic):
                error = topic
            elif not 0 <= part.partition_index < len(topic.partitions):
                error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif part.start_offset < 0:
                error = ErrorCode.INVALID_REQUEST
            else:
                starts[topic.topic_id, part.partition_index] = part.start_offset
            partitions.append(
                altering.AlterShareGroupOffsetsResponsePartition(partition_index=part.partition_index, error_code=error)
            )
        answers.append(
            altering.AlterShareGroupOffsetsResponseTopic(
                topic_name=asked.topic_name,
                topic_id=topic.topic_id if isinstance(topic, Topic) else ZERO_UUID,
                partitions=tuple(partitions),
            )
        )
    async with services.groups.holding(request.group_id) as (group, _):
        _check_idle(request.group_id, group)
        if starts and not await services.share_store.alter(request.group_id, starts):
            raise KafkaError(ErrorCode.NON_EMPTY_GROUP, f"Group {request.group_id} has members.")
    await _drop(request.group_id, starts, services)
    return AlterShareGroupOffsetsResponse(responses=tuple(answers))


async def begin_share_group(group_id: str, services: HasGroups) -> None:
    """Create the group if none of that name exists. Raise KafkaError."""
    if not group_id:
        raise KafkaError(ErrorCode.INVALID_GROUP_ID, "the group has no name")
    reply = services.groups.submit(group_id, BeginShareGroup(services.groups.next_request_id()))
    if isinstance(reply, asyncio.Future):
        reply = await reply
    if reply.error is not ErrorCode.NONE:
        raise KafkaError(reply.error, f"Group {group_id} cannot be a share group.")


def _check_idle(group_id: str, group: Value) -> None:
    if of_type(ShareGroup, group_id, group).members:
        raise KafkaError(ErrorCode.NON_EMPTY_GROUP, f"Group {group_id} is not empty.")


async def _drop(group_id: str, partitions: Iterable[tuple[UUID, int]], services: HasShare) -> None:
    """Drop remembered state. If other code still uses such state, it cannot write it any more, because the epochs of
    the rows have risen.
    """
    async for topic_id, index in in_pieces(partitions):
        services.share.drop((ShareKey(group_id, topic_id, index),))


# --- DeleteShareGroupOffsets --------------------------------------------------------------------------------------


async def delete_share_group_offsets(
    request: DeleteShareGroupOffsetsRequest, context: RequestContext[ShareOffsetsServices]
) -> DeleteShareGroupOffsetsResponse:
    """Delete positions of a share group without members. Afterwards the group begins in these topics like a group that
    has never read them.
    """
    require_protocol(SHARE, context)
    services = context.services
    topics = await look_up_topics((topic.topic_name for topic in request.topics), context, AclOperation.READ)
    known = {topic.topic_id: topic async for topic in in_pieces(topics.values()) if isinstance(topic, Topic)}
    async with services.groups.holding(request.group_id) as (group, _):
        _check_idle(request.group_id, group)
        gone = await services.share_store.delete(request.group_id, known.keys()) if known else set[UUID]()
    for topic_id in gone:
        indexes = range(len(known[topic_id].partitions))
        await _drop(request.group_id, ((topic_id, index) for index in indexes), services)
    responses = await mapped(lambda asked: _deleted(asked.topic_name, topics[asked.topic_name], gone), request.topics)
    return DeleteShareGroupOffsetsResponse(responses=tuple(responses))


def _deleted(name: str, topic: Topic | ErrorCode, gone: set[UUID]) -> deleting.DeleteShareGroupOffsetsResponseTopic:
    if not isinstance(topic, Topic):
        return deleting.DeleteShareGroupOffsetsResponseTopic(topic_name=name, topic_id=ZERO_UUID, error_code=topic)
    return deleting.DeleteShareGroupOffsetsResponseTopic(
        topic_name=name,
        topic_id=topic.topic_id,
        error_code=ErrorCode.NONE if topic.topic_id in gone else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        error_message=None if topic.topic_id in gone else "the group stands nowhere in this topic",
    )
