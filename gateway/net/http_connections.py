"""Connections of an HTTP server: how many there may be, and how long one may do nothing.

The one idea: aiohttp waits for a request without end. So a peer that sends none, or half of one, would hold a socket of
the process that serves Kafka clients. Here each connection has a deadline between its requests. A handler that runs,
such as a stream of events, bounds itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast

import structlog

logger = structlog.stdlib.get_logger(__name__)

IDLE_S = 30.0
"""How long a connection may wait for a request, and a peer may take to read an answer."""
TOLD_INTERVAL_S = 60.0


class HttpConnections:
    """Makes the protocols of one server, at most `most` at a time."""

    def __init__(self, most: int, idle_s: float = IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        self._told_s = float("-inf")

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
        if len(self._open) >= self._most:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._told_s > TOLD_INTERVAL_S:
                self._told_s = now_s
                logger.warning("an HTTP connection was closed: too many are open", most=self._most)
            return False
        self._open[transport] = connection
        connection.arm(self._idle_s)
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        self._open.pop(transport, None)


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol."""

    def __init__(self, connections: HttpConnections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._inner = inner
        self._transport: asyncio.Transport | None = None
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
        # uvloop's transports have the methods of asyncio's and not their classes.
        made = self._transport = cast(asyncio.Transport, transport)
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
