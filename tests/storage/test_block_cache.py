"""The cache of remote objects' blocks: each block is read once and shared by readers. Blocks are read ahead for
sequential readers. Their number is limited, and a wrong block is never kept.
"""

from __future__ import annotations

import asyncio

import pytest

from storage import block_cache
from storage.block_cache import BlockCache

BLOCK = 10


class FarObject:
    """An object of `size` bytes that counts its requests."""

    def __init__(self, size_bytes: int = 1_000) -> None:
        self.content = bytes(at % 256 for at in range(size_bytes))
        self.asked: list[tuple[int, int]] = []
        self.answering = asyncio.Event()
        self.answering.set()
        self.failing = False

    async def fetch(self, object_id: int, start: int, end: int) -> tuple[memoryview, int]:
        self.asked.append((start, end))
        await self.answering.wait()
        if self.failing:
            raise ConnectionError("away")
        return memoryview(self.content[start:end]), len(self.content)

    def cache(self, cache_bytes: int = 1_000) -> BlockCache:
        return BlockCache(self.fetch, cache_bytes=cache_bytes, block_bytes=BLOCK)


async def read(cache: BlockCache, *ranges: tuple[int, int], object_id: int = 1) -> list[bytes]:
    return [bytes(piece) for piece in cache.cut(await cache.load(object_id, ranges), ranges)]


async def settled() -> None:
    """Wait until no request is under way."""
    while coming := {task for task in asyncio.all_tasks() if task.get_name() == "read of an object"}:
        await asyncio.wait(coming)


async def test_blocks_that_follow_each_other_come_in_one_request_of_bounded_size() -> None:
    far = FarObject()
    cache = far.cache()
    assert await read(cache, (5, 30), (71, 3)) == [far.content[5:35], far.content[71:74]]
    assert far.asked == [(0, 40), (70, 80)]
    await read(far.cache(), (0, 90))
    assert far.asked[2:] == [(0, 40), (40, 80), (80, 90)]


async def test_several_readers_of_one_place_share_one_request() -> None:
    far = FarObject()
    far.answering.clear()
    cache = far.cache()
    readers = [asyncio.create_task(read(cache, (3, 10))) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    far.answering.set()
    assert await asyncio.gather(*readers) == [[far.content[3:13]]] * 5
    assert far.asked == [(0, 20)]


async def test_a_cancelled_reader_does_not_cancel_the_request_of_the_others() -> None:
    far = FarObject()
    far.answering.clear()
    cache = far.cache()
    first = asyncio.create_task(read(cache, (0, 5)))
    await asyncio.sleep(0)
    second = asyncio.create_task(read(cache, (0, 5)))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    far.answering.set()
    assert await second == [far.content[:5]]
    assert len(far.asked) == 1


async def test_a_sequential_reader_finds_the_next_blocks_cached() -> None:
    far = FarObject()
    cache = far.cache()
    for at in range(0, 1_000, 5):
        await read(cache, (at, 5))
        await settled()
    assert sum(end - start for start, end in far.asked) == 1_000, "everything once"
    assert len(far.asked) < 35, "in large requests"
    asked = len(far.asked)
    await read(far.cache(), (500, 5))
    assert len(far.asked) == asked + 1, "one read says nothing of the next"


async def test_cached_bytes_are_bounded() -> None:
    far = FarObject()
    cache = far.cache(cache_bytes=55)
    for at in (0, 700, 300, 900, 100, 500, 200):
        assert await read(cache, (at, 10)) == [far.content[at : at + 10]]
        await settled()
        assert cache.held_bytes <= 55
    assert await read(cache, (0, 1_000)) == [far.content]


async def test_a_failure_reaches_all_waiting_readers_and_is_not_cached() -> None:
    far = FarObject()
    far.failing = True
    cache = far.cache()
    outcomes = await asyncio.gather(read(cache, (0, 5)), read(cache, (0, 5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ConnectionError] * 2
    far.failing = False
    assert await read(cache, (0, 5)) == [far.content[:5]]


async def test_a_wrong_block_is_requested_again_even_while_it_is_loading() -> None:
    far = FarObject()
    cache = far.cache()
    await read(cache, (0, 5))
    far.content = bytes(1_000)
    cache.forget(1)
    assert await read(cache, (0, 5)) == [bytes(5)]
    cache.forget(None)
    assert cache.held_bytes == 0
    far.answering.clear()
    late = asyncio.create_task(read(cache, (40, 5)))
    await asyncio.sleep(0)
    cache.forget(1)
    far.answering.set()
    await late
    assert cache.held_bytes == 0


async def test_concurrent_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "REQUESTS", 3)
    far = FarObject()
    far.answering.clear()
    cache = far.cache()
    readers = [asyncio.create_task(read(cache, (at, 5))) for at in range(0, 1_000, 50)]
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(far.asked) == 3
    far.answering.set()
    await asyncio.gather(*readers)


async def test_no_reader_waits_for_a_closed_cache() -> None:
    far = FarObject()
    far.answering.clear()
    cache = far.cache()
    reader = asyncio.create_task(read(cache, (0, 5)))
    await asyncio.sleep(0)
    cache.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reader, 60)
