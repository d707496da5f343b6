"""DeleteTopics. `timeout_ms` has no effect, because a topic is gone by the time of the answer."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import structlog

from gateway.apis.admin.new_topics import TopicServices
from gateway.apis.services import FindsTopics
from gateway.net.context import RequestContext
from gateway.net.errors import storage_refusal
from gateway.net.pieces import in_pieces, mapped, tally
from gateway.security.authorizer import HasAuthorizer, may, may_topic, refusal_of
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from protocol.schema import ZERO_UUID
from storage.errors import StorageError
from storage.types import Topic

logger = structlog.get_logger(__name__)

STRICT_DELETE_TOPICS = 5
"""First version in which clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""


async def delete_topics(request: DeleteTopicsRequest, context: RequestContext[TopicServices]) -> DeleteTopicsResponse:
    """Delete topics by name, from version 6 also by id. A name is free once every live node knows of the
    deletion (`TopicStore.create`).

    As ControllerApis.deleteTopics, this deletes internal topics, too. Deleting `__consumer_offsets` only removes its
    name from listings, until a client looks for a group's coordinator.
    """
    services = context.services
    if not services.catalog.broker.delete_topic_enable:
        code = ErrorCode.TOPIC_DELETION_DISABLED if context.version >= 3 else ErrorCode.INVALID_REQUEST
        raise KafkaError(code, "delete.topic.enable is false.")
    asked = request.topics or await mapped(lambda name: DeleteTopicState(name=name), request.topic_names)
    named = await tally(state.topic_id if state.name is None else state.name for state in asked)
    await services.catalog.refresh_if_changed()
    mutations = services.throttles.mutations(context, STRICT_DELETE_TOPICS)
    responses: dict[DeleteTopicState, DeletableTopicResult] = {}
    failure: KafkaError | None = None
    any_deleted = False
    async for state in in_pieces(asked):
        if state in responses:
            continue
        try:
            if failure is not None:
                raise failure
            topic = _find_deletable(state, named, context)
            mutations.record(len(topic.partitions))
            try:
                is_deleted = await services.topics.delete(topic.topic_id)
            except StorageError as error:
                if not any_deleted:
                    raise
                logger.warning("topic not deleted, and none after it", topic=topic.name, reason=str(error))
                failure = storage_refusal(context.storage_failed(context.api_key, error))
                raise failure from error
            if not is_deleted:
                raise _unknown(state)
            any_deleted = True
        except KafkaError as error:
            responses[state] = DeletableTopicResult(
                name=_shown_name(state, error, context),
                topic_id=state.topic_id,
                error_code=error.code,
                error_message=error.message,
            )
        else:
            services.catalog.remove(topic.topic_id)
            logger.info("topic deleted", topic=topic.name)
            responses[state] = DeletableTopicResult(name=topic.name, topic_id=topic.topic_id)
    return DeleteTopicsResponse(throttle_time_ms=mutations.wait_ms, responses=tuple(responses.values()))


def _find_deletable(state: DeleteTopicState, named: Counter[str | UUID], context: RequestContext[FindsTopics]) -> Topic:
    services = context.services
    if state.name is not None and state.topic_id != ZERO_UUID:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Give either the name or the id of a topic.")
    if state.name is None and state.topic_id == ZERO_UUID:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Neither the name nor the id of a topic is given.")
    if state.name is not None:
        if named[state.name] > 1:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
        topic = services.catalog.get(state.name)
        if not _may_delete_any(context) and not may_topic(context, AclOperation.DESCRIBE, state.name):
            raise refusal_of(ResourceType.TOPIC)
    else:
        if named[state.topic_id] > 1:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic id.")
        topic = services.catalog.get_by_id(state.topic_id)
    if topic is None:
        raise _unknown(state)
    if not _may_delete_any(context) and not may_topic(context, AclOperation.DELETE, topic.name):
        raise refusal_of(ResourceType.TOPIC)
    return topic


def _shown_name(state: DeleteTopicState, error: KafkaError, context: RequestContext[FindsTopics]) -> str | None:
    """Return the name for a refusal. A client that named a topic by id and may not delete it sees the name if it may
    describe the topic."""
    topic = context.services.catalog.get_by_id(state.topic_id)
    refused = error.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    if refused and topic is not None and may_topic(context, AclOperation.DESCRIBE, topic.name, told=False):
        return topic.name
    return state.name


def _may_delete_any(context: RequestContext[HasAuthorizer]) -> bool:
    return may(context, AclOperation.DELETE, ResourceType.CLUSTER, told=False)


def _unknown(state: DeleteTopicState) -> KafkaError:
    if state.name is None:
        return KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, "This server does not host this topic ID.")
    return KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition.")
