"""Keep full garbage collections, which stop every task, short.

The one idea: a full collection visits every object in one go. So the objects found alive are set apart, and the next
collection visits only newer ones. The half million objects of one request would take fifty milliseconds, and are
garbage once the request is answered. So a full collection waits for such requests. Young collections continue. Once
very many objects are set apart, all are visited again while the node is idle, which takes a tenth of a second for a
million.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

LEFTOVERS_S = 0.1
"""Time after the answer until the request's objects are gone."""

_NEVER = 2**31 - 1
_FULL = 2


@dataclass(frozen=True, slots=True)
class Growth:
    """Conditions under which all objects are visited again. Only such a visit finds cyclic garbage among the objects
    set apart.
    """

    objects: int = 1_000_000
    """Objects set apart, above twice the number alive at the last visit to all objects, at which all are visited again
    as soon as the loop idles."""
    most: int = 3
    """At this multiple of the growth, all objects are visited even if the loop never idles, because memory is
    finite."""
    idle_s: float = 1.0
    idle_share: float = 0.02
    """The loop is idle if its thread works for at most the share `idle_share` of `idle_s` seconds."""


GROWTH = Growth()


def _nothing() -> None:
    return None


class FullCollections:
    """The process' full collections, which any number of requests may put off at a time."""

    def __init__(self, max_pause_s: float = 5.0, max_without_s: float = 60.0) -> None:
        """A fetch may be parked for minutes, so its pause ends after `max_pause_s`. Consecutive requests delay a full
        collection no longer than `max_without_s`."""
        self._max_pause_s = max_pause_s
        self._max_without_s = max_without_s
        self._pauses = 0
        self._usual = gc.get_threshold()
        self._paused_since_s = 0.0
        self.overdue: Callable[[], None] = _nothing
        """Called when a collection that became due during a pause is about to run."""

    def pause(self) -> Callable[[], None]:
        """Delay full collections until the returned function is called, or for `max_pause_s`. The function may be
        called twice."""
        now_s = time.monotonic()
        if self._pauses and now_s - self._paused_since_s > self._max_without_s:
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

        timer = asyncio.get_running_loop().call_later(self._max_pause_s, end)
        return end


full_collections = FullCollections()
"""One instance, because the process has one collector."""


class Survivors:
    """Set apart the objects that each full collection finds alive, until `close`. After a delayed collection, set all
    present objects apart without a visit, because most of what a long request leaves behind is there to stay. A process
    has at most one, on its event loop."""

    def __init__(self, growth: Growth = GROWTH) -> None:
        self._growth = growth
        self._loop = asyncio.get_running_loop()
        self._awaited = False
        self._collecting = False
        self._look: asyncio.TimerHandle | None = None
        """Timer that waits until the event loop is idle."""
        self._alive = self._apart = self._counted_above = 0
        """Numbers of objects: those found alive by the last visit to all objects; an upper bound on those set apart by
        now; the bound above which those set apart are counted."""
        self._visit_new()
        gc.callbacks.append(self._collected)
        full_collections.overdue = self._set_apart

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        gc.callbacks.remove(self._collected)
        full_collections.overdue = _nothing

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        """Note the result of a collection. Python calls this during the collection, on any thread."""
        if phase == "stop" and info["generation"] == _FULL and not self._awaited and not self._collecting:
            self._awaited = True
            self._loop.call_soon_threadsafe(self._set_apart)

    def _set_apart(self) -> None:
        self._awaited = False
        self._apart += len(gc.get_objects())  # the objects that are not frozen yet
        gc.freeze()
        if self._apart > self._counted_above and self._look is None:
            self._look_when_idle()
        # This finds nothing. Python schedules the next full collection by the number of objects that this one leaves.
        self._collect()

    def _look_when_idle(self) -> None:
        self._look = self._loop.call_later(self._growth.idle_s, self._look_if_idle, time.thread_time())

    def _look_if_idle(self, worked_before_s: float) -> None:
        idles = time.thread_time() - worked_before_s <= self._growth.idle_s * self._growth.idle_share
        if not idles and self._apart <= self._counted_above + self._growth.most * self._most:
            self._look_when_idle()
            return
        self._look = None
        if self._have_become_many():
            self._look_at_all()

    @property
    def _most(self) -> int:
        return 2 * self._alive + self._growth.objects

    def _have_become_many(self) -> bool:
        """Return True if very many objects are set apart. Counting takes as long as visiting them, so the number is
        first estimated as a sum of new objects. The count shows how many of them still exist. The next count follows
        when a quarter more have been added."""
        self._apart = gc.get_freeze_count()
        self._counted_above = max(self._most, self._apart + self._most // 4)
        return self._apart > self._most

    def _look_at_all(self) -> None:
        gc.unfreeze()
        self._visit_new()

    def _visit_new(self) -> None:
        """Visit the objects that are not set apart yet, and set apart those found alive. Before the first visit a
        process that forks nodes may have set objects apart, and a visit would copy all their pages."""
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
