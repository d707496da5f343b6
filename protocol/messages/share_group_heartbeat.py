"""ShareGroupHeartbeat: the one request by which members of a share group (KIP-932) join, stay alive and leave.

Version 0 was early access and is gone. Null means "as before".
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.messages.consumer_group_heartbeat import Assignment
from protocol.schema import array, int16, int32, message, nested, string


@message(ApiKey.SHARE_GROUP_HEARTBEAT, versions="1", flexible="0+")
class ShareGroupHeartbeatRequest:
    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()
    rack_id: str | None = string(nullable="0+", default=None)
    subscribed_topic_names: tuple[str, ...] | None = array(string, nullable="0+", default=None)


@message(ApiKey.SHARE_GROUP_HEARTBEAT, versions="1", flexible="0+")
class ShareGroupHeartbeatResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    member_id: str | None = string(nullable="0+", default=None)
    member_epoch: int = int32()
    heartbeat_interval_ms: int = int32()
    assignment: Assignment | None = nested(Assignment, nullable="0+", default=None)
