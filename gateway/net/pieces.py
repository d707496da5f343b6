"""Long work in pieces, so that a request of very many elements does not keep the event loop from the others.

The one idea: the cost of an element is not known beforehand. So a loop over many elements checks the clock after each
and yields when it has had its turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
H = TypeVar("H", bound=Hashable)

PIECE = 200
"""Elements that are worked on in one go without checking the clock: some milliseconds at most."""

TURN_S = 0.002
"""Time for which one request works before other tasks have a turn. Loops are nested, with other work between them, so
this is a small part of the time for which the event loop may be blocked.
"""


def in_pieces(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items. Other tasks have a turn on the event loop whenever the items have taken TURN_S, so the
    caller's knowledge may be out of date after each item."""
    return _Pieces(items)


class _Pieces(AsyncIterator[T]):
    """The iterator of `in_pieces`. It is not an asynchronous generator, because the event loop keeps a list of these,
    which costs more than a loop over a few items."""

    __slots__ = ("_items", "_since_s")

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._since_s = perf_counter()

    async def __anext__(self) -> T:
        if perf_counter() - self._since_s > TURN_S:
            await asyncio.sleep(0)
            self._since_s = perf_counter()
        for item in self._items:
            return item
        raise StopAsyncIteration


async def mapped(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the function's result for each item."""
    return [function(item) async for item in in_pieces(items)]


async def by_pieces(function: Callable[[Sequence[T]], list[R]], items: Sequence[T]) -> list[R]:
    """Return the function's results for all items. The function receives PIECE items at a time; few items cost one
    call."""
    if len(items) <= PIECE:
        return function(items)
    made: list[R] = []
    for start in range(0, len(items), PIECE):
        made += function(items[start : start + PIECE])
        await asyncio.sleep(0)
    return made


async def tally(items: Iterable[H]) -> Counter[H]:
    """Count how often each item occurs."""
    counted: Counter[H] = Counter()
    async for item in in_pieces(items):
        counted[item] += 1
    return counted


async def first_of_each(items: Iterable[H]) -> list[H]:
    """Return the items in their order, each once."""
    seen: dict[H, None] = {}
    async for item in in_pieces(items):
        seen[item] = None
    return list(seen)
