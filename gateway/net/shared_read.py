"""One read of the store for all concurrent callers.

The one idea: a caller gets a read that began after its call, so nothing that was committed before is missing from the
result. Callers that arrive during a read share the next one. For any number of callers, the store works on one such
read at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from gateway.operate.logs import NO_REQUEST

T = TypeVar("T")


class SharedRead(Generic[T]):
    """A shared read. Callers must not change its result."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._under_way: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return what the read returns, or raise what it raises. A caller that is cancelled does not affect the
        others."""
        if self._next is None:
            following = self._after(self._under_way)
            self._next = asyncio.get_running_loop().create_task(following, context=NO_REQUEST.copy())
            self._next.add_done_callback(retrieve_error)
        return await asyncio.shield(self._next)

    async def _after(self, former: asyncio.Task[T] | None) -> T:
        if former is not None and not former.done():
            await asyncio.wait([former])
        self._under_way, self._next = self._next, None
        return await self._read()


class _Ended(Protocol):
    """The part of a future that this module uses, for a result of any type."""

    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...


def retrieve_error(task: _Ended) -> None:
    """Retrieve a failure that waiting callers receive. If all have gone, asyncio must not report it as lost."""
    if not task.cancelled():
        task.exception()
