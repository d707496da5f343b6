"""Process many rows in turns, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

ROWS_PER_TURN = 1_000
"""Rows of one turn: some milliseconds of Python."""


async def in_turns(items: Iterable[T], per_turn: int = ROWS_PER_TURN) -> AsyncIterator[T]:
    """Yield the items, and let other tasks run after every `per_turn` items."""
    for number, item in enumerate(items):
        if number and number % per_turn == 0:
            await asyncio.sleep(0)
        yield item


_DECODER = json.JSONDecoder()


def json_elements(text: str) -> Iterator[Any]:
    """Decode the elements of a JSON array from Postgres one by one: decoding ten thousand at once takes longer than
    one turn."""
    position, end = 1, len(text) - 1
    while True:
        while position < end and text[position] in ", \n":
            position += 1
        if position >= end:
            return
        element, position = _DECODER.raw_decode(text, position)
        yield element
