"""A TCP balancer in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.postgres import LoopThread

READ_BYTES = 64 * 1024


class Balancer:
    """Listens on ports of localhost, and forwards each connection to the port's next target that accepts it."""

    def __init__(self, loop: LoopThread, routes: Mapping[int, Sequence[int]]) -> None:
        self.accepted: Counter[int] = Counter()
        """Number of connections by port."""
        self._turns = {port: itertools.cycle(targets) for port, targets in routes.items()}
        self._tries = {port: len(targets) for port, targets in routes.items()}
        for port in routes:
            loop.run(asyncio.start_server(self._serve, "127.0.0.1", port))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port: int = writer.get_extra_info("sockname")[1]
        self.accepted[port] += 1
        with contextlib.closing(writer):
            for _ in range(self._tries[port]):
                with contextlib.suppress(OSError):
                    upstream = await asyncio.open_connection("127.0.0.1", next(self._turns[port]))
                    await asyncio.gather(_pump(reader, upstream[1]), _pump(upstream[0], writer))
                    return


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError), contextlib.closing(sink):
        while data := await source.read(READ_BYTES):
            sink.write(data)
            await sink.drain()
