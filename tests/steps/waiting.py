"""Poll for a condition until a deadline.

Use it for events in another process, on another node or in Postgres, of which a test is not notified. A deadline is
long, because it allows for a busy machine and does not measure speed.
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
    """Call `look` until its value holds, and return this value. After `seconds` raise AssertionError with the last
    value.
    """
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
    """Call `look`, a function or a coroutine function, until its value holds, and return this value. Other tasks run in
    between. After `seconds` raise AssertionError with the last value.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer = look()
        found = cast(T, await answer if inspect.isawaitable(answer) else answer)
        if holds(found):
            return found
        assert time.monotonic() < deadline, _late(seconds, what, found)
        await asyncio.sleep(POLL_SECONDS)


async def until_blocked(connection: asyncpg.Connection, sessions: int = 1) -> None:
    """Wait until this many sessions of the connection's database wait for a lock."""

    async def waiting() -> int:
        # Within a transaction, Postgres shows the sessions that existed at the first query, and none that began since.
        await connection.execute("select pg_stat_clear_snapshot()")
        return int(await connection.fetchval(_BLOCKED) or 0)

    await until(waiting, "sessions wait for a lock", holds=lambda count: count >= sessions)


async def turns(count: int = 1) -> None:
    """Let other tasks of the event loop run for this many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


def _late(seconds: float, what: str, found: object) -> str:
    return f"not in {seconds:.0f} s: {what or 'the condition holds'}; last: {found!r}"
