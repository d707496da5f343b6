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
PAUSES, LONGEST_PAUSE_SECONDS = 4, 0.1
"""The pause between two looks is this many times as long as a look takes, up to a bound. Otherwise some looks, such as
reading all metrics of several nodes, take more CPU time than the work for which the test waits.
"""
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
    while True:
        looked_s = time.monotonic()
        found = look()
        if holds(found):
            return found
        assert time.monotonic() < deadline, _late(seconds, what, found)
        time.sleep(_pause_s(looked_s))


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
        looked_s = time.monotonic()
        answer = look()
        found = cast(T, await answer if inspect.isawaitable(answer) else answer)
        if holds(found):
            return found
        assert time.monotonic() < deadline, _late(seconds, what, found)
        await asyncio.sleep(_pause_s(looked_s))


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


def _pause_s(looked_s: float) -> float:
    return min(max(POLL_SECONDS, PAUSES * (time.monotonic() - looked_s)), LONGEST_PAUSE_SECONDS)


def _late(seconds: float, what: str, found: object) -> str:
    return f"not in {seconds:.0f} s: {what or 'the condition holds'}; last: {found!r}"
