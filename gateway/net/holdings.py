"""Count the client bytes that the whole node holds, under one bound: requests read and not yet answered, answers not
yet written, and bytes that a peer has left unread in its socket's buffer. Large requests that are still arriving, or
have arrived and may not start yet, have the same bound once more. An address may fill as much of it as is still free,
so a few addresses cannot fill it: after two that do their best, a third has an eighth of the bound. The addresses of an
IPv6 network count as one.

The one idea: each connection reports how much more or less it holds. A connection that wants to start something while
the node is full waits for its turn, first come, first served. A connection that holds little may continue with small
requests, so heartbeats survive a storage outage that fills the node with produce requests. Arriving requests cannot
keep each other from becoming whole, because some of them have a turn until they start: such a request may always be
read on, and its bytes fill no room. An address has one turn at a time, so one address cannot take them all. A
connection that has a turn and hardly sends is closed once others wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

SMALL_BYTES = 16 * 1024
"""Bytes that a connection may always hold in requests, however full the node is. This part of an arriving request is
not counted.
"""
TURNS = 2
"""Number of turns at the same time. Each may hold a request of the maximal size, beyond the limit."""
TURN_BYTES_PER_S = 16 * 1024
"""The least pace of a connection that has a turn while others wait. A client with default settings gives up a
request after 30 s (Java) or 60 s (librdkafka), so at a lower pace it could not send even a megabyte. A mobile link
keeps this pace, and pauses of some seconds matter little. Kafka demands no pace: `queued.max.request.bytes` is
unlimited by default, and where it is set, slow senders delay all others."""
TURN_WINDOW_S = 30.0
"""Seconds over which the pace of a turn is measured."""


class Waiter(Protocol):
    def proceed(self) -> None:
        """Continue with what was kept back, because there is room. Call `wait` again if the room is not enough."""
        ...


class Reader(Waiter, Protocol):
    """A connection with a large request that is arriving, or has arrived and may not start yet."""

    @property
    def network(self) -> str:
        """The network of the peer's address (`gateway/net/networks.py`)."""
        ...


@dataclass(slots=True, eq=False)
class _Origin:
    """The large requests that are arriving from one address."""

    counted_bytes: int = 0
    """Bytes of these requests, without the request that has a turn."""
    turn: Reader | None = None
    """The connection that may continue to read although its address or the node is full."""
    arrived_bytes: dict[Reader, int] = field(default_factory=dict[Reader, int])
    waiting: dict[Reader, None] = field(default_factory=dict[Reader, None])


class _Look(NamedTuple):
    """The start of a window in which the pace of a turn is measured."""

    at_s: float
    arrived_bytes: int


