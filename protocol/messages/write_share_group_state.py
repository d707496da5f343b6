"""WriteShareGroupState: what a share group has done since with the records of its partitions (KIP-932).

Version 1 counts what behind the start offset is settled (KIP-1226).
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int8, int16, int32, int64, message, string, struct, uuid


@struct
class StateBatch:
    first_offset: int = int64()
    last_offset: int = int64()
    delivery_state: int = int8()
    delivery_count: int = int16()


@struct
class PartitionData:
    partition: int = int32()
    state_epoch: int = int32()
    leader_epoch: int = int32()
    start_offset: int = int64()
    delivery_complete_count: int = int32(versions="1+", default=-1)
    state_batches: tuple[StateBatch, ...] = array(StateBatch)


@struct
class WriteStateData:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionData, ...] = array(PartitionData)


@message(ApiKey.WRITE_SHARE_GROUP_STATE, versions="0-1", flexible="0+")
class WriteShareGroupStateRequest:
    group_id: str = string()
    topics: tuple[WriteStateData, ...] = array(WriteStateData)


@struct
class PartitionResult:
    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)


@struct
class WriteStateResult:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionResult, ...] = array(PartitionResult)


@message(ApiKey.WRITE_SHARE_GROUP_STATE, versions="0-1", flexible="0+")
class WriteShareGroupStateResponse:
    results: tuple[WriteStateResult, ...] = array(WriteStateResult)
