"""How a refusal looks on the wire: one builder per API for the answer in which everything asked for failed.

The one idea: a handler raises, this module answers. `error_response` puts one code on everything a request asked for,
where that API's clients look for it (each partition, topic, group or member, or the top level), so that no client waits
for an element that is missing from its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from protocol.api_keys import ApiKey
from protocol.codec import response_class
from protocol.errors import ErrorCode
from protocol.messages import (
    alter_configs,
    consumer_group_describe,
    consumer_group_heartbeat,
    create_partitions,
    create_topics,
    delete_groups,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    describe_topic_partitions,
    fetch,
    find_coordinator,
    heartbeat,
    incremental_alter_configs,
    init_producer_id,
    join_group,
    leave_group,
    list_config_resources,
    list_groups,
    list_offsets,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    sync_group,
)
from protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from protocol.schema import message_schema


def error_response(api_key: ApiKey, version: int, request: Any, code: ErrorCode, message: str | None = None) -> Any:
    """The response to `request` in which everything asked for failed with `code`.

    `message` appears where the response has a field for it. Raises KeyError for an API without a builder, which
    `tests/gateway/test_errors.py` excludes for everything that is served.
    """
    return _BUILDERS[api_key](request, version, code, message)


def top_level_error_response(api_key: ApiKey, version: int, code: ErrorCode) -> Any | None:
    """The response with nothing but a top-level code, for a request that could not be read; None where `version` of
    the response has no such field."""
    response_type = response_class(api_key)
    for field in message_schema(response_type).fields:
        if field.name == "error_code" and version in field.versions:
            return response_type(error_code=code)
    return None


_BUILDERS: dict[ApiKey, Callable[[Any, int, ErrorCode, str | None], Any]] = {}

Builder = TypeVar("Builder", bound=Callable[[Any, int, ErrorCode, str | None], Any])


def _answers(api_key: ApiKey) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        _BUILDERS[api_key] = builder
        return builder

    return register


# --- records --------------------------------------------------------------------------------------------------------


@_answers(ApiKey.PRODUCE)
def _produce(request: produce.ProduceRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    return produce.ProduceResponse(
        responses=tuple(
            produce.TopicProduceResponse(
                name=topic.name,
                topic_id=topic.topic_id,
                partition_responses=tuple(
                    produce.PartitionProduceResponse(
                        index=partition.index, error_code=code, base_offset=-1, error_message=message
                    )
                    for partition in topic.partition_data
                ),
            )
            for topic in request.topic_data
        )
    )


@_answers(ApiKey.FETCH)
def _fetch(request: fetch.FetchRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    """Top level from v7, and on each partition: librdkafka and Java read the first, older clients only the second."""
    return fetch.FetchResponse(
        error_code=code,
        responses=tuple(
            fetch.FetchableTopicResponse(
                topic=topic.topic,
                topic_id=topic.topic_id,
                partitions=tuple(
                    fetch.PartitionData(
                        partition_index=partition.partition, error_code=code, high_watermark=-1, records=b""
                    )
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        ),
    )


@_answers(ApiKey.LIST_OFFSETS)
def _list_offsets(request: list_offsets.ListOffsetsRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    return list_offsets.ListOffsetsResponse(
        topics=tuple(
            list_offsets.ListOffsetsTopicResponse(
                name=topic.name,
                partitions=tuple(
                    list_offsets.ListOffsetsPartitionResponse(
                        partition_index=partition.partition_index, error_code=code
                    )
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        )
    )


@_answers(ApiKey.OFFSET_FOR_LEADER_EPOCH)
def _offset_for_leader_epoch(
    request: offset_for_leader_epoch.OffsetForLeaderEpochRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return offset_for_leader_epoch.OffsetForLeaderEpochResponse(
        topics=tuple(
            offset_for_leader_epoch.OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=tuple(
                    offset_for_leader_epoch.EpochEndOffset(partition=partition.partition, error_code=code)
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        )
    )


@_answers(ApiKey.INIT_PRODUCER_ID)
def _init_producer_id(
    request: init_producer_id.InitProducerIdRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return init_producer_id.InitProducerIdResponse(error_code=code, producer_id=-1, producer_epoch=-1)


@_answers(ApiKey.DELETE_RECORDS)
def _delete_records(
    request: delete_records.DeleteRecordsRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return delete_records.DeleteRecordsResponse(
        topics=tuple(
            delete_records.DeleteRecordsTopicResult(
                name=topic.name,
                partitions=tuple(
                    delete_records.DeleteRecordsPartitionResult(
                        partition_index=partition.partition_index, low_watermark=-1, error_code=code
                    )
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        )
    )


# --- topics, cluster, configs -----------------------------------------------------------------------------------------


@_answers(ApiKey.API_VERSIONS)
def _api_versions(request: ApiVersionsRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    return ApiVersionsResponse(error_code=code)


@_answers(ApiKey.METADATA)
def _metadata(request: metadata.MetadataRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    """Without brokers, so that Java and librdkafka keep the metadata they have and ask again."""
    return metadata.MetadataResponse(
        error_code=code,
        topics=tuple(
            metadata.MetadataResponseTopic(
                error_code=code, name=topic.name if version >= 12 else topic.name or "", topic_id=topic.topic_id
            )
            for topic in request.topics or ()
        ),
    )


@_answers(ApiKey.DESCRIBE_TOPIC_PARTITIONS)
def _describe_topic_partitions(
    request: describe_topic_partitions.DescribeTopicPartitionsRequest,
    version: int,
    code: ErrorCode,
    message: str | None,
) -> Any:
    return describe_topic_partitions.DescribeTopicPartitionsResponse(
        topics=tuple(
            describe_topic_partitions.DescribeTopicPartitionsResponseTopic(error_code=code, name=topic.name)
            for topic in request.topics
        )
    )


@_answers(ApiKey.DESCRIBE_CLUSTER)
def _describe_cluster(
    request: describe_cluster.DescribeClusterRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return describe_cluster.DescribeClusterResponse(
        error_code=code, error_message=message, endpoint_type=request.endpoint_type
    )


@_answers(ApiKey.CREATE_TOPICS)
def _create_topics(
    request: create_topics.CreateTopicsRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return create_topics.CreateTopicsResponse(
        topics=tuple(
            create_topics.CreatableTopicResult(name=topic.name, error_code=code, error_message=message)
            for topic in request.topics
        )
    )


@_answers(ApiKey.DELETE_TOPICS)
def _delete_topics(
    request: delete_topics.DeleteTopicsRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    if version >= 6:
        responses = tuple(
            delete_topics.DeletableTopicResult(
                name=topic.name, topic_id=topic.topic_id, error_code=code, error_message=message
            )
            for topic in request.topics
        )
    else:
        responses = tuple(
            delete_topics.DeletableTopicResult(name=name, error_code=code, error_message=message)
            for name in request.topic_names
        )
    return delete_topics.DeleteTopicsResponse(responses=responses)


@_answers(ApiKey.CREATE_PARTITIONS)
def _create_partitions(
    request: create_partitions.CreatePartitionsRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return create_partitions.CreatePartitionsResponse(
        results=tuple(
            create_partitions.CreatePartitionsTopicResult(name=topic.name, error_code=code, error_message=message)
            for topic in request.topics
        )
    )


@_answers(ApiKey.DESCRIBE_CONFIGS)
def _describe_configs(
    request: describe_configs.DescribeConfigsRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return describe_configs.DescribeConfigsResponse(
        results=tuple(
            describe_configs.DescribeConfigsResult(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource in request.resources
        )
    )


@_answers(ApiKey.ALTER_CONFIGS)
def _alter_configs(
    request: alter_configs.AlterConfigsRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return alter_configs.AlterConfigsResponse(
        responses=tuple(
            alter_configs.AlterConfigsResourceResponse(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource in request.resources
        )
    )


@_answers(ApiKey.INCREMENTAL_ALTER_CONFIGS)
def _incremental_alter_configs(
    request: incremental_alter_configs.IncrementalAlterConfigsRequest,
    version: int,
    code: ErrorCode,
    message: str | None,
) -> Any:
    return incremental_alter_configs.IncrementalAlterConfigsResponse(
        responses=tuple(
            incremental_alter_configs.AlterConfigsResourceResponse(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource in request.resources
        )
    )


@_answers(ApiKey.LIST_CONFIG_RESOURCES)
def _list_config_resources(
    request: list_config_resources.ListConfigResourcesRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return list_config_resources.ListConfigResourcesResponse(error_code=code)


@_answers(ApiKey.DESCRIBE_LOG_DIRS)
def _describe_log_dirs(
    request: describe_log_dirs.DescribeLogDirsRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    """One nameless directory that failed: before v3 there is no other place for the code."""
    return describe_log_dirs.DescribeLogDirsResponse(
        error_code=code, results=(describe_log_dirs.DescribeLogDirsResult(error_code=code),)
    )


# --- groups -----------------------------------------------------------------------------------------------------------


@_answers(ApiKey.FIND_COORDINATOR)
def _find_coordinator(
    request: find_coordinator.FindCoordinatorRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    if version < 4:
        return find_coordinator.FindCoordinatorResponse(
            error_code=code, error_message=message, node_id=-1, host="", port=-1
        )
    return find_coordinator.FindCoordinatorResponse(
        coordinators=tuple(
            find_coordinator.Coordinator(key=key, node_id=-1, host="", port=-1, error_code=code, error_message=message)
            for key in request.coordinator_keys
        )
    )


@_answers(ApiKey.JOIN_GROUP)
def _join_group(request: join_group.JoinGroupRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    return join_group.JoinGroupResponse(
        error_code=code, member_id=request.member_id, protocol_name=None if version >= 7 else ""
    )


@_answers(ApiKey.SYNC_GROUP)
def _sync_group(request: sync_group.SyncGroupRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    return sync_group.SyncGroupResponse(error_code=code)


@_answers(ApiKey.HEARTBEAT)
def _heartbeat(request: heartbeat.HeartbeatRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    return heartbeat.HeartbeatResponse(error_code=code)


@_answers(ApiKey.CONSUMER_GROUP_HEARTBEAT)
def _consumer_group_heartbeat(
    request: consumer_group_heartbeat.ConsumerGroupHeartbeatRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return consumer_group_heartbeat.ConsumerGroupHeartbeatResponse(error_code=code, error_message=message)


@_answers(ApiKey.CONSUMER_GROUP_DESCRIBE)
def _consumer_group_describe(
    request: consumer_group_describe.ConsumerGroupDescribeRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return consumer_group_describe.ConsumerGroupDescribeResponse(
        groups=tuple(
            consumer_group_describe.DescribedGroup(group_id=group_id, error_code=code, error_message=message)
            for group_id in request.group_ids
        )
    )


@_answers(ApiKey.LEAVE_GROUP)
def _leave_group(request: leave_group.LeaveGroupRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    """Only the top level: upstream lists members only when the group itself could be asked."""
    return leave_group.LeaveGroupResponse(error_code=code)


@_answers(ApiKey.DESCRIBE_GROUPS)
def _describe_groups(
    request: describe_groups.DescribeGroupsRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return describe_groups.DescribeGroupsResponse(
        groups=tuple(
            describe_groups.DescribedGroup(group_id=group_id, error_code=code, error_message=message)
            for group_id in request.groups
        )
    )


@_answers(ApiKey.LIST_GROUPS)
def _list_groups(request: list_groups.ListGroupsRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    return list_groups.ListGroupsResponse(error_code=code)


@_answers(ApiKey.DELETE_GROUPS)
def _delete_groups(
    request: delete_groups.DeleteGroupsRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return delete_groups.DeleteGroupsResponse(
        results=tuple(
            delete_groups.DeletableGroupResult(group_id=group_id, error_code=code) for group_id in request.groups_names
        )
    )


@_answers(ApiKey.OFFSET_COMMIT)
def _offset_commit(
    request: offset_commit.OffsetCommitRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return offset_commit.OffsetCommitResponse(
        topics=tuple(
            offset_commit.OffsetCommitResponseTopic(
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=tuple(
                    offset_commit.OffsetCommitResponsePartition(
                        partition_index=partition.partition_index, error_code=code
                    )
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        )
    )


@_answers(ApiKey.OFFSET_FETCH)
def _offset_fetch(request: offset_fetch.OffsetFetchRequest, version: int, code: ErrorCode, message: str | None) -> Any:
    """v1 on each partition, v2-7 at the top level, v8+ on each group."""
    if version >= 8:
        return offset_fetch.OffsetFetchResponse(
            groups=tuple(
                offset_fetch.OffsetFetchResponseGroup(group_id=group.group_id, error_code=code)
                for group in request.groups
            )
        )
    topics: tuple[offset_fetch.OffsetFetchResponseTopic, ...] = ()
    if version < 2:
        topics = tuple(
            offset_fetch.OffsetFetchResponseTopic(
                name=topic.name,
                partitions=tuple(
                    offset_fetch.OffsetFetchResponsePartition(
                        partition_index=partition_index, committed_offset=-1, metadata="", error_code=code
                    )
                    for partition_index in topic.partition_indexes
                ),
            )
            for topic in request.topics or ()
        )
    return offset_fetch.OffsetFetchResponse(error_code=code, topics=topics)


@_answers(ApiKey.OFFSET_DELETE)
def _offset_delete(
    request: offset_delete.OffsetDeleteRequest, version: int, code: ErrorCode, message: str | None
) -> Any:
    return offset_delete.OffsetDeleteResponse(error_code=code)
