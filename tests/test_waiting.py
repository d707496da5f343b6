"""A wait ends with the first value that holds, or with the last value after its deadline."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from tests.steps.waiting import turns, until, wait_for


async def later(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_first_value_that_holds_is_returned() -> None:
    counted = itertools.count()
    assert wait_for(lambda: next(counted)) == 1
    assert wait_for(lambda: next(counted), holds=lambda value: value > 3) == 4
    assert await until(lambda: next(counted)) == 5
    assert await until(lambda: later(next(counted)), holds=lambda value: value > 7) == 8


async def test_wait_beyond_its_deadline_fails_with_the_last_value() -> None:
    for wait in (
        lambda: wait_for(list[int], "records come", seconds=0.02),
        lambda: asyncio.run(until(list[int], "records come", seconds=0.02)),
    ):
        with pytest.raises(AssertionError, match=r"records come; last: \[\]"):
            await asyncio.to_thread(wait)


async def test_long_looks_are_followed_by_longer_pauses() -> None:
    looks: list[bool] = []
    with pytest.raises(AssertionError):
        wait_for(lambda: looks.append(threading.Event().wait(0.02)), seconds=0.5)
    assert len(looks) < 10


async def test_other_tasks_run_during_a_wait_and_during_turns() -> None:
    event = asyncio.Event()
    task = asyncio.create_task(event.wait())
    await turns()
    asyncio.get_running_loop().call_later(0.02, event.set)
    await until(event.is_set)
    await turns()
    assert task.done()
