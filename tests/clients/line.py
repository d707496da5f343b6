"""What stands between a gateway and clients that are to fall silent: it passes bytes on until one of them is muted.

The one idea: clients have a listener of their own that is advertised as this line's address, and each connection is
known by the client id in its first request. Nobody is told of a mute: connections stay open, and nothing passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict

from tests.postgres import LoopThread

READ_BYTES = 64 * 1024
_FIRST = struct.Struct(">ihhih")
"""Of a request: its size, key, version and correlation id, and how long the client id is that follows."""


class Line:
    """Listens on a port of its own, of `address`; what comes there goes to `upstream_port` of this host."""

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
        """Nothing of this client passes in either direction, nor will it on connections to come."""
        self._loop.run(self._mute(name))

    async def _mute(self, name: str) -> None:
        self._muted.add(name)
        self._passing[name].clear()

    def unmute(self, name: str) -> None:
        """If it was muted, its connections are cut; on others it passes."""
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
