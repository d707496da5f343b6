"""ListTransactions, DescribeTransactions, DescribeProducers and WriteTxnMarkers: transactions as administrators see and
end them (KIP-664).

The one idea: a transaction that has ended cannot hang in one partition. An administrator who aborts it in one partition
aborts all of it, and its producer is fenced. Only Kafka's own coordinators send COMMIT markers, so these are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Protocol

import re2

from gateway.apis.coordinator_topics import offsets_partitions
from gateway.apis.partition_lookup import find_partition, look_up_topics
from gateway.apis.services import FindsTopics, HasTransactions
from gateway.cluster.leases import partition_of
from gateway.coordinator.consumer.topics import InvalidPatternError, compile_pattern
from gateway.coordinator.transactions import NO_EPOCH, TransactionState
from gateway.log.topic_names import CONSUMER_OFFSETS, why_illegal
from gateway.net.context import RequestContext
from gateway.net.pieces import first_of_each, in_pieces
from gateway.security.authorizer import HasAuthorizer, may, may_topic
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import list_transactions as listed
from protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    PartitionResponse,
    ProducerState,
    TopicResponse,
)
from protocol.messages.describe_transactions import DescribeTransactionsRequest, DescribeTransactionsResponse, TopicData
from protocol.messages.describe_transactions import TransactionState as DescribedTransaction
from protocol.messages.list_transactions import ListTransactionsRequest, ListTransactionsResponse
from protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopic,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from protocol.records import COORDINATOR_EPOCH
from storage.errors import StorageError
from storage.transactions import StoredProducer, TransactionPartition
from storage.types import Topic

AT_A_TIME = 1_000
"""Rows that one query of Postgres returns."""

NOT_OPEN = -1
"""Value for the start of a transaction that is not open, as a time or as an offset."""

UPSTREAM_STATES = frozenset(TransactionState) | {"PrepareEpochFence", "Dead"}
"""States that a request may name. No transaction is ever in one of upstream's other states."""


# --- ListTransactions -------------------------------------------------------------------------------------------------


class TransactionAdminServices(FindsTopics, HasTransactions, Protocol): ...


async def list_transactions(
    request: ListTransactionsRequest, context: RequestContext[TransactionAdminServices]
) -> ListTransactionsResponse:
    """List the transactions that this node coordinates: admin clients ask every node and merge. Clients of a shared
    listener ask one node, which lists all.

    A filter by duration also lists transactions that are over, and producers that have begun none. Upstream does the
    same (TransactionStateManager.listTransactionStates), because their start time is −1.
    """
    states = dict.fromkeys(request.state_filters)
    producer_ids = frozenset(request.producer_id_filters)
    pattern = _pattern(request.transactional_id_pattern)
    transactions, lists_all = context.services.transactions, context.connection.shared is not None
    found = [
        listed.TransactionState(
            transactional_id=producer.transactional_id,
            producer_id=producer.producer_id,
            transaction_state=producer.state,
        )
        async for producer in in_pieces(await context.services.transactions.listing.get())
        if (not states or producer.state in states)
        and (not producer_ids or producer.producer_id in producer_ids)
        and (request.duration_filter < 0 or producer.begun_ms is None or producer.begun_ms > request.duration_filter)
        and (pattern is None or pattern.fullmatch(producer.transactional_id))
        and (lists_all or transactions.coordinates(producer.transactional_id))
        and may(context, AclOperation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, producer.transactional_id, told=False)
    ]
    return ListTransactionsResponse(
        unknown_state_filters=tuple(state for state in states if state not in UPSTREAM_STATES),
        transaction_states=tuple(found),
    )


def _pattern(text: str | None) -> re2.Pattern | None:
    if not text:
        return None
    try:
        return compile_pattern(text)
    except InvalidPatternError as invalid:
        raise KafkaError(
            ErrorCode.INVALID_REGULAR_EXPRESSION,
            f"Transaction ID pattern `{text}` is not a valid regular expression: {invalid}.",
        ) from invalid


# --- DescribeTransactions ---------------------------------------------------------------------------------------------


