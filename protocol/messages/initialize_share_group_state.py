"""InitializeShareGroupState: where a share group is to begin in a partition, with nothing delivered yet (KIP-932)."""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct, uuid


@struct
class PartitionData:
    partition: int = int32()
    state_epoch: int = int32()
    start_offset: int = int64()


@struct
class InitializeStateData:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionData, ...] = array(PartitionData)


@message(ApiKey.INITIALIZE_SHARE_GROUP_STATE, versions="0", flexible="0+")
class InitializeShareGroupStateRequest:
    group_id: str = string()
    topics: tuple[InitializeStateData, ...] = array(InitializeStateData)


@struct
class PartitionResult:
    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)


@struct
class InitializeStateResult:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionResult, ...] = array(PartitionResult)


@message(ApiKey.INITIALIZE_SHARE_GROUP_STATE, versions="0", flexible="0+")
class InitializeShareGroupStateResponse:
    results: tuple[InitializeStateResult, ...] = array(InitializeStateResult)
