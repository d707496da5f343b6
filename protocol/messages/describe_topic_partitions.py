"""DescribeTopicPartitions: partitions of topics, page by page behind a cursor (KIP-966)."""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int16, int32, message, nested, string, struct, uuid


@struct
class TopicRequest:
    name: str = string()


@struct
class Cursor:
    topic_name: str = string()
    partition_index: int = int32()


@message(ApiKey.DESCRIBE_TOPIC_PARTITIONS, versions="0", flexible="0+")
class DescribeTopicPartitionsRequest:
    topics: tuple[TopicRequest, ...] = array(TopicRequest)
    response_partition_limit: int = int32(default=2000)
    cursor: Cursor | None = nested(Cursor, nullable="0+", default=None)


@struct
class DescribeTopicPartitionsResponsePartition:
    error_code: int = int16()
    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32(default=-1)
    replica_nodes: tuple[int, ...] = array(int32)
    isr_nodes: tuple[int, ...] = array(int32)
    eligible_leader_replicas: tuple[int, ...] | None = array(int32, nullable="0+", default=None)
    last_known_elr: tuple[int, ...] | None = array(int32, nullable="0+", default=None)
    offline_replicas: tuple[int, ...] = array(int32)


@struct
class DescribeTopicPartitionsResponseTopic:
    error_code: int = int16()
    name: str | None = string(nullable="0+")
    topic_id: UUID = uuid()
    is_internal: bool = boolean()
    partitions: tuple[DescribeTopicPartitionsResponsePartition, ...] = array(DescribeTopicPartitionsResponsePartition)
    topic_authorized_operations: int = int32(default=-0x80000000)


@message(ApiKey.DESCRIBE_TOPIC_PARTITIONS, versions="0", flexible="0+")
class DescribeTopicPartitionsResponse:
    throttle_time_ms: int = int32()
    topics: tuple[DescribeTopicPartitionsResponseTopic, ...] = array(DescribeTopicPartitionsResponseTopic)
    next_cursor: Cursor | None = nested(Cursor, nullable="0+", default=None)
