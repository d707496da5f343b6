"""Very many rows are worked on in turns, so that they do not keep the event loop from the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

ROWS_PER_TURN = 1_000
"""Some milliseconds of Python."""


async def in_turns(items: Iterable[T], per_turn: int = ROWS_PER_TURN) -> AsyncIterator[T]:
    """The items; everybody else has a turn on the event loop before each `per_turn` of them but the first."""
    for number, item in enumerate(items):
        if number and number % per_turn == 0:
            await asyncio.sleep(0)
        yield item
