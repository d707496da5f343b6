"""AlterPartitionReassignments: choose the brokers of a partition's replicas (KIP-455, KIP-860)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int16, int32, message, string, struct


@struct
class ReassignablePartition:
    partition_index: int = int32()
    replicas: tuple[int, ...] | None = array(int32, nullable="0+", default=None)


@struct
class ReassignableTopic:
    name: str = string()
    partitions: tuple[ReassignablePartition, ...] = array(ReassignablePartition)


@message(ApiKey.ALTER_PARTITION_REASSIGNMENTS, versions="0-1", flexible="0+")
class AlterPartitionReassignmentsRequest:
    timeout_ms: int = int32(default=60000)
    allow_replication_factor_change: bool = boolean(versions="1+", default=True)
    topics: tuple[ReassignableTopic, ...] = array(ReassignableTopic)


@struct
class ReassignablePartitionResponse:
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default="")


@struct
class ReassignableTopicResponse:
    name: str = string()
    partitions: tuple[ReassignablePartitionResponse, ...] = array(ReassignablePartitionResponse)


@message(ApiKey.ALTER_PARTITION_REASSIGNMENTS, versions="0-1", flexible="0+")
class AlterPartitionReassignmentsResponse:
    throttle_time_ms: int = int32()
    allow_replication_factor_change: bool = boolean(versions="1+", default=True)
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default="")
    responses: tuple[ReassignableTopicResponse, ...] = array(ReassignableTopicResponse)
