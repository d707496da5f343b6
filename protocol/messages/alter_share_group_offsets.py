"""AlterShareGroupOffsets: set the offsets at which an empty share group begins (KIP-932)."""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct, uuid


@struct
class AlterShareGroupOffsetsRequestPartition:
    partition_index: int = int32()
    start_offset: int = int64()


@struct
class AlterShareGroupOffsetsRequestTopic:
    topic_name: str = string()
    partitions: tuple[AlterShareGroupOffsetsRequestPartition, ...] = array(AlterShareGroupOffsetsRequestPartition)


@message(ApiKey.ALTER_SHARE_GROUP_OFFSETS, versions="0", flexible="0+")
class AlterShareGroupOffsetsRequest:
    group_id: str = string()
    topics: tuple[AlterShareGroupOffsetsRequestTopic, ...] = array(AlterShareGroupOffsetsRequestTopic)


@struct
class AlterShareGroupOffsetsResponsePartition:
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)


@struct
class AlterShareGroupOffsetsResponseTopic:
    topic_name: str = string()
    topic_id: UUID = uuid()
    partitions: tuple[AlterShareGroupOffsetsResponsePartition, ...] = array(AlterShareGroupOffsetsResponsePartition)


@message(ApiKey.ALTER_SHARE_GROUP_OFFSETS, versions="0", flexible="0+")
class AlterShareGroupOffsetsResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    responses: tuple[AlterShareGroupOffsetsResponseTopic, ...] = array(AlterShareGroupOffsetsResponseTopic)
