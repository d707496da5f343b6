"""What is said of clients that fail to show who they are: a line a second, for they try as fast as a node answers."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

logger = structlog.stdlib.get_logger(__name__)

INTERVAL_S = 1.0


class Failures:
    """Of one listener."""

    def __init__(self, event: str, *, listener: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._event = event
        self._listener = listener
        self._clock = clock
        self._logged_at = float("-inf")
        self._unlogged = 0

    def log(self, **said: object) -> None:
        """`more` is how many have failed since the last line that had none of their own."""
        now = self._clock()
        if now < self._logged_at + INTERVAL_S:
            self._unlogged += 1
            return
        logger.warning(self._event, listener=self._listener, more=self._unlogged, **said)
        self._logged_at, self._unlogged = now, 0
