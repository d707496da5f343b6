"""Very many rows are worked on in turns, so that they do not keep the event loop from the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

ROWS_PER_TURN = 1_000
"""Some milliseconds of Python."""


async def in_turns(items: Iterable[T], per_turn: int = ROWS_PER_TURN) -> AsyncIterator[T]:
    """The items; everybody else has a turn on the event loop before each `per_turn` of them but the first."""
    for number, item in enumerate(items):
        if number and number % per_turn == 0:
            await asyncio.sleep(0)
        yield item


_DECODER = json.JSONDecoder()


def json_elements(text: str) -> Iterator[Any]:
    """The elements of a JSON array as Postgres writes it, each decoded when it is asked for: ten thousand at once take
    longer than one turn may."""
    position, end = 1, len(text) - 1
    while True:
        while position < end and text[position] in ", \n":
            position += 1
        if position >= end:
            return
        element, position = _DECODER.raw_decode(text, position)
        yield element
