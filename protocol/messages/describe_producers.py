"""DescribeProducers: list the producers of partitions, and the starts of their open transactions (KIP-664)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct


@struct
class TopicRequest:
    name: str = string()
    partition_indexes: tuple[int, ...] = array(int32)


@message(ApiKey.DESCRIBE_PRODUCERS, versions="0", flexible="0+")
class DescribeProducersRequest:
    topics: tuple[TopicRequest, ...] = array(TopicRequest)


@struct
class ProducerState:
    producer_id: int = int64()
    producer_epoch: int = int32()
    last_sequence: int = int32(default=-1)
    last_timestamp: int = int64(default=-1)
    coordinator_epoch: int = int32()
    current_txn_start_offset: int = int64(default=-1)


@struct
class PartitionResponse:
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    active_producers: tuple[ProducerState, ...] = array(ProducerState)


@struct
class TopicResponse:
    name: str = string()
    partitions: tuple[PartitionResponse, ...] = array(PartitionResponse)


@message(ApiKey.DESCRIBE_PRODUCERS, versions="0", flexible="0+")
class DescribeProducersResponse:
    throttle_time_ms: int = int32()
    topics: tuple[TopicResponse, ...] = array(TopicResponse)
