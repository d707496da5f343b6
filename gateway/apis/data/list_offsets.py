"""ListOffsets: the offset at a timestamp, or at one of the special timestamps."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from gateway.apis.partition_lookup import (
    Epochs,
    epoch_at,
    epochs_of,
    find_served,
    look_up_topics,
    read_epochs,
    read_states,
    state_of,
)
from gateway.apis.services import FindsTopics, HasHistory, HasInternalLogs, HasLog
from gateway.log.batch_search import Place, first_of_log_since, newest
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces, tally
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode
from protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from storage.errors import StorageError
from storage.types import Partition, PartitionKey, PartitionState, Topic

if TYPE_CHECKING:
    from gateway.internal_log.writer import InternalLogs

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
EARLIEST_PENDING_UPLOAD = -6

FIRST_VERSION = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
"""For each special timestamp, the first version in which it may be requested."""

AFTER_ALL_VERSIONS = 2**15
READ_COMMITTED = 1
NOTHING = (-1, -1)


class ListOffsetsServices(FindsTopics, HasHistory, HasInternalLogs, HasLog, Protocol): ...


async def list_offsets(
    request: ListOffsetsRequest, context: RequestContext[ListOffsetsServices]
) -> ListOffsetsResponse:
    """Look up offsets. Start and end come from Postgres, never from the tail's copy, because a tool that asks for the
    end needs the committed one.

    The answer for a record carries the leader epoch in which the record was appended. A client that committed the
    offset with a later epoch would be refused by its own next look-up (KIP-320). The end of the log has the present
    epoch.

    Nothing is tiered, so the local log is the whole log. With `read_committed` it ends at the last stable offset.
    """
    named = await tally((topic.name, part.partition_index) for topic in request.topics for part in topic.partitions)
    found: dict[tuple[str, int], Partition | ErrorCode] = {}
    known = await look_up_topics((topic.name for topic in request.topics), context, AclOperation.DESCRIBE)
    if context.services.internal_logs is not None:
        await _wait_for_writer(known.values(), context.services.internal_logs)
    async for topic in in_pieces(request.topics):
        async for part in in_pieces(topic.partitions):
            asked = (topic.name, part.partition_index)
            twice = named[asked] > 1
            found[asked] = ErrorCode.INVALID_REQUEST if twice else _find(known[topic.name], part, context)
    partitions = [part for part in found.values() if isinstance(part, Partition)]
    states = await read_states(partitions, context)
    epochs = await read_epochs(partitions, states, context) if _asks_for_records(request) else {}
    topics: list[ListOffsetsTopicResponse] = []
    async for topic in in_pieces(request.topics):
        answers = [
            await _answer(
                part, found[topic.name, part.partition_index], states, epochs, request.isolation_level, context
            )
            async for part in in_pieces(topic.partitions)
        ]
        topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=tuple(answers)))
    return ListOffsetsResponse(topics=tuple(topics))


async def _wait_for_writer(known: Collection[Topic | ErrorCode], logs: InternalLogs) -> None:
    """Wait for the writer of internal topics, if the request names only such topics. A client that requests the ends of
    all topics does not read them.
    """
    internal = [topic.name for topic in known if isinstance(topic, Topic) and topic.internal]
    if len(internal) == len(known):
        for name in internal:
            await logs.ready(name)


def _find(
    topic: Topic | ErrorCode, part: ListOffsetsPartition, context: RequestContext[object]
) -> Partition | ErrorCode:
    if part.timestamp < 0 and context.version < FIRST_VERSION.get(part.timestamp, AFTER_ALL_VERSIONS):
        return ErrorCode.UNSUPPORTED_VERSION
    return find_served(topic, part.partition_index, part.current_leader_epoch)


async def _answer(
    part: ListOffsetsPartition,
    found: Partition | ErrorCode,
    states: dict[PartitionKey, PartitionState] | ErrorCode,
    epochs: dict[PartitionKey, list[tuple[int, int]]] | ErrorCode,
    isolation_level: int,
    context: RequestContext[HasLog],
) -> ListOffsetsPartitionResponse:
    if isinstance(found, ErrorCode):
        return ListOffsetsPartitionResponse(partition_index=part.partition_index, error_code=found)
    state = state_of(found, states)
    if isinstance(state, ErrorCode):
        return ListOffsetsPartitionResponse(partition_index=part.partition_index, error_code=state)
    end_offset = state.last_stable_offset if isolation_level == READ_COMMITTED else state.high_watermark
    try:
        timestamp, offset = await _place_at(part.timestamp, found.partition_key, state, end_offset, context)
    except StorageError as error:
        code = context.storage_failed(context.api_key, error)
        return ListOffsetsPartitionResponse(partition_index=part.partition_index, error_code=code)
    if offset >= end_offset and part.timestamp != LATEST and part.timestamp not in (EARLIEST, EARLIEST_LOCAL):
        # The consumer would not receive this record, because it is at or beyond the end that the consumer may read.
        timestamp, offset = NOTHING
    leader_epoch = _epoch_of(part.timestamp, offset, state, epochs_of(found, epochs))
    if isinstance(leader_epoch, ErrorCode):
        return ListOffsetsPartitionResponse(partition_index=part.partition_index, error_code=leader_epoch)
    return ListOffsetsPartitionResponse(
        partition_index=part.partition_index, timestamp=timestamp, offset=offset, leader_epoch=leader_epoch
    )


def _asks_for_records(request: ListOffsetsRequest) -> bool:
    return any(part.timestamp != LATEST for topic in request.topics for part in topic.partitions)


def _epoch_of(timestamp: int, offset: int, state: PartitionState, epochs: Epochs | ErrorCode) -> int | ErrorCode:
    if offset < 0:
        return -1
    if timestamp == LATEST or offset >= state.high_watermark:
        return state.leader_epoch
    return epochs if isinstance(epochs, ErrorCode) else epoch_at(offset, epochs)


async def _place_at(
    timestamp: int, key: PartitionKey, state: PartitionState, end_offset: int, context: RequestContext[HasLog]
) -> Place:
    log_store = context.services.log
    if timestamp == LATEST:
        return -1, end_offset
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return -1, state.log_start_offset
    if timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return NOTHING
    if timestamp == MAX_TIMESTAMP:
        batches = await log_store.batches_of_max_timestamp(key)
        places = [await newest(batch, state.log_start_offset) for batch in batches]
        return max((place for place in places if place), key=lambda place: place[0], default=NOTHING)
    return await first_of_log_since(log_store, key, timestamp, state.log_start_offset) or NOTHING
