"""The queue of a connection's requests. If one request is late, no other request overtakes it."""

from __future__ import annotations

import asyncio

from gateway.net.places import Line, Place


async def test_each_place_waits_for_earlier_ones_and_a_cancelled_one_delays_no_other() -> None:
    line, order = Line(), list[str]()

    async def use(name: str, place: Place, pauses: int) -> None:
        try:
            for _ in range(pauses):
                await asyncio.sleep(0)
            async with place:
                await asyncio.sleep(0)
                order.append(name)
        finally:
            place.leave()

    places = [line.take() for _ in range(5)]
    pauses = {"a": 9, "b": 0, "c": 3, "d": 0, "e": 5}
    tasks = [asyncio.create_task(use(name, place, pauses[name])) for place, name in zip(places, pauses, strict=True)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "b", "c", "e"]


async def test_leaving_out_of_turn_admits_no_other() -> None:
    line = Line()
    first, refused, last = line.take(), line.take(), line.take()
    refused.leave()
    entered = asyncio.create_task(last.__aenter__())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not entered.done()
    first.leave()
    await asyncio.wait_for(entered, 10)


async def test_place_behind_finished_ones_is_reached_at_once() -> None:
    line = Line()
    async with line.take():
        pass
    place = line.take().__aenter__()
    try:
        place.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")
