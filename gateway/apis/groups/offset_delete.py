"""OffsetDelete: forget a group's offsets of topics that it does not read any more."""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

from gateway.apis.groups.offset_topics import has_partition
from gateway.apis.services import FindsTopics, HasGroups, HasOffsets
from gateway.coordinator.classic.views import offset_delete_refusal, subscribes_to
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces, mapped
from gateway.security.authorizer import may_topic
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode
from protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)


class OffsetDeleteServices(FindsTopics, HasGroups, HasOffsets, Protocol): ...


async def offset_delete(
    request: OffsetDeleteRequest, context: RequestContext[OffsetDeleteServices]
) -> OffsetDeleteResponse:
    """Delete offsets under the group's own queue: a member that joins concurrently waits, so no subscribed topic loses
    offsets.

    Deleting an offset that was never committed is no error.
    """
    services = context.services
    if not request.group_id:
        return OffsetDeleteResponse(error_code=ErrorCode.INVALID_GROUP_ID)
    await services.catalog.resolve_all(asked.name for asked in request.topics)
    topics = await mapped(lambda asked: (asked, services.catalog.get(asked.name)), request.topics)
    async with services.groups.holding(request.group_id) as (held, lease):
        group = services.groups.summary(held)
        refusal = offset_delete_refusal(group)
        if refusal is not None:
            return OffsetDeleteResponse(error_code=refusal)
        doomed: list[tuple[UUID, int]] = []
        answers: list[OffsetDeleteResponseTopic] = []
        async for asked, topic in in_pieces(topics):
            subscribed = subscribes_to(group, asked.name)
            readable = may_topic(context, AclOperation.READ, asked.name)
            partitions: list[OffsetDeleteResponsePartition] = []
            async for partition in in_pieces(asked.partitions):
                index, error = partition.partition_index, ErrorCode.NONE
                if not readable:
                    error = ErrorCode.TOPIC_AUTHORIZATION_FAILED
                elif topic is None or not has_partition(topic, index):
                    error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                elif subscribed:
                    error = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
                else:
                    doomed.append((topic.topic_id, index))
                partitions.append(OffsetDeleteResponsePartition(partition_index=index, error_code=error))
            answers.append(OffsetDeleteResponseTopic(name=asked.name, partitions=tuple(partitions)))
        if doomed:
            await services.offsets.delete(request.group_id, doomed, lease)
    return OffsetDeleteResponse(topics=tuple(answers))
