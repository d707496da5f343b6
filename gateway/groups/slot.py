"""One group in memory: the value, what waits for it, and whom it still owes an answer.

The one idea: every request that has no answer yet is in `parked`, whether it waits in the mailbox, in a write that is
under way, or is held by the group itself; so to let go of a group is to answer everything in `parked`, and nobody is
forgotten. What happens to the group is decided in `gateway/groups/runtime.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from gateway.coordinator.model import (
    ConnectionId,
    DeleteGroup,
    DeleteReply,
    Event,
    Group,
    Heartbeat,
    HeartbeatReply,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeaveReply,
    OffsetCommit,
    OffsetCommitReply,
    Reply,
    RequestId,
    SyncGroup,
    SyncReply,
)
from protocol.errors import ErrorCode, KafkaError
from storage.types import CoordinatorLease

Request = JoinGroup | SyncGroup | Heartbeat | LeaveGroup | OffsetCommit | DeleteGroup
"""Events that someone waits for: each gets exactly one reply."""


def refuse(request: Request, error: ErrorCode) -> Reply:
    """The reply to `request` that says only `error`, in the shape the request's handler expects."""
    match request:
        case JoinGroup():
            return JoinReply(error, request.member_id)
        case SyncGroup():
            return SyncReply(error)
        case Heartbeat():
            return HeartbeatReply(error)
        case LeaveGroup():
            return LeaveReply(error)
        case OffsetCommit():
            return OffsetCommitReply(error)
        case DeleteGroup():
            return DeleteReply(error)


@dataclass(slots=True, eq=False)
class Hold:
    """Someone who wants the settled group to keep still for a while: `turn` resolves when it does."""

    turn: asyncio.Future[None]


class Slot:
    """Busy while the group is loaded, stored or held; only then may the mailbox hold anything."""

    __slots__ = (
        "busy",
        "dropped",
        "group",
        "group_id",
        "lease",
        "loaded",
        "mailbox",
        "parked",
        "state_timestamp_ms",
        "timer",
    )

    def __init__(self, group_id: str, lease: CoordinatorLease) -> None:
        self.group_id = group_id
        self.lease = lease
        self.group = Group(group_id)
        self.loaded = False
        self.state_timestamp_ms = 0
        """Wall-clock time of the last change of state."""
        self.busy = False
        self.dropped = False
        self.mailbox: deque[Event | Hold] = deque()
        self.parked: dict[RequestId, tuple[Request, asyncio.Future[Any]]] = {}
        self.timer: asyncio.TimerHandle | None = None

    def park(self, request: Request, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        """The future of the reply to `request`, which somebody else will answer."""
        future: asyncio.Future[Any] = loop.create_future()
        self.parked[request.request_id] = (request, future)
        return future

    def answer(self, request_id: RequestId, reply: Reply) -> bool:
        """Whether the request was parked here."""
        parked = self.parked.pop(request_id, None)
        if parked is None:
            return False
        # A handler whose connection is gone has cancelled its future.
        if not parked[1].done():
            parked[1].set_result(reply)
        return True

    def refuse_parked_on(self, connection_id: ConnectionId) -> None:
        """Nothing held for a closed connection can be sent any more; it must not be held either."""
        for request_id, (request, _) in list(self.parked.items()):
            if not isinstance(request, DeleteGroup) and request.connection_id == connection_id:
                self.answer(request_id, refuse(request, ErrorCode.COORDINATOR_NOT_AVAILABLE))

    def let_go(self, error: ErrorCode) -> None:
        """Answers everyone with `error`, for good. Heartbeats for a group that could not be read are answered NONE:
        upstream keeps members alive while it loads them."""
        self.dropped = True
        self.disarm()
        for request_id, (request, _) in list(self.parked.items()):
            alive = isinstance(request, Heartbeat) and not self.loaded and error is ErrorCode.COORDINATOR_NOT_AVAILABLE
            self.answer(request_id, refuse(request, ErrorCode.NONE if alive else error))
        for item in self.mailbox:
            if isinstance(item, Hold) and not item.turn.done():
                item.turn.set_exception(KafkaError(error))
        self.mailbox.clear()

    def disarm(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
