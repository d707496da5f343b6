"""Count the client bytes that the whole node holds, under one bound: requests read and not yet answered, answers not
yet written, and bytes that a peer has left unread in its socket's buffer. Requests that are still arriving have the
same bound once more.

The one idea: each connection reports how much more or less it holds. A connection that wants to start something while
the node is full waits for its turn, first come, first served. A connection that holds little may continue with small
requests, so heartbeats survive a storage outage that fills the node with produce requests. Arriving requests cannot
keep each other from becoming whole: one of them may always be read on.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

SMALL_BYTES = 16 * 1024
"""Bytes that a connection may hold in requests however full the node is."""


class Waiter(Protocol):
    def proceed(self) -> None:
        """Continue with what was kept back, because there is room. Call `wait` again if the room is not enough."""
        ...


class Holdings:
    """One counter for a node's connections, and the queue of those that wait for room."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._in_work_bytes = 0
        self._arriving_bytes = 0
        self._reader: Waiter | None = None
        self._waiting: dict[Waiter, None] = {}

    @property
    def held_bytes(self) -> int:
        return self._in_work_bytes + self._arriving_bytes

    def has_room(self) -> bool:
        """True if the node may work on another request."""
        return self._in_work_bytes < self._limit_bytes

    def overdrawn(self) -> bool:
        """True if the work that continues without room, batch by batch, has reached a quarter of the bound."""
        return self._in_work_bytes >= self._limit_bytes + self._limit_bytes // 4

    def room_bytes(self) -> int:
        """Bytes that may still be added to the work; 0 when the node is full."""
        return max(self._limit_bytes - self._in_work_bytes, 0)

    def may_read_on(self, waiter: Waiter) -> bool:
        """Return True if more of a large request may be read: while there is room, and for one request even without
        room."""
        if self._in_work_bytes < self._limit_bytes and self._arriving_bytes < self._limit_bytes:
            return True
        if self._reader is None:
            self._reader = waiter
        return self._reader is waiter

    def arrive(self, waiter: Waiter, more_bytes: int) -> None:
        """Count more arrived bytes of a request; a negative number when it is whole, or its connection has gone."""
        self._arriving_bytes += more_bytes
        if more_bytes < 0:
            if self._reader is waiter:
                self._reader = None
            self._let_go_on()

    def take(self, count_bytes: int) -> None:
        self._in_work_bytes += count_bytes

    def give_back(self, count_bytes: int) -> None:
        self._in_work_bytes -= count_bytes
        if self._waiting:
            self._let_go_on()

    def _let_go_on(self) -> None:
        # Each at most once: a connection that finds too little room waits again, behind the others.
        for _ in range(len(self._waiting)):
            if not self._waiting or not self.has_room():
                return
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            waiter.proceed()

    def wait(self, waiter: Waiter) -> None:
        self._waiting[waiter] = None

    async def room(self, patience_s: float) -> None:
        """Wait until another request may be worked on, no longer than `patience_s`, because the holders of the room
        may themselves wait for room."""
        if self.has_room():
            return
        turn = _Turn(asyncio.get_running_loop().create_future())
        self.wait(turn)
        try:
            async with asyncio.timeout(patience_s):
                await turn.come
        except TimeoutError:
            pass
        finally:
            self.forget(turn)

    def forget(self, waiter: Waiter) -> None:
        self._waiting.pop(waiter, None)


class _Turn:
    def __init__(self, come: asyncio.Future[None]) -> None:
        self.come = come

    def proceed(self) -> None:
        if not self.come.done():
            self.come.set_result(None)


class Share:
    """Bytes that one request holds, or is about to hold, besides its own. They are counted in advance, because many
    requests may ask for room before any of them has taken it."""

    __slots__ = ("_count_bytes", "_holdings")

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._count_bytes = 0

    def become(self, count_bytes: int) -> None:
        more_bytes, self._count_bytes = count_bytes - self._count_bytes, count_bytes
        if more_bytes > 0:
            self._holdings.take(more_bytes)
        elif more_bytes:
            self._holdings.give_back(-more_bytes)


UNBOUNDED = Holdings(2**62)
"""Holdings for code outside a server's connections."""
