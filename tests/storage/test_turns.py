"""Long work on rows in turns, between which other tasks run."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from storage.turns import in_turns, json_elements

ELEMENTS = st.lists(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5))


async def test_other_tasks_run_after_every_so_many_items() -> None:
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


@given(ELEMENTS, st.sampled_from([", ", ",", ", \n "]))
def test_elements_of_a_json_array_are_yielded_one_by_one(elements: list[object], separator: str) -> None:
    text = "[" + separator.join(json.dumps(element, ensure_ascii=False) for element in elements) + "]"
    assert list(json_elements(text)) == elements
