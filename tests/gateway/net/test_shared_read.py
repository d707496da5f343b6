"""One read that serves many callers. Each caller gets the state at its call or later, and is not affected if another
caller gives up.
"""

from __future__ import annotations

import asyncio

from gateway.net.shared_read import SharedRead
from storage.errors import StorageUnavailable
from tests.steps.waiting import turns, until


class Store:
    def __init__(self) -> None:
        self.value = 0
        self.reads = 0
        self.at_once = 0
        self.most_at_once = 0
        self.gate = asyncio.Event()
        self.fails = False

    async def read(self) -> int:
        self.reads += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        value = self.value
        try:
            await self.gate.wait()
        finally:
            self.at_once -= 1
        if self.fails:
            raise StorageUnavailable("gone")
        return value


async def test_callers_that_wait_share_a_read_that_began_after_they_asked() -> None:
    store = Store()
    shared = SharedRead(store.read)
    first = asyncio.create_task(shared.get())
    await until(lambda: store.reads == 1)
    store.value = 1
    others = [asyncio.create_task(shared.get()) for _ in range(50)]
    await turns()
    store.gate.set()
    assert await first == 0
    assert await asyncio.gather(*others) == [1] * 50
    assert (store.reads, store.most_at_once) == (2, 1)


async def test_caller_without_a_running_read_receives_the_newest_state() -> None:
    store = Store()
    store.gate.set()
    shared = SharedRead(store.read)
    for value in range(3):
        store.value = value
        assert await shared.get() == value


async def test_cancelled_caller_does_not_affect_the_others() -> None:
    store = Store()
    shared = SharedRead(store.read)
    first, second = asyncio.create_task(shared.get()), asyncio.create_task(shared.get())
    await until(lambda: store.reads == 1)
    first.cancel()
    await asyncio.wait([first])
    store.gate.set()
    assert await second == 0
    assert store.reads == 1


async def test_failure_reaches_all_callers_and_is_not_cached() -> None:
    store = Store()
    store.fails = True
    store.gate.set()
    shared = SharedRead(store.read)
    for outcome in await asyncio.gather(shared.get(), shared.get(), return_exceptions=True):
        assert isinstance(outcome, StorageUnavailable)
    store.fails = False
    assert await shared.get() == 0
