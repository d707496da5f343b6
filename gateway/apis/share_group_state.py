"""InitializeShareGroupState, ReadShareGroupState, WriteShareGroupState, DeleteShareGroupState and
ReadShareGroupStateSummary: what share groups have done with records, as brokers tell each other (KIP-932).

The one idea: the state is the one that ShareFetch goes by, and who leads a partition here is its coordinator. What is
read is what is stored, which is all that was ever acknowledged. What is written goes through the value that this node
has in memory, as acknowledgements do, so it never has another beside it; whatever else changes a row raises its epoch,
by which whoever led it before writes nothing more.
Mirrors ShareCoordinatorService and ShareCoordinatorShard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

from gateway.apis.share_group_offsets import begin_share_group
from gateway.coordinator.share.partition import SETTLED, RecordState, StateTold, Told
from gateway.log.partition_lookup import resolve_topics
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from gateway.share.reader import LOADED_AT_ONCE, partition_settings, start_of
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import delete_share_group_state as deleting
from protocol.messages import initialize_share_group_state as initializing
from protocol.messages import read_share_group_state as reading
from protocol.messages import read_share_group_state_summary as summing
from protocol.messages import write_share_group_state as writing
from protocol.messages.delete_share_group_state import DeleteShareGroupStateRequest, DeleteShareGroupStateResponse
from protocol.messages.initialize_share_group_state import (
    InitializeShareGroupStateRequest,
    InitializeShareGroupStateResponse,
)
from protocol.messages.read_share_group_state import ReadShareGroupStateRequest, ReadShareGroupStateResponse
from protocol.messages.read_share_group_state_summary import (
    ReadShareGroupStateSummaryRequest,
    ReadShareGroupStateSummaryResponse,
)
from protocol.messages.write_share_group_state import WriteShareGroupStateRequest, WriteShareGroupStateResponse
from storage.share import READ_AT_A_TIME, WRITTEN_AT_A_TIME, PartitionName, ShareKey, ShareRow, ShareSummary
from storage.types import Partition

ANY_EPOCH = -1
NOWHERE = -1
"""Where a group begins that has not found out yet; where it stands that has not begun."""
MAX_INT32 = 2**31 - 1
MAX_OFFSET = 2**63 - 2
"""Of a record: there is one behind it."""
MAX_DELIVERIES = 2**15 - 2
"""It is delivered once more, and that is told, before anybody asks whether it was often enough."""
MAX_TOLD = 50_000
"""Batches of one answer, but for its last partition: whoever is told of fewer asks for the others again."""
KEPT = frozenset({RecordState.AVAILABLE.value, *(state.value for state in SETTLED)})
_SETTLED = tuple(state.value for state in SETTLED)

NEGATIVE = KafkaError(ErrorCode.INVALID_REQUEST, "The partition id cannot be a negative number.")
UNKNOWN = KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition.")
ELSEWHERE = KafkaError(ErrorCode.NOT_COORDINATOR, "another node leads the partition")
FENCED_LEADER = KafkaError(
    ErrorCode.FENCED_LEADER_EPOCH, "The leader epoch in the request is older than the epoch on the broker."
)
FENCED_STATE = KafkaError(
    ErrorCode.FENCED_STATE_EPOCH,
    "The share coordinator rejected the request because the share-group state epoch did not match.",
)
ENOUGH = KafkaError(
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "one answer has no room for more: ask again for what is left"
)
UNREAD = KafkaError(ErrorCode.INVALID_REQUEST, "Read operation on uninitialized share partition not allowed.")
UNWRITTEN = KafkaError(ErrorCode.INVALID_REQUEST, "Write operation on uninitialized share partition not allowed.")

Part = TypeVar("Part")
Result = TypeVar("Result")
Found = Partition | KafkaError
"""A partition of which this node is the coordinator, or why it is none."""

# --- InitializeShareGroupState ------------------------------------------------------------------------------------


async def initialize_share_group_state(
    request: InitializeShareGroupStateRequest, context: RequestContext
) -> InitializeShareGroupStateResponse:
    """Offset −1: the first reader begins where the group's settings say. A group that nobody has joined yet begins with
    it where this node coordinates it; elsewhere it is one that there is not."""
    if not request.group_id:
        return InitializeShareGroupStateResponse()
    asked = await _asked(request.topics)
    found = await _found(asked, context)
    begins: dict[PartitionName, tuple[int, int]] = {}
    async for name, part in in_pieces(asked.items()):
        if isinstance(found[name], KafkaError):
            continue
        if part.start_offset < NOWHERE or part.start_offset > MAX_OFFSET + 1:
            found[name] = KafkaError(ErrorCode.INVALID_REQUEST, f"there is no offset {part.start_offset}")
        else:
            begins[name] = part.start_offset, part.state_epoch
    begun: Mapping[PartitionName, bool] | KafkaError = {}
    if begins:
        begun = await _initialize(request.group_id, begins, context)
    async for name in in_pieces(begins):
        if isinstance(begun, KafkaError):
            found[name] = begun
        elif not begun.get(name):
            found[name] = FENCED_STATE if name in begun else UNKNOWN
        else:
            context.services.share.drop((ShareKey(request.group_id, *name),))
    return InitializeShareGroupStateResponse(
        results=await _by_topic(
            found,
            lambda name: initializing.PartitionResult(partition=name[1], **_error(found[name])),
            lambda topic_id, parts: initializing.InitializeStateResult(topic_id=topic_id, partitions=parts),
        )
    )


async def _initialize(
    group_id: str, begins: Mapping[PartitionName, tuple[int, int]], context: RequestContext
) -> Mapping[PartitionName, bool] | KafkaError:
    """As `ShareStore.initialize`, or why there is no such group."""
    services = context.services
    begun = await services.share_store.initialize(group_id, begins)
    if len(begun) == len(begins):
        return begun
    try:
        await begin_share_group(group_id, services)
    except KafkaError as error:
        if error.code is not ErrorCode.NOT_COORDINATOR:
            return error
        if not begun:
            return KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no share group {group_id}")
        return begun
    left = {name: begin for name, begin in begins.items() if name not in begun}
    return {**begun, **await services.share_store.initialize(group_id, left)}


def refuse_initialize_share_group_state(
    request: InitializeShareGroupStateRequest, version: int, code: ErrorCode, message: str | None
) -> InitializeShareGroupStateResponse:
    return InitializeShareGroupStateResponse(
        results=_refused(
            request.topics, code, message, initializing.PartitionResult, initializing.InitializeStateResult
        )
    )


# --- ReadShareGroupState ------------------------------------------------------------------------------------------


async def read_share_group_state(
    request: ReadShareGroupStateRequest, context: RequestContext
) -> ReadShareGroupStateResponse:
    """Whoever reads by a leader epoch that nobody had yet is the partition's leader: what members have acquired of it
    is available again. What is available and was never delivered is told as no batch."""
    if _is_void(request.group_id, request.topics):
        return ReadShareGroupStateResponse()
    services, group_id = context.services, request.group_id
    asked = await _asked(request.topics)
    found = await _found(asked, context)
    names = [name async for name in in_pieces(asked) if not isinstance(found[name], KafkaError)]
    heard = await services.share_store.hear_leaders(group_id, {name: asked[name].leader_epoch for name in names})
    async for name in in_pieces(heard):
        services.share.drop((ShareKey(group_id, *name),))
    results: dict[PartitionName, reading.PartitionResult] = {}
    told = 0
    for begin in range(0, len(names), READ_AT_A_TIME):
        some = names[begin : begin + READ_AT_A_TIME]
        if told >= MAX_TOLD:
            found.update(dict.fromkeys(names[begin:], ENOUGH))
            break
        rows = await services.share_store.states(group_id, some)
        async for name, row in in_pieces(list(zip(some, rows, strict=True))):
            if row is None:
                found[name] = UNREAD
            elif row.leader_epoch > asked[name].leader_epoch:
                found[name] = FENCED_LEADER
            elif told >= MAX_TOLD:
                found[name] = ENOUGH
            else:
                results[name] = await _read(name[1], row)
                told += len(row.ranges)
    return ReadShareGroupStateResponse(
        results=await _by_topic(
            found,
            lambda name: results.get(name) or reading.PartitionResult(partition=name[1], **_error(found[name])),
            lambda topic_id, parts: reading.ReadStateResult(topic_id=topic_id, partitions=parts),
        )
    )


async def _read(index: int, row: ShareRow) -> reading.PartitionResult:
    batches: list[reading.StateBatch] = []
    offset = row.start_offset
    async for length, state, delivery_count in in_pieces(row.ranges):
        if state != RecordState.AVAILABLE.value or delivery_count:
            batches.append(
                reading.StateBatch(
                    first_offset=offset,
                    last_offset=offset + length - 1,
                    delivery_state=state,
                    delivery_count=delivery_count,
                )
            )
        offset += length
    return reading.PartitionResult(
        partition=index, state_epoch=row.begun_epoch, start_offset=row.start_offset, state_batches=tuple(batches)
    )


def refuse_read_share_group_state(
    request: ReadShareGroupStateRequest, version: int, code: ErrorCode, message: str | None
) -> ReadShareGroupStateResponse:
    return ReadShareGroupStateResponse(
        results=_refused(request.topics, code, message, reading.PartitionResult, reading.ReadStateResult)
    )


# --- WriteShareGroupState -----------------------------------------------------------------------------------------


async def write_share_group_state(
    request: WriteShareGroupStateRequest, context: RequestContext
) -> WriteShareGroupStateResponse:
    """Durable when it is answered. How much is settled behind the start offset is counted from what is written, not
    taken from the request."""
    if _is_void(request.group_id, request.topics):
        return WriteShareGroupStateResponse()
    services, group_id = context.services, request.group_id
    asked = await _asked(request.topics)
    found = await _found(asked, context)
    names = [name async for name in in_pieces(asked) if not isinstance(found[name], KafkaError)]
    for begin in range(0, len(names), WRITTEN_AT_A_TIME):
        some = names[begin : begin + WRITTEN_AT_A_TIME]
        epochs = await services.share_store.epochs([ShareKey(group_id, *name) for name in some])
        for name, epoch in zip(some, epochs, strict=True):
            if epoch is None:
                found[name] = UNWRITTEN
    names = [name for name in names if not isinstance(found[name], KafkaError)]
    for begin in range(0, len(names), LOADED_AT_ONCE):
        some = names[begin : begin + LOADED_AT_ONCE]
        outcomes = await asyncio.gather(*(_write(group_id, asked[name], found[name], name, context) for name in some))
        for name, refused in zip(some, outcomes, strict=True):
            found[name] = refused or found[name]
    return WriteShareGroupStateResponse(
        results=await _by_topic(
            found,
            lambda name: writing.PartitionResult(partition=name[1], **_error(found[name])),
            lambda topic_id, parts: writing.WriteStateResult(topic_id=topic_id, partitions=parts),
        )
    )


async def _write(
    group_id: str, asked: writing.PartitionData, partition: Found, name: PartitionName, context: RequestContext
) -> KafkaError | None:
    """Why it is not written."""
    assert isinstance(partition, Partition)
    share, groups = context.services.share, context.services.groups.settings
    settings, key = groups.share_of.get(group_id, groups.share), ShareKey(group_id, *name)

    async def start() -> int:
        return await start_of(partition, settings, context) if asked.start_offset < 0 else asked.start_offset

    try:
        told = await _told(asked)
        await share.load(key, start, partition_settings(settings))
        begun_epoch, leader_epoch = share.epochs(key)
        if asked.leader_epoch != ANY_EPOCH and asked.leader_epoch < leader_epoch:
            return FENCED_LEADER
        if asked.state_epoch != ANY_EPOCH and asked.state_epoch < begun_epoch:
            return FENCED_STATE
        taken = await share.apply(key, told)
    except KafkaError as error:
        return ELSEWHERE if error.code is ErrorCode.NOT_LEADER_OR_FOLLOWER else error
    return KafkaError(taken.error, "there would be too many ranges of records") if taken.error else None


async def _told(asked: writing.PartitionData) -> StateTold:
    """Raises KafkaError."""
    if not NOWHERE <= asked.start_offset <= MAX_OFFSET + 1:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"there is no offset {asked.start_offset}")
    told: list[Told] = []
    async for batch in in_pieces(asked.state_batches):
        if (
            not 0 <= batch.first_offset <= batch.last_offset <= MAX_OFFSET
            or batch.delivery_state not in KEPT
            or not 0 <= batch.delivery_count <= MAX_DELIVERIES
        ):
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"there is no such state of records: {batch}")
        state = RecordState(batch.delivery_state)
        told.append(Told(batch.first_offset, batch.last_offset, state, batch.delivery_count))
    return StateTold(None if asked.start_offset == NOWHERE else asked.start_offset, tuple(told))


def refuse_write_share_group_state(
    request: WriteShareGroupStateRequest, version: int, code: ErrorCode, message: str | None
) -> WriteShareGroupStateResponse:
    return WriteShareGroupStateResponse(
        results=_refused(request.topics, code, message, writing.PartitionResult, writing.WriteStateResult)
    )


# --- DeleteShareGroupState ----------------------------------------------------------------------------------------


async def delete_share_group_state(
    request: DeleteShareGroupStateRequest, context: RequestContext
) -> DeleteShareGroupStateResponse:
    """What was not there is deleted, too. Members that read on begin anew, as in a partition that is new to them."""
    if _is_void(request.group_id, request.topics):
        return DeleteShareGroupStateResponse()
    services = context.services
    found = await _found(await _asked(request.topics), context)
    names = [name async for name, place in in_pieces(found.items()) if not isinstance(place, KafkaError)]
    await services.share_store.forget(request.group_id, names)
    async for name in in_pieces(names):
        services.share.drop((ShareKey(request.group_id, *name),))
    return DeleteShareGroupStateResponse(
        results=await _by_topic(
            found,
            lambda name: deleting.PartitionResult(partition=name[1], **_error(found[name])),
            lambda topic_id, parts: deleting.DeleteStateResult(topic_id=topic_id, partitions=parts),
        )
    )


def refuse_delete_share_group_state(
    request: DeleteShareGroupStateRequest, version: int, code: ErrorCode, message: str | None
) -> DeleteShareGroupStateResponse:
    return DeleteShareGroupStateResponse(
        results=_refused(request.topics, code, message, deleting.PartitionResult, deleting.DeleteStateResult)
    )


# --- ReadShareGroupStateSummary -----------------------------------------------------------------------------------


async def read_share_group_state_summary(
    request: ReadShareGroupStateSummaryRequest, context: RequestContext
) -> ReadShareGroupStateSummaryResponse:
    """Where a group has not begun it stands at −1, and what is settled there is not known."""
    if _is_void(request.group_id, request.topics):
        return ReadShareGroupStateSummaryResponse()
    found = await _found(await _asked(request.topics), context)
    names = [name async for name, place in in_pieces(found.items()) if not isinstance(place, KafkaError)]
    results: dict[PartitionName, summing.PartitionResult] = {}
    for begin in range(0, len(names), WRITTEN_AT_A_TIME):
        some = names[begin : begin + WRITTEN_AT_A_TIME]
        summaries = await context.services.share_store.summaries(request.group_id, some, _SETTLED)
        for name, summary in zip(some, summaries, strict=True):
            results[name] = _summed_up(name[1], summary)
    return ReadShareGroupStateSummaryResponse(
        results=await _by_topic(
            found,
            lambda name: results.get(name) or summing.PartitionResult(partition=name[1], **_error(found[name])),
            lambda topic_id, parts: summing.ReadStateSummaryResult(topic_id=topic_id, partitions=parts),
        )
    )


def _summed_up(index: int, summary: ShareSummary | None) -> summing.PartitionResult:
    if summary is None:
        return summing.PartitionResult(partition=index, start_offset=NOWHERE)
    settled = min(summary.settled, MAX_INT32) if summary.start_offset != NOWHERE else NOWHERE
    return summing.PartitionResult(
        partition=index,
        state_epoch=summary.begun_epoch,
        leader_epoch=summary.leader_epoch,
        start_offset=summary.start_offset,
        delivery_complete_count=settled,
    )


def refuse_read_share_group_state_summary(
    request: ReadShareGroupStateSummaryRequest, version: int, code: ErrorCode, message: str | None
) -> ReadShareGroupStateSummaryResponse:
    return ReadShareGroupStateSummaryResponse(
        results=_refused(request.topics, code, message, summing.PartitionResult, summing.ReadStateSummaryResult)
    )


# --- what all of them do ------------------------------------------------------------------------------------------


def _is_void(group_id: str, topics: Sequence[Any]) -> bool:
    """Then nothing is answered, as upstream."""
    return not group_id or not all(topic.partitions for topic in topics)


async def _asked(topics: Iterable[Any]) -> dict[PartitionName, Any]:
    """What is said of each partition; of one that is named twice, the last."""
    asked: dict[PartitionName, Any] = {}
    async for topic in in_pieces(topics):
        async for part in in_pieces(topic.partitions):
            asked[topic.topic_id, part.partition] = part
    return asked


async def _found(names: Iterable[PartitionName], context: RequestContext) -> dict[PartitionName, Found]:
    services = context.services
    names = list(names)
    missing = await resolve_topics((("", topic_id) for topic_id, _ in names), context, by_id=True)
    found: dict[PartitionName, Found] = {}
    async for topic_id, index in in_pieces(names):
        topic = services.catalog.get_by_id(topic_id)
        place: Found
        if index < 0:
            place = NEGATIVE
        elif topic is None:
            place = (
                UNKNOWN if missing is ErrorCode.UNKNOWN_TOPIC_ID else KafkaError(missing, "the topics cannot be read")
            )
        elif index >= len(topic.partitions):
            place = UNKNOWN
        elif not services.membership.leads(topic.partitions[index]):
            place = ELSEWHERE
        else:
            place = topic.partitions[index]
        found[topic_id, index] = place
    return found


async def _by_topic(
    names: Iterable[PartitionName],
    answer: Callable[[PartitionName], Part],
    result: Callable[[UUID, tuple[Part, ...]], Result],
) -> tuple[Result, ...]:
    parts: dict[UUID, list[Part]] = {}
    async for name in in_pieces(names):
        parts.setdefault(name[0], []).append(answer(name))
    return tuple([result(topic_id, tuple(some)) async for topic_id, some in in_pieces(parts.items())])


def _refused(
    topics: Iterable[Any],
    code: ErrorCode,
    message: str | None,
    answer: Callable[..., object],
    result: Callable[..., Result],
) -> tuple[Result, ...]:
    """The code on every partition, in the order of the request."""
    return tuple(
        result(
            topic_id=topic.topic_id,
            partitions=tuple(
                answer(partition=part.partition, error_code=code, error_message=message) for part in topic.partitions
            ),
        )
        for topic in topics
    )


def _error(found: Found) -> dict[str, Any]:
    return {"error_code": found.code, "error_message": found.message} if isinstance(found, KafkaError) else {}
