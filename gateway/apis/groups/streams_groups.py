"""The streams group APIs: messages to events of a streams group (KIP-1071), values to messages.

The one idea: as for consumer groups, each handler is a translation; `gateway/coordinator/streams` decides what a member
may do. A group cannot create topics. So once the group has named the internal topics that its topology lacks, this
module creates them on the client's behalf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

from gateway.apis.admin.features import STREAMS, ChecksFeatures, require_protocol
from gateway.apis.admin.new_topics import make_internal_topics, may_create_topic
from gateway.apis.groups.epoch_groups import describe_groups, play_heartbeat, require_group_id, require_shown
from gateway.apis.services import ChangesCatalog, FindsTopics, HasGroups, HasThrottles
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId
from gateway.coordinator.streams.model import (
    Endpoint,
    EndpointPartitions,
    StreamsGroup,
    StreamsGroupHeartbeat,
    StreamsGroupHeartbeatReply,
    StreamsMember,
    state_of,
)
from gateway.coordinator.streams.tasks import NO_TASKS, Task, Tasks
from gateway.coordinator.streams.topology import MAX_NAMED, StatusCode, Subtopology, TopicInfo, Topology
from gateway.log.topic_names import INTERNAL_TOPICS, why_illegal
from gateway.net.context import RequestContext
from gateway.net.refusals import DerivedRefusal
from gateway.security.authorized_operations import Resource, authorized_operations
from protocol.api_keys import ApiKey
from protocol.codec import has_more_elements
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import streams_group_describe as described
from protocol.messages import streams_group_heartbeat as message
from protocol.messages.streams_group_heartbeat import StreamsGroupHeartbeatRequest, StreamsGroupHeartbeatResponse
from protocol.messages.streams_group_topology_description_update import (
    StreamsGroupTopologyDescriptionUpdateRequest,
    StreamsGroupTopologyDescriptionUpdateResponse,
)
from protocol.shown import shown

MAX_TOPOLOGY_ELEMENTS = 5_000
"""Subtopologies, their topics and these topics' settings. The group compares and stores them in one step."""
MAX_TOPOLOGY_CHARACTERS = 1 << 20
"""Characters of all names and settings. Kafka would store them in one record of at most this length."""

HIDDEN = "The described group uses topics that the client is not authorized to describe."

ASSIGNOR = "sticky"
"""Kafka's name of a similar assignor."""
FIRST_VERSION_WITH_OFFSETS = 1
"""First version in which members report the offsets of their tasks."""
TASK_OFFSET_INTERVAL_MS = 60_000
"""Interval in which members report the offsets of their tasks. Kafka's default; no decision depends on it here."""
ACCEPTABLE_RECOVERY_LAG = 10_000
"""Lag below which a copy of a task is as good as the task. Kafka's default; there are no warm-up tasks here."""


class StreamsGroupServices(ChangesCatalog, ChecksFeatures, FindsTopics, HasGroups, HasThrottles, Protocol): ...


class DescriptionStatus(IntEnum):
    """Upstream: StreamsGroupTopologyDescriptionManager."""

    NOT_REQUESTED = 0
    NOT_STORED = 1


async def streams_group_heartbeat(
    request: StreamsGroupHeartbeatRequest, context: RequestContext[StreamsGroupServices]
) -> StreamsGroupHeartbeatResponse:
    """Answer a heartbeat. Unknown topics of the topology are looked up first, as for consumer groups."""
    require_protocol(STREAMS, context)
    require_group_id(request.group_id)
    topology = None if request.topology is None else topology_of(request.topology)
    if topology is not None:
        _check_names(topology.required_topics)
        await context.services.catalog.resolve_all(topology.required_topics)
    reply = await play_heartbeat(request.group_id, _event(request, topology, context), request.member_epoch, context)
    status = [message.Status(status_code=code, status_detail=detail) for code, detail in reply.status]
    if reply.missing_internal_topics:
        names = [topic.name for topic in reply.missing_internal_topics]
        if refused := [name for name in names if not may_create_topic(context, name)]:
            # All topics are created or none, as in upstream.
            status = [_with_refused(each, refused) for each in status]
        else:
            failures = await make_internal_topics(reply.missing_internal_topics, context)
            status = [_with_failures(each, failures) for each in status]
    return _response(reply, tuple(status), context.version)


