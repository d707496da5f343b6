"""A librdkafka consumer that closes in the middle of a rebalance does close (decision 0012)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from protocol.errors import ErrorCode
from tests.frames.members import fresh, member, settle
from tests.gateway_process import ROOT, GatewayProcess

ROUNDS, THREADS = 144, 24


@pytest.mark.timeout(300)
def test_who_closes_in_a_rebalance_is_not_left_waiting(gateway: GatewayProcess) -> None:
    program = [sys.executable, "-m", "tests.clients.closers", gateway.bootstrap, str(ROUNDS), str(THREADS)]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines()[-1:] == [f"closed {ROUNDS}"], ended.stderr[-3000:]


async def test_a_member_is_told_when_it_is_let_go(gateway: GatewayProcess) -> None:
    group = fresh("leaving")
    async with member(gateway.bootstrap, group) as stays, member(gateway.bootstrap, group) as goes:
        await settle(stays, goes)
        begun = time.monotonic()
        left = await goes.leave()
        assert time.monotonic() - begun >= 0.020
        assert left.members[0].error_code == ErrorCode.NONE
        assert await stays.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
        assert (await goes.leave()).members[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID


async def test_a_member_that_hangs_up_as_it_leaves_has_left(gateway: GatewayProcess) -> None:
    group = fresh("hanging-up")
    async with member(gateway.bootstrap, group) as stays:
        async with member(gateway.bootstrap, group) as goes:
            await settle(stays, goes)
            leaving = asyncio.create_task(goes.leave())
            await asyncio.sleep(0)  # the request is written
        leaving.cancel()
        # Well before the grace of a closed connection, and its session, have run out.
        for _ in range(100):
            if await stays.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the member has not left")
