"""OffsetDelete: forget a group's offsets of topics it does not subscribe to (KIP-496). It was never made flexible."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, message, string, struct


@struct
class OffsetDeleteRequestPartition:
    partition_index: int = int32()


@struct
class OffsetDeleteRequestTopic:
    name: str = string()
    partitions: tuple[OffsetDeleteRequestPartition, ...] = array(OffsetDeleteRequestPartition)


@message(ApiKey.OFFSET_DELETE, versions="0", flexible="none")
class OffsetDeleteRequest:
    group_id: str = string()
    topics: tuple[OffsetDeleteRequestTopic, ...] = array(OffsetDeleteRequestTopic)


@struct
class OffsetDeleteResponsePartition:
    partition_index: int = int32()
    error_code: int = int16()


@struct
class OffsetDeleteResponseTopic:
    name: str = string()
    partitions: tuple[OffsetDeleteResponsePartition, ...] = array(OffsetDeleteResponsePartition)


@message(ApiKey.OFFSET_DELETE, versions="0", flexible="none")
class OffsetDeleteResponse:
    error_code: int = int16()
    throttle_time_ms: int = int32()
    topics: tuple[OffsetDeleteResponseTopic, ...] = array(OffsetDeleteResponseTopic)
