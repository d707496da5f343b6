"""The listening sockets and every connection they accepted.

The one idea: the server owns what connections share (the scratch buffer, the count of the node's held bytes, the
limits) and their end. It reports a connection that its peer closed, so that the group coordinator can count a vanished
client as a failed member. It does not report one that we closed ourselves.

It reads no bytes (`gateway/net/connection.py`) and knows no API.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from ssl import SSLContext
from typing import NamedTuple, Protocol

import structlog

from gateway.config.listeners import DEFAULT_NAME
from gateway.net.connection import Connection, ConnectionLimits
from gateway.net.holdings import TURN_WINDOW_S, Holdings
from gateway.net.requests import Guard, RequestHandler
from gateway.net.tls_connection import Identify, TlsConnection
from gateway.net.tls_listener import TlsListener, bind_sockets
from gateway.operate.metrics import Metrics
from protocol.framing import SCRATCH_BYTES
from storage.types import Address

logger = structlog.stdlib.get_logger(__name__)

BACKLOG = 1024
MAX_SWEEP_S = 10.0
CLOSE_TIMEOUT_S = 0.5

ConnectionClosed = Callable[[str, bool], None]
"""Receives the id of each ended connection, and True if the peer closed or lost it."""

ConnectionWait = Callable[[str], float]
"""Returns by how many seconds the next connection from an address is too early; 0 if it may be accepted."""
ConnectionLimit = Callable[[str], int]
"""Returns how many connections an address may have at the same time."""
MAX_REFUSED = 1_000
"""Connections that came too early and are not yet closed; more are closed at once."""
MAX_REFUSED_S = 10.0


class Listener(Protocol):
    """Listening sockets: asyncio's server, or a TlsListener."""

    async def start_serving(self) -> None: ...
    def is_serving(self) -> bool: ...
    def close(self) -> None: ...


class Tls(NamedTuple):
    """The TLS settings of an encrypted listener."""

    context: SSLContext
    identify: Identify | None
    """How clients authenticate by certificate. None if they authenticate by other means."""


