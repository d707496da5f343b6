"""ShareGroupDescribe: share groups (KIP-932) with their members and what these are assigned."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.messages.consumer_group_describe import Assignment
from protocol.schema import array, boolean, int16, int32, message, nested, string, struct


@message(ApiKey.SHARE_GROUP_DESCRIBE, versions="1", flexible="0+")
class ShareGroupDescribeRequest:
    group_ids: tuple[str, ...] = array(string)
    include_authorized_operations: bool = boolean()


@struct
class Member:
    member_id: str = string()
    rack_id: str | None = string(nullable="0+", default=None)
    member_epoch: int = int32()
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: tuple[str, ...] = array(string)
    assignment: Assignment = nested(Assignment)


@struct
class DescribedGroup:
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    group_id: str = string()
    group_state: str = string()
    group_epoch: int = int32()
    assignment_epoch: int = int32()
    assignor_name: str = string()
    members: tuple[Member, ...] = array(Member)
    authorized_operations: int = int32(default=-2147483648)


@message(ApiKey.SHARE_GROUP_DESCRIBE, versions="1", flexible="0+")
class ShareGroupDescribeResponse:
    throttle_time_ms: int = int32()
    groups: tuple[DescribedGroup, ...] = array(DescribedGroup)
