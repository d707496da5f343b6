"""TxnOffsetCommit: a group's consumed offsets, committed with a producer's transaction.

The one idea: it is an OffsetCommit (`committing.py`) whose offsets are pending until the transaction ends. They are
neither reported to the group nor journaled, because a pending offset may never be committed.
"""

from __future__ import annotations

from typing import Protocol

from gateway.apis.groups.committing import Commit, CommitServices, Committer, Transaction, commit, commits_of, set_all
from gateway.apis.services import FindsTopics, HasTransactions
from gateway.apis.transactions.enlist import enlist_in_transaction
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces, mapped
from gateway.net.refusals import DerivedRefusal
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from storage.types import Refusal

LOADING_KNOWN_FROM = 2
"""First version whose clients know COORDINATOR_LOAD_IN_PROGRESS: Java producers before 2.0 fail on it (KAFKA-7296)."""
ABORTABLE_KNOWN_FROM = 4
FIRST_VERSION_THAT_TAKES_IN = 5
BY_ID_FROM = 6
"""The version that names topics by their ids."""


class TxnOffsetCommitServices(CommitServices, FindsTopics, HasTransactions, Protocol): ...


async def txn_offset_commit(
    request: TxnOffsetCommitRequest, context: RequestContext[TxnOffsetCommitServices]
) -> TxnOffsetCommitResponse:
    """Commit offsets in a transaction. Refusals stand where OffsetCommit's do.

    Postgres checks the producer's id and epoch, and whether AddOffsetsToTxn has named the group: without it the
    transaction must be aborted. From version 5 on the group is enlisted here (KIP-890).

    Unlike in an OffsetCommit, the group's name must not be empty. Before version 3 the request does not name the
    committing member, so any transaction may commit, even if the group has members.
    """
    version = context.version
    by_id = version >= BY_ID_FROM
    topics, surviving = await commits_of(request.topics, by_id, context)
    if not request.group_id:
        await set_all(surviving, ErrorCode.INVALID_GROUP_ID)
    elif surviving and (code := await _take_in(request, context)):
        await set_all(surviving, code)
    elif surviving:
        unknown = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        codes = {Refusal.UNKNOWN_TOPIC: unknown}
        if version >= ABORTABLE_KNOWN_FROM:
            codes[Refusal.NOT_IN_TRANSACTION] = ErrorCode.TRANSACTION_ABORTABLE
            codes[Refusal.TRANSACTION_TOO_LARGE] = ErrorCode.TRANSACTION_ABORTABLE
        committer = Committer(
            group_id=request.group_id,
            member_id=request.member_id,
            group_instance_id=request.group_instance_id,
            generation_id=request.generation_id_or_member_epoch,
            codes=codes,
            transaction=Transaction(request.transactional_id, request.producer_id, request.producer_epoch),
        )
        await commit(surviving, committer, context)

    def answered(one: Commit) -> TxnOffsetCommitResponsePartition:
        code = said_at(version, one.error or ErrorCode.NONE)
        return TxnOffsetCommitResponsePartition(partition_index=one.partition.partition_index, error_code=code)

    return TxnOffsetCommitResponse(
        topics=tuple(
            [
                TxnOffsetCommitResponseTopic(
                    name=name, topic_id=topic_id, partitions=tuple(await mapped(answered, commits))
                )
                async for name, topic_id, commits in in_pieces(topics)
            ]
        )
    )


async def _take_in(request: TxnOffsetCommitRequest, context: RequestContext[HasTransactions]) -> ErrorCode:
    if context.version < FIRST_VERSION_THAT_TAKES_IN:
        return ErrorCode.NONE
    transaction = request.transactional_id, request.producer_id, request.producer_epoch
    return await enlist_in_transaction(*transaction, context, group_ids=(request.group_id,))


def said_at(version: int, code: ErrorCode) -> ErrorCode:
    if version < LOADING_KNOWN_FROM and code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    return code


refuse_txn_offset_commit = DerivedRefusal(ApiKey.TXN_OFFSET_COMMIT, code_at=said_at)
