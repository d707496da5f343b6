"""Log failed authentications: one line per second at most, because clients retry as fast as a node responds."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

logger = structlog.stdlib.get_logger(__name__)

INTERVAL_S = 1.0


class Failures:
    """Failures of one listener."""

    def __init__(self, event: str, *, listener: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._event = event
        self._listener = listener
        self._clock = clock
        self._logged_at = float("-inf")
        self._unlogged = 0

    def log(self, **said: object) -> None:
        """Log one failure. `more` is the number of failures since the last line that got no line of their own."""
        now = self._clock()
        if now < self._logged_at + INTERVAL_S:
            self._unlogged += 1
            return
        logger.warning(self._event, listener=self._listener, more=self._unlogged, **said)
        self._logged_at, self._unlogged = now, 0
