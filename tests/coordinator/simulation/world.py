"""Time, chance and the network of one run.

One agenda holds all future actions in order of time, and one random source makes all choices. A connection keeps the
order of its requests and may break at any time, before or after a request was received. The server learns of a break
late, or much later.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.coordinator.classic.model import Event
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, Reply, RequestId

if TYPE_CHECKING:
    from .clients import Client
    from .server import Server


@dataclass(frozen=True, slots=True)
class Weather:
    """Chances of faults, and delays."""

    break_on_send: float = 0.0
    """The chance that a connection breaks with a request under way. The request may or may not arrive."""
    break_on_reply: float = 0.0
    late: float = 0.0
    """The chance that a message takes seconds instead of milliseconds."""
    dawdle: float = 0.0
    """The chance that a client pauses for seconds, because it processes records or is stopped."""
    store_failure: float = 0.0
    late_tick: float = 0.0
    half_open: float = 0.0
    """The chance that the server does not learn of a closed connection for many seconds."""


CALM = Weather()


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.weather = CALM
        self.now_ms = 1_000_000
        self.told: list[str] = []
        self.server: Server
        self.owns: Callable[[Client], None] = lambda client: None
        """Called each time a client begins to read partitions that it claims."""
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._last = 0

    def number(self) -> int:
        """Return a number that was not returned before."""
        self._last += 1
        return self._last

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_ms + delay_ms, self.number(), action))

    def run_until(self, until_ms: int) -> None:
        while self._agenda and self._agenda[0][0] <= until_ms:
            self.now_ms, _, action = heapq.heappop(self._agenda)
            action()
        self.now_ms = until_ms

    def latency_ms(self) -> int:
        return self.random.randint(500, 6_000) if self.chance(self.weather.late) else self.random.randint(1, 30)

    def pause_ms(self, usual_ms: int = 20) -> int:
        """Return for how long a client pauses before it continues."""
        if self.chance(self.weather.dawdle):
            return self.random.randint(500, 20_000)
        return self.random.randint(0, usual_ms)

    def tell(self, line: str) -> None:
        self.told.append(f"{(self.now_ms - 1_000_000) / 1000:9.3f}  {line}")


class Connection:
    """One client's connection. Its id starts with the client's name. The coordinator must not use this name."""

    def __init__(
        self, world: World, name: str, receive: Callable[[Connection, Event, Reply], None], lost: Callable[[], None]
    ) -> None:
        self.connection_id = ConnectionId(f"{name}/{world.number()}")
        self._world = world
        self._receive = receive
        self._lost = lost
        self._open_here = True
        self._open_there = True
        self._last_arrival_ms = 0

    def send(self, event: Event) -> None:
        world = self._world
        broken = world.chance(world.weather.break_on_send)
        if not broken or world.chance(0.5):
            self._in_order(lambda: self._arrive(event))
        if broken:
            world.after(world.random.randint(1, 300), self._break)

    def close(self) -> None:
        """Close the connection at the client. The client ignores later answers."""
        if self._open_here:
            self._open_here = False
            # The close arrives after everything that was sent before, as on a socket.
            half_open = self._world.chance(self._world.weather.half_open)
            self._in_order(self._closed_there, self._world.random.randint(2_000, 25_000) if half_open else 1)

    def _break(self) -> None:
        if self._open_here:
            self.close()
            self._lost()

    def _in_order(self, action: Callable[[], None], at_least_ms: int = 0) -> None:
        world = self._world
        self._last_arrival_ms = max(self._last_arrival_ms + 1, world.now_ms + at_least_ms + world.latency_ms())
        world.after(self._last_arrival_ms - world.now_ms, action)

    def _arrive(self, event: Event) -> None:
        if self._open_there:
            self._world.server.receive(event, self)

    def _closed_there(self) -> None:
        if self._open_there:
            self._open_there = False
            self._world.server.disconnected(self.connection_id)

    def cut(self) -> None:
        """Close the connection because the server has crashed, which cuts all its connections."""
        self._open_there = False
        if self._open_here:
            self._open_here = False
            self._lost()

    def reply(self, event: Event, reply: Reply) -> None:
        """Send a reply from the server."""
        world = self._world
        if world.chance(world.weather.break_on_reply):
            world.after(1, self._break)
            return
        world.after(world.latency_ms(), lambda: self._receive(self, event, reply) if self._open_here else None)


def request_id(world: World) -> RequestId:
    return RequestId(world.number())


def member_id(world: World, name: str) -> MemberId:
    """Return a member id. It is unguessable enough for a test, and the referee can read its owner in it."""
    return MemberId(f"{name}#{world.number()}")
