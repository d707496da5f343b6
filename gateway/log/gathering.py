"""Decide when a committer begins its next commit: at once, or a moment later, with the requests that arrive until then.

The one idea: requests that met a moment ago will meet again. A commit costs three processes a wake-up and the disk a
sync, whatever it carries. So if several requests met at the last commit, the next one waits until as many are there
again, or a bound has passed. A request that was alone at the last commit does not wait: one record in flight is
committed when it arrives. And if requests arrive so seldom that waiting for them takes longer than a commit, no commit
waits: at a thousand records a second, each would wait a millisecond to share a commit of half a millisecond.

The next commit waits for as many requests as the last one carried, or for two if the last one carried one and left
others waiting. It does not wait for both together: if clients send at a pace, every commit would wait for more requests
than arrive in time.

Values only: it holds no clock, no timer and no queue.
"""

from __future__ import annotations

ENOUGH_BYTES = 64 * 1024
"""A commit of this size is worth its cost. It begins, however few requests have brought it."""

ENOUGH_REQUESTS = 128
"""A commit that has this many requests does not wait, however many shared the last commit."""

WORTH_COMMITS = 1.5
"""The next requests may take this many times the duration of a commit to arrive, at the rate of the last commits. If
clients wait for their answers, the last client's next request arrives about one duration later.
"""

NEWEST_SHARE = 0.25
"""Weight of the newest commit in both means. One quick or slow commit must not separate clients that share commits."""


class Gathering:
    """One committer's memory of its last commits. All times are of one clock, in seconds."""

    __slots__ = ("_bound_s", "_duration_s", "_ended_s", "_interval_s", "_wanted")

    def __init__(self, bound_s: float) -> None:
        """`bound_s` is the longest wait. With 0 no commit waits."""
        self._bound_s = bound_s
        self._wanted = 0
        self._ended_s = float("-inf")
        self._duration_s = 0.0
        """Mean duration of the last commits."""
        self._interval_s = 0.0
        """Mean time between the requests that they carried, without silences. It begins at 0, so that the first
        requests that meet wait for each other."""

    def ended(self, carried: int, *, left_others: bool, began_s: float, now_s: float) -> None:
        """Record the end of a commit that began at `began_s`: the number of requests whose batches it contained, at
        least one, and whether other requests are waiting.
        """
        self._wanted = max(min(carried, ENOUGH_REQUESTS), 2 if left_others else 0)
        self._duration_s += (now_s - began_s - self._duration_s) * NEWEST_SHARE
        if began_s - self._ended_s <= self._bound_s:
            self._interval_s += ((now_s - self._ended_s) / carried - self._interval_s) * NEWEST_SHARE
        self._ended_s = now_s

    def deadline_s(self, requests: int, now_s: float) -> float | None:
        """Return the time until which the commit of this many requests, now found in the queue, may wait; None: it
        begins at once. A request that arrives after a full interval of silence starts a new batch and does not wait."""
        if self._wanted < 2 or self._bound_s <= 0 or now_s - self._ended_s > self._bound_s:
            return None
        missing = self._wanted - requests
        if missing > 0 and missing * self._interval_s > WORTH_COMMITS * self._duration_s:
            return None
        return now_s + self._bound_s

    def complete(self, requests: int, queued_bytes: int) -> bool:
        """Return True if no further request is expected, or if enough requests have arrived."""
        return requests >= self._wanted or queued_bytes >= ENOUGH_BYTES
