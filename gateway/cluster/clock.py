"""The cluster's time: Postgres' clock, as far as this node knows it.

The one idea: Postgres or another node compares stored times with Postgres' clock, so this node dates them by the same
clock. Between two readings of that clock the node counts by itself. A reading changes the node's time only as far as
the duration of the call leaves no doubt, so the time does not oscillate with the network.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

boot_time_s: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds that continue while the machine is suspended, as Postgres elsewhere continues to count. CLOCK_MONOTONIC
stands still then, and a lease that ran out would still be believed. Without such a clock this is the monotonic one."""


def wall_ms() -> int:
    """Return the time of this machine's own clock."""
    return time.time_ns() // 1_000_000


class ClusterClock:
    """This machine's own clock until it is first compared with Postgres' clock."""

    def __init__(self, *, own_ms: Callable[[], int] = wall_ms, elapsed_s: Callable[[], float] = boot_time_s) -> None:
        """`elapsed_s` counts evenly, also if the machine's clock is set, and while the machine is suspended."""
        self._elapsed_s = elapsed_s
        self._zero_ms = own_ms() - elapsed_s() * 1000
        """Milliseconds since 1970 when `elapsed_s` was 0."""

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return int(self._zero_ms + self._elapsed_s() * 1000)

    async def compare(self, ask: Callable[[], Awaitable[int]]) -> None:
        """Follow Postgres' clock. `ask` reads this clock, in ms. Exceptions of `ask` are passed to the caller."""
        asked_s = self._elapsed_s()
        database_ms = await ask()
        # Postgres read its clock at some moment during the call.
        latest_ms, earliest_ms = database_ms - asked_s * 1000, database_ms - self._elapsed_s() * 1000
        self._zero_ms = min(max(self._zero_ms, earliest_ms), latest_ms)
