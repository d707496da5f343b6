"""Measure for how long one turn of a task blocks the event loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

HELD_MS = 40.0
"""CPU time in milliseconds. A request may block the loop for half of this time (`python -m bench.worst` measures that).
A test runs on a shared machine, so it only detects code that does not yield at all.
"""


class Turns:
    longest_ms = 0.0


@asynccontextmanager
async def watched() -> AsyncGenerator[Turns]:
    """Measure the longest CPU time between two turns of a task, with the garbage collector off."""
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
