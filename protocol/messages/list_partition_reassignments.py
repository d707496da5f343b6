"""ListPartitionReassignments: list the replicas that are being moved (KIP-455)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, message, string, struct


@struct
class ListPartitionReassignmentsTopics:
    name: str = string()
    partition_indexes: tuple[int, ...] = array(int32)


@message(ApiKey.LIST_PARTITION_REASSIGNMENTS, versions="0", flexible="0+")
class ListPartitionReassignmentsRequest:
    timeout_ms: int = int32(default=60000)
    topics: tuple[ListPartitionReassignmentsTopics, ...] | None = array(
        ListPartitionReassignmentsTopics, nullable="0+", default=None
    )


@struct
class OngoingPartitionReassignment:
    partition_index: int = int32()
    replicas: tuple[int, ...] = array(int32)
    adding_replicas: tuple[int, ...] = array(int32)
    removing_replicas: tuple[int, ...] = array(int32)


@struct
class OngoingTopicReassignment:
    name: str = string()
    partitions: tuple[OngoingPartitionReassignment, ...] = array(OngoingPartitionReassignment)


@message(ApiKey.LIST_PARTITION_REASSIGNMENTS, versions="0", flexible="0+")
class ListPartitionReassignmentsResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default="")
    topics: tuple[OngoingTopicReassignment, ...] = array(OngoingTopicReassignment)
