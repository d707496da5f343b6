"""Long work on rows in turns."""

from __future__ import annotations

import asyncio

from storage.turns import in_turns


async def test_others_have_a_turn_between_so_many_items() -> None:
    seen: list[int | str] = []
    see = seen.append

    async def other() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async for item in in_turns(range(7), 3):
        see(item)
    task.cancel()
    assert seen == [0, 1, 2, "other", 3, 4, 5, "other", 6]
