"""The cache of chunks that were read from files or objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from storage.byte_store import Range
from storage.chunk_reader import ChunkReader
from storage.chunks import Chunk
from storage.segments import SegmentDirectory
from storage.types import PartitionKey
from tests.storage.batches import batch_bytes

T = TypeVar("T")


class Slow(SegmentDirectory):
    """Files whose bytes arrive when the test permits it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, segment_bytes=4096)
        self.has_read, self.may_return = asyncio.Event(), asyncio.Event()

    async def load(self, object_id: int, ranges: Sequence[Range], look: Callable[[list[bytearray]], T]) -> T:
        result = await super().load(object_id, ranges, look)
        self.has_read.set()
        await self.may_return.wait()
        return result


async def test_read_in_progress_at_a_change_of_history_is_not_kept(tmp_path: Path) -> None:
    """The object that was read is lost. In the new history another one gets its number, and begins at the same
    position."""
    former, present = (bytes(batch_bytes(100, fill=fill)) for fill in (1, 2))
    chunk = Chunk(PartitionKey(1), 0, 0, 7, 0, 100, 1, 0, True, None)
    store = Slow(tmp_path)
    reader = ChunkReader(store)
    try:
        await store.put(7, [former])
        reading = asyncio.create_task(reader.batches([chunk]))
        await store.has_read.wait()
        reader.forget()
        await store.remove([7])
        await store.put(7, [present])
        store.may_return.set()
        await reading
        (batches,) = await reader.batches([chunk])
        assert isinstance(batches, tuple)
        assert [bytes(batch.records) for batch in batches] == [present]
    finally:
        reader.close()
        store.close()
