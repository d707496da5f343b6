"""The listening sockets of an encrypted listener, which count a connection from its first byte.

The one idea: asyncio's server makes a connection when its TLS handshake is over. Until then the peer counts towards no
limit, so one address could hold any number of sockets for TLS_HANDSHAKE_S. This listener accepts by itself and asks
the server before each handshake.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from ssl import SSLContext

import structlog

logger = structlog.stdlib.get_logger(__name__)

TLS_HANDSHAKE_S = 10.0
TLS_SHUTDOWN_S = 1.0
"""How long to wait for a peer's TLS close."""
ACCEPT_RETRY_S = 1.0
"""Pause after a connection could not be accepted, the same as in asyncio's server."""

Permit = Callable[[str], float | None]
"""Returns None if a peer of this address may begin a handshake, and counts it until `ended` is called. Otherwise
returns the seconds after which the peer's connection is closed."""


class TlsListener:
    """`start_serving` once, `close` at any time. A handshake under way when the listener closes is cut off."""

    def __init__(
        self,
        sockets: list[socket.socket],
        context: SSLContext,
        make_connection: Callable[[], asyncio.BaseProtocol],
        permit: Permit,
        ended: Callable[[str], None],
    ) -> None:
        self.sockets = sockets
        self._context = context
        self._make_connection = make_connection
        self._permit = permit
        self._ended = ended
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: set[asyncio.Task[None]] = set()

    async def start_serving(self) -> None:
        for listening in self.sockets:
            self._accepting.append(asyncio.create_task(self._accept(listening)))

    def is_serving(self) -> bool:
        return any(not accepting.done() for accepting in self._accepting)

    def close(self) -> None:
        for task in (*self._accepting, *self._handshakes):
            task.cancel()
        self._accepting = []
        for listening in self.sockets:
            listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except ConnectionError:
                continue  # the peer has already left
            except OSError as error:
                # The process may have run out of file descriptors. Without this task the listener is dead.
                logger.error("connection not accepted; trying again", error=str(error))
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            host = str(address[0])
            refused_for_s = self._permit(host)
            if refused_for_s is not None:
                loop.call_later(refused_for_s, accepted.close)
                continue
            handshake = asyncio.create_task(self._shake_hands(accepted, host))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, host: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=TLS_HANDSHAKE_S,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S,
            )
        except OSError as error:  # OSError includes SSLError and timeouts
            logger.debug("TLS handshake failed", address=host, error=str(error))
        finally:
            self._ended(host)


async def bind_sockets(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Bind and listen on every address of a host; an empty host is every interface. Raise OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            bound.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(backlog)
            listening.setblocking(False)
    except OSError:
        for listening in bound:
            listening.close()
        raise
    return bound
