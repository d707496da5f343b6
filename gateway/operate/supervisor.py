"""Keep the node's background loops alive: a failure is logged and counted, and the loop restarts with back-off.

The one idea: a loop is a coroutine function that does one pass and returns. This module decides when and how often it
runs, and what happens when it raises. It knows nothing of what the loops do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from gateway.config.definition import ConfigError
from gateway.config.errors import ConfigurationError
from gateway.operate.metrics import Metrics
from storage.errors import StorageError

logger = structlog.stdlib.get_logger(__name__)

FIRST_BACKOFF_S = 0.1
FORESEEN = (StorageError, TimeoutError, ConfigError, ConfigurationError)
"""Expected errors, whose text is the whole diagnosis. They are logged without a traceback."""
MAX_BACKOFF_S = 10.0
"""The longest back-off. It never exceeds the interval of the pass, because a node whose leases expire in the meantime
serves no group.
"""


@dataclass(slots=True, eq=False)
class _Loop:
    name: str
    run_once: Callable[[], Awaitable[object]]
    interval_s: float
    last_success: float = field(default_factory=time.monotonic)
    failing: bool = False


class Supervisor:
    """Run named passes at their intervals until `stop`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._loops: dict[str, _Loop] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(
        self, name: str, run_once: Callable[[], Awaitable[object]], *, interval_ms: int, regular: bool = True
    ) -> None:
        """Run `run_once` now, and then `interval_ms` after the end of each pass. A pass that is not `regular` waits for
        work before it returns, so its age does not show whether it is healthy.
        """
        loop = _Loop(name, run_once, interval_ms / 1000)
        self._loops[name] = loop
        self._metrics.loop_failures.labels(name)  # Alert rules need a series that begins at 0.
        if regular:
            self._metrics.watch_loop(name, lambda: time.monotonic() - loop.last_success)
        self._tasks.append(asyncio.create_task(self._run(loop), name=f"loop {name}"))

    async def stop(self) -> None:
        """Cancel every loop and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _run(self, loop: _Loop) -> None:
        backoff_s, told = FIRST_BACKOFF_S, ""
        while True:
            try:
                await loop.run_once()
            except Exception as error:
                self._metrics.loop_failures.labels(loop.name).inc()
                text = f"{type(error).__name__}: {error}"
                if text != told:
                    # While Postgres is unavailable every pass fails in the same way, and a traceback would show where
                    # but not why.
                    told, foreseen = text, isinstance(error, FORESEEN)
                    logger.log(
                        logging.WARNING if foreseen else logging.ERROR,
                        "background pass failed",
                        loop=loop.name,
                        error=text,
                        exc_info=not foreseen,
                    )
                loop.failing = True
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S, max(loop.interval_s, FIRST_BACKOFF_S))
                continue
            if loop.failing:
                logger.info("background pass works again", loop=loop.name)
            loop.failing, told = False, ""
            loop.last_success = time.monotonic()
            backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(loop.interval_s)
