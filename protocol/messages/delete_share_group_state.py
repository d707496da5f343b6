"""DeleteShareGroupState: forget where a share group stands in partitions (KIP-932)."""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, message, string, struct, uuid


@struct
class PartitionData:
    partition: int = int32()


@struct
class DeleteStateData:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionData, ...] = array(PartitionData)


@message(ApiKey.DELETE_SHARE_GROUP_STATE, versions="0", flexible="0+")
class DeleteShareGroupStateRequest:
    group_id: str = string()
    topics: tuple[DeleteStateData, ...] = array(DeleteStateData)


@struct
class PartitionResult:
    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)


@struct
class DeleteStateResult:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionResult, ...] = array(PartitionResult)


@message(ApiKey.DELETE_SHARE_GROUP_STATE, versions="0", flexible="0+")
class DeleteShareGroupStateResponse:
    results: tuple[DeleteStateResult, ...] = array(DeleteStateResult)
