"""AddPartitionsToTxn, AddOffsetsToTxn and EndTxn: enlist partitions and groups in a transaction, and end it.

Clients name partitions and groups before they write there (KIP-98); the log refuses writes to others. Clients of
`transaction.version` 2 name nothing (KIP-890): Produce and TxnOffsetCommit enlist what they write to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.apis.partition_lookup import find_partition, look_up_topics
from gateway.apis.services import FindsTopics, HasTransactions
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from gateway.net.refusals import DerivedRefusal
from gateway.security.kinds import AclOperation
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
    AddPartitionsToTxnTransaction,
)
from protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from storage.types import Partition, PartitionKey, Topic

FIRST_VERSION_WITH_FENCED = 2
FIRST_VERSION_WITH_ABORTABLE = 4
FIRST_VERSION_THAT_RAISES_EPOCH = 5
FIRST_VERSION_OF_BROKERS = 4
"""First version in which one AddPartitionsToTxn holds many transactions."""
MAX_TRANSACTIONS = 1_000
"""Transactions of one request. Each is processed by itself, so this many take a second or two."""


class TransactionServices(FindsTopics, HasTransactions, Protocol): ...


async def add_partitions_to_txn(
    request: AddPartitionsToTxnRequest, context: RequestContext[TransactionServices]
) -> AddPartitionsToTxnResponse:
    """Enlist all partitions of a transaction or none: if one partition does not exist, the others get
    OPERATION_NOT_ATTEMPTED.

    From version 4 on each transaction succeeds or fails alone.
    """
    if context.version < FIRST_VERSION_OF_BROKERS:
        asked = AddPartitionsToTxnTransaction(
            transactional_id=request.v3_and_below_transactional_id,
            producer_id=request.v3_and_below_producer_id,
            producer_epoch=request.v3_and_below_producer_epoch,
            topics=request.v3_and_below_topics,
        )
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=await _take_in(asked, context))
    if len(request.transactions) > MAX_TRANSACTIONS:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, f"One request may have {MAX_TRANSACTIONS} transactions.")
    results: list[AddPartitionsToTxnResult] = []
    async for asked in in_pieces(request.transactions):
        try:
            told = await _take_in(asked, context)
        except KafkaError as error:
            told = _each(asked.topics, error.code)
        results.append(AddPartitionsToTxnResult(transactional_id=asked.transactional_id, topic_results=told))
    return AddPartitionsToTxnResponse(results_by_transaction=tuple(results))


async def _take_in(
    asked: AddPartitionsToTxnTransaction, context: RequestContext[TransactionServices]
) -> tuple[AddPartitionsToTxnTopicResult, ...]:
    """Enlist the partitions of one transaction, and return the result of each. Raise KafkaError, StorageError."""
    _require_id(asked.transactional_id)
    # Brokers send these versions for clients that they have already checked (permissions.py).
    operation = AclOperation.WRITE if context.version < FIRST_VERSION_OF_BROKERS else None
    known = await look_up_topics((topic.name for topic in asked.topics), context, operation)
    found = {
        (topic.name, index): _writable(known[topic.name], index)
        async for topic in in_pieces(asked.topics)
        async for index in in_pieces(topic.partitions)
    }
    keys: list[PartitionKey] = [part.partition_key for part in found.values() if isinstance(part, Partition)]
    others = ErrorCode.NONE if len(keys) == len(found) else ErrorCode.OPERATION_NOT_ATTEMPTED
    is_in = frozenset(keys)
    if len(keys) == len(found):
        producer = (asked.transactional_id, asked.producer_id, asked.producer_epoch)
        if asked.verify_only:
            is_in = await context.services.transactions.taken_in_by(*producer)
        else:
            await context.services.transactions.add(*producer, keys, is_awaited=context.connection.is_awaiting)

    def error_of(name: str, index: int) -> ErrorCode:
        part = found[name, index]
        if not isinstance(part, Partition):
            return part
        return others if part.partition_key in is_in else ErrorCode.TRANSACTION_ABORTABLE

    return tuple(
        [
            AddPartitionsToTxnTopicResult(
                name=topic.name,
                results_by_partition=tuple(
                    [
                        AddPartitionsToTxnPartitionResult(
                            partition_index=index, partition_error_code=error_of(topic.name, index)
                        )
                        async for index in in_pieces(topic.partitions)
                    ]
                ),
            )
            async for topic in in_pieces(asked.topics)
        ]
    )


def _writable(topic: Topic | ErrorCode, index: int) -> Partition | ErrorCode:
    """Return the partition, or the reason of a refusal. Clients write to no internal topic, so its log has no markers.
    Kafka refuses with the same code."""
    internal = isinstance(topic, Topic) and topic.internal
    return ErrorCode.TOPIC_AUTHORIZATION_FAILED if internal else find_partition(topic, index)


def _code_at(version: int, code: ErrorCode) -> ErrorCode:
    if code is ErrorCode.TRANSACTION_ABORTABLE and version < FIRST_VERSION_WITH_ABORTABLE:
        # The transaction is too large. Clients fail it, or the producer, for any code that they do not retry.
        return ErrorCode.POLICY_VIOLATION
    if code is ErrorCode.PRODUCER_FENCED and version < FIRST_VERSION_WITH_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return code


def refuse_add_partitions_to_txn(
    request: AddPartitionsToTxnRequest, version: int, code: ErrorCode, _message: str | None
) -> AddPartitionsToTxnResponse:
    if version >= FIRST_VERSION_OF_BROKERS:
        return AddPartitionsToTxnResponse(error_code=code)
    return AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=_each(request.v3_and_below_topics, _code_at(version, code))
    )


def _each(topics: Sequence[AddPartitionsToTxnTopic], code: ErrorCode) -> tuple[AddPartitionsToTxnTopicResult, ...]:
    return tuple(
        AddPartitionsToTxnTopicResult(
            name=topic.name,
            results_by_partition=tuple(
                AddPartitionsToTxnPartitionResult(partition_index=index, partition_error_code=code)
                for index in topic.partitions
            ),
        )
        for topic in topics
    )


async def add_offsets_to_txn(
    request: AddOffsetsToTxnRequest, context: RequestContext[HasTransactions]
) -> AddOffsetsToTxnResponse:
    """Enlist the group, so that TxnOffsetCommit accepts its offsets for this transaction."""
    _require_id(request.transactional_id)
    await context.services.transactions.add(
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        group_ids=(request.group_id,),
        is_awaited=context.connection.is_awaiting,
    )
    return AddOffsetsToTxnResponse()


refuse_add_offsets_to_txn = DerivedRefusal(ApiKey.ADD_OFFSETS_TO_TXN, code_at=_code_at)


async def end_txn(request: EndTxnRequest, context: RequestContext[HasTransactions]) -> EndTxnResponse:
    """End the transaction, and answer when every reader sees the outcome. From version 5 on the answer carries the
    producer's new epoch."""
    _require_id(request.transactional_id)
    raises_epoch = context.version >= FIRST_VERSION_THAT_RAISES_EPOCH
    producer = await context.services.transactions.end(
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        committed=request.committed,
        raise_epoch=raises_epoch,
        is_awaited=context.connection.is_awaiting,
    )
    if not raises_epoch:
        return EndTxnResponse()
    return EndTxnResponse(producer_id=producer.producer_id, producer_epoch=producer.producer_epoch)


refuse_end_txn = DerivedRefusal(ApiKey.END_TXN, code_at=_code_at)


def _require_id(transactional_id: str) -> None:
    if not transactional_id:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "the transactional id is empty")