class Server:
    """A server. Call `bind`, then `serve`, and in the end `stop_reading`, `drain` and `close`. Each call works even if
    earlier ones were left out.
    """

    def __init__(self, metrics: Metrics, limits: ConnectionLimits) -> None:
        self._metrics = metrics
        self._limits = limits
        self._holdings = Holdings(limits.max_node_bytes)
        self._scratch = bytearray(SCRATCH_BYTES)
        self._connections: set[Connection] = set()
        self._listeners: dict[str, Listener] = {}
        self._requests: RequestHandler | None = None
        self._own_requests: Mapping[str, RequestHandler] = {}
        self._tls: dict[str, Tls] = {}
        self._guards: Mapping[str, Callable[[], Guard]] = {}
        self._shared: Mapping[str, Address] = {}
        self._connection_closed: ConnectionClosed | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._draining = False
        self._refused_since_log = 0
        self._connection_wait: ConnectionWait = lambda _address: 0.0
        self._too_early = 0
        self._most_from: ConnectionLimit = lambda _address: sys.maxsize
        self._from: Counter[str] = Counter()
        self._handshakes: Counter[str] = Counter()
        metrics.connections.set_function(lambda: len(self._connections))
        metrics.held_bytes.set_function(lambda: self._holdings.held_bytes)

    async def bind(self, host: str, port: int, listener: str = DEFAULT_NAME, tls: Tls | None = None) -> int:
        """Take the address for a listener without listening on it yet. Return the port (the one given, or the one
        chosen for 0). An empty host is every interface. Raise OSError."""
        if tls is not None:
            self._tls[listener] = tls
            sockets = await bind_sockets(host, port, BACKLOG)
            self._listeners[listener] = TlsListener(
                sockets,
                tls.context,
                lambda: self._new_connection(listener),
                self._begin_handshake,
                self._handshake_ended,
            )
            return int(sockets[0].getsockname()[1])
        bound = await asyncio.get_running_loop().create_server(
            lambda: self._new_connection(listener),
            host or None,
            port,
            backlog=BACKLOG,
            reuse_address=True,
            start_serving=False,
        )
        self._listeners[listener] = bound
        return int(bound.sockets[0].getsockname()[1])

    async def serve(
        self,
        requests: RequestHandler,
        connection_closed: ConnectionClosed,
        connection_wait: ConnectionWait = lambda _address: 0.0,
        guards: Mapping[str, Callable[[], Guard]] | None = None,
        own_requests: Mapping[str, RequestHandler] | None = None,
        most_from: ConnectionLimit = lambda _address: sys.maxsize,
        shared: Mapping[str, Address] | None = None,
    ) -> None:
        """Accept connections from here on. Call `connection_closed` for each that ends before the drain, with its
        id, and True if its peer is to blame. `guards` make, by listener, the guard before a connection's requests.
        `own_requests`: handlers of the listeners that `requests` does not serve. `shared`: the advertised addresses of
        shared listeners."""
        assert self._listeners, "bind comes first"
        self._requests, self._connection_closed = requests, connection_closed
        self._own_requests = own_requests or {}
        self._connection_wait = connection_wait
        self._most_from = most_from
        self._guards = guards or {}
        self._shared = shared or {}
        for bound in self._listeners.values():
            await bound.start_serving()
        self._sweep()

    def _new_connection(self, listener: str) -> Connection:
        assert self._requests is not None
        loop = asyncio.get_running_loop()
        guard = self._guards[listener]() if listener in self._guards else None
        tls = self._tls.get(listener)
        requests = self._own_requests.get(listener, self._requests)
        given = (requests, self, self._limits, self._holdings, self._scratch, loop, listener, guard)
        if tls is None:
            connection = Connection(*given)
        else:
            connection = TlsConnection(*given)
            connection.identify = tls.identify
        connection.info.shared = self._shared.get(listener)
        return connection

    @property
    def connections(self) -> frozenset[Connection]:
        """The open connections."""
        return frozenset(self._connections)

    @property
    def is_listening(self) -> bool:
        serving = bool(self._listeners) and all(bound.is_serving() for bound in self._listeners.values())
        return serving and not self._draining

    def stop_accepting(self) -> None:
        self._draining = True
        for bound in self._listeners.values():
            bound.close()

    def stop_reading(self) -> None:
        """Accept no further connection and no further request. Each connection closes once it has its answers."""
        self.stop_accepting()
        for connection in list(self._connections):
            connection.stop_reading()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every request read before `stop_reading` is answered.

        Return False if the time was not enough; the remaining requests are then cut off.
        """
        self.stop_reading()
        drained = await self._wait_until_empty(timeout_s)
        if not drained:
            logger.warning("shutdown closed connections with unanswered requests", connections=len(self._connections))
            await self.close()
        return drained

    async def close(self) -> None:
        """Close all connections at once."""
        self.stop_accepting()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            connection.close()
        await self._wait_until_empty(CLOSE_TIMEOUT_S)

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
        """Close idle connections, and those whose peer reads no answers or delays the requests of others. The interval
        keeps a close at most a quarter late."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._connections):
            if connection.is_idle(now):
                logger.info("idle connection closed", connection=connection.info.connection_id)
                self._metrics.idle_closed.inc()
                connection.close_idle()
            elif connection.is_stalled(now):
                logger.warning("connection closed: its peer reads no answers", connection=connection.info.connection_id)
                self._metrics.protocol_errors.labels("unread_answers").inc()
                connection.close_failed()
        self._close_slow_reader(now)
        if self._refused_since_log:
            logger.warning("connections refused: max.connections reached", count=self._refused_since_log)
            self._refused_since_log = 0
        idle_s = self._limits.max_idle_ms / 1000
        self._sweeper = loop.call_later(min(MAX_SWEEP_S, idle_s / 4) if idle_s > 0 else MAX_SWEEP_S, self._sweep)

    def _close_slow_reader(self, now: float) -> None:
        max_idle_s = self._limits.max_idle_ms / 1000
        window_s = min(TURN_WINDOW_S, max_idle_s / 4) if max_idle_s > 0 else TURN_WINDOW_S
        slow = self._holdings.slow_reader(now, window_s)
        if isinstance(slow, Connection):
            logger.warning(
                "connection closed: requests of others waited for its own, which hardly arrives",
                client_host=slow.address,
                connection=slow.info.connection_id,
            )
            self._metrics.protocol_errors.labels("slow_request").inc()
            slow.close_failed()

    # --- what connections tell ------------------------------------------------------------------------------------

    def connection_opened(self, connection: Connection) -> float | None:
        if self._draining:
            return 0.0
        if len(self._connections) >= self._limits.max_connections:
            self._refused_since_log += 1
            self._metrics.protocol_errors.labels("max_connections").inc()
            return 0.0
        address = connection.address.removeprefix("/")
        if self._from[address] >= self._most_from(address):
            self._metrics.protocol_errors.labels("max_connections_per_ip").inc()
            return 0.0
        # The rate counts an encrypted connection before its handshake.
        wait_s = 0.0 if isinstance(connection, TlsConnection) else self._connection_wait(address)
        if wait_s > 0:
            return self._refuse_early(min(wait_s, MAX_REFUSED_S))
        self._connections.add(connection)
        self._from[address] += 1
        self._metrics.connections_opened.inc()
        return None

    def _begin_handshake(self, address: str) -> float | None:
        """Return None to let a peer begin a TLS handshake. Otherwise its connection is closed after that many seconds.
        Handshakes count as connections in both limits and in the rate."""
        if self._draining:
            return 0.0
        if len(self._connections) + self._handshakes.total() >= self._limits.max_connections:
            self._refused_since_log += 1
            self._metrics.protocol_errors.labels("max_connections").inc()
            return 0.0
        if self._from[address] + self._handshakes[address] >= self._most_from(address):
            self._metrics.protocol_errors.labels("max_connections_per_ip").inc()
            return 0.0
        wait_s = self._connection_wait(address)
        if wait_s > 0:
            return self._refuse_early(min(wait_s, MAX_REFUSED_S))
        self._handshakes[address] += 1
        return None

    def _handshake_ended(self, address: str) -> None:
        self._handshakes[address] -= 1
        if not self._handshakes[address]:
            del self._handshakes[address]

    def _refuse_early(self, wait_s: float) -> float:
        """Delay the refusal of a client that may not open another connection, as upstream does, so that the client does
        not return at once.
        """
        if self._too_early >= MAX_REFUSED:
            return 0.0
        self._too_early += 1
        asyncio.get_running_loop().call_later(wait_s, self._early_one_closed)
        return wait_s

    def _early_one_closed(self) -> None:
        self._too_early -= 1

    def connection_ended(self, connection: Connection, *, by_peer: bool) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            address = connection.address.removeprefix("/")
            self._from[address] -= 1
            if not self._from[address]:
                del self._from[address]
        self._ended.set()
        if not self._draining:
            assert self._connection_closed is not None
            self._connection_closed(connection.info.connection_id, by_peer)

    def protocol_error(self, reason: str) -> None:
        self._metrics.protocol_errors.labels(reason).inc()