refuse_streams_group_heartbeat = DerivedRefusal(ApiKey.STREAMS_GROUP_HEARTBEAT, values={"status": ()})


def _check_names(names: Iterable[str]) -> None:
    """Check names before the coordinator receives the request, as upstream does. Raise KafkaError."""
    prohibited = sorted(INTERNAL_TOPICS.intersection(names))
    if prohibited:
        raise KafkaError(
            ErrorCode.STREAMS_INVALID_TOPOLOGY,
            f"Use of Kafka internal topics {','.join(prohibited)} in a Kafka Streams topology is prohibited.",
        )
    illegal = sorted(name for name in names if why_illegal(name) is not None)
    if illegal:
        raise KafkaError(
            ErrorCode.STREAMS_INVALID_TOPOLOGY, f"Topic names {','.join(illegal)} are not valid topic names."
        )


def _with_refused(status: message.Status, names: Sequence[str]) -> message.Status:
    if status.status_code != StatusCode.MISSING_INTERNAL_TOPICS:
        return status
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    told = ", ".join(map(shown, names[:MAX_NAMED])) + more
    return message.Status(
        status_code=status.status_code,
        status_detail=f"{status.status_detail}; Unauthorized to CREATE on topics {told}.",
    )


def _with_failures(status: message.Status, failures: Mapping[str, KafkaError]) -> message.Status:
    if not failures or status.status_code != StatusCode.MISSING_INTERNAL_TOPICS:
        return status
    first = sorted(failures.items())[:MAX_NAMED]
    told = "; ".join(f"{shown(name)}: {error.message or error.code.name}" for name, error in first)
    more = f"; and {len(failures) - len(first)} more" if len(failures) > len(first) else ""
    return message.Status(
        status_code=status.status_code, status_detail=f"{status.status_detail} They cannot be created: {told}{more}"
    )


# --- from messages ------------------------------------------------------------------------------------------------


def _event(
    request: StreamsGroupHeartbeatRequest, topology: Topology | None, context: RequestContext[HasGroups]
) -> StreamsGroupHeartbeat:
    endpoint, tags = request.user_endpoint, request.client_tags
    return StreamsGroupHeartbeat(
        request_id=context.services.groups.next_request_id(),
        connection_id=ConnectionId(context.connection.connection_id),
        connection_number=context.connection.number,
        client_id=context.client_id or "",
        client_host=context.connection.client_host,
        member_id=MemberId(request.member_id),
        member_epoch=request.member_epoch,
        endpoint_information_epoch=request.endpoint_information_epoch,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        topology=topology,
        active=_tasks(request.active_tasks),
        standby=_tasks(request.standby_tasks),
        warmup=_tasks(request.warmup_tasks),
        process_id=request.process_id,
        user_endpoint=None if endpoint is None else Endpoint(endpoint.host, endpoint.port),
        client_tags=None if tags is None else tuple(sorted((tag.key, tag.value) for tag in tags)),
        has_source_patterns=request.topology is not None and _has_patterns(request.topology),
        shutdown_application=request.shutdown_application,
    )


def _tasks(given: Sequence[message.TaskIds] | None) -> frozenset[Task] | None:
    if given is None:
        return None
    return frozenset((each.subtopology_id, index) for each in given for index in each.partitions)


def _has_patterns(topology: message.Topology) -> bool:
    return any(each.source_topic_regex for each in topology.subtopologies)


def topology_of(given: message.Topology) -> Topology:
    """Build the topology. Raise KafkaError if it is too large, or if a copartition group names a topic that does not
    exist in it."""
    if has_more_elements(given, MAX_TOPOLOGY_ELEMENTS):
        raise KafkaError(ErrorCode.POLICY_VIOLATION, f"A topology may have {MAX_TOPOLOGY_ELEMENTS} elements.")
    if sum(map(len, _texts(given))) > MAX_TOPOLOGY_CHARACTERS:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, f"A topology may have {MAX_TOPOLOGY_CHARACTERS} characters.")
    return Topology(given.epoch, tuple(_subtopology(each) for each in given.subtopologies))