async def describe_transactions(
    request: DescribeTransactionsRequest, context: RequestContext[TransactionAdminServices]
) -> DescribeTransactionsResponse:
    """Describe transactions. Every node can answer from Postgres. An id that is named twice is answered once, because
    its transaction may have very many partitions."""
    described: list[DescribedTransaction] = []
    asked: list[str] = []
    async for transactional_id in in_pieces(await first_of_each(request.transactional_ids)):
        if may(context, AclOperation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, transactional_id):
            asked.append(transactional_id)
        else:
            code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            described.append(DescribedTransaction(transactional_id=transactional_id, error_code=code))
    for start in range(0, len(asked), AT_A_TIME):
        described += await _describe(asked[start : start + AT_A_TIME], context)
    return DescribeTransactionsResponse(transaction_states=tuple(described))


async def _describe(
    transactional_ids: Sequence[str], context: RequestContext[TransactionAdminServices]
) -> list[DescribedTransaction]:
    store = context.services.transactions.store
    found = await store.read_many(frozenset(transactional_ids))
    open_ids = [read.enlisted_id for read in found.values() if read.enlisted_id is not None]
    partitions = await store.partitions(open_ids)
    groups = await store.groups(open_ids)
    count = offsets_partitions(context.services.catalog)
    topics = {
        producer_id: await _topics(partitions.get(producer_id, ()), groups.get(producer_id, ()), count, context)
        async for producer_id in in_pieces(open_ids)
    }
    return [
        _described(transactional_id, found[transactional_id], topics)
        async for transactional_id in in_pieces(transactional_ids)
    ]


def _described(
    transactional_id: str, read: StoredProducer, topics: Mapping[int, tuple[TopicData, ...]]
) -> DescribedTransaction:
    record = read.record
    if record is None:
        code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND if transactional_id else ErrorCode.INVALID_REQUEST
        return DescribedTransaction(transactional_id=transactional_id, error_code=code)
    started_ms = read.last_started_ms if read.started_ms is None else read.started_ms
    return DescribedTransaction(
        transactional_id=transactional_id,
        transaction_state=record.state,
        transaction_timeout_ms=record.timeout_ms,
        transaction_start_time_ms=NOT_OPEN if started_ms is None else started_ms,
        producer_id=record.producer_id,
        producer_epoch=record.producer_epoch,
        topics=() if read.enlisted_id is None else topics.get(read.enlisted_id, ()),
    )


async def _topics(
    partitions: Sequence[TransactionPartition],
    group_ids: Sequence[str],
    count: int,
    context: RequestContext[HasAuthorizer],
) -> tuple[TopicData, ...]:
    """Return a transaction's partitions, without topics that the client may not see.

    As upstream, a group shows as the partition of `__consumer_offsets` for its offsets; that topic has `count`
    partitions.
    """
    topics = [
        TopicData(topic=name, partitions=tuple([part.partition_index async for part in in_pieces(some)]))
        for name, some in groupby(partitions, key=lambda part: part.topic)
    ]
    if group_ids:
        indexes = {partition_of(group_id, count) async for group_id in in_pieces(group_ids)}
        topics.append(TopicData(topic=CONSUMER_OFFSETS, partitions=tuple(sorted(indexes))))
    return tuple([topic async for topic in in_pieces(topics) if may_topic(context, AclOperation.DESCRIBE, topic.topic)])


# --- DescribeProducers ------------------------------------------------------------------------------------------------


async def describe_producers(
    request: DescribeProducersRequest, context: RequestContext[TransactionAdminServices]
) -> DescribeProducersResponse:
    """Describe the producers that partitions remember, and the start of each one's open transaction there.

    A partition that is named twice is answered once, because it may remember very many.
    """
    known = await look_up_topics((topic.name for topic in request.topics), context, AclOperation.READ)
    asked: dict[str, dict[int, None]] = {}
    async for topic in in_pieces(request.topics):
        indexes = asked.setdefault(topic.name, {})
        async for index in in_pieces(topic.partition_indexes):
            indexes[index] = None
    topics: list[TopicResponse] = []
    async for name, indexes in in_pieces(asked.items()):
        found = known[name]
        if found is not ErrorCode.TOPIC_AUTHORIZATION_FAILED and why_illegal(name):
            found = ErrorCode.INVALID_TOPIC_EXCEPTION
        partitions = [await _producers_of(found, index, context) async for index in in_pieces(indexes)]
        topics.append(TopicResponse(name=name, partitions=tuple(partitions)))
    return DescribeProducersResponse(topics=tuple(topics))


