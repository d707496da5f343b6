"""ReadShareGroupState: what a share group has done with the records of its partitions (KIP-932)."""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int8, int16, int32, int64, message, string, struct, uuid


@struct
class PartitionData:
    partition: int = int32()
    leader_epoch: int = int32()


@struct
class ReadStateData:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionData, ...] = array(PartitionData)


@message(ApiKey.READ_SHARE_GROUP_STATE, versions="0", flexible="0+")
class ReadShareGroupStateRequest:
    group_id: str = string()
    topics: tuple[ReadStateData, ...] = array(ReadStateData)


@struct
class StateBatch:
    first_offset: int = int64()
    last_offset: int = int64()
    delivery_state: int = int8()
    delivery_count: int = int16()


@struct
class PartitionResult:
    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    state_epoch: int = int32()
    start_offset: int = int64()
    state_batches: tuple[StateBatch, ...] = array(StateBatch)


@struct
class ReadStateResult:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionResult, ...] = array(PartitionResult)


@message(ApiKey.READ_SHARE_GROUP_STATE, versions="0", flexible="0+")
class ReadShareGroupStateResponse:
    results: tuple[ReadStateResult, ...] = array(ReadStateResult)
