"""Full garbage collections wait while a request of very many elements is in hand.

The one idea: a full collection looks at every object there is, in one go; the half million objects of one request make
that fifty milliseconds, and they go without it when the request is answered. Young collections go on meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

MAX_PAUSE_S = 5.0
"""A fetch may be parked for minutes: its pause ends before it does."""

MAX_WITHOUT_S = 60.0
"""Requests that follow upon each other put a full collection off no longer than this."""

LEFTOVERS_S = 0.1
"""From the answer until what the request was made of is gone."""

_NEVER = 2**31 - 1


class FullCollections:
    """The process' full collections, which any number of requests may put off at a time."""

    def __init__(self) -> None:
        self._pauses = 0
        self._usual = gc.get_threshold()
        self._paused_since_s = 0.0

    def pause(self) -> Callable[[], None]:
        """Puts them off until what is returned is called, or for MAX_PAUSE_S. It may be called twice."""
        now_s = time.monotonic()
        if self._pauses and now_s - self._paused_since_s > MAX_WITHOUT_S:
            return _nothing
        if not self._pauses:
            self._paused_since_s = now_s
            self._usual = gc.get_threshold()
            gc.set_threshold(*self._usual[:2], _NEVER)
        self._pauses += 1
        ended = False

        def end() -> None:
            nonlocal ended
            if ended:
                return
            ended = True
            timer.cancel()
            self._pauses -= 1
            if not self._pauses:
                gc.set_threshold(*self._usual)

        timer = asyncio.get_running_loop().call_later(MAX_PAUSE_S, end)
        return end


def _nothing() -> None:
    return None


full_collections = FullCollections()
"""One, as the collector is one."""
