"""One group in memory: its value, the events that wait for it, and the requests without an answer.

The one idea: every request without an answer is in `parked`, whether it waits in the mailbox, in a write in progress,
or is held by the group itself. So dropping a group means answering everything in `parked`. `gateway/groups/runtime.py`
and the value's machine decide what happens to the group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

from gateway.coordinator.facts import Fact, GroupTypeChanged, MemberId
from gateway.coordinator.machine import ClientRequest, ConnectionId, Event, GroupT, Reply, ReplyT, Request, RequestId
from protocol.errors import ErrorCode, KafkaError
from storage.types import CoordinatorLease

Refuse = Callable[[Request[Reply], ErrorCode], Reply]
"""Returns a reply that contains only an error, in the shape that the request's handler expects."""

MAX_TOUCHED = 10_000
"""Maximal number of members that are tracked as changed. If there are more, the whole group is stored."""


@dataclass(slots=True, eq=False)
class Turn:
    """A caller that needs the settled group to stay unchanged for a while. `come` resolves when the caller's turn
    begins."""

    come: asyncio.Future[None]


class Unstored:
    """Differences between a group and its stored form, as reported by facts: the contents of the next write."""

    __slots__ = ("members", "whole")

    def __init__(self) -> None:
        self.members: set[MemberId] = set()
        self.whole = False
        """True if every member may have changed."""

    def note(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            self.members.update(fact.touches())
            if isinstance(fact, GroupTypeChanged):
                self.whole = True
        if len(self.members) > MAX_TOUCHED:
            self.whole = True
        if self.whole:
            self.members.clear()

    def clear(self) -> None:
        self.members.clear()
        self.whole = False


class Slot(Generic[GroupT]):
    """A group's slot. It is busy while the group is loaded, stored or held. The mailbox is empty while the slot is not
    busy."""

    __slots__ = (
        "busy",
        "dropped",
        "group",
        "group_id",
        "lease",
        "loaded",
        "mailbox",
        "parked",
        "reprieved",
        "timer",
        "unstored",
    )

    def __init__(self, group_id: str, lease: CoordinatorLease, group: GroupT) -> None:
        self.group_id = group_id
        self.lease = lease
        self.group = group
        self.loaded = False
        self.busy = False
        self.dropped = False
        self.unstored = Unstored()
        self.mailbox: deque[Event | Turn] = deque()
        self.parked: dict[RequestId, tuple[Request[Reply], asyncio.Future[Any]]] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.reprieved = False
        """True if the last timer fired so late that no deadline was enforced."""

    def park(self, request: Request[ReplyT], loop: asyncio.AbstractEventLoop) -> asyncio.Future[ReplyT]:
        """Return the future of the reply to `request`. Other code sets its result."""
        future: asyncio.Future[ReplyT] = loop.create_future()
        self.parked[request.request_id] = (request, future)
        return future

    def answer(self, request_id: RequestId, reply: Reply) -> bool:
        """Answer the request. Return False if it is not parked here."""
        parked = self.parked.pop(request_id, None)
        if parked is None:
            return False
        # A handler whose connection is gone has already cancelled its future.
        if not parked[1].done():
            parked[1].set_result(reply)
        return True

    def refuse_parked_on(self, connection_id: ConnectionId, refuse: Refuse) -> None:
        """Answer the requests of a closed connection, because their replies can no longer be sent."""
        for request_id, (request, _) in list(self.parked.items()):
            if isinstance(request, ClientRequest) and request.connection_id == connection_id:
                self.answer(request_id, refuse(request, ErrorCode.COORDINATOR_NOT_AVAILABLE))

    def let_go(self, error: ErrorCode, refuse: Refuse) -> None:
        """Answer every request with `error`. The slot is not used any more."""
        self.dropped = True
        self.disarm()
        for request_id, (request, _) in list(self.parked.items()):
            self.answer(request_id, refuse(request, error))
        for item in self.mailbox:
            if isinstance(item, Turn) and not item.come.done():
                item.come.set_exception(KafkaError(error))
        self.mailbox.clear()

    def disarm(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
