"""Turn rows of the index into batches: fetch the bytes, check them, and cache them for the next reader.

The one idea: the bytes at a place never change. So checked bytes may be cached as long as there is room, and concurrent
readers of one place share them. Threads read files and split batches. An object that cannot be read delays nothing
else.

The reader sends no query to Postgres. A missing chunk may have moved, and only the caller can look again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from storage.byte_store import ByteStore
from storage.chunks import Chunk, DamagedChunkError, split
from storage.types import StoredBatch

CACHE_BYTES = 64 * 1024 * 1024
READERS = 2
"""Threads that split inline batches; a store has threads of its own."""
BATCH_OVERHEAD_BYTES = 300
"""Memory of a cached batch besides its bytes."""

INLINE_ON_LOOP_BYTES = 64 * 1024
"""If the inline chunks of a read have fewer bytes in total, they are split on the caller's thread, because another
thread would cost more.
"""

Batches = tuple[StoredBatch, ...]
Results = list[Batches | DamagedChunkError]
Place = tuple[int, int]


class ChunkReader:
    """Reads chunks. `store` is None if all bytes are inline."""

    def __init__(self, store: ByteStore | None = None, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[Place, tuple[int, Batches]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None

    async def batches_uncached(self, chunks: Sequence[Chunk]) -> Results:
        """Read chunks without caching them, and verify inline bytes, too. Movers and checkers use this."""
        return await self._read(chunks, keep=False)

    async def batches(self, chunks: Sequence[Chunk]) -> Results:
        """Return the batches of each chunk, or the reason why the chunk cannot be read."""
        return await self._read(chunks, keep=True)

    async def _read(self, chunks: Sequence[Chunk], *, keep: bool) -> Results:
        cache = self._cache
        found: list[Batches | DamagedChunkError | None] = [None] * len(chunks)
        inline: list[int] = []
        by_object: dict[int, list[int]] = {}
        for index, chunk in enumerate(chunks):
            if chunk.object_id is None:
                inline.append(index)
            elif (cached := self._cache.get((chunk.object_id, chunk.position))) is not None:
                self._cache.move_to_end((chunk.object_id, chunk.position))
                found[index] = cached[1]
            else:
                by_object.setdefault(chunk.object_id, []).append(index)
        if sum(chunks[index].size_bytes for index in inline) <= INLINE_ON_LOOP_BYTES:
            for index in inline:
                found[index] = _inline(chunks[index], verify=not keep)
        elif inline:
            told = await self._in_thread(lambda: [_inline(chunks[index], verify=not keep) for index in inline])
            for index, result in zip(inline, told, strict=True):
                found[index] = result
        wanted = [[chunks[index] for index in indexes] for indexes in by_object.values()]
        loads = [self._load(object_id, some) for object_id, some in zip(by_object, wanted, strict=True)]
        loaded = [await loads[0]] if len(loads) == 1 else await asyncio.gather(*loads)
        for (object_id, indexes), results in zip(by_object.items(), loaded, strict=True):
            for index, result in zip(indexes, results, strict=True):
                found[index] = result
                # After a change of history, another object may have the number of the one that was read.
                if keep and cache is self._cache and not isinstance(result, DamagedChunkError):
                    self._keep((object_id, chunks[index].position), chunks[index].size_bytes, result)
        return [result if result is not None else DamagedChunkError("it was not read") for result in found]

    async def _load(self, object_id: int, chunks: Sequence[Chunk]) -> Results:
        store = self._store
        if store is None:
            error = DamagedChunkError(f"object {object_id} is in a store that this node has not")
            return [error] * len(chunks)

        def look(pieces: list[bytearray]) -> Results:
            return [_checked(chunk, piece) for chunk, piece in zip(chunks, pieces, strict=True)]

        try:
            results = await store.load(object_id, [(chunk.position, chunk.size_bytes) for chunk in chunks], look)
        except OSError as error:
            return [DamagedChunkError(f"object {object_id} cannot be read: {error}")] * len(chunks)
        if any(isinstance(result, DamagedChunkError) for result in results):
            store.forget(object_id)
        return results

    async def _in_thread(self, work: Callable[[], Results]) -> Results:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="chunk-reader")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _keep(self, place: Place, size_bytes: int, batches: Batches) -> None:
        size_bytes += BATCH_OVERHEAD_BYTES * len(batches)
        before = self._cache.pop(place, None)
        if before is not None:
            self._cached_bytes -= before[0]
        self._cache[place] = (size_bytes, batches)
        self._cached_bytes += size_bytes
        while self._cached_bytes > self._cache_bytes:
            _, (freed_bytes, _) = self._cache.popitem(last=False)
            self._cached_bytes -= freed_bytes

    def forget(self) -> None:
        """Drop the cache, because places may hold other bytes from now on, after a change of history."""
        self._cache = OrderedDict()
        self._cached_bytes = 0
        if self._store is not None:
            self._store.forget(None)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def _inline(chunk: Chunk, *, verify: bool) -> Batches | DamagedChunkError:
    if chunk.records is None:
        return DamagedChunkError("its inline bytes are gone")
    try:
        return split(chunk, chunk.records, verify=verify)
    except DamagedChunkError as error:
        return error


def _checked(chunk: Chunk, records: bytearray) -> Batches | DamagedChunkError:
    try:
        return split(chunk, records, verify=True)
    except DamagedChunkError as error:
        return error
