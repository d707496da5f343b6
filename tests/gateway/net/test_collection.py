"""Full garbage collections wait for large requests, but not for ever. Objects that survive a collection are frozen."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.net import coding, collection
from gateway.net.coding import AT_ONCE_ELEMENTS, decode_in_thread
from gateway.net.collection import FullCollections, Growth, Survivors
from protocol.api_keys import ApiKey
from protocol.codec import encode
from protocol.errors import ProtocolError
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic

# a test process has many objects of other tests, and a full collection visits all of them
pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def as_if_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget unfinished requests of other tests, whose event loops are closed."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    monkeypatch.setattr(coding, "full_collections", FullCollections())
    yield
    gc.set_threshold(*before)


async def test_full_collections_wait_until_the_last_request_is_done() -> None:
    usual = gc.get_threshold()
    collections = FullCollections()
    first, second = collections.pause(), collections.pause()
    assert gc.get_threshold() == (*usual[:2], 2**31 - 1)
    first()
    first()
    assert gc.get_threshold() != usual
    second()
    assert gc.get_threshold() == usual


async def test_a_pause_ends_by_itself() -> None:
    usual = gc.get_threshold()
    end = FullCollections(max_pause_s=0.01).pause()
    async with asyncio.timeout(30):
        while gc.get_threshold() != usual:  # noqa: ASYNC110 (a timer of the module changes it)
            await asyncio.sleep(0.001)
    end()
    assert gc.get_threshold() == usual


async def test_continuous_requests_do_not_postpone_a_collection_for_ever() -> None:
    usual = gc.get_threshold()
    collections = FullCollections(max_without_s=-1.0)
    first = collections.pause()
    later = collections.pause()
    first()
    assert gc.get_threshold() == usual
    later()
    assert gc.get_threshold() == usual


def metadata_of(count: int) -> bytes:
    request = MetadataRequest(topics=tuple(MetadataRequestTopic(name=f"t{number}") for number in range(count)))
    return b"".join(bytes(chunk) for chunk in encode(request, 9))


async def test_collection_waits_for_a_request_of_many_elements() -> None:
    usual = gc.get_threshold()
    request, done_with = await decode_in_thread(ApiKey.METADATA, 9, metadata_of(AT_ONCE_ELEMENTS + 1), 0)
    assert isinstance(request, MetadataRequest)
    assert len(request.topics or ()) == AT_ONCE_ELEMENTS + 1
    assert gc.get_threshold() != usual
    done_with()
    assert gc.get_threshold() == usual


async def test_collection_does_not_wait_for_a_torn_request() -> None:
    usual = gc.get_threshold()
    with pytest.raises(ProtocolError):
        await decode_in_thread(ApiKey.METADATA, 9, metadata_of(AT_ONCE_ELEMENTS + 1)[:-20], 0)
    assert gc.get_threshold() == usual


class Node:
    """An object in a reference cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
async def survivors() -> AsyncIterator[Survivors]:
    """The process' full collections, without pauses that an earlier test left when its event loop was closed."""
    FullCollections.__init__(collection.full_collections)
    made = Survivors()
    yield made
    made.close()
    gc.unfreeze()


async def test_full_collection_skips_objects_found_alive_before(survivors: Survivors) -> None:
    kept = [Node() for _ in range(500)]
    for number in range(3):
        before = gc.get_freeze_count()
        gc.collect()
        await asyncio.sleep(0)
        assert (gc.get_freeze_count() - before >= len(kept)) == (number == 0)
        assert not set(map(id, kept)) & set(map(id, gc.get_objects())), "the collector knows nothing of them"


@pytest.mark.parametrize(
    ("idle_share", "overgrowth"), [pytest.param(10.0, 3, id="idle"), pytest.param(-1.0, 0, id="too-much")]
)
async def test_frozen_garbage_is_found_once_there_is_much(idle_share: float, overgrowth: int) -> None:
    survivors = Survivors(Growth(objects=1_000, most=overgrowth, idle_s=0.01, idle_share=idle_share))
    node = Node()
    gc.collect()
    await asyncio.sleep(0)
    gone = weakref.ref(node)
    del node
    gc.collect()
    await asyncio.sleep(0)
    assert gone() is not None
    kept = [[] for _ in range(2 * gc.get_freeze_count() + 2_000)]
    gc.collect()
    await asyncio.sleep(0)
    assert gone() is not None, "not at once: who asks something now would wait for it"
    async with asyncio.timeout(30):
        while gone() is not None:  # noqa: ASYNC110 (a timer of the module looks)
            await asyncio.sleep(0.005)
    assert len(kept) > 2_000
    survivors.close()
    gc.unfreeze()


async def test_busy_loop_is_not_stopped_for_a_collection_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_s = itertools.count()
    asked: list[int] = []
    monkeypatch.setattr(time, "thread_time", lambda: asked.append(1) or next(worked_s))
    survivors = Survivors(Growth(objects=1_000, idle_s=0.001))
    walks: list[int] = []
    unfreeze, count = gc.unfreeze, gc.get_freeze_count
    monkeypatch.setattr(gc, "unfreeze", lambda: walks.append(1) or unfreeze())
    monkeypatch.setattr(gc, "get_freeze_count", lambda: walks.append(1) or count())
    kept = [[] for _ in range(2 * count() + 2_000)]
    gc.collect()
    async with asyncio.timeout(30):
        while len(asked) < 10:  # noqa: ASYNC110 (a timer of the module asks)
            await asyncio.sleep(0.001)
    assert not walks
    assert len(kept) > 2_000
    survivors.close()
    unfreeze()


async def test_short_lived_objects_do_not_trigger_a_count_of_frozen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    survivors = Survivors(Growth(objects=1_000))
    counted: list[int] = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or count())
    for _ in range(5 * count() // 20_000 + 1):
        passing = [Node.__new__(Node) for _ in range(20_000)]
        del passing
    gc.collect()
    await asyncio.sleep(0)
    assert not counted
    survivors.close()
    gc.unfreeze()


async def test_collection_in_a_thread_freezes_on_the_loop(survivors: Survivors) -> None:
    kept = [Node() for _ in range(500)]
    before = gc.get_freeze_count()
    await asyncio.to_thread(gc.collect)
    await asyncio.sleep(0)
    assert gc.get_freeze_count() - before >= len(kept)


async def test_nothing_is_frozen_after_close() -> None:
    Survivors().close()
    before = gc.get_freeze_count()
    gc.collect()
    await asyncio.sleep(0)
    assert gc.get_freeze_count() <= before
    gc.unfreeze()


async def test_remains_of_a_long_request_are_not_visited(survivors: Survivors) -> None:
    usual = gc.get_threshold()
    collected: list[int] = []
    resume = collection.full_collections.pause()
    kept = [Node() for _ in range(700 * 10 * 15)]
    assert gc.get_count()[2] > usual[2], "one has come due"
    gc.callbacks.append(lambda phase, info: collected.append(info["generation"]) if phase == "start" else None)
    try:
        resume()
        assert not set(map(id, kept[:-8_000])) & set(map(id, gc.get_objects()))
        assert [generation for generation in collected if generation == 2] == [2], "of nothing"
    finally:
        gc.callbacks.pop()
