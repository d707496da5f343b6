"""LeaveGroup: leave a classic group at once instead of by session timeout.

Version 3 takes many members, answered one by one (KIP-345); 5 brings reasons (KIP-800).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, message, string, struct


@struct
class MemberIdentity:
    member_id: str = string()
    group_instance_id: str | None = string(nullable="0+", default=None)
    reason: str | None = string(versions="5+", nullable="5+", default=None)


@message(ApiKey.LEAVE_GROUP, versions="0-5", flexible="4+")
class LeaveGroupRequest:
    group_id: str = string()
    member_id: str = string(versions="0-2")
    members: tuple[MemberIdentity, ...] = array(MemberIdentity, versions="3+")


@struct
class MemberResponse:
    member_id: str = string()
    group_instance_id: str | None = string(nullable="0+")
    error_code: int = int16()


@message(ApiKey.LEAVE_GROUP, versions="0-5", flexible="4+")
class LeaveGroupResponse:
    throttle_time_ms: int = int32(versions="1+")
    error_code: int = int16()
    members: tuple[MemberResponse, ...] = array(MemberResponse, versions="3+")
