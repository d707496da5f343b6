"""Jobs on a real Postgres: each runs on one node, moves when that node ends, and no pass outlives its lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from gateway.cluster.jobs import Job, Jobs
from gateway.cluster.membership import Membership
from gateway.cluster.wake import Wake
from storage.nodes import NodeStore
from storage.pool import Database
from storage.types import BOTH, SHARD_COUNTS, LeaseKind, Roles
from tests.steps.waiting import until

TTL_MS = 60_000
HOUR_MS = 3_600_000


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=1, cold_connections=1)
    yield opened
    await opened.close()


class Node:
    def __init__(self, database: Database, port: int = 9092, roles: Roles = BOTH) -> None:
        store = NodeStore(database)
        self.membership = Membership(store, {"PLAINTEXT": ("127.0.0.1", port)}, None, TTL_MS, roles=roles)
        self.jobs = Jobs(store, self.membership, TTL_MS)

    async def start(self) -> Node:
        await self.membership.join()
        await self.look()
        return self

    async def look(self) -> None:
        await self.membership.renew()
        self.jobs.wake("test")
        await self.jobs.keep()

    @property
    def held(self) -> set[Job]:
        return {job for job in Job if self.jobs.lease(job) is not None}


class Work:
    """A job's pass that waits until the test continues it, and counts its runs."""

    def __init__(self) -> None:
        self.begun, self.ended, self.cancelled = 0, 0, 0
        self.go_on = asyncio.Event()

    async def run(self) -> None:
        self.begun += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.ended += 1


async def test_each_job_runs_on_one_node_and_jobs_are_spread(database: Database) -> None:
    first, second = await Node(database).start(), await Node(database, 9093).start()
    assert first.held == set(Job)
    for _ in Job:
        await first.look()
        await second.look()
    assert first.held | second.held == set(Job)
    assert not first.held & second.held
    assert second.held
    assert first.jobs.handed_over == second.jobs.held


async def test_jobs_run_on_controllers_while_one_is_alive(database: Database) -> None:
    broker = await Node(database, 9092, Roles(is_controller=False)).start()
    assert broker.held == set(Job), "rather than by nobody"
    controller = await Node(database, 9093, Roles(is_broker=False)).start()
    for _ in Job:
        await broker.look()
        await controller.look()
    assert (broker.held, controller.held) == (set(), set(Job))
    other = await Node(database, 9094, Roles(is_controller=False)).start()
    await controller.look()
    assert (other.held, controller.held) == (set(), set(Job)), "another broker gets none"
    await controller.membership.withdraw()
    await controller.jobs.release()
    for _ in Job:
        await broker.look()
        await other.look()
    assert broker.held | other.held == set(Job)
    assert broker.held
    assert other.held


async def test_pass_begins_only_with_the_lease(database: Database) -> None:
    node, work = Node(database), Work()
    work.go_on.set()
    run = node.jobs.paced(Job.RETENTION, "retention", work.run, HOUR_MS)
    waiting = asyncio.ensure_future(run())
    await node.membership.join()
    assert work.begun == 0
    await node.look()
    async with asyncio.timeout(30):
        await waiting
    assert work.ended == 1, "an hour early"
    without = node.jobs.paced(Job.RETENTION, "other", work.run, 1)
    node.jobs.forget()
    await without()
    assert work.begun == 1


async def test_pass_ends_when_its_lease_is_lost_and_others_continue(database: Database) -> None:
    node, lost, kept = await Node(database).start(), Work(), Work()
    runs = [
        asyncio.ensure_future(node.jobs.paced(job, "pass", work.run, 1)())
        for job, work in ((Job.RETENTION, lost), (Job.COMPACTION, kept))
    ]
    await until(lambda: lost.begun == kept.begun == 1)
    await database.control.fetch(
        "update coordinator_lease set lease_epoch = lease_epoch + 1 where kind = 'jobs' and shard = $1",
        int(Job.RETENTION),
    )
    node.jobs.wake("test")
    await node.jobs.keep()
    async with asyncio.timeout(30):
        await runs[0]
    assert (lost.cancelled, kept.cancelled) == (1, 0)
    kept.go_on.set()
    async with asyncio.timeout(30):
        await runs[1]
    assert kept.ended == 1


async def test_jobs_of_a_stopped_node_move_at_once(database: Database) -> None:
    first, work = await Node(database).start(), Work()
    second = Node(database, 9093)
    await second.membership.join()
    await first.membership.renew()
    run = asyncio.ensure_future(first.jobs.paced(Job.DELETION, "deletion", work.run, 1)())
    await until(lambda: work.begun == 1)
    await first.jobs.release()
    assert work.cancelled == 1
    async with asyncio.timeout(30):
        await run
    await first.membership.withdraw()
    await second.look()
    assert second.held == set(Job), "handed over: nobody waits for a lease to run out"
    first.jobs.wake("test")
    await first.jobs.keep()
    assert first.held == set()


async def test_a_job_under_way_is_handed_over_last(database: Database) -> None:
    first, work = await Node(database).start(), Work()
    second = await Node(database, 9093).start()
    await first.membership.renew()
    theirs = [job for job in Job if first.jobs.wanted()[job] == second.membership.node_id]
    run = asyncio.ensure_future(first.jobs.paced(theirs[0], "pass", work.run, 1)())
    await until(lambda: work.begun == 1)
    for _ in range(2 * len(Job)):
        await first.look()
    assert first.jobs.lease(theirs[0]) is not None
    assert not any(first.jobs.lease(job) for job in theirs[1:])
    work.go_on.set()
    await run
    await first.look()
    assert first.jobs.lease(theirs[0]) is None
    assert work.cancelled == 0


async def test_a_pass_that_fails_is_tried_again_long_before_its_interval(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.cluster.jobs.FIRST_RETRY_S", 0.01)
    node, tries = await Node(database).start(), []

    async def fail() -> None:
        tries.append(time.monotonic())
        if len(tries) < 4:
            raise RuntimeError("not yet")

    run = node.jobs.paced(Job.RETENTION, "retention", fail, HOUR_MS)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            await run()
    await run()
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps[-1] >= 0.04, "each wait is twice the one before"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await run()


async def test_an_hourly_pass_that_keeps_failing_is_tried_often_enough_for_its_alert(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alert SluiceBackgroundPassFails needs more than three failures in 15 minutes."""
    waits: list[float] = []

    async def note(self: Wake, timeout_s: float) -> str:
        waits.append(timeout_s)
        return "test"

    async def fail() -> None:
        raise RuntimeError("still not")

    node = await Node(database).start()
    monkeypatch.setattr(Wake, "wait", note)
    run = node.jobs.paced(Job.FUNCTIONS, "functions", fail, HOUR_MS)
    for _ in range(15):
        with pytest.raises(RuntimeError):
            await run()
    assert max(waits) < 15 * 60 / 4


def test_every_job_has_one_of_a_fixed_number_of_leases() -> None:
    """With another number of leases, all jobs would be placed differently. Nodes of two releases would then keep
    handing jobs to each other.
    """
    assert SHARD_COUNTS[LeaseKind.JOBS] == 8
    assert all(0 <= job < 8 for job in Job)
