"""A librdkafka consumer that closes in the middle of a rebalance does end (decision 0012)."""

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
def test_a_close_in_the_middle_of_a_rebalance_ends(gateway: GatewayProcess) -> None:
    program = [sys.executable, "-m", "tests.clients.closers", gateway.bootstrap, str(ROUNDS), str(THREADS)]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines()[-1:] == [f"closed {ROUNDS}"], ended.stderr[-3000:]


async def test_a_leaving_member_is_answered_after_the_grace(gateway: GatewayProcess) -> None:
    group = fresh("leaving")
    async with member(gateway.bootstrap, group) as stays, member(gateway.bootstrap, group) as goes:
        await settle(stays, goes)
        begun = time.monotonic()
        left = await goes.leave()
        assert time.monotonic() - begun >= 0.020
        assert left.members[0].error_code == ErrorCode.NONE
        assert await stays.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
        assert (await goes.leave()).members[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID


async def test_a_member_that_disconnects_during_its_leave_has_left(gateway: GatewayProcess) -> None:
    group = fresh("hanging-up")
    async with member(gateway.bootstrap, group) as stays:
        async with member(gateway.bootstrap, group) as goes:
            await settle(stays, goes)
            leaving = asyncio.create_task(goes.leave())
            await asyncio.sleep(0)  # Give the client time to write its request.
        leaving.cancel()
        # This is well before the grace period of a closed connection ends, and before the member's session ends.
        for _ in range(100):
            if await stays.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the member has not left")
