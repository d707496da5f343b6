"""Count the client bytes that the whole node holds, under one bound: requests read and not yet answered, answers not
yet written, and bytes that a peer has left unread in its socket's buffer. Requests that are still arriving have the
same bound once more, and those of one address half of it.

The one idea: each connection reports how much more or less it holds. A connection that wants to start something while
the node is full waits for its turn, first come, first served. A connection that holds little may continue with small
requests, so heartbeats survive a storage outage that fills the node with produce requests. Arriving requests cannot
keep each other from becoming whole: one of them may always be read on, and one of each address while the node has room.
So a peer that sends half requests delays large requests of its own address only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

SMALL_BYTES = 16 * 1024
"""Bytes that a connection may hold in requests however full the node is. As many of an arriving request are not
counted."""


class Waiter(Protocol):
    def proceed(self) -> None:
        """Continue with what was kept back, because there is room. Call `wait` again if the room is not enough."""
        ...


class Reader(Waiter, Protocol):
    """A connection, whose request may still be arriving."""

    @property
    def address(self) -> str:
        """The peer's host."""
        ...


@dataclass(slots=True, eq=False)
class _Origin:
    """The large requests that are arriving from one address."""

    count_bytes: int = 0
    reader: Reader | None = None
    """The connection that may read on although the address has reached its bound."""
    waiting: dict[Reader, None] = field(default_factory=dict[Reader, None])


class Holdings:
    """One counter for a node's connections, and the queues of those that wait for room."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._address_limit_bytes = limit_bytes // 2
        self._in_work_bytes = 0
        self._waiting: dict[Waiter, None] = {}
        self._arriving_bytes = 0
        self._filled_bytes = 0
        """Sum of the arriving bytes of all addresses, with each address counted only up to its bound. A request that
        may read on beyond this bound therefore uses no room of other addresses."""
        self._reader: Reader | None = None
        """The connection that may read on although the node is full."""
        self._origins: dict[str, _Origin] = {}
        """Addresses from which large requests are arriving."""

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

    # --- requests that are arriving -------------------------------------------------------------------------------

    def arrive(self, reader: Reader, more_bytes: int) -> None:
        """Count more arrived bytes of a request, beyond SMALL_BYTES. The number is negative when the request is whole
        or its connection has gone."""
        was_full = self._filled_bytes >= self._limit_bytes
        origin = self._origins.setdefault(reader.address, _Origin())
        self._filled_bytes -= min(origin.count_bytes, self._address_limit_bytes)
        origin.count_bytes += more_bytes
        self._filled_bytes += min(origin.count_bytes, self._address_limit_bytes)
        self._arriving_bytes += more_bytes
        if more_bytes > 0:
            return
        origin.waiting.pop(reader, None)
        if origin.reader is reader:
            origin.reader = None
        if not origin.count_bytes:  # so no connection waits, because each of them has counted bytes
            del self._origins[reader.address]
        is_freed = self._reader is reader
        if is_freed:
            self._reader = None
        if is_freed or (was_full and self._filled_bytes < self._limit_bytes):
            self._let_read_on(list(self._origins.values()))
        else:
            self._let_read_on((origin,))

    def is_full_for(self, reader: Reader) -> bool:
        """Return True if no large request of the connection may be read now."""
        if self._filled_bytes < self._address_limit_bytes:
            return False
        if self._filled_bytes >= self._limit_bytes:
            return self._reader is not reader
        origin = self._origins.get(reader.address)
        return origin is not None and origin.count_bytes >= self._address_limit_bytes and origin.reader is not reader

    def may_read_on(self, reader: Reader) -> bool:
        """Return True if more of a request may be read whose connection has counted bytes of it: while there is room,
        and for one request of the node or of the address even without room. Otherwise call `proceed` once it may."""
        origin = self._origins[reader.address]
        if not self.has_room() or self._filled_bytes >= self._limit_bytes:
            if self._reader is None:
                self._reader = reader
            may = self._reader is reader
        elif origin.count_bytes >= self._address_limit_bytes:
            if origin.reader is None:
                origin.reader = reader
            may = origin.reader is reader
        else:
            may = True
        if not may:
            # A connection that waits must not keep others from reading on.
            if self._reader is reader:
                self._reader = None
            if origin.reader is reader:
                origin.reader = None
            origin.waiting[reader] = None
        return may

    def _let_read_on(self, origins: Iterable[_Origin]) -> None:
        for origin in origins:
            for _ in range(len(origin.waiting)):
                if not origin.waiting or not self._has_turn(origin):
                    break
                reader = next(iter(origin.waiting))
                del origin.waiting[reader]
                reader.proceed()

    def _has_turn(self, origin: _Origin) -> bool:
        """Return True if another connection of the address may read on."""
        if not self.has_room():
            return False
        if self._filled_bytes >= self._limit_bytes:
            return self._reader is None
        return origin.count_bytes < self._address_limit_bytes or origin.reader is None

    # --- requests in work, and answers ----------------------------------------------------------------------------

    def take(self, count_bytes: int) -> None:
        self._in_work_bytes += count_bytes

    def give_back(self, count_bytes: int) -> None:
        was_full = not self.has_room()
        self._in_work_bytes -= count_bytes
        if self._waiting:
            self._let_go_on()
        if was_full and self._origins:
            self._let_read_on(list(self._origins.values()))

    def _let_go_on(self) -> None:
        # Try each waiter at most once: a connection that finds too little room waits again, behind the others.
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
