"""An encrypted connection: the same, with answers handed to TLS in pieces.

The one idea: TLS encrypts all bytes of a write before it returns, and a Fetch may be answered with fifty megabytes. So
a transport between the connection and asyncio's passes on one piece in each turn of the event loop, and tells the
connection to pause as a socket's buffer does.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, cast

from gateway.net.connection import WRITE_HIGH_WATER_BYTES, Connection
from gateway.net.context import Principal
from protocol.buffer import Buffer

PIECE_BYTES = 256 * 1024
"""Number of bytes that are encrypted without yielding. This takes half a millisecond."""
READ_HIGH_WATER_BYTES = 64 * 1024
"""Number of encrypted bytes that may wait while the connection does not read."""

Identify = Callable[[ssl.SSLObject], Principal]
"""Returns the peer's principal by the certificate in asyncio's `ssl_object`. Raises ValueError if the certificate
names none."""


class PacedTransport(asyncio.Transport):
    """The part of a transport that `Connection` uses. `pause` and `resume` are the connection's own."""

    def __init__(
        self,
        inner: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        super().__init__()
        self._inner = inner
        self._loop = loop
        self._pause, self._resume = pause, resume
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._inner_paused = False
        self._told_to_pause = False
        self._next: asyncio.Handle | None = None
        self._closing = False

    # --- the connection's side ------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        for data in list_of_data:
            view = memoryview(data).cast("B")
            self._queued_bytes += len(view)
            self._queue.append(view)
        if self._next is None and not self._inner_paused:
            self._write_piece()
        if self._queued_bytes > WRITE_HIGH_WATER_BYTES and not self._told_to_pause:
            self._told_to_pause = True
            self._pause()

    def _write_piece(self) -> None:
        self._next = None
        room = PIECE_BYTES
        piece: list[memoryview] = []
        while self._queue and room:
            view = self._queue.popleft()
            if len(view) > room:
                self._queue.appendleft(view[room:])
                view = view[:room]
            room -= len(view)
            piece.append(view)
        self._queued_bytes -= PIECE_BYTES - room
        if piece:
            self._inner.writelines(piece)
        if self._queue:
            if not self._inner_paused:
                self._next = self._loop.call_soon(self._write_piece)
            return
        if self._closing:
            self._inner.close()
        elif self._told_to_pause and not self._inner_paused:
            self._told_to_pause = False
            self._resume()

    def get_write_buffer_size(self) -> int:
        return self._queued_bytes + self._inner.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high, low)

    def is_closing(self) -> bool:
        return self._closing or self._inner.is_closing()

    def close(self) -> None:
        """Close after everything has been written."""
        self._closing = True
        if not self._queue:
            self._inner.close()

    def abort(self) -> None:
        self._closing = True
        self.drop()
        self._inner.abort()

    def drop(self) -> None:
        """Drop the pending bytes, because no more bytes can be written."""
        self._queue.clear()
        self._queued_bytes = 0
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._inner.get_extra_info(name, default)

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def inner_paused(self) -> None:
        self._inner_paused = True
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if not self._told_to_pause:
            self._told_to_pause = True
            self._pause()

    def inner_resumed(self) -> None:
        self._inner_paused = False
        if self._next is None:
            self._write_piece()


class _TlsTransport(Protocol):
    """A transport of asyncio or uvloop under TLS."""

    def set_read_buffer_limits(self, high: int) -> None: ...


class TlsConnection(Connection):
    """A connection of a listener whose security protocol is SSL or SASL_SSL. Its handshake is over when the
    connection is made."""

    identify: Identify | None = None
    """Derives the peer's principal from its certificate; None: the client authenticates otherwise."""
    _pacer: PacedTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        inner = cast(_TlsTransport, transport)
        self._pacer = PacedTransport(
            cast(asyncio.Transport, transport), self._loop, super().pause_writing, super().resume_writing
        )
        inner.set_read_buffer_limits(READ_HIGH_WATER_BYTES)
        super().connection_made(self._pacer)
        if self.identify is None:
            return
        try:
            self.info.principal = self.identify(transport.get_extra_info("ssl_object"))
        except ValueError as error:
            self.refuse("certificate", str(error))

    def pause_writing(self) -> None:
        self._pacer.inner_paused()

    def resume_writing(self) -> None:
        self._pacer.inner_resumed()

    def eof_received(self) -> bool:
        """Close, because TLS has no half-open connection."""
        super().eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pacer.drop()
        super().connection_lost(exc)
