"""DeleteTopics: remove topics by name, from version 6 also by id.

Version 5 brings an error message per topic.
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, message, string, struct, uuid


@struct
class DeleteTopicState:
    name: str | None = string(nullable="0+", default=None)
    topic_id: UUID = uuid()


@message(ApiKey.DELETE_TOPICS, versions="1-6", flexible="4+")
class DeleteTopicsRequest:
    topics: tuple[DeleteTopicState, ...] = array(DeleteTopicState, versions="6+")
    topic_names: tuple[str, ...] = array(string, versions="0-5")
    timeout_ms: int = int32()


@struct
class DeletableTopicResult:
    name: str | None = string(nullable="6+")
    topic_id: UUID = uuid(versions="6+")
    error_code: int = int16()
    error_message: str | None = string(versions="5+", nullable="5+", default=None)


@message(ApiKey.DELETE_TOPICS, versions="1-6", flexible="4+")
class DeleteTopicsResponse:
    throttle_time_ms: int = int32()
    responses: tuple[DeletableTopicResult, ...] = array(DeletableTopicResult)
