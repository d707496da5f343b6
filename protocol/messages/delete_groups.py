"""DeleteGroups: forget empty groups and their offsets (KIP-229). Version 3 brings a message for each error."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, message, string, struct


@message(ApiKey.DELETE_GROUPS, versions="0-3", flexible="2+")
class DeleteGroupsRequest:
    groups_names: tuple[str, ...] = array(string)


@struct
class DeletableGroupResult:
    group_id: str = string()
    error_code: int = int16()
    error_message: str | None = string(versions="3+", nullable="3+", default=None)


@message(ApiKey.DELETE_GROUPS, versions="0-3", flexible="2+")
class DeleteGroupsResponse:
    throttle_time_ms: int = int32()
    results: tuple[DeletableGroupResult, ...] = array(DeletableGroupResult)
