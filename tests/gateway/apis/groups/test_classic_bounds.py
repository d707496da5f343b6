"""Limits on the metadata that a classic member may send, and on the assignments that a leader may send. A group keeps
both in memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.apis.groups.classic_groups import MAX_STORED_BYTES, join_group, sync_group
from gateway.net.context import ConnectionInfo
from protocol.errors import ErrorCode
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment


class _SubmittedError(Exception):
    pass


def context() -> Any:
    def submit(group_id: str, event: object) -> None:
        raise _SubmittedError

    groups = SimpleNamespace(next_request_id=lambda: 1, submit=submit)
    connection = ConnectionInfo("connection", "/127.0.0.1")
    return SimpleNamespace(services=SimpleNamespace(groups=groups), connection=connection, version=5, client_id="c")


def joining(size: int) -> JoinGroupRequest:
    """Return a JoinGroup request that makes the group keep `size` bytes. The names of protocols and their type count,
    too.
    """
    size -= len("consumer" + "p0" + "p1")
    halves = (bytes(size // 2), bytes(size - size // 2))
    protocols = tuple(JoinGroupRequestProtocol(name=f"p{number}", metadata=half) for number, half in enumerate(halves))
    return JoinGroupRequest(
        group_id="g",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        member_id="m",
        protocol_type="consumer",
        protocols=protocols,
    )


def syncing(size: int) -> SyncGroupRequest:
    """Return assignments that make the group keep `size` bytes. Member ids count, too."""
    size -= len("m0" + "m1")
    halves = (bytes(size // 2), bytes(size - size // 2))
    assignments = tuple(
        SyncGroupRequestAssignment(member_id=f"m{number}", assignment=half) for number, half in enumerate(halves)
    )
    return SyncGroupRequest(
        group_id="g",
        generation_id=1,
        member_id="m",
        protocol_type="consumer",
        protocol_name="p0",
        assignments=assignments,
    )


@pytest.mark.parametrize(("handler", "asking"), [(join_group, joining), (sync_group, syncing)])
async def test_metadata_beyond_the_bound_of_a_group_is_refused(handler: Any, asking: Any) -> None:
    with pytest.raises(_SubmittedError):
        await handler(asking(MAX_STORED_BYTES), context())
    answer = await handler(asking(MAX_STORED_BYTES + 1), context())
    assert answer.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
