"""Turns by address: scarce work of a node, shared fairly among the addresses that request it.

The one idea: each address has a queue of its own, and the queues take turns. However many requests one address has
waiting, another's first request is served after at most one request of every other address.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from gateway.net.networks import network_of


class Turns:
    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def busy(self) -> bool:
        """True if the next request has to wait."""
        return not self._free or bool(self._lines)

    @asynccontextmanager
    async def turn(self, address: str) -> AsyncGenerator[None]:
        """Wait until the address has its turn, and hold it."""
        if self.busy:
            await self._wait(network_of(address))
        else:
            self._free -= 1
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, network: str) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(network, deque()).append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._lines:
            network = next(iter(self._lines))
            line = self._lines.pop(network)
            waiting = line.popleft()
            if line:
                self._lines[network] = line  # behind the other waiting requests
            if not waiting.done():
                waiting.set_result(None)
                return
        self._free += 1
