"""DescribeLogDirs: the sizes of partitions on disk, per log directory (KIP-113).

Version 3 brings an error for the whole answer, 4 the size of the volume (KIP-827),
5 whether the directory takes no new partitions (KIP-1066).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int16, int32, int64, message, string, struct


@struct
class DescribableLogDirTopic:
    topic: str = string()
    partitions: tuple[int, ...] = array(int32)


@message(ApiKey.DESCRIBE_LOG_DIRS, versions="1-5", flexible="2+")
class DescribeLogDirsRequest:
    topics: tuple[DescribableLogDirTopic, ...] | None = array(DescribableLogDirTopic, nullable="0+")


@struct
class DescribeLogDirsPartition:
    partition_index: int = int32()
    partition_size: int = int64()
    offset_lag: int = int64()
    is_future_key: bool = boolean()


@struct
class DescribeLogDirsTopic:
    name: str = string()
    partitions: tuple[DescribeLogDirsPartition, ...] = array(DescribeLogDirsPartition)


@struct
class DescribeLogDirsResult:
    error_code: int = int16()
    log_dir: str = string()
    topics: tuple[DescribeLogDirsTopic, ...] = array(DescribeLogDirsTopic)
    total_bytes: int = int64(versions="4+", default=-1)
    usable_bytes: int = int64(versions="4+", default=-1)
    is_cordoned: bool = boolean(versions="5+")


@message(ApiKey.DESCRIBE_LOG_DIRS, versions="1-5", flexible="2+")
class DescribeLogDirsResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16(versions="3+")
    results: tuple[DescribeLogDirsResult, ...] = array(DescribeLogDirsResult)