class Holdings:
    """One counter for a node's connections, and the queues of those that wait for room."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._in_work_bytes = 0
        self._waiting: dict[Waiter, None] = {}
        self._arriving_bytes = 0
        self._filled_bytes = 0
        """Arriving bytes without those of the requests that have a turn."""
        self._turns: dict[Reader, _Look | None] = {}
        self._origins: dict[str, _Origin] = {}
        """Addresses from which large requests are arriving."""
        self._queue: dict[_Origin, None] = {}
        """The addresses with waiting connections, in the order of their turns."""

    @property
    def held_bytes(self) -> int:
        return self._in_work_bytes + self._arriving_bytes

    def has_room(self) -> bool:
        """True if the node may start another request."""
        return self._in_work_bytes < self._limit_bytes

    def overdrawn(self) -> bool:
        """True if the work that continues without room, batch by batch, has reached a quarter of the bound."""
        return self._in_work_bytes >= self._limit_bytes + self._limit_bytes // 4

    def room_bytes(self) -> int:
        """Number of bytes that may still be added to the work. 0 if the node is full."""
        return max(self._limit_bytes - self._in_work_bytes, 0)

    # --- requests that are arriving -------------------------------------------------------------------------------

    def arrive(self, reader: Reader, more_bytes: int) -> None:
        """Count more bytes of an arriving request, beyond SMALL_BYTES. The number is negative when the request starts,
        or when its connection has ended.
        """
        origin = self._origins.setdefault(reader.network, _Origin())
        arrived_bytes = origin.arrived_bytes.pop(reader, 0) + more_bytes
        if arrived_bytes:
            origin.arrived_bytes[reader] = arrived_bytes
        self._arriving_bytes += more_bytes
        if origin.turn is not reader:
            self._fill(origin, more_bytes)
        elif more_bytes <= 0:
            origin.turn = None
            del self._turns[reader]
            self._fill(origin, arrived_bytes)
        if more_bytes > 0:
            return
        self._stop_waiting(origin, reader)
        if not origin.arrived_bytes:
            del self._origins[reader.network]
        self._let_read_on()

    def _fill(self, origin: _Origin, more_bytes: int) -> None:
        origin.counted_bytes += more_bytes
        self._filled_bytes += more_bytes

    def room_for(self, reader: Reader, wanted_bytes: int) -> int:
        """Return how many of these bytes of a large request the connection may read now."""
        if 2 * (self._filled_bytes + wanted_bytes) < self._limit_bytes or reader in self._turns:
            return wanted_bytes
        origin = self._origins.get(reader.network)
        return min(self._room_of(origin.counted_bytes if origin is not None else 0), wanted_bytes)

    def _room_of(self, counted_bytes: int) -> int:
        """Return how many more bytes an address may hold. An address may hold as much as is still free."""
        return max((self._limit_bytes - self._filled_bytes - counted_bytes + 1) // 2, 0)

    def may_read_on(self, reader: Reader) -> bool:
        """Return True if more of a request may be read whose connection has counted bytes of it: while there is room,
        and with a turn even without room. Otherwise call `proceed` once it may."""
        if reader in self._turns:
            return True
        origin = self._origins[reader.network]
        if self._has_room_for(origin):
            return True
        if self._has_turn_for(origin):
            origin.turn = reader
            self._turns[reader] = None
            self._fill(origin, -origin.arrived_bytes[reader])
            if origin in self._queue:  # the next turn belongs to another address
                del self._queue[origin]
                self._queue[origin] = None
            return True
        origin.waiting[reader] = None
        self._queue[origin] = None
        return False

    def slow_reader(self, now_s: float, window_s: float = TURN_WINDOW_S) -> Reader | None:
        """Return a connection that has a turn and was slower than TURN_BYTES_PER_S in the last window, if others wait.
        While the work is full, its request could not start. Call this regularly."""
        is_awaited = bool(self._queue) and self.has_room()
        for reader, look in self._turns.items():
            arrived_bytes = self._origins[reader.network].arrived_bytes[reader]
            if not is_awaited:
                self._turns[reader] = None
            elif look is None:
                self._turns[reader] = _Look(now_s, arrived_bytes)
            elif (passed_s := now_s - look.at_s) >= window_s:
                if arrived_bytes - look.arrived_bytes < passed_s * TURN_BYTES_PER_S:
                    return reader
                self._turns[reader] = _Look(now_s, arrived_bytes)
        return None

    def _has_room_for(self, origin: _Origin) -> bool:
        return self.has_room() and self._room_of(origin.counted_bytes) > 0

    def _has_turn_for(self, origin: _Origin) -> bool:
        return origin.turn is None and len(self._turns) < TURNS

    def _stop_waiting(self, origin: _Origin, reader: Reader) -> None:
        origin.waiting.pop(reader, None)
        if not origin.waiting:
            self._queue.pop(origin, None)

    def _let_read_on(self) -> None:
        for origin in list(self._queue):
            # Try each waiter at most once: a connection that may not continue waits again, behind the others.
            for _ in range(len(origin.waiting)):
                if not origin.waiting or not (self._has_turn_for(origin) or self._has_room_for(origin)):
                    break
                reader = next(iter(origin.waiting))
                self._stop_waiting(origin, reader)
                reader.proceed()

    # --- requests in work, and answers ----------------------------------------------------------------------------

    def take(self, count_bytes: int) -> None:
        self._in_work_bytes += count_bytes

    def give_back(self, count_bytes: int) -> None:
        was_full = not self.has_room()
        self._in_work_bytes -= count_bytes
        if self._waiting:
            self._let_go_on()
        if was_full and self._queue:
            self._let_read_on()

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
    """Bytes that one request holds, or is about to hold, in addition to its own size. They are counted in advance,
    because many requests may check for memory before any of them has used it.
    """

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
"""Counts without a limit, for code outside a server's connections."""
