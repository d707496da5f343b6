"""ListOffsets: the offset at a timestamp, or at one of the special timestamps (negative numbers).

Version 2 brings isolation levels, 4 leader epochs, 7 the largest timestamp (-3), 8 and 9 tiered storage (-4, -5), 10 a
timeout, 11 the earliest offset pending upload (-6).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int8, int16, int32, int64, message, string, struct


@struct
class ListOffsetsPartition:
    partition_index: int = int32()
    current_leader_epoch: int = int32(versions="4+", default=-1)
    timestamp: int = int64()


@struct
class ListOffsetsTopic:
    name: str = string()
    partitions: tuple[ListOffsetsPartition, ...] = array(ListOffsetsPartition)


@message(ApiKey.LIST_OFFSETS, versions="1-11", flexible="6+")
class ListOffsetsRequest:
    replica_id: int = int32()
    isolation_level: int = int8(versions="2+")
    topics: tuple[ListOffsetsTopic, ...] = array(ListOffsetsTopic)
    timeout_ms: int = int32(versions="10+")


@struct
class ListOffsetsPartitionResponse:
    partition_index: int = int32()
    error_code: int = int16()
    timestamp: int = int64(default=-1)
    offset: int = int64(default=-1)
    leader_epoch: int = int32(versions="4+", default=-1)


@struct
class ListOffsetsTopicResponse:
    name: str = string()
    partitions: tuple[ListOffsetsPartitionResponse, ...] = array(ListOffsetsPartitionResponse)


@message(ApiKey.LIST_OFFSETS, versions="1-11", flexible="6+")
class ListOffsetsResponse:
    throttle_time_ms: int = int32(versions="2+")
    topics: tuple[ListOffsetsTopicResponse, ...] = array(ListOffsetsTopicResponse)
