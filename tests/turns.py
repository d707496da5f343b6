"""How long the event loop is held by one turn of somebody's."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

HELD_MS = 40.0
"""CPU time. What a request may hold the loop for is half of it (`python -m bench.worst` says what it does); a test that
shares its machine is only to notice what does not give way at all."""


class Turns:
    longest_ms = 0.0


@asynccontextmanager
async def watched() -> AsyncGenerator[Turns]:
    """Of the CPU time between two turns of a task the longest; garbage is collected when there is time."""
    turns = Turns()

    async def count() -> None:
        since = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            turns.longest_ms, since = max(turns.longest_ms, (now - since) * 1000), now

    gc.disable()
    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    try:
        yield turns
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    finally:
        counting.cancel()
        gc.enable()