async def _producers_of(
    topic: Topic | ErrorCode, index: int, context: RequestContext[HasTransactions]
) -> PartitionResponse:
    partition = find_partition(topic, index)
    if isinstance(partition, ErrorCode):
        return PartitionResponse(partition_index=index, error_code=partition)
    store = context.services.transactions.store
    producers: list[ProducerState] = []
    try:
        some = await store.producers(partition.partition_key, AT_A_TIME)
        while some:
            producers += [
                ProducerState(
                    producer_id=producer.producer_id,
                    producer_epoch=producer.producer_epoch,
                    last_sequence=producer.last_sequence,
                    last_timestamp=producer.appended_ms,
                    # All markers have this epoch, because any node may end a transaction. Upstream sets it once a
                    # marker of the producer exists.
                    coordinator_epoch=COORDINATOR_EPOCH if producer.is_transactional else NO_EPOCH,
                    current_txn_start_offset=(
                        NOT_OPEN if producer.open_since_offset is None else producer.open_since_offset
                    ),
                )
                async for producer in in_pieces(some)
            ]
            behind = some[-1].producer_id
            more = len(some) == AT_A_TIME
            some = await store.producers(partition.partition_key, AT_A_TIME, behind=behind) if more else []
    except StorageError as error:
        return PartitionResponse(partition_index=index, error_code=context.storage_failed(context.api_key, error))
    return PartitionResponse(partition_index=index, active_producers=tuple(producers))


# --- WriteTxnMarkers --------------------------------------------------------------------------------------------------


async def write_txn_markers(
    request: WriteTxnMarkersRequest, context: RequestContext[TransactionAdminServices]
) -> WriteTxnMarkersResponse:
    """Abort the transactions that producers have open in partitions, for an administrator.

    An ABORT marker aborts the whole transaction and fences its producer. Upstream writes it to the partition alone,
    which takes a part out of a transaction that may be committed later. That is correct only if the transaction has
    ended and the partition was forgotten, which cannot happen here. Without a later epoch the producer would continue
    as if nothing had happened. If nothing is open, nothing is written. A COMMIT marker gets INVALID_REQUEST.
    """
    known = await look_up_topics(
        (topic.name for marker in request.markers for topic in marker.topics),
        context,
        None,
    )
    results = [
        WritableTxnMarkerResult(
            producer_id=marker.producer_id,
            topics=tuple(
                [
                    await _mark_topic(marker, topic, known[topic.name], context)
                    async for topic in in_pieces(marker.topics)
                ]
            ),
        )
        async for marker in in_pieces(request.markers)
    ]
    return WriteTxnMarkersResponse(markers=tuple(results))


async def _mark_topic(
    marker: WritableTxnMarker,
    asked: WritableTxnMarkerTopic,
    topic: Topic | ErrorCode,
    context: RequestContext[HasTransactions],
) -> WritableTxnMarkerTopicResult:
    return WritableTxnMarkerTopicResult(
        name=asked.name,
        partitions=tuple(
            [
                WritableTxnMarkerPartitionResult(
                    partition_index=index, error_code=await _mark(marker, topic, index, context)
                )
                async for index in in_pieces(asked.partition_indexes)
            ]
        ),
    )


async def _mark(
    marker: WritableTxnMarker, topic: Topic | ErrorCode, index: int, context: RequestContext[HasTransactions]
) -> ErrorCode:
    partition = find_partition(topic, index)
    if isinstance(partition, ErrorCode):
        return partition
    assert isinstance(topic, Topic)
    if marker.transaction_result:
        return ErrorCode.INVALID_REQUEST
    count = len(topic.partitions)
    try:
        await context.services.transactions.abort_in_partition(
            partition.partition_key,
            marker.producer_id,
            marker.producer_epoch,
            marker.transaction_version,
            keeps=None if topic.name != CONSUMER_OFFSETS else lambda group_id: partition_of(group_id, count) == index,
        )
    except KafkaError as refused:
        return refused.code
    except StorageError as error:
        return context.storage_failed(context.api_key, error)
    return ErrorCode.NONE
