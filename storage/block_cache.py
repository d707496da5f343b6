"""A bounded cache of blocks of objects that were read from a remote store.

The one idea: a store answers a large range nearly as fast as a small one. So the cache reads whole blocks, several per
request, and reads ahead for readers that read in order. Concurrent readers of one place share its blocks, also while a
request is in progress: a request belongs to the cache and continues if the reader that caused it has gone.

The cache checks no contents. A reader that finds a bad block calls `forget`. Failures are not cached.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from storage.byte_store import Range

BLOCK_BYTES = 1024 * 1024
SPAN_BLOCKS = 4
"""Maximal number of blocks that one request reads."""
REQUESTS = 16
"""Maximal number of concurrent requests of all readers. Together with SPAN_BLOCKS it limits the memory outside the
cache.
"""
AHEAD_BLOCKS = 8
"""How many blocks are read ahead for a reader that reads in order. The next read-ahead begins when less than half is
left."""
CACHE_BYTES = 64 * 1024 * 1024

Fetch = Callable[[int, int, int], Awaitable[tuple[memoryview, int]]]
"""Takes object, first byte, and the byte after the last. Returns the available bytes and the object's size. Raises
OSError.
"""

Blocks = Mapping[int, bytes]
_Place = tuple[int, int]


class BlockCache:
    """A cache of blocks. `fetch` reads a range and must return within a limited time."""

    def __init__(self, fetch: Fetch, *, cache_bytes: int = CACHE_BYTES, block_bytes: int = BLOCK_BYTES) -> None:
        self._fetch = fetch
        self._cache_bytes = cache_bytes
        self._block_bytes = block_bytes
        self._blocks: OrderedDict[_Place, bytes] = OrderedDict()
        self._held_bytes = 0
        self._loading: dict[_Place, asyncio.Task[dict[int, bytes]]] = {}
        self._requests = asyncio.Semaphore(REQUESTS)
        self._sizes: OrderedDict[int, int] = OrderedDict()
        """Sizes of the objects as of their last read."""

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    async def load(self, object_id: int, ranges: Sequence[Range]) -> Blocks:
        """Return the blocks that `cut` needs for the ranges."""
        wanted = sorted({index for position, size in ranges for index in self._indexes(position, position + size)})
        if not wanted:
            return {}
        in_order = any((object_id, index) in self._blocks for index in (wanted[0] - 1, wanted[0]))
        found: dict[int, bytes] = {}
        missing: list[int] = []
        for index in wanted:
            block = self._blocks.get((object_id, index))
            if block is None:
                missing.append(index)
            else:
                self._blocks.move_to_end((object_id, index))
                found[index] = block
        coming = self._begin(object_id, missing)
        if in_order:
            self._read_ahead(object_id, wanted[-1])
        for task in coming:
            # Shielded, because other readers may wait for the same request.
            found.update(await asyncio.shield(task))
        return found

    def cut(self, blocks: Blocks, ranges: Iterable[Range]) -> list[bytearray]:
        """Return the bytes of the ranges. Bytes behind the object's end are missing."""
        return [self._cut(blocks, position, position + size) for position, size in ranges]

    def forget(self, object_id: int | None) -> None:
        """Drop everything of the object (None: of all objects), including requests in progress."""
        for place in [place for place in self._blocks if object_id in (None, place[0])]:
            self._held_bytes -= len(self._blocks.pop(place))
        for place in [place for place in self._loading if object_id in (None, place[0])]:
            del self._loading[place]
        for known in [known for known in self._sizes if object_id in (None, known)]:
            del self._sizes[known]

    def close(self) -> None:
        for task in set(self._loading.values()):
            task.cancel()

    def _indexes(self, position: int, end: int) -> range:
        return range(position // self._block_bytes, -(-end // self._block_bytes))

    def _cut(self, blocks: Blocks, position: int, end: int) -> bytearray:
        cut = bytearray()
        for index in self._indexes(position, end):
            start = index * self._block_bytes
            block = memoryview(blocks[index])
            cut += block[max(position - start, 0) : max(end - start, 0)]
            if len(block) < self._block_bytes:
                break
        return cut

    def _begin(self, object_id: int, indexes: Iterable[int]) -> list[asyncio.Task[dict[int, bytes]]]:
        """Return the requests to wait for until these blocks are present. Each block is requested once."""
        coming: dict[asyncio.Task[dict[int, bytes]], None] = {}
        span: list[int] = []

        def ask() -> None:
            if span:
                task = asyncio.create_task(self._load_span(object_id, tuple(span)), name="read of an object")
                for index in span:
                    self._loading[object_id, index] = task
                task.add_done_callback(_look_at)
                coming[task] = None
                span.clear()

        for index in indexes:
            task = self._loading.get((object_id, index))
            if task is not None:
                coming[task] = None
                continue
            if span and (span[-1] + 1 != index or len(span) == SPAN_BLOCKS):
                ask()
            span.append(index)
        ask()
        return list(coming)

    async def _load_span(self, object_id: int, span: Sequence[int]) -> dict[int, bytes]:
        task = asyncio.current_task()
        try:
            start = span[0] * self._block_bytes
            async with self._requests:
                got, size_bytes = await self._fetch(object_id, start, (span[-1] + 1) * self._block_bytes)
            came = {
                index: bytes(got[index * self._block_bytes - start : (index + 1) * self._block_bytes - start])
                for index in span
            }
            if all(self._loading.get((object_id, index)) is task for index in span):
                self._keep(object_id, size_bytes, came)
            return came
        finally:
            for index in span:
                if self._loading.get((object_id, index)) is task:
                    del self._loading[object_id, index]

    def _keep(self, object_id: int, size_bytes: int, came: Blocks) -> None:
        self._sizes[object_id] = size_bytes
        self._sizes.move_to_end(object_id)
        while len(self._sizes) > max(1, self._cache_bytes // self._block_bytes):
            self._sizes.popitem(last=False)
        for index, block in came.items():
            self._blocks[object_id, index] = block
            self._held_bytes += len(block)
        while self._held_bytes > self._cache_bytes:
            _, block = self._blocks.popitem(last=False)
            self._held_bytes -= len(block)

    def _read_ahead(self, object_id: int, index: int) -> None:
        """Read the blocks after this one, unless enough of them are present or requested."""
        size_bytes = self._sizes.get(object_id)
        if size_bytes is None:
            return
        last = min(index + AHEAD_BLOCKS, (size_bytes - 1) // self._block_bytes)
        middle = min(index + AHEAD_BLOCKS // 2 + 1, last)
        if middle > index and not self._is_coming((object_id, middle)):
            self._begin(
                object_id,
                [place for place in range(index + 1, last + 1) if (object_id, place) not in self._blocks],
            )

    def _is_coming(self, place: _Place) -> bool:
        return place in self._blocks or place in self._loading


def _look_at(task: asyncio.Task[dict[int, bytes]]) -> None:
    """Retrieve the error, so that asyncio does not report it as lost. The next reader sends the request again and sees
    the error.
    """
    if not task.cancelled():
        task.exception()
