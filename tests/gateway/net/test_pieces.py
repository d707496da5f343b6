"""Work on many elements yields to other tasks after a certain time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.net import pieces
from gateway.net.pieces import first_of_each, in_pieces, mapped, tally


async def turns_during_ten_elements() -> int:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert [item async for item in in_pieces(range(10))] == list(range(10))
    counting.cancel()
    return turns


async def test_work_gives_way_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TURN_S", 0.0)
    assert await turns_during_ten_elements() >= 9


async def test_few_quick_elements_are_handled_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TURN_S", 60.0)
    assert await turns_during_ten_elements() == 0


async def test_results_of_all_elements_are_returned() -> None:
    assert await mapped(lambda number: number + 1, [1, 2]) == [2, 3]
    assert await tally("abca") == {"a": 2, "b": 1, "c": 1}
    assert await first_of_each("abcab") == ["a", "b", "c"]
