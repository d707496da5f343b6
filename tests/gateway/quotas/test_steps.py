"""Measuring the time that a coroutine itself uses. Only the coroutine's steps advance the test's clock."""

from __future__ import annotations

import asyncio

import pytest

from gateway.quotas.steps import Steps


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_waiting_time_does_not_count() -> None:
    clock = Clock()
    later: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def come() -> None:
        clock.now_s += 1_000
        later.set_result("come")

    async def works() -> str:
        clock.now_s += 2
        asyncio.get_running_loop().call_soon(come)
        found = await later
        clock.now_s += 3
        return found

    steps = Steps(works(), clock)
    assert await steps == "come"
    assert steps.worked_s == 5


async def test_an_error_passes_and_its_time_counts() -> None:
    clock = Clock()

    async def fails() -> None:
        clock.now_s += 4
        raise LookupError("nothing there")

    steps = Steps(fails(), clock)
    with pytest.raises(LookupError, match="nothing there"):
        await steps
    assert steps.worked_s == 4


async def test_error_of_an_awaited_future_reaches_the_coroutine() -> None:
    later: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def minds() -> str:
        try:
            await later
        except LookupError as error:
            return f"minded {error}"
        return "heard nothing"

    asyncio.get_running_loop().call_soon(later.set_exception, LookupError("it"))
    assert await Steps(minds()) == "minded it"


async def test_cancellation_reaches_the_coroutine_once() -> None:
    heard: list[str] = []
    began = asyncio.Event()

    async def waits() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    async def awaits() -> None:
        await Steps(waits())

    task = asyncio.create_task(awaits())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard == ["cancelled"]
