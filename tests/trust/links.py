"""A TCP proxy between clients and one node. It can forward bytes at once, late, in one direction only, or not at all.

The one idea: a node advertises the link's address instead of its own, so every stock client goes through it, also after
it has read the metadata. Between a node and Postgres is another kind of proxy (tests/cluster/proxy.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from enum import Enum

from tests.postgres import LoopThread

READ_BYTES = 64 * 1024


class Direction(Enum):
    REQUESTS = "requests"
    ANSWERS = "answers"


class Link:
    """Listens on `port` of 127.0.0.1 and forwards to `upstream_port`. Its methods may be called from any thread."""

    def __init__(self, loop: LoopThread, port: int, upstream_port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._loop = loop
        self._upstream_port = upstream_port
        self._delay_s = 0.0
        self._passing: dict[Direction, asyncio.Event] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = loop.run(self._listen(port))

    def delay(self, seconds: float) -> None:
        """Delay everything by `seconds` from now on."""
        self._delay_s = seconds

    def cut(self, *directions: Direction) -> None:
        """Forward nothing in these directions. Connections stay open."""
        self._loop.run(self._set(directions, passing=False))

    def reset(self) -> None:
        """Break every open connection."""
        self._loop.run(self._abort())

    def heal(self) -> None:
        """Forward everything again, the delayed bytes first."""
        self._delay_s = 0.0
        self._loop.run(self._set(tuple(Direction), passing=True))

    def close(self) -> None:
        self.heal()
        self._loop.run(self._close())

    async def _listen(self, port: int) -> asyncio.Server:
        for direction in Direction:
            self._passing[direction] = asyncio.Event()
            self._passing[direction].set()
        return await asyncio.start_server(self._serve, "127.0.0.1", port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, to_upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, to_upstream}
        self._writers |= ends
        try:
            pumps = {
                asyncio.ensure_future(self._pump(reader, to_upstream, Direction.REQUESTS)),
                asyncio.ensure_future(self._pump(upstream, writer, Direction.ANSWERS)),
            }
            # Kafka connections are never half open: if one end closes, both close.
            _, pending = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pending:
                pump.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: Direction) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(READ_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._passing[direction].wait()
                if source.at_eof():
                    # The sender has given up, and retries elsewhere. A request that arrives after its own retry may
                    # undo a later change, for instance DeleteTopics by name. Kafka has the same weakness, so no
                    # workload could judge the result.
                    return
                sink.write(data)
                await sink.drain()

    async def _set(self, directions: tuple[Direction, ...], *, passing: bool) -> None:
        for direction in directions:
            event = self._passing[direction]
            event.set() if passing else event.clear()

    async def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        await self._abort()
