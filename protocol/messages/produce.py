"""Produce: append record batches to partitions.

Version 3 admits only batches of magic 2, 5 returns the log's start, 7 allows zstd, 8 names the records at fault
(KIP-467), 10 hints at the current leader (KIP-951), 13 addresses topics by id.
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, nested, records, string, struct, uuid


@struct
class PartitionProduceData:
    index: int = int32()
    records: bytes | memoryview | None = records(nullable="0+")


@struct
class TopicProduceData:
    name: str = string(versions="0-12")
    topic_id: UUID = uuid(versions="13+")
    partition_data: tuple[PartitionProduceData, ...] = array(PartitionProduceData)


@message(ApiKey.PRODUCE, versions="3-13", flexible="9+")
class ProduceRequest:
    transactional_id: str | None = string(nullable="0+", default=None)
    acks: int = int16()
    timeout_ms: int = int32()
    topic_data: tuple[TopicProduceData, ...] = array(TopicProduceData)


@struct
class BatchIndexAndErrorMessage:
    batch_index: int = int32()
    batch_index_error_message: str | None = string(nullable="0+", default=None)


@struct
class LeaderIdAndEpoch:
    leader_id: int = int32(default=-1)
    leader_epoch: int = int32(default=-1)


@struct
class PartitionProduceResponse:
    index: int = int32()
    error_code: int = int16()
    base_offset: int = int64()
    log_append_time_ms: int = int64(default=-1)
    log_start_offset: int = int64(versions="5+", default=-1)
    record_errors: tuple[BatchIndexAndErrorMessage, ...] = array(BatchIndexAndErrorMessage, versions="8+")
    error_message: str | None = string(versions="8+", nullable="8+", default=None)
    current_leader: LeaderIdAndEpoch = nested(LeaderIdAndEpoch, versions="10+", tag=0)


@struct
class TopicProduceResponse:
    name: str = string(versions="0-12")
    topic_id: UUID = uuid(versions="13+")
    partition_responses: tuple[PartitionProduceResponse, ...] = array(PartitionProduceResponse)


@struct
class NodeEndpoint:
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable="0+", default=None)


@message(ApiKey.PRODUCE, versions="3-13", flexible="9+")
class ProduceResponse:
    responses: tuple[TopicProduceResponse, ...] = array(TopicProduceResponse)
    throttle_time_ms: int = int32()
    node_endpoints: tuple[NodeEndpoint, ...] = array(NodeEndpoint, versions="10+", tag=0)
