"""Connections of an HTTP server: how many there may be, and how long one may do nothing.

The one idea: aiohttp waits for a request without end. So a peer that sends none, or half of one, would hold a socket of
the process that serves Kafka clients. Here each connection has a deadline between its requests. A handler that runs,
such as a stream of events, bounds itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from ssl import SSLContext
from typing import cast

import structlog

from gateway.net.networks import network_of
from gateway.net.tls_listener import TlsListener, bind_sockets

logger = structlog.stdlib.get_logger(__name__)

IDLE_S = 30.0
"""How long a connection may wait for a request, and a peer may take to read an answer."""
TOLD_INTERVAL_S = 60.0


class HttpConnections:
    """Makes the protocols of one server, at most `most` at a time, and `most_from` for one network."""

    def __init__(self, most: int, idle_s: float = IDLE_S, most_from: int = sys.maxsize) -> None:
        self._most, self._most_from = most, most_from
        self._idle_s = idle_s
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        self._from: Counter[str] = Counter()
        self._handshakes: Counter[str] = Counter()
        """TLS handshakes that have begun and not ended, by network."""
        self._told_s = float("-inf")

    async def listen(
        self, make: Callable[[], asyncio.Protocol], host: str, port: int, backlog: int, tls: SSLContext | None
    ) -> asyncio.Server | TlsListener:
        """Listen on an address; an empty host is every interface. Raise OSError.

        With `tls` a handshake counts as a connection. asyncio's own server lets a peer begin any number of handshakes.
        """
        if tls is None:
            return await asyncio.get_running_loop().create_server(
                self.factory(make), host or None, port, reuse_address=True, backlog=backlog
            )
        sockets = await bind_sockets(host, port, backlog)
        listener = TlsListener(sockets, tls, self.factory(make), self._begin_handshake, self._handshake_ended)
        await listener.start_serving()
        return listener

    def factory(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return a protocol factory for `create_server`; `make` is aiohttp's."""
        return lambda: _Connection(self, make())

    @contextmanager
    def busy(self, transport: asyncio.BaseTransport | None) -> Generator[None]:
        """Suspend the deadline while a handler runs."""
        connection = None if transport is None else self._open.get(transport)
        if connection is None:
            yield
            return
        connection.suspend()
        try:
            yield
        finally:
            connection.arm(self._idle_s)

    def opened(self, transport: asyncio.Transport, connection: _Connection) -> bool:
        """Register a connection; False if there are too many."""
        if not self._has_room(len(self._open), self._from[connection.network], connection.network):
            return False
        self._open[transport] = connection
        self._from[connection.network] += 1
        connection.arm(self._idle_s)
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        connection = self._open.pop(transport, None)
        if connection is not None:
            _count_down(self._from, connection.network)

    def _has_room(self, count: int, count_from: int, network: str) -> bool:
        if count < self._most and count_from < self._most_from:
            return True
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_s > TOLD_INTERVAL_S:
            self._told_s = now_s
            logger.warning("an HTTP connection was closed: too many are open", open=count, network=network)
        return False

    def _begin_handshake(self, address: str) -> float | None:
        count = len(self._open) + self._handshakes.total()
        network = network_of(address)
        if not self._has_room(count, self._from[network] + self._handshakes[network], network):
            return 0.0
        self._handshakes[network] += 1
        return None

    def _handshake_ended(self, address: str) -> None:
        _count_down(self._handshakes, network_of(address))


def _count_down(counter: Counter[str], network: str) -> None:
    counter[network] -= 1
    if not counter[network]:
        del counter[network]


class _Connection(asyncio.Protocol):
    """Forwards everything to aiohttp's protocol."""

    def __init__(self, connections: HttpConnections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self.network = ""
        """The peer's network: an IPv6 client has all addresses of it."""
        self._deadline: asyncio.TimerHandle | None = None

    def arm(self, seconds: float) -> None:
        self.suspend()
        if self._transport is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    def suspend(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop have the methods of asyncio's transports, but not their classes.
        made = self._transport = cast(asyncio.Transport, transport)
        peer: tuple[object, ...] | None = transport.get_extra_info("peername")
        self.network = network_of(str(peer[0])) if peer else ""
        if self._connections.opened(made, self):
            self._inner.connection_made(transport)
        else:
            self._transport = None
            made.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:
            return
        self.suspend()
        self._connections.closed(self._transport)
        self._transport = None
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
