"""A proxy between a gateway and its clients that can mute one client.

The one idea: clients use a listener of their own, whose advertised address is this proxy's. The client id in the first
request identifies a connection. A muted connection stays open, but no byte passes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict

from tests.postgres import LoopThread

READ_BYTES = 64 * 1024
_FIRST = struct.Struct(">ihhih")
"""Start of a request: size, API key, version, correlation id, and the length of the client id that follows."""


class Line:
    """Listens on a port of `address`, and forwards connections to `upstream_port` of this host."""

    def __init__(self, loop: LoopThread, upstream_port: int) -> None:
        self._loop = loop
        self._upstream_port = upstream_port
        self._passing: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._writers: defaultdict[str, set[asyncio.StreamWriter]] = defaultdict(set)
        self._muted: set[str] = set()
        self._server = loop.run(self._listen())
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                first = await reader.readexactly(_FIRST.size)
                client_id = await reader.readexactly(_FIRST.unpack(first)[-1])
                upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            except (OSError, asyncio.IncompleteReadError):
                return
            name, ends = client_id.decode(), {writer, upstream[1]}
            if name not in self._muted:
                self._passing[name].set()
            self._writers[name] |= ends
            upstream[1].write(first + client_id)
            try:
                await asyncio.gather(self._pump(name, reader, upstream[1]), self._pump(name, upstream[0], writer))
            finally:
                self._writers[name] -= ends
                upstream[1].close()

    async def _pump(self, name: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(READ_BYTES):
                await self._passing[name].wait()
                sink.write(data)
                await sink.drain()
        sink.close()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def mute(self, name: str) -> None:
        """Forward no bytes of this client in either direction, on present and on later connections."""
        self._loop.run(self._mute(name))

    async def _mute(self, name: str) -> None:
        self._muted.add(name)
        self._passing[name].clear()

    def unmute(self, name: str) -> None:
        """Forward later connections of this client. If the client was muted, its present connections are cut."""
        self._loop.run(self._unmute(name))

    async def _unmute(self, name: str) -> None:
        if name in self._muted:
            self._muted.discard(name)
            self._cut(name)

    def _cut(self, name: str) -> None:
        for writer in self._writers[name]:
            writer.transport.abort()
        self._passing[name].set()

    def close(self) -> None:
        self._loop.run(self._close())

    async def _close(self) -> None:
        self._server.close()
        for name in list(self._writers):
            self._cut(name)
