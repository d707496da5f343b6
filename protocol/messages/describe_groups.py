"""DescribeGroups: state, protocol and members of classic groups.

Version 3 brings authorized operations (KIP-430), 4 static members, 6 a message and GROUP_ID_NOT_FOUND (KIP-1043).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, binary, boolean, int16, int32, message, string, struct


@message(ApiKey.DESCRIBE_GROUPS, versions="0-6", flexible="5+")
class DescribeGroupsRequest:
    groups: tuple[str, ...] = array(string)
    include_authorized_operations: bool = boolean(versions="3+")


@struct
class DescribedGroupMember:
    member_id: str = string()
    group_instance_id: str | None = string(versions="4+", nullable="4+", default=None)
    client_id: str = string()
    client_host: str = string()
    member_metadata: bytes = binary()
    member_assignment: bytes = binary()


@struct
class DescribedGroup:
    error_code: int = int16()
    error_message: str | None = string(versions="6+", nullable="6+", default=None)
    group_id: str = string()
    group_state: str = string()
    protocol_type: str = string()
    protocol_data: str = string()
    members: tuple[DescribedGroupMember, ...] = array(DescribedGroupMember)
    authorized_operations: int = int32(versions="3+", default=-0x80000000)


@message(ApiKey.DESCRIBE_GROUPS, versions="0-6", flexible="5+")
class DescribeGroupsResponse:
    throttle_time_ms: int = int32(versions="1+")
    groups: tuple[DescribedGroup, ...] = array(DescribedGroup)
