"""The recent rate of use, and how long a client must wait until its rate falls to its limit.

Mirrors upstream's Rate over samples (SampledStat, QuotaUtils): some complete windows and the present one.
"""

from __future__ import annotations

from collections import deque

MAX_WAIT_S = 3_600.0
"""Longest wait. For a limit close to 0 the wait would be infinite."""
WINDOWS, WINDOW_S = 11, 1.0
"""The values of upstream's quota.window.num and quota.window.size.seconds."""


class Rate:
    """The rate for one limit. Times are seconds of one monotonic clock."""

    def __init__(self, windows: int = WINDOWS, window_s: float = WINDOW_S) -> None:
        self._windows = windows
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()

    def record(self, amount: float, now_s: float) -> None:
        self._forget(now_s)
        if self._samples and now_s < self._samples[-1][0] + self._window_s:
            began_s, before = self._samples[-1]
            self._samples[-1] = began_s, before + amount
        else:
            self._samples.append((now_s, amount))

    def take_back(self, amount: float) -> None:
        """Subtract from the last recorded amount."""
        if self._samples:
            began_s, before = self._samples[-1]
            self._samples[-1] = began_s, before - amount

    def value(self, now_s: float) -> float:
        """Return the rate per second."""
        self._forget(now_s)
        return sum(amount for _, amount in self._samples) / self._elapsed_s(now_s)

    def wait_s(self, bound: float, now_s: float) -> float:
        """Return the seconds until the rate falls to the limit, if nothing more is recorded."""
        value = self.value(now_s)
        if value <= bound:
            return 0.0
        if bound <= 0:
            return self._windows * self._window_s
        return min(self._elapsed_s(now_s) * (value - bound) / bound, MAX_WAIT_S)

    def is_idle(self, now_s: float) -> bool:
        """True if the rate need not be kept any longer."""
        self._forget(now_s)
        return not self._samples

    def _elapsed_s(self, now_s: float) -> float:
        """Return at least the length of all windows but the present one, so that a new client does not start with the
        rate of its first instant."""
        since_s = self._samples[0][0] if self._samples else now_s
        return max(now_s - since_s, (self._windows - 1) * self._window_s)

    def _forget(self, now_s: float) -> None:
        while self._samples and self._samples[0][0] + self._windows * self._window_s <= now_s:
            self._samples.popleft()


class TokenBucket:
    """The limit determines how many tokens arrive per second. The bucket holds at most as many tokens as arrive in all
    windows. A client that takes more tokens than the bucket holds goes into debt. Mirrors upstream's TokenBucket
    (KIP-599).
    """

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._filled_s = 0.0

    def take(self, amount: float, bound: float, now_s: float) -> None:
        self._tokens = self._fill(bound, now_s) - amount

    def wait_s(self, bound: float, now_s: float) -> float:
        """Return the seconds until the debt is paid."""
        return min(max(-self._fill(bound, now_s) / bound, 0.0), MAX_WAIT_S)

    def is_idle(self, now_s: float) -> bool:
        """True if the bucket may be forgotten: it is full again under every bound that it had."""
        return self._tokens is None or (self._tokens >= 0 and self._filled_s + WINDOWS * WINDOW_S <= now_s)

    def _fill(self, bound: float, now_s: float) -> float:
        most = bound * WINDOWS * WINDOW_S
        if self._tokens is None:
            self._tokens = most
        else:
            self._tokens = min(most, self._tokens + bound * (now_s - self._filled_s))
        self._filled_s = now_s
        return self._tokens
