"""Turns of requests by address: which request waits for which."""

from __future__ import annotations

import asyncio

import pytest

from gateway.net.networks import network_of
from gateway.security.turns import Turns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_newcomer_waits_for_one_of_each_other_address() -> None:
    turns, served = Turns(1), []
    go_on = asyncio.Semaphore(0)

    async def ask(address: str) -> None:
        async with turns.turn(address):
            await go_on.acquire()
            served.append(address)

    asking = [asyncio.create_task(ask(address)) for address in ["10.0.0.1"] * 50 + ["10.0.0.2"] * 50]
    await settle()
    asking.append(asyncio.create_task(ask("10.0.0.3")))
    await settle()
    for _ in range(101):
        go_on.release()
    await asyncio.gather(*asking)
    assert served.index("10.0.0.3") <= 3
    assert served[4:20] == ["10.0.0.1", "10.0.0.2"] * 8 or served[4:20] == ["10.0.0.2", "10.0.0.1"] * 8


async def test_allowed_number_runs_concurrently_also_after_cancellations() -> None:
    turns = Turns(2)
    working = most = 0

    async def ask(address: str) -> None:
        nonlocal working, most
        async with turns.turn(address):
            working += 1
            most = max(most, working)
            try:
                await asyncio.sleep(0)
            finally:
                working -= 1

    for number in range(200):
        asking = [asyncio.create_task(ask(f"10.0.0.{each % 3}")) for each in range(9)]
        for _ in range(number % 7):
            await asyncio.sleep(0)
        for each in asking[number % 4 :: 2]:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert most == 2
    async with asyncio.timeout(60), turns.turn("a"), turns.turn("b"):
        assert turns._free == 0 and not turns._lines  # noqa: SLF001, PT018 - nothing is lost, nothing left


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("/10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("/unknown", "/unknown"),
    ],
)
def test_an_ipv6_network_counts_as_one_address(address: str, network: str) -> None:
    assert network_of(address) == network
