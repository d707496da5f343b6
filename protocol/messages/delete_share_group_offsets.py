"""DeleteShareGroupOffsets: forget the positions of an empty share group in topics (KIP-932)."""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, message, string, struct, uuid


@struct
class DeleteShareGroupOffsetsRequestTopic:
    topic_name: str = string()


@message(ApiKey.DELETE_SHARE_GROUP_OFFSETS, versions="0", flexible="0+")
class DeleteShareGroupOffsetsRequest:
    group_id: str = string()
    topics: tuple[DeleteShareGroupOffsetsRequestTopic, ...] = array(DeleteShareGroupOffsetsRequestTopic)


@struct
class DeleteShareGroupOffsetsResponseTopic:
    topic_name: str = string()
    topic_id: UUID = uuid()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)


@message(ApiKey.DELETE_SHARE_GROUP_OFFSETS, versions="0", flexible="0+")
class DeleteShareGroupOffsetsResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    responses: tuple[DeleteShareGroupOffsetsResponseTopic, ...] = array(DeleteShareGroupOffsetsResponseTopic)
