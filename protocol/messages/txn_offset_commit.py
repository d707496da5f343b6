"""TxnOffsetCommit: commit offsets of a group, effective when the transaction commits.

Version 2 brings leader epochs (KIP-320), 3 the group's member and generation (KIP-447), 4 the code
TRANSACTION_ABORTABLE. With 5 AddOffsetsToTxn need not come first (KIP-890). Version 6 names
topics by their ids (KIP-1319).
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct, uuid


@struct
class TxnOffsetCommitRequestPartition:
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(versions="2+", default=-1)
    committed_metadata: str | None = string(nullable="0+")


@struct
class TxnOffsetCommitRequestTopic:
    name: str = string(versions="0-5")
    topic_id: UUID = uuid(versions="6+")
    partitions: tuple[TxnOffsetCommitRequestPartition, ...] = array(TxnOffsetCommitRequestPartition)


@message(ApiKey.TXN_OFFSET_COMMIT, versions="0-6", flexible="3+")
class TxnOffsetCommitRequest:
    transactional_id: str = string()
    group_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    generation_id_or_member_epoch: int = int32(versions="3+", default=-1)
    member_id: str = string(versions="3+")
    group_instance_id: str | None = string(versions="3+", nullable="3+", default=None)
    topics: tuple[TxnOffsetCommitRequestTopic, ...] = array(TxnOffsetCommitRequestTopic)


@struct
class TxnOffsetCommitResponsePartition:
    partition_index: int = int32()
    error_code: int = int16()


@struct
class TxnOffsetCommitResponseTopic:
    name: str = string(versions="0-5")
    topic_id: UUID = uuid(versions="6+")
    partitions: tuple[TxnOffsetCommitResponsePartition, ...] = array(TxnOffsetCommitResponsePartition)


@message(ApiKey.TXN_OFFSET_COMMIT, versions="0-6", flexible="3+")
class TxnOffsetCommitResponse:
    throttle_time_ms: int = int32()
    topics: tuple[TxnOffsetCommitResponseTopic, ...] = array(TxnOffsetCommitResponseTopic)
