"""CreatePartitions: increase the number of a topic's partitions (KIP-195).

Version 3 admits the code THROTTLING_QUOTA_EXCEEDED.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int16, int32, message, string, struct


@struct
class CreatePartitionsAssignment:
    broker_ids: tuple[int, ...] = array(int32)


@struct
class CreatePartitionsTopic:
    name: str = string()
    count: int = int32()
    assignments: tuple[CreatePartitionsAssignment, ...] | None = array(CreatePartitionsAssignment, nullable="0+")


@message(ApiKey.CREATE_PARTITIONS, versions="0-3", flexible="2+")
class CreatePartitionsRequest:
    topics: tuple[CreatePartitionsTopic, ...] = array(CreatePartitionsTopic)
    timeout_ms: int = int32()
    validate_only: bool = boolean()


@struct
class CreatePartitionsTopicResult:
    name: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)


@message(ApiKey.CREATE_PARTITIONS, versions="0-3", flexible="2+")
class CreatePartitionsResponse:
    throttle_time_ms: int = int32()
    results: tuple[CreatePartitionsTopicResult, ...] = array(CreatePartitionsTopicResult)
