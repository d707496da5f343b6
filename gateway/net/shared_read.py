"""One read of the store for all who ask at the same time.

The one idea: a caller is given a read that began after it asked, so nothing that was committed before is missing from
it; callers that wait meanwhile share the next one. However many ask, the store works on one such read at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from gateway.operate.logs import NO_REQUEST

T = TypeVar("T")


class SharedRead(Generic[T]):
    """A read whose result nobody changes."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._under_way: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """What the read returns or raises. A caller that goes away takes nothing from the others."""
        if self._next is None:
            following = self._after(self._under_way)
            self._next = asyncio.get_running_loop().create_task(following, context=NO_REQUEST.copy())
            self._next.add_done_callback(_retrieved)
        return await asyncio.shield(self._next)

    async def _after(self, former: asyncio.Task[T] | None) -> T:
        if former is not None:
            await asyncio.wait([former])
        self._under_way, self._next = self._next, None
        return await self._read()


def _retrieved(task: asyncio.Task[T]) -> None:
    """A failure is everybody's who waited; if nobody did any more, nobody misses it."""
    if not task.cancelled():
        task.exception()
