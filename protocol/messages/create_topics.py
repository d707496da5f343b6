"""CreateTopics: make topics with partitions, replicas or an explicit assignment, and configs.

Version 4 admits -1 as "the broker's default" (KIP-464), 5 returns the resulting configs (KIP-525), 7 the topic id.
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, message, string, struct, uuid


@struct
class CreatableReplicaAssignment:
    partition_index: int = int32()
    broker_ids: tuple[int, ...] = array(int32)


@struct
class CreatableTopicConfig:
    name: str = string()
    value: str | None = string(nullable="0+")


@struct
class CreatableTopic:
    name: str = string()
    num_partitions: int = int32()
    replication_factor: int = int16()
    assignments: tuple[CreatableReplicaAssignment, ...] = array(CreatableReplicaAssignment)
    configs: tuple[CreatableTopicConfig, ...] = array(CreatableTopicConfig)


@message(ApiKey.CREATE_TOPICS, versions="2-7", flexible="5+")
class CreateTopicsRequest:
    topics: tuple[CreatableTopic, ...] = array(CreatableTopic)
    timeout_ms: int = int32(default=60000)
    validate_only: bool = boolean()


@struct
class CreatableTopicConfigs:
    name: str = string()
    value: str | None = string(nullable="0+")
    read_only: bool = boolean()
    config_source: int = int8(default=-1)
    is_sensitive: bool = boolean()


@struct
class CreatableTopicResult:
    name: str = string()
    topic_id: UUID = uuid(versions="7+")
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    topic_config_error_code: int = int16(versions="5+", tag=0)
    num_partitions: int = int32(versions="5+", default=-1)
    replication_factor: int = int16(versions="5+", default=-1)
    configs: tuple[CreatableTopicConfigs, ...] | None = array(CreatableTopicConfigs, versions="5+", nullable="5+")


@message(ApiKey.CREATE_TOPICS, versions="2-7", flexible="5+")
class CreateTopicsResponse:
    throttle_time_ms: int = int32()
    topics: tuple[CreatableTopicResult, ...] = array(CreatableTopicResult)
