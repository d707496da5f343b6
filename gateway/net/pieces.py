"""Long work in pieces, so that a request of very many elements does not keep the event loop from the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
H = TypeVar("H", bound=Hashable)

PIECE = 200
"""Elements that are worked on in one go: some milliseconds at most, at twenty microseconds each."""


async def in_pieces(items: Iterable[T], piece: int = PIECE) -> AsyncIterator[T]:
    """The items; everybody else has a turn on the event loop behind every `piece` of them. What the caller knew before
    may have changed after each."""
    for done, item in enumerate(items, 1):
        yield item
        if done % piece == 0:
            await asyncio.sleep(0)


async def mapped(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What the function makes of each item."""
    return [function(item) async for item in in_pieces(items)]


async def tally(items: Iterable[H]) -> Counter[H]:
    """How often each item occurs."""
    counted: Counter[H] = Counter()
    async for item in in_pieces(items, 10 * PIECE):
        counted[item] += 1
    return counted
