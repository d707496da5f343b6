"""AddPartitionsToTxn, AddOffsetsToTxn and EndTxn: what a transaction takes in, and how it ends.

Clients name partitions and groups before they write there (KIP-98); what they have not named, the log refuses. Those
that go by `transaction.version` 2 name nothing (KIP-890): Produce and TxnOffsetCommit take in what they write to.
"""

from __future__ import annotations

from gateway.log.partition_lookup import find_partition, look_up_topics
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopicResult,
)
from protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from storage.types import Partition, PartitionKey

FIRST_VERSION_WITH_FENCED = 2
FIRST_VERSION_THAT_RAISES_EPOCH = 5
NO_LEADER_EPOCH = -1


async def add_partitions_to_txn(
    request: AddPartitionsToTxnRequest, context: RequestContext
) -> AddPartitionsToTxnResponse:
    """All of them or none: where one does not exist, the others are answered OPERATION_NOT_ATTEMPTED."""
    _require_id(request.v3_and_below_transactional_id)
    known = await look_up_topics((topic.name for topic in request.v3_and_below_topics), context, AclOperation.WRITE)
    found = {
        (topic.name, index): find_partition(known[topic.name], index, NO_LEADER_EPOCH)
        async for topic in in_pieces(request.v3_and_below_topics)
        async for index in in_pieces(topic.partitions)
    }
    keys: list[PartitionKey] = [part.partition_key for part in found.values() if isinstance(part, Partition)]
    if len(keys) == len(found):
        await context.services.transactions.add(
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
            keys,
        )
    others = ErrorCode.NONE if len(keys) == len(found) else ErrorCode.OPERATION_NOT_ATTEMPTED

    def error_of(name: str, index: int) -> ErrorCode:
        part = found[name, index]
        return others if isinstance(part, Partition) else part

    return AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=tuple(
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
                async for topic in in_pieces(request.v3_and_below_topics)
            ]
        )
    )


def refuse_add_partitions_to_txn(
    request: AddPartitionsToTxnRequest, version: int, code: ErrorCode, message: str | None
) -> AddPartitionsToTxnResponse:
    code = _as_of(code, version)
    return AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=tuple(
            AddPartitionsToTxnTopicResult(
                name=topic.name,
                results_by_partition=tuple(
                    AddPartitionsToTxnPartitionResult(partition_index=index, partition_error_code=code)
                    for index in topic.partitions
                ),
            )
            for topic in request.v3_and_below_topics
        )
    )


async def add_offsets_to_txn(request: AddOffsetsToTxnRequest, context: RequestContext) -> AddOffsetsToTxnResponse:
    """From here on TxnOffsetCommit takes offsets of the group for this transaction."""
    _require_id(request.transactional_id)
    await context.services.transactions.add(
        request.transactional_id, request.producer_id, request.producer_epoch, group_ids=(request.group_id,)
    )
    return AddOffsetsToTxnResponse()


def refuse_add_offsets_to_txn(
    request: AddOffsetsToTxnRequest, version: int, code: ErrorCode, message: str | None
) -> AddOffsetsToTxnResponse:
    return AddOffsetsToTxnResponse(error_code=_as_of(code, version))


async def end_txn(request: EndTxnRequest, context: RequestContext) -> EndTxnResponse:
    """Answered when every reader sees how it ended; from version 5 on with the epoch that the producer has now."""
    _require_id(request.transactional_id)
    raises_epoch = context.version >= FIRST_VERSION_THAT_RAISES_EPOCH
    producer = await context.services.transactions.end(
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        committed=request.committed,
        raise_epoch=raises_epoch,
    )
    if not raises_epoch:
        return EndTxnResponse()
    return EndTxnResponse(producer_id=producer.producer_id, producer_epoch=producer.producer_epoch)


def refuse_end_txn(request: EndTxnRequest, version: int, code: ErrorCode, message: str | None) -> EndTxnResponse:
    return EndTxnResponse(error_code=_as_of(code, version))


def _require_id(transactional_id: str) -> None:
    if not transactional_id:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "an empty transactional id")


def _as_of(code: ErrorCode, version: int) -> ErrorCode:
    if code is ErrorCode.PRODUCER_FENCED and version < FIRST_VERSION_WITH_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return code
