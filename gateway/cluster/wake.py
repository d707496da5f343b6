"""A loop's wake-up: any number of reasons to run, one run.

The one idea: a channel that holds one token. A caller with a reason puts it in, and later reasons merge into it. The
reason itself is only counted: a pass looks at everything by itself.
"""

from __future__ import annotations

import asyncio
import contextlib

TICK = "tick"
"""The loop's interval has passed without a wake-up."""


class Wake:
    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._trigger = TICK
        self.merged = 0
        """Reasons that arrived while another reason was already waiting."""

    def __call__(self, trigger: str) -> None:
        if self._event.is_set():
            self.merged += 1
        else:
            self._trigger = trigger
            self._event.set()

    async def wait(self, timeout_s: float) -> str:
        """Return the first reason since the last call, waiting for one if necessary, or TICK after the timeout."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)
        if not self._event.is_set():
            return TICK
        self._event.clear()
        return self._trigger
