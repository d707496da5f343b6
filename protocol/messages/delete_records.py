"""DeleteRecords: move the start of partitions' logs forward to given offsets (KIP-107)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct


@struct
class DeleteRecordsPartition:
    partition_index: int = int32()
    offset: int = int64()


@struct
class DeleteRecordsTopic:
    name: str = string()
    partitions: tuple[DeleteRecordsPartition, ...] = array(DeleteRecordsPartition)


@message(ApiKey.DELETE_RECORDS, versions="0-2", flexible="2+")
class DeleteRecordsRequest:
    topics: tuple[DeleteRecordsTopic, ...] = array(DeleteRecordsTopic)
    timeout_ms: int = int32()


@struct
class DeleteRecordsPartitionResult:
    partition_index: int = int32()
    low_watermark: int = int64()
    error_code: int = int16()


@struct
class DeleteRecordsTopicResult:
    name: str = string()
    partitions: tuple[DeleteRecordsPartitionResult, ...] = array(DeleteRecordsPartitionResult)


@message(ApiKey.DELETE_RECORDS, versions="0-2", flexible="2+")
class DeleteRecordsResponse:
    throttle_time_ms: int = int32()
    topics: tuple[DeleteRecordsTopicResult, ...] = array(DeleteRecordsTopicResult)
