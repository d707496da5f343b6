"""StreamsGroupHeartbeat: how an instance of Kafka Streams joins its group (KIP-1071), reports its tasks, and leaves.

Null means "as before". Only the first request contains the topology. Version 1 knows static members, measures the
acceptable lag in 64 bits, and may ask for a description of the topology.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, int64, message, nested, string, struct, uint16


@struct
class KeyValue:
    key: str = string()
    value: str = string()


@struct
class TopicInfo:
    name: str = string()
    partitions: int = int32()
    replication_factor: int = int16()
    topic_configs: tuple[KeyValue, ...] = array(KeyValue)


@struct
class CopartitionGroup:
    """Indexes into the lists of its subtopology."""

    source_topics: tuple[int, ...] = array(int16)
    source_topic_regex: tuple[int, ...] = array(int16)
    repartition_source_topics: tuple[int, ...] = array(int16)


@struct
class Subtopology:
    subtopology_id: str = string()
    source_topics: tuple[str, ...] = array(string)
    source_topic_regex: tuple[str, ...] = array(string)
    state_changelog_topics: tuple[TopicInfo, ...] = array(TopicInfo)
    repartition_sink_topics: tuple[str, ...] = array(string)
    repartition_source_topics: tuple[TopicInfo, ...] = array(TopicInfo)
    copartition_groups: tuple[CopartitionGroup, ...] = array(CopartitionGroup)


@struct
class Topology:
    epoch: int = int32()
    subtopologies: tuple[Subtopology, ...] = array(Subtopology)


@struct
class TaskIds:
    subtopology_id: str = string()
    partitions: tuple[int, ...] = array(int32)


@struct
class TaskOffset:
    subtopology_id: str = string()
    partition: int = int32()
    offset: int = int64()


@struct
class Endpoint:
    host: str = string()
    port: int = uint16()


@message(ApiKey.STREAMS_GROUP_HEARTBEAT, versions="0-1", flexible="0+")
class StreamsGroupHeartbeatRequest:
    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()
    endpoint_information_epoch: int = int32()
    instance_id: str | None = string(nullable="0+", default=None)
    rack_id: str | None = string(nullable="0+", default=None)
    rebalance_timeout_ms: int = int32(default=-1)
    topology: Topology | None = nested(Topology, nullable="0+", default=None)
    active_tasks: tuple[TaskIds, ...] | None = array(TaskIds, nullable="0+", default=None)
    standby_tasks: tuple[TaskIds, ...] | None = array(TaskIds, nullable="0+", default=None)
    warmup_tasks: tuple[TaskIds, ...] | None = array(TaskIds, nullable="0+", default=None)
    process_id: str | None = string(nullable="0+", default=None)
    user_endpoint: Endpoint | None = nested(Endpoint, nullable="0+", default=None)
    client_tags: tuple[KeyValue, ...] | None = array(KeyValue, nullable="0+", default=None)
    task_offsets: tuple[TaskOffset, ...] | None = array(TaskOffset, nullable="0+", default=None)
    task_end_offsets: tuple[TaskOffset, ...] | None = array(TaskOffset, nullable="0+", default=None)
    shutdown_application: bool = boolean(default=False)


@struct
class Status:
    status_code: int = int8()
    status_detail: str = string()


@struct
class TopicPartition:
    topic: str = string()
    partitions: tuple[int, ...] = array(int32)


@struct
class EndpointToPartitions:
    user_endpoint: Endpoint = nested(Endpoint)
    active_partitions: tuple[TopicPartition, ...] = array(TopicPartition)
    standby_partitions: tuple[TopicPartition, ...] = array(TopicPartition)


@message(ApiKey.STREAMS_GROUP_HEARTBEAT, versions="0-1", flexible="0+")
class StreamsGroupHeartbeatResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    member_id: str = string()
    member_epoch: int = int32()
    heartbeat_interval_ms: int = int32()
    acceptable_recovery_lag_legacy: int = int32(versions="0")
    task_offset_interval_ms: int = int32()
    acceptable_recovery_lag: int = int64(versions="1+", default=-1)
    status: tuple[Status, ...] | None = array(Status, nullable="0+")
    active_tasks: tuple[TaskIds, ...] | None = array(TaskIds, nullable="0+", default=None)
    standby_tasks: tuple[TaskIds, ...] | None = array(TaskIds, nullable="0+", default=None)
    warmup_tasks: tuple[TaskIds, ...] | None = array(TaskIds, nullable="0+", default=None)
    topology_description_required: bool = boolean(versions="1+")
    endpoint_information_epoch: int = int32()
    partitions_by_user_endpoint: tuple[EndpointToPartitions, ...] | None = array(
        EndpointToPartitions, nullable="0+", default=None
    )
