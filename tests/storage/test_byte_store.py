"""One test suite for every place outside Postgres: a directory, and a bucket by obstore, in memory and as files."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore

from storage import object_store
from storage.byte_store import ByteStore
from storage.object_store import ObjectStore
from storage.segments import SegmentDirectory
from tests.storage.batches import DEADLINE_S


@pytest.fixture(params=["directory", "memory", "files"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ByteStore]:
    made: ByteStore
    if request.param == "directory":
        made = SegmentDirectory(tmp_path, segment_bytes=1024)
    elif request.param == "memory":
        made = ObjectStore("s3://bucket", MemoryStore())
    else:
        # Like objects of Google and Azure, obstore's files cannot be removed twice.
        made = ObjectStore("gs://bucket", LocalStore(tmp_path))
    yield made
    made.close()


async def load(store: ByteStore, object_id: int, *ranges: tuple[int, int]) -> list[bytes]:
    return await store.load(object_id, ranges, lambda pieces: [bytes(piece) for piece in pieces])


async def test_an_object_is_readable_in_any_ranges(store: ByteStore) -> None:
    content = bytes(range(256)) * 20
    await store.put(7, [content[:100], memoryview(content)[100:3000], bytearray(content[3000:])])
    for ranges in itertools.permutations([(0, 10), (5, 20), (4000, 1120), (10, 0), (10, 90)]):
        assert await load(store, 7, *ranges) == [content[at : at + size] for at, size in ranges]


async def test_an_object_in_parts_is_whole(store: ByteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * 1024 * 1024)
    content = bytes(range(251)) * 50_000
    pieces = [content[at : at + 700_001] for at in range(0, len(content), 700_001)]
    await store.put(2**40, pieces)
    assert await load(store, 2**40, (0, len(content))) == [content]


async def test_a_range_behind_the_end_of_an_object_is_reported_missing(store: ByteStore) -> None:
    await store.put(1, [b"0123456789"])
    assert await load(store, 1, (8, 5), (0, 2)) == [b"89", b"01"]
    assert await load(store, 1, (10, 5)) == [b""]


async def test_an_absent_object_is_not_found(store: ByteStore) -> None:
    with pytest.raises(FileNotFoundError):
        await load(store, 9, (0, 1))


async def test_an_object_can_be_removed_twice(store: ByteStore) -> None:
    for object_id in (1, 2, 3):
        await store.put(object_id, [b"abc"])
    await store.remove([1, 3, 4])
    await store.remove([1])
    await store.remove([])
    (left,) = await store.listed()
    assert (left.object_id, left.size_bytes) == (2, 3)
    assert -5 < left.age_s < 60
    store.forget(1)
    with pytest.raises(FileNotFoundError):
        await load(store, 1, (0, 1))


async def test_objects_of_a_store_without_bulk_removal_are_removed_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roller waits ten seconds for a hundred objects, and then begins again with the first of them. One after the
    other they take longer if a request takes a tenth of a second."""
    store = ObjectStore("gs://bucket", LocalStore(tmp_path))
    for object_id in range(100):
        await store.put(object_id, [b"x"])
    at_work = asyncio.Barrier(10)
    delete = obstore.delete_async

    async def delete_together(*arguments: Any) -> None:
        await at_work.wait()
        await delete(*arguments)

    monkeypatch.setattr(obstore, "delete_async", delete_together)
    async with asyncio.timeout(DEADLINE_S):
        await store.remove(range(100))
    assert await store.listed() == []
    store.close()


async def test_only_objects_are_listed(store: ByteStore) -> None:
    await store.create_marker(b"{}")
    for object_id in range(1_200):
        await store.put(object_id, [b"x"])
    assert {each.object_id for each in await store.listed()} == set(range(1_200))


async def test_a_marker_is_created_only_once(store: ByteStore) -> None:
    assert await store.read_marker() is None
    await store.create_marker(b"one")
    with pytest.raises(FileExistsError):
        await store.create_marker(b"two")
    assert await store.read_marker() == b"one"
    await store.replace_marker(b"two")
    assert await store.read_marker() == b"two"


async def test_many_readers_read_concurrently(store: ByteStore) -> None:
    content = bytes(range(256)) * 4096
    await store.put(1, [content])
    ranges = [(at, 5_000) for at in range(0, 1_000_000, 7_000)]
    found = await asyncio.gather(*(load(store, 1, each) for each in ranges))
    assert found == [[content[at : at + size]] for at, size in ranges]


async def test_a_replaced_object_is_read_again() -> None:
    store = ObjectStore("s3://bucket", MemoryStore())
    await store.put(1, [b"of a history that was lost"])
    assert await load(store, 1, (0, 4)) == [b"of a"]
    await store.put(1, [b"new"])
    assert await load(store, 1, (0, 4)) == [b"new"]
    store.close()
