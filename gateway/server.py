"""The listening socket and every connection it accepted.

The one idea: the server owns what connections share (the scratch buffer, the node's intake, the limits) and their end:
who was closed by its peer is reported, so that the group coordinator can count a vanished client as a failed member;
what we closed ourselves is not.

It reads no bytes (`gateway/connection.py`) and knows no API.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import structlog

from gateway.connection import Connection, ConnectionLimits, Intake, RequestHandler
from gateway.metrics import Metrics
from protocol.framing import SCRATCH_BYTES

log = structlog.stdlib.get_logger(__name__)

BACKLOG = 1024
MAX_SWEEP_S = 30.0

PeerClosed = Callable[[str], None]
"""Told the id of a connection that its peer closed or lost."""


class Server:
    """Accepts connections from `start` to `stop_accepting`; `drain` ends them."""

    def __init__(
        self, requests: RequestHandler, metrics: Metrics, limits: ConnectionLimits, peer_closed: PeerClosed
    ) -> None:
        self._requests = requests
        self._metrics = metrics
        self._limits = limits
        self._peer_closed = peer_closed
        self._intake = Intake(limits.max_intake_bytes)
        self._scratch = bytearray(SCRATCH_BYTES)
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._draining = False
        self._refused_since_log = 0
        metrics.connections.set_function(lambda: len(self._connections))
        metrics.intake_bytes.set_function(lambda: self._intake.held_bytes)

    async def start(self, host: str, port: int) -> int:
        """Opens the listener and returns its port (the one given, or the one chosen for 0). Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self._requests, self, self._limits, self._intake, self._scratch, loop),
            host,
            port,
            backlog=BACKLOG,
            reuse_address=True,
        )
        self._sweep()
        listening: socket.socket = self._listener.sockets[0]
        return int(listening.getsockname()[1])

    @property
    def is_listening(self) -> bool:
        return self._listener is not None and self._listener.is_serving()

    def stop_accepting(self) -> None:
        if self._listener is not None:
            self._listener.close()

    async def drain(self, timeout_s: float) -> bool:
        """Answers what was read, reads nothing more and closes each connection as it falls silent.

        False if the time was not enough; whatever is left is then cut off.
        """
        self._draining = True
        self.stop_accepting()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            connection.stop_reading()
        drained = await self._wait_until_empty(timeout_s)
        if not drained:
            log.warning("requests cut off at shutdown", connections=len(self._connections))
            for connection in list(self._connections):
                connection.close()
            await self._wait_until_empty(0.5)
        return drained

    async def _wait_until_empty(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self._connections:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _sweep(self) -> None:
        """Closes connections that are idle; the interval keeps a close at most a quarter late."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._connections):
            if connection.is_idle(now):
                log.info("idle connection closed", connection=connection.info.connection_id)
                self._metrics.idle_closed.inc()
                connection.close()
        if self._refused_since_log:
            log.warning("connections refused: max.connections reached", count=self._refused_since_log)
            self._refused_since_log = 0
        self._sweeper = loop.call_later(min(MAX_SWEEP_S, self._limits.max_idle_ms / 4000), self._sweep)

    # --- what connections tell ------------------------------------------------------------------------------------

    def connection_opened(self, connection: Connection) -> bool:
        if self._draining:
            return False
        if len(self._connections) >= self._limits.max_connections:
            self._refused_since_log += 1
            self._metrics.protocol_errors.labels("max_connections").inc()
            return False
        self._connections.add(connection)
        self._metrics.connections_opened.inc()
        return True

    def connection_ended(self, connection: Connection, *, by_peer: bool) -> None:
        self._connections.discard(connection)
        self._ended.set()
        if by_peer and not self._draining:
            self._peer_closed(connection.info.connection_id)

    def protocol_error(self, reason: str) -> None:
        self._metrics.protocol_errors.labels(reason).inc()
