"""ListGroups: the groups this node coordinates.

Version 4 filters by and shows states (KIP-518), 5 types (KIP-848).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, message, string, struct


@message(ApiKey.LIST_GROUPS, versions="0-5", flexible="3+")
class ListGroupsRequest:
    states_filter: tuple[str, ...] = array(string, versions="4+")
    types_filter: tuple[str, ...] = array(string, versions="5+")


@struct
class ListedGroup:
    group_id: str = string()
    protocol_type: str = string()
    group_state: str = string(versions="4+")
    group_type: str = string(versions="5+")


@message(ApiKey.LIST_GROUPS, versions="0-5", flexible="3+")
class ListGroupsResponse:
    throttle_time_ms: int = int32(versions="1+")
    error_code: int = int16()
    groups: tuple[ListedGroup, ...] = array(ListedGroup)