def _texts(given: message.Topology) -> Iterable[str]:
    for each in given.subtopologies:
        yield each.subtopology_id
        yield from each.source_topics
        yield from each.repartition_sink_topics
        for topic in (*each.state_changelog_topics, *each.repartition_source_topics):
            yield topic.name
            for config in topic.topic_configs:
                yield from (config.key, config.value)


def _subtopology(given: message.Subtopology) -> Subtopology:
    repartition = [topic.name for topic in given.repartition_source_topics]
    return Subtopology(
        subtopology_id=given.subtopology_id,
        source_topics=given.source_topics,
        repartition_sink_topics=given.repartition_sink_topics,
        state_changelog_topics=_topics(given.state_changelog_topics),
        repartition_source_topics=_topics(given.repartition_source_topics),
        copartition_groups=tuple(_names(group, given.source_topics, repartition) for group in given.copartition_groups),
    )


def _topics(given: Sequence[message.TopicInfo]) -> tuple[TopicInfo, ...]:
    return tuple(
        TopicInfo(
            name=each.name,
            partitions=each.partitions,
            replication_factor=each.replication_factor,
            topic_configs=tuple((config.key, config.value) for config in each.topic_configs),
        )
        for each in given
    )


def _names(group: message.CopartitionGroup, sources: Sequence[str], repartition: Sequence[str]) -> frozenset[str]:
    """Return the names of the topics to which the group refers by index. Patterns are refused elsewhere."""
    return frozenset(
        (
            *_at(group.source_topics, sources),
            *_at(group.repartition_source_topics, repartition),
        )
    )


def _at(indexes: Iterable[int], names: Sequence[str]) -> Iterable[str]:
    for index in indexes:
        if not 0 <= index < len(names):
            raise KafkaError(
                ErrorCode.STREAMS_INVALID_TOPOLOGY, f"a copartition group names topic {index} of {len(names)}"
            )
        yield names[index]


# --- to messages --------------------------------------------------------------------------------------------------


def _response(
    reply: StreamsGroupHeartbeatReply, status: tuple[message.Status, ...], version: int
) -> StreamsGroupHeartbeatResponse:
    tasks, endpoints = reply.tasks, reply.partitions_by_user_endpoint
    # If the reply is an error or answers a leave, it has no intervals.
    reports_offsets = version >= FIRST_VERSION_WITH_OFFSETS and reply.heartbeat_interval_ms > 0
    return StreamsGroupHeartbeatResponse(
        error_code=reply.error,
        error_message=reply.message,
        member_id=reply.member_id or "",
        member_epoch=reply.member_epoch,
        heartbeat_interval_ms=reply.heartbeat_interval_ms,
        task_offset_interval_ms=TASK_OFFSET_INTERVAL_MS if reports_offsets else 0,
        acceptable_recovery_lag=ACCEPTABLE_RECOVERY_LAG if reports_offsets else -1,
        status=status,
        active_tasks=None if tasks is None else _task_ids(tasks.active),
        standby_tasks=None if tasks is None else _task_ids(tasks.standby),
        warmup_tasks=None if tasks is None else (),
        endpoint_information_epoch=reply.endpoint_information_epoch,
        partitions_by_user_endpoint=None if endpoints is None else tuple(_endpoint(each) for each in endpoints),
    )


def _task_ids(tasks: Iterable[Task]) -> tuple[message.TaskIds, ...]:
    by_subtopology: dict[str, list[int]] = {}
    for subtopology_id, index in tasks:
        by_subtopology.setdefault(subtopology_id, []).append(index)
    return tuple(
        message.TaskIds(subtopology_id=subtopology_id, partitions=tuple(sorted(indexes)))
        for subtopology_id, indexes in sorted(by_subtopology.items())
    )


def _endpoint(given: EndpointPartitions) -> message.EndpointToPartitions:
    return message.EndpointToPartitions(
        user_endpoint=message.Endpoint(host=given.endpoint.host, port=given.endpoint.port),
        active_partitions=_partitions(given.active),
        standby_partitions=_partitions(given.standby),
    )


