"""The audit trail: one line for each request that changes the cluster, or tries to.

The one idea: a line shows the request and the response field by field, as their declarations name them, so a new field
needs no code here. Secrets are left out: bytes (salts, keys of tokens) and the values of settings that may be
passwords. The line is written before the answer leaves.

Clients' data is no subject: records, and commits of groups' members, are not in the trail.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, cast
from uuid import UUID

from gateway.apis.admin.config_resources import ResourceType as ConfigResourceType
from gateway.config.broker_table import shown_value
from gateway.config.definition import HIDDEN
from gateway.config.group import GROUP_CONFIGS
from gateway.config.topic import TOPIC_CONFIGS
from gateway.net.context import RequestContext
from gateway.net.dispatch import Audit
from gateway.security.kinds import AclOperation, PatternType, Permission, ResourceType
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.leave_group import LeaveGroupRequest
from protocol.messages.offset_commit import OffsetCommitRequest

AUDITED = frozenset(
    {
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.DELETE_RECORDS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.CREATE_ACLS,
        ApiKey.DELETE_ACLS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.CREATE_DELEGATION_TOKEN,
        ApiKey.RENEW_DELEGATION_TOKEN,
        ApiKey.EXPIRE_DELEGATION_TOKEN,
        ApiKey.ALTER_CLIENT_QUOTAS,
        ApiKey.DELETE_GROUPS,
        ApiKey.LEAVE_GROUP,
        ApiKey.OFFSET_COMMIT,
        ApiKey.OFFSET_DELETE,
        ApiKey.ALTER_SHARE_GROUP_OFFSETS,
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
        ApiKey.ELECT_LEADERS,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        ApiKey.UPDATE_FEATURES,
        ApiKey.WRITE_TXN_MARKERS,
        ApiKey.UNREGISTER_BROKER,
        ApiKey.UNREGISTER_CONTROLLER,
        ApiKey.ADD_RAFT_VOTER,
        ApiKey.REMOVE_RAFT_VOTER,
    }
)

_OF_ACLS: Mapping[str, type[IntEnum]] = {
    "resource_type": ResourceType,
    "resource_type_filter": ResourceType,
    "resource_pattern_type": PatternType,
    "pattern_type": PatternType,
    "pattern_type_filter": PatternType,
    "operation": AclOperation,
    "permission_type": Permission,
}
_OF_CONFIGS: Mapping[str, type[IntEnum]] = {"resource_type": ConfigResourceType}
_CODES: Mapping[ApiKey, Mapping[str, type[IntEnum]]] = {
    ApiKey.CREATE_ACLS: _OF_ACLS,
    ApiKey.DELETE_ACLS: _OF_ACLS,
    ApiKey.ALTER_CONFIGS: _OF_CONFIGS,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _OF_CONFIGS,
}
"""Fields of an API whose numeric codes have names."""

REMOVED = "member was removed by an admin"
"""Beginning of the reason with which administrators remove members (KIP-800)."""

_ERROR_FIELDS = frozenset({"error_code", "topic_config_error_code"})
_LEFT_OUT = frozenset({"timeout_ms", "throttle_time_ms"})


def audit_into(append: Callable[[str], None], node: str) -> Mapping[ApiKey, Audit]:
    """Return the stage of each audited API. `append` writes a line and may block; `node` is this node's address.

    The lines have a thread of their own: if the disk hangs, they must not take all threads of the node.
    """
    writer = ThreadPoolExecutor(1, thread_name_prefix="audit")

    async def audit(request: object, response: object, code: int, context: RequestContext[object]) -> None:
        if isinstance(request, OffsetCommitRequest) and not _is_by_administrator(request):
            return
        if isinstance(request, LeaveGroupRequest) and not _removes_others(request):
            return
        # A request may have megabytes, so the thread also formats its log line.
        await asyncio.get_running_loop().run_in_executor(
            writer, copy_context().run, lambda: append(line_of(request, response, code, context, node))
        )

    return dict.fromkeys(AUDITED, audit)


def _is_by_administrator(request: OffsetCommitRequest) -> bool:
    """Return whether a commit names no member of the group. Tools that reset offsets send such commits, and so do
    consumers that assign their partitions themselves."""
    return request.generation_id_or_member_epoch < 0 and not request.member_id


def _removes_others(request: LeaveGroupRequest) -> bool:
    """Return whether an administrator removes members. A member that leaves names itself alone and by its member id.
    Java's tools give a reason that begins like REMOVED unless they are given another one."""
    members = request.members
    return len(members) > 1 or any(
        not member.member_id or (member.reason or "").startswith(REMOVED) for member in members
    )


def line_of(request: object, response: object, code: int, context: RequestContext[object], node: str) -> str:
    """Return the line of a request. `response` is None and `code` set if the whole request was refused."""
    connection = context.connection
    names = _CODES.get(context.api_key, {})
    answered = _plain(response, names)
    errors = {ErrorCode(code).name} if code else set[str]()
    errors.update(_errors(answered))
    return json.dumps(
        {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "node": node,
            "principal": str(connection.principal),
            "host": connection.client_host.removeprefix("/"),
            "listener": connection.listener,
            "client_id": context.client_id,
            "api": context.api_key.name.lower(),
            "errors": sorted(errors),
            "request": _plain(request, names),
            "response": answered,
        }
    )


def _errors(found: object) -> Iterator[str]:
    """Yield the names of the errors in a part of an answer."""
    if isinstance(found, dict):
        for name, value in cast("dict[str, object]", found).items():
            if name in _ERROR_FIELDS:
                if value != ErrorCode.NONE.name:
                    yield cast("str", value)
            else:
                yield from _errors(value)
    elif isinstance(found, list):
        for part in cast("list[object]", found):
            yield from _errors(part)


def _plain(value: object, names: Mapping[str, type[IntEnum]]) -> Any:
    """Return a part of a message as values that JSON can represent."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_fields(value, names)
    if isinstance(value, tuple):
        return [_plain(part, names) for part in cast("tuple[object, ...]", value)]
    if isinstance(value, bytes | bytearray | memoryview):
        return HIDDEN
    if isinstance(value, UUID):
        return str(value)
    return value


def _plain_fields(struct: Any, names: Mapping[str, type[IntEnum]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(struct):
        name, value = field.name, getattr(struct, field.name)
        if name in _LEFT_OUT:
            continue
        if name in _ERROR_FIELDS:
            found[name] = ErrorCode(value).name
        elif name in names:
            found[name] = _name_of(names[name], value)
        else:
            found[name] = _plain(value, names)
    setting, text = found.get("name"), found.get("value")
    if isinstance(setting, str) and isinstance(text, str):
        found["value"] = text if setting in TOPIC_CONFIGS or setting in GROUP_CONFIGS else shown_value(setting, text)
    return found


def _name_of(kind: type[IntEnum], code: int) -> str | int:
    try:
        return kind(code).name
    except ValueError:
        return code
