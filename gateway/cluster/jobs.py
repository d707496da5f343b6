"""Work that one node does for the whole cluster: each job has a lease, and runs where that is held.

The one idea: a job is a shard of the lease kind `jobs`. So jobs spread over the live nodes as groups do, go on
elsewhere when their node ends, and are handed over, not waited for, when it stops. A pass is paced here: it begins as
soon as the lease is had, then at the job's interval, after a failure sooner.

A pass is cancelled when its lease is lost, but what it had asked of Postgres by then may still happen. So a job must be
safe beside a second pass of itself, or fence what it writes with its lease's epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

from gateway.cluster.leases import HAND_OVER_INTERVAL_S, Leases
from gateway.cluster.membership import Membership
from gateway.cluster.wake import Wake
from storage.nodes import NodeStore
from storage.types import CoordinatorLease, LeaseKind

FIRST_RETRY_S = 1.0
"""Delay after a failed pass. It doubles with each further failure, up to the job's interval."""


class Job(IntEnum):
    """Background work that one node does at a time. The number is the shard of its lease and is stored, so numbers
    are not reused."""

    RETENTION = 0
    COMPACTION = 1
    DELETION = 2
    PRODUCER_EXPIRY = 3
    ROLL = 4
    """Inline bytes to where they belong, and what no chunk names away."""
    FUNCTIONS = 5
    """Drop functions of releases that no node runs."""
    TRANSACTION_TIMEOUTS = 6
    METADATA = 7
    """Replicas in sync, delegation tokens that have expired, and the cluster's metrics. The last of the leases that
    there are: with more, nodes of two releases would place all of them otherwise, and hand them to and fro."""


class Jobs:
    """The jobs' leases that this node holds, and the passes that run under them. `keep` is a pass of a supervisor."""

    def __init__(self, store: NodeStore, membership: Membership, ttl_ms: int) -> None:
        self._leases = Leases(store, membership, ttl_ms, kind=LeaseKind.JOBS)
        self._leases.listen(acquired=self._acquired, lost=self._lost, in_unrest=self._running_jobs)
        self._ttl_s = ttl_ms / 1000
        self._paced: list[tuple[Job, Wake]] = []
        self._running: dict[tuple[Job, str], asyncio.Task[None]] = {}
        self._more = False
        self.wake = Wake()
        self.wake("start")

    def lease(self, job: Job) -> CoordinatorLease | None:
        """The job's lease, if this node may count on it at this moment."""
        return self._leases.lease_of(job)

    def wanted(self) -> dict[int, int]:
        """Which live node should do each job."""
        return self._leases.wanted()

    @property
    def held(self) -> int:
        """Leases that this node may count on at this moment."""
        return self._leases.held

    @property
    def handed_over(self) -> int:
        """Leases that this node gave to another while it lived."""
        return self._leases.handed_over

    def paced(
        self, job: Job, name: str, run: Callable[[], Awaitable[None]], interval_ms: int
    ) -> Callable[[], Awaitable[None]]:
        """A pass that waits until `run` is due and runs it, if the lease is held then; for a supervisor that calls it
        again at once. Of the names of one job each runs by itself."""
        wake, interval_s = Wake(), interval_ms / 1000
        self._paced.append((job, wake))
        wait_s = retry_s = min(FIRST_RETRY_S, interval_s)

        async def run_where_held() -> None:
            nonlocal wait_s, retry_s
            await wake.wait(wait_s)
            wait_s = interval_s
            if self.lease(job) is None:
                return
            wait_s, retry_s = retry_s, min(2 * retry_s, interval_s)
            if await self._run((job, name), run):
                wait_s, retry_s = interval_s, min(FIRST_RETRY_S, interval_s)

        return run_where_held

    def due(self, job: Job) -> None:
        """There is work: the job's passes begin now, if the lease is held."""
        self._wake_passes(job, "due")

    async def keep(self) -> None:
        """Waits for a reason or a fifth of the time to live, then prolongs leases, takes those that this node should
        have, and hands over what it should not. Raises StorageError."""
        await self.wake.wait(HAND_OVER_INTERVAL_S if self._more else self._ttl_s / 5)
        async with asyncio.timeout(self._ttl_s / 2):
            await self._leases.renew()
            self._more = await self._leases.balance()

    async def release(self) -> None:
        """Ends the passes under way, gives every lease up and takes none any more. Raises StorageError."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        try:
            if running:
                await asyncio.wait(running, timeout=self._ttl_s / 10)
        finally:
            await self._leases.release()

    def forget(self) -> None:
        """No lease is known to be held any more."""
        self._leases.forget()

    async def _run(self, key: tuple[Job, str], run: Callable[[], Awaitable[None]]) -> bool:
        """Run one job. Return False if the lease was lost in the meantime."""
        task = self._running[key] = asyncio.ensure_future(_awaited(run))
        try:
            await asyncio.wait((task,))
            if task.cancelled():
                return False
            task.result()
            return True
        finally:
            if not task.done():
                # The task that waits here is itself being cancelled.
                task.cancel()
                await asyncio.wait((task,))
            del self._running[key]

    def _running_jobs(self) -> set[int]:
        return {job for job, _ in self._running}

    def _acquired(self, lease: CoordinatorLease) -> None:
        self._wake_passes(lease.shard, "acquired")

    def _wake_passes(self, shard: int, trigger: str) -> None:
        for job, wake in self._paced:
            if job == shard:
                wake(trigger)

    def _lost(self, shard: int) -> None:
        for (job, _), task in self._running.items():
            if job == shard:
                task.cancel()


async def _awaited(run: Callable[[], Awaitable[None]]) -> None:
    await run()
