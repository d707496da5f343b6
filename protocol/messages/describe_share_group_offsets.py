"""DescribeShareGroupOffsets: the positions of share groups in their partitions (KIP-932). Version 1 adds the lag."""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct, uuid


@struct
class DescribeShareGroupOffsetsRequestTopic:
    topic_name: str = string()
    partitions: tuple[int, ...] = array(int32)


@struct
class DescribeShareGroupOffsetsRequestGroup:
    group_id: str = string()
    topics: tuple[DescribeShareGroupOffsetsRequestTopic, ...] | None = array(
        DescribeShareGroupOffsetsRequestTopic, nullable="0+"
    )


@message(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, versions="0-1", flexible="0+")
class DescribeShareGroupOffsetsRequest:
    groups: tuple[DescribeShareGroupOffsetsRequestGroup, ...] = array(DescribeShareGroupOffsetsRequestGroup)


@struct
class DescribeShareGroupOffsetsResponsePartition:
    partition_index: int = int32()
    start_offset: int = int64()
    leader_epoch: int = int32()
    lag: int = int64(versions="1+", default=-1)
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)


@struct
class DescribeShareGroupOffsetsResponseTopic:
    topic_name: str = string()
    topic_id: UUID = uuid()
    partitions: tuple[DescribeShareGroupOffsetsResponsePartition, ...] = array(
        DescribeShareGroupOffsetsResponsePartition
    )


@struct
class DescribeShareGroupOffsetsResponseGroup:
    group_id: str = string()
    topics: tuple[DescribeShareGroupOffsetsResponseTopic, ...] = array(DescribeShareGroupOffsetsResponseTopic)
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)


@message(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, versions="0-1", flexible="0+")
class DescribeShareGroupOffsetsResponse:
    throttle_time_ms: int = int32()
    groups: tuple[DescribeShareGroupOffsetsResponseGroup, ...] = array(DescribeShareGroupOffsetsResponseGroup)
