"""StreamsGroupDescribe: state, epochs, topology, members, tasks and targets of streams groups (KIP-1071).

Version 1 names the assignor, and describes the topology as its application sees it.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.messages.streams_group_heartbeat import Endpoint, KeyValue, TaskIds, TaskOffset, TopicInfo
from protocol.messages.streams_group_topology_description_update import TopologyDescription
from protocol.schema import array, boolean, int8, int16, int32, message, nested, string, struct


@message(ApiKey.STREAMS_GROUP_DESCRIBE, versions="0-1", flexible="0+")
class StreamsGroupDescribeRequest:
    group_ids: tuple[str, ...] = array(string)
    include_authorized_operations: bool = boolean()
    include_topology_description: bool = boolean(versions="1+")


@struct
class Subtopology:
    subtopology_id: str = string()
    source_topics: tuple[str, ...] = array(string)
    repartition_sink_topics: tuple[str, ...] = array(string)
    state_changelog_topics: tuple[TopicInfo, ...] = array(TopicInfo)
    repartition_source_topics: tuple[TopicInfo, ...] = array(TopicInfo)


@struct
class Topology:
    epoch: int = int32()
    subtopologies: tuple[Subtopology, ...] | None = array(Subtopology, nullable="0+", default=None)


@struct
class Assignment:
    active_tasks: tuple[TaskIds, ...] = array(TaskIds)
    standby_tasks: tuple[TaskIds, ...] = array(TaskIds)
    warmup_tasks: tuple[TaskIds, ...] = array(TaskIds)


@struct
class Member:
    member_id: str = string()
    member_epoch: int = int32()
    instance_id: str | None = string(nullable="0+", default=None)
    rack_id: str | None = string(nullable="0+", default=None)
    client_id: str = string()
    client_host: str = string()
    topology_epoch: int = int32()
    process_id: str = string()
    user_endpoint: Endpoint | None = nested(Endpoint, nullable="0+", default=None)
    client_tags: tuple[KeyValue, ...] = array(KeyValue)
    task_offsets: tuple[TaskOffset, ...] = array(TaskOffset)
    task_end_offsets: tuple[TaskOffset, ...] = array(TaskOffset)
    assignment: Assignment = nested(Assignment)
    target_assignment: Assignment = nested(Assignment)
    is_classic: bool = boolean()


@struct
class DescribedGroup:
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    group_id: str = string()
    group_state: str = string()
    group_epoch: int = int32()
    assignment_epoch: int = int32()
    topology: Topology | None = nested(Topology, nullable="0+", default=None)
    members: tuple[Member, ...] = array(Member)
    authorized_operations: int = int32(default=-0x80000000)
    topology_description: TopologyDescription | None = nested(
        TopologyDescription, versions="1+", nullable="1+", default=None
    )
    topology_description_status: int = int8(versions="1+")
    assignor_name: str | None = string(versions="1+", nullable="1+", default=None)


@message(ApiKey.STREAMS_GROUP_DESCRIBE, versions="0-1", flexible="0+")
class StreamsGroupDescribeResponse:
    throttle_time_ms: int = int32()
    groups: tuple[DescribedGroup, ...] = array(DescribedGroup)
