"""Full garbage collections, which stop everybody, stay short.

The one idea: a full collection looks at every object there is, in one go. What it has found alive is set apart, so that
the next looks at what has come since. And the half million objects of one request make fifty milliseconds of it, and
go without it when the request is answered: it waits for them. Young collections go on meanwhile. Once very many are set
apart all are looked at again, which takes a tenth of a second for a million: when nobody asks anything.
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

MAX_GROWTH = 1_000_000
"""Objects set apart above twice as many as were alive when all were looked at last: then all are again, as soon as the
loop idles, since what has become garbage among them by a cycle is found by that alone."""

MAX_OVERGROWTH = 3
"""So many times that many above, and all are looked at though the loop never idles: memory has an end too."""

IDLE_S = 1.0
MAX_IDLE_SHARE = 0.02
"""The loop idles when its thread works for no more than this part of so many seconds."""

_NEVER = 2**31 - 1
_FULL = 2


def _nothing() -> None:
    return None


class FullCollections:
    """The process' full collections, which any number of requests may put off at a time."""

    def __init__(self) -> None:
        self._pauses = 0
        self._usual = gc.get_threshold()
        self._paused_since_s = 0.0
        self.overdue: Callable[[], None] = _nothing
        """Called when one that came due in a pause is about to be made up for."""

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
                if gc.get_count()[_FULL] > self._usual[_FULL]:
                    self.overdue()
                gc.set_threshold(*self._usual)

        timer = asyncio.get_running_loop().call_later(MAX_PAUSE_S, end)
        return end


full_collections = FullCollections()
"""One, as the collector is one."""


class Survivors:
    """Sets apart what each full collection finds alive, from now until `close`, and, as it is, what there is when one
    has been put off: what a long request leaves behind was made to stay. One in a process, on its loop."""

    def __init__(self, max_growth: int = MAX_GROWTH) -> None:
        self._max_growth = max_growth
        self._loop = asyncio.get_running_loop()
        self._awaited = False
        self._collecting = False
        self._look: asyncio.TimerHandle | None = None
        """Awaits an idle loop."""
        self._alive = self._apart = self._counted_above = 0
        """Objects: alive when all were looked at last; set apart by now, at most; how many make a count worth it."""
        self._look_at_all()
        gc.callbacks.append(self._collected)
        full_collections.overdue = self._set_apart

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        gc.callbacks.remove(self._collected)
        full_collections.overdue = _nothing

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        """In the middle of a collection, of whichever thread."""
        if phase == "stop" and info["generation"] == _FULL and not self._awaited and not self._collecting:
            self._awaited = True
            self._loop.call_soon_threadsafe(self._set_apart)

    def _set_apart(self) -> None:
        self._awaited = False
        self._apart += len(gc.get_objects())  # those that are not apart yet
        gc.freeze()
        if self._apart > self._counted_above and self._look is None:
            self._look_when_idle()
        self._collect()  # of nothing: Python measures by what was left how soon the next full one comes

    def _look_when_idle(self) -> None:
        self._look = self._loop.call_later(IDLE_S, self._look_if_idle, time.thread_time())

    def _look_if_idle(self, worked_before_s: float) -> None:
        idles = time.thread_time() - worked_before_s <= IDLE_S * MAX_IDLE_SHARE
        if not idles and self._apart <= self._counted_above + MAX_OVERGROWTH * self._most:
            self._look_when_idle()
            return
        self._look = None
        if self._have_become_many():
            self._look_at_all()

    @property
    def _most(self) -> int:
        return 2 * self._alive + self._max_growth

    def _have_become_many(self) -> bool:
        """To count them takes as long as to walk along them all, so those that have come are added up before. Some of
        them are gone again, which a count finds out; the next is made when a quarter more have come."""
        self._apart = gc.get_freeze_count()
        self._counted_above = max(self._most, self._apart + self._most // 4)
        return self._apart > self._most

    def _look_at_all(self) -> None:
        gc.unfreeze()
        self._collect()
        gc.freeze()
        self._alive = self._apart = gc.get_freeze_count()
        self._counted_above = self._most
        self._collect()

    def _collect(self) -> None:
        self._collecting = True
        try:
            gc.collect()
        finally:
            self._collecting = False