def _partitions(given: Mapping[str, Iterable[int]]) -> tuple[message.TopicPartition, ...]:
    return tuple(
        message.TopicPartition(topic=topic, partitions=tuple(sorted(indexes))) for topic, indexes in given.items()
    )


# --- StreamsGroupDescribe -----------------------------------------------------------------------------------------


async def streams_group_describe(
    request: described.StreamsGroupDescribeRequest, context: RequestContext[StreamsGroupServices]
) -> described.StreamsGroupDescribeResponse:
    """Describe streams groups, as `describe_groups` says."""
    status = DescriptionStatus.NOT_STORED if request.include_topology_description else DescriptionStatus.NOT_REQUESTED

    async def describe(group: StreamsGroup) -> described.DescribedGroup:
        if group.topology is not None:
            await require_shown(context, _topics_of(group.topology), HIDDEN)
        return described.DescribedGroup(
            group_id=group.group_id,
            group_state=state_of(group).value,
            group_epoch=group.group_epoch,
            assignment_epoch=group.assignment_epoch,
            topology=None if group.topology is None else _described_topology(group.topology),
            members=tuple(_member(each, group.target.get(each.member_id, NO_TASKS)) for each in group.members.values()),
            authorized_operations=authorized_operations(
                Resource.GROUP, group.group_id, context, asked=request.include_authorized_operations
            ),
            topology_description_status=status,
            assignor_name=ASSIGNOR,
        )

    groups = await describe_groups(StreamsGroup, STREAMS, request, context, describe, described.DescribedGroup)
    return described.StreamsGroupDescribeResponse(groups=groups)


def _topics_of(topology: Topology) -> frozenset[str]:
    return topology.required_topics.union(*(each.repartition_sink_topics for each in topology.subtopologies))


def _described_topology(topology: Topology) -> described.Topology:
    return described.Topology(
        epoch=topology.epoch,
        subtopologies=tuple(
            described.Subtopology(
                subtopology_id=each.subtopology_id,
                source_topics=tuple(sorted(each.source_topics)),
                repartition_sink_topics=tuple(sorted(each.repartition_sink_topics)),
                state_changelog_topics=_topic_infos(each.state_changelog_topics),
                repartition_source_topics=_topic_infos(each.repartition_source_topics),
            )
            for each in topology.subtopologies
        ),
    )


def _topic_infos(topics: Iterable[TopicInfo]) -> tuple[message.TopicInfo, ...]:
    return tuple(
        message.TopicInfo(
            name=topic.name,
            partitions=topic.partitions,
            replication_factor=topic.replication_factor,
            topic_configs=tuple(message.KeyValue(key=key, value=value) for key, value in topic.topic_configs),
        )
        for topic in sorted(topics, key=lambda topic: topic.name)
    )


def _member(member: StreamsMember, target: Tasks) -> described.Member:
    endpoint = member.user_endpoint
    return described.Member(
        member_id=member.member_id,
        member_epoch=member.member_epoch,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        topology_epoch=member.topology_epoch,
        process_id=member.process_id,
        user_endpoint=None if endpoint is None else message.Endpoint(host=endpoint.host, port=endpoint.port),
        client_tags=tuple(message.KeyValue(key=key, value=value) for key, value in member.client_tags),
        assignment=_assignment(member.assigned),
        target_assignment=_assignment(target),
    )


def _assignment(tasks: Tasks) -> described.Assignment:
    return described.Assignment(active_tasks=_task_ids(tasks.active), standby_tasks=_task_ids(tasks.standby))


# --- StreamsGroupTopologyDescriptionUpdate ----------------------------------------------------------------------------


async def streams_group_topology_description_update(
    _request: StreamsGroupTopologyDescriptionUpdateRequest, context: RequestContext[ChecksFeatures]
) -> StreamsGroupTopologyDescriptionUpdateResponse:
    """Refuse the request as a Kafka broker without a plugin for descriptions does. The gateway never requests a
    description in a heartbeat answer.
    """
    require_protocol(STREAMS, context)
    raise KafkaError(
        ErrorCode.UNSUPPORTED_VERSION, "The broker has no streams group topology description plugin configured."
    )
