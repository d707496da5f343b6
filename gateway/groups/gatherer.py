"""Group commit: while one transaction runs, the items that arrive are gathered for the next one.

The one idea: a thousand concurrent callers cost a few transactions instead of a thousand, and a lone caller never
waits. Items keep their order of arrival. If Postgres refuses a transaction of several items, each item is tried alone,
so that a bad item does not fail the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from gateway.operate.logs import NO_REQUEST
from storage.errors import StorageError, StorageUnavailable

Item = TypeVar("Item")
Result = TypeVar("Result")


def _one(_item: object) -> int:
    return 1


class Gatherer(Generic[Item, Result]):
    """`work` returns one result per item, in the items' order, or raises StorageError for all items.

    A transaction takes items until their sizes reach `max_size`. An item is never split, so a larger item gets a
    transaction of its own.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        max_size: int,
        size: Callable[[Item], int] = _one,
    ) -> None:
        self.name = name
        self.queued_size = 0
        self._work = work
        self._size = size
        self._max_size = max_size
        self._queue: deque[tuple[Item, int, asyncio.Future[Result]]] = deque()
        self._running: asyncio.Task[None] | None = None

    def submit(self, item: Item) -> asyncio.Future[Result]:
        """Return a future of the item's result. The item is in the queue when this returns, so transactions follow the
        order of the calls.

        The future raises StorageUnavailable if the outcome is unknown, and other StorageErrors as `work` does.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        size = self._size(item)
        self._queue.append((item, size, future))
        self.queued_size += size
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name=self.name, context=NO_REQUEST.copy())
        return future

    async def drain(self) -> None:
        """Wait until nothing is queued or in progress. The caller limits the wait."""
        while self._running is not None:
            await asyncio.wait((self._running,))

    async def _run(self) -> None:
        taken: list[tuple[Item, asyncio.Future[Result]]] = []
        try:
            while self._queue:
                taken = self._take()
                await self._commit(taken)
        finally:
            self._running = None
            # Items are left here only by an unforeseen error or a cancelled task. No caller may wait for ever because
            # of that.
            _fail(
                (*taken, *((item, future) for item, _, future in self._queue)), StorageError(f"{self.name} has stopped")
            )
            self._queue.clear()
            self.queued_size = 0

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        taken: list[tuple[Item, asyncio.Future[Result]]] = []
        size = 0
        while self._queue:
            item, item_size, future = self._queue[0]
            if taken and size + item_size > self._max_size:
                break
            self._queue.popleft()
            taken.append((item, future))
            size += item_size
        self.queued_size -= size
        return taken

    async def _commit(self, taken: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._work([item for item, _ in taken])
        except StorageUnavailable as error:
            _fail(taken, error)
            return
        except StorageError as error:
            if len(taken) == 1:
                _fail(taken, error)
                return
            for one in taken:
                await self._commit((one,))
            return
        for (_, future), result in zip(taken, results, strict=True):
            if not future.done():
                future.set_result(result)


def _fail(taken: Sequence[tuple[Item, asyncio.Future[Result]]], error: StorageError) -> None:
    for _, future in taken:
        if not future.done():
            future.set_exception(error)
