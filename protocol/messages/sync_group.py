"""SyncGroup: the leader sends the assignment of a generation, and every member waits for its own part.

Version 3 brings static members (KIP-345), 5 protocol type and name to check against (KIP-559).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, binary, int16, int32, message, string, struct


@struct
class SyncGroupRequestAssignment:
    member_id: str = string()
    assignment: bytes = binary()


@message(ApiKey.SYNC_GROUP, versions="0-5", flexible="4+")
class SyncGroupRequest:
    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string(versions="3+", nullable="3+", default=None)
    protocol_type: str | None = string(versions="5+", nullable="5+", default=None)
    protocol_name: str | None = string(versions="5+", nullable="5+", default=None)
    assignments: tuple[SyncGroupRequestAssignment, ...] = array(SyncGroupRequestAssignment)


@message(ApiKey.SYNC_GROUP, versions="0-5", flexible="4+")
class SyncGroupResponse:
    throttle_time_ms: int = int32(versions="1+")
    error_code: int = int16()
    protocol_type: str | None = string(versions="5+", nullable="5+", default=None)
    protocol_name: str | None = string(versions="5+", nullable="5+", default=None)
    assignment: bytes = binary()
