"""Poll for a condition until a deadline.

Use it for what happens in another process, on another node or in Postgres, because no event reports that to a test. A
deadline is a bound for a loaded machine and not a measure of speed, so it is long.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import asyncpg

T = TypeVar("T")

SECONDS = 60.0
POLL_SECONDS = 0.01
_BLOCKED = """
select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'
"""


def wait_for(
    look: Callable[[], T], what: str = "", *, holds: Callable[[T], object] = bool, seconds: float = SECONDS
) -> T:
    """Return the first value of `look` that holds. Raise AssertionError with the last value after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds(found := look()):
        assert time.monotonic() < deadline, _late(seconds, what, found)
        time.sleep(POLL_SECONDS)
    return found


async def until(
    look: Callable[[], T | Awaitable[T]],
    what: str = "",
    *,
    holds: Callable[[T], object] = bool,
    seconds: float = SECONDS,
) -> T:
    """Return the first value of `look`, a function or a coroutine function, that holds. Other tasks go on. Raise
    AssertionError with the last value after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = look()
        found = cast(T, await answer if inspect.isawaitable(answer) else answer)
        if holds(found):
            return found
        assert time.monotonic() < deadline, _late(seconds, what, found)
        await asyncio.sleep(POLL_SECONDS)


async def until_blocked(connection: asyncpg.Connection, sessions: int = 1) -> None:
    """Wait until so many sessions of the connection's database wait for a lock."""

    async def waiting() -> int:
        # Within a transaction Postgres shows the sessions of the first look, and none that has begun since.
        await connection.execute("select pg_stat_clear_snapshot()")
        return int(await connection.fetchval(_BLOCKED) or 0)

    await until(waiting, "sessions wait for a lock", holds=lambda count: count >= sessions)


async def turns(count: int = 1) -> None:
    """Let other tasks of the event loop run, so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def _late(seconds: float, what: str, found: object) -> str:
    return f"not in {seconds:.0f} s: {what or 'the condition holds'}; last: {found!r}"
