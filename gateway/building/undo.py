"""The steps that undo a start, the newest first. They also undo an incomplete start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from storage.errors import StorageError

logger = structlog.get_logger(__name__)

STEP_TIMEOUT_S = 0.3
"""Bound of each step of stopping after the drain. With the drain and Postgres's own stop the total is below 5 s."""


class StartError(Exception):
    """The node cannot serve; the message is one line for the person who started it."""


class Undo:
    """The steps that undo the start, each with the time that it may take."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, float, Callable[[], Awaitable[object]]]] = []

    def push(self, name: str, limit_s: float, step: Callable[[], Awaitable[object]]) -> None:
        """Run the step before all steps that were pushed earlier."""
        self._steps.append((name, limit_s, step))

    async def run(self) -> None:
        """Run every step. If a step fails, the other steps still run."""
        while self._steps:
            name, limit_s, undo = self._steps.pop()
            # Wait instead of cancelling: asyncpg waits for an unresponsive Postgres even to cancel a query.
            step = asyncio.ensure_future(undo())
            finished, _ = await asyncio.wait({step}, timeout=limit_s)
            step.add_done_callback(retrieve_error)
            error = step.exception() if finished else TimeoutError(f"not done in {limit_s} s")
            if isinstance(error, StorageError | OSError):
                logger.warning("a step of the shutdown failed", step=name, error=str(error))
            elif error is not None:
                logger.error("a step of the shutdown failed", step=name, exc_info=error)


class _Ended(Protocol):
    """The part of a future that this module uses, for a result of any type."""

    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...


def retrieve_error(step: _Ended) -> None:
    """Retrieve the error of a step that ended after its time: the timeout was logged, and asyncio would log a trace."""
    if not step.cancelled():
        step.exception()
