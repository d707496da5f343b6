"""DeleteRecords: move the log's start forward."""

from __future__ import annotations

from typing import Protocol

import structlog

from gateway.apis.partition_lookup import find_partition, look_up_topics
from gateway.apis.services import FindsTopics, HasCatalog, HasLog, HasTail
from gateway.net.context import RequestContext
from gateway.net.errors import REFUSAL_CODES
from gateway.net.pieces import in_pieces
from gateway.net.refusals import DerivedRefusal
from gateway.security.kinds import AclOperation
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from storage.errors import StorageError
from storage.types import Partition, Refusal, Topic

logger = structlog.get_logger(__name__)

HIGH_WATERMARK = -1


class DeleteRecordsServices(FindsTopics, HasLog, HasTail, Protocol): ...


async def delete_records(
    request: DeleteRecordsRequest, context: RequestContext[DeleteRecordsServices]
) -> DeleteRecordsResponse:
    """Move log starts. −1 means the high watermark. For a topic that is only compacted the request is refused, as in
    upstream's ReplicaManager.
    """
    known = await look_up_topics((topic.name for topic in request.topics), context, AclOperation.DELETE)
    topics: list[DeleteRecordsTopicResult] = []
    async for topic in in_pieces(request.topics):
        partitions = [await _delete(known[topic.name], part, context) async for part in in_pieces(topic.partitions)]
        topics.append(DeleteRecordsTopicResult(name=topic.name, partitions=tuple(partitions)))
    return DeleteRecordsResponse(topics=tuple(topics))


refuse_delete_records = DerivedRefusal(ApiKey.DELETE_RECORDS, values={"low_watermark": -1})


def _deletable(
    topic: Topic | ErrorCode, part: DeleteRecordsPartition, context: RequestContext[HasCatalog]
) -> Partition | ErrorCode:
    """Return the partition, or the error that forbids deletion here, in upstream's order."""
    partition = find_partition(topic, part.partition_index)
    if isinstance(topic, ErrorCode) or isinstance(partition, ErrorCode):
        return partition
    if topic.internal:
        return ErrorCode.INVALID_TOPIC_EXCEPTION
    config = context.services.catalog.config(topic)
    if config.cleanup_compact and not config.cleanup_delete:
        return ErrorCode.POLICY_VIOLATION
    return partition


async def _delete(
    topic: Topic | ErrorCode, part: DeleteRecordsPartition, context: RequestContext[DeleteRecordsServices]
) -> DeleteRecordsPartitionResult:
    partition = _deletable(topic, part, context)
    if isinstance(partition, ErrorCode):
        return _failed(part, partition)
    if part.offset < HIGH_WATERMARK:
        return _failed(part, ErrorCode.OFFSET_OUT_OF_RANGE)
    services = context.services
    try:
        log_start_offset = await services.log.delete_records(partition.partition_key, part.offset)
    except StorageError as error:
        return _failed(part, context.storage_failed(context.api_key, error))
    if isinstance(log_start_offset, Refusal):
        return _failed(part, REFUSAL_CODES[log_start_offset])
    services.tail.log_start_moved(partition.partition_key, log_start_offset)
    logger.info("records deleted", partition_key=partition.partition_key, log_start_offset=log_start_offset)
    return DeleteRecordsPartitionResult(partition_index=part.partition_index, low_watermark=log_start_offset)


def _failed(part: DeleteRecordsPartition, code: ErrorCode) -> DeleteRecordsPartitionResult:
    return DeleteRecordsPartitionResult(partition_index=part.partition_index, low_watermark=-1, error_code=code)
