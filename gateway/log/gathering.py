"""When a committer begins its next commit: at once, or a moment later, with what else arrives until then.

The one idea: who was there a moment ago will be back. A commit costs three processes a wake-up and the disk a sync,
whatever it carries; so where several requests met at the last one, the next waits until as many are there again, or a
bound has passed. Who was alone at the last commit waits for nobody: one record in flight is committed when it arrives.

As many are waited for as the last commit carried, or two where it carried one and left others waiting. Not as many as
both together: where clients send at a pace, that would make every commit wait for more than come in time.

Values only: it holds no clock, no timer and no queue.
"""

from __future__ import annotations

ENOUGH_BYTES = 64 * 1024
"""So much shares what a commit costs: it begins, however few requests have brought it."""

ENOUGH_REQUESTS = 128
"""So many are not waited for more of, however many met."""


class Gathering:
    """What one committer remembers of its last commit. All times are of one clock, in seconds."""

    __slots__ = ("_bound_s", "_ended_s", "_wanted")

    def __init__(self, bound_s: float) -> None:
        """`bound_s`: the longest wait; 0 means that no commit waits."""
        self._bound_s = bound_s
        self._wanted = 0
        self._ended_s = float("-inf")

    def ended(self, carried: int, *, left_others: bool, now_s: float) -> None:
        """A commit has ended that carried batches of so many requests, and has left others waiting or not."""
        self._wanted = max(min(carried, ENOUGH_REQUESTS), 2 if left_others else 0)
        self._ended_s = now_s

    def deadline_s(self, now_s: float) -> float | None:
        """Until when the commit of what has just been found in the queue may wait; None: it begins at once. What comes
        when nobody has come for the bound is no part of what met before."""
        if self._wanted < 2 or self._bound_s <= 0 or now_s - self._ended_s > self._bound_s:
            return None
        return now_s + self._bound_s

    def complete(self, requests: int, queued_bytes: int) -> bool:
        """Whether there is nobody to be waited for, or enough without them."""
        return requests >= self._wanted or queued_bytes >= ENOUGH_BYTES
