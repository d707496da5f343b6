"""Work that one node does for the whole cluster: each job has a lease, and the node that holds the lease runs the job.

The one idea: a job is a shard of the lease kind `jobs`. So jobs spread over the live nodes as groups do. If a job's
node dies, another node takes the job over. A node that stops hands its jobs over at once, so that no node waits for
their leases to expire.

A pass begins as soon as the node has the lease, then at the job's interval, and sooner after a failure. A node cancels
a pass when it loses the lease, but Postgres may still carry out a statement that the pass had sent. So a job must be
safe beside a second pass of itself, or fence its writes with its lease's epoch.
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
"""Delay after a failed pass. It doubles with each further failure, up to the job's interval and to LAST_RETRY_S."""
LAST_RETRY_S = 60.0
"""Longest delay after a failed pass. A job that runs once an hour must fail often enough for its alert to go on."""


class Job(IntEnum):
    """Background work that one node does at a time. The number is the shard of its lease and is stored, so numbers
    are not reused."""

    RETENTION = 0
    COMPACTION = 1
    DELETION = 2
    PRODUCER_EXPIRY = 3
    ROLL = 4
    """Move inline bytes to the store of record bytes, and delete stored bytes that no chunk names."""
    FUNCTIONS = 5
    """Drop functions of releases that no node runs."""
    TRANSACTION_TIMEOUTS = 6
    METADATA = 7
    """Update the replicas in sync, delete expired delegation tokens, and read the cluster's metrics. This must stay the
    last job: if the number of leases grew, nodes of two releases would place all of them differently, and would hand
    them back and forth."""


class Jobs:
    """The jobs' leases that this node holds, and the passes that run under them. `keep` is a pass of a supervisor."""

    def __init__(self, store: NodeStore, membership: Membership, ttl_ms: int) -> None:
        self._leases = Leases(store, membership, ttl_ms, kind=LeaseKind.JOBS)
        running = self._running_jobs
        self._leases.listen(acquired=self._acquired, lost=self._lost, in_use=running, in_unrest=running)
        self._ttl_s = ttl_ms / 1000
        self._paced: list[tuple[Job, Wake]] = []
        self._running: dict[tuple[Job, str], asyncio.Task[None]] = {}
        self._more = False
        self.wake = Wake()
        self.wake("start")

    def lease(self, job: Job) -> CoordinatorLease | None:
        """Return the job's lease, if this node may rely on it now."""
        return self._leases.lease_of(job)

    def wanted(self) -> dict[int, int]:
        """Return the live node that should do each job."""
        return self._leases.wanted()

    @property
    def held(self) -> int:
        """Leases on which this node may rely now."""
        return self._leases.held

    @property
    def handed_over(self) -> int:
        """Leases that this node has handed over to another node."""
        return self._leases.handed_over

    def paced(
        self, job: Job, name: str, run: Callable[[], Awaitable[None]], interval_ms: int
    ) -> Callable[[], Awaitable[None]]:
        """Return a pass for a supervisor that calls it again at once. The pass waits until `run` is due, and runs it if
        this node holds the lease then. A job may have several passes, each with its own `name` and its own pace."""
        wake, interval_s = Wake(), interval_ms / 1000
        self._paced.append((job, wake))
        wait_s = retry_s = min(FIRST_RETRY_S, interval_s)

        async def run_where_held() -> None:
            nonlocal wait_s, retry_s
            await wake.wait(wait_s)
            wait_s = interval_s
            if self.lease(job) is None:
                return
            wait_s, retry_s = retry_s, min(2 * retry_s, interval_s, LAST_RETRY_S)
            if await self._run((job, name), run):
                wait_s, retry_s = interval_s, min(FIRST_RETRY_S, interval_s)

        return run_where_held

    def due(self, job: Job) -> None:
        """Note that the job has work. If this node holds the lease, the job's passes begin now."""
        self._wake_passes(job, "due")

    async def keep(self) -> None:
        """Wait for a reason, or for a fifth of the leases' time to live. Then prolong the leases, acquire those that
        this node should have, and hand over those that another node should have. Raise StorageError."""
        await self.wake.wait(HAND_OVER_INTERVAL_S if self._more else self._ttl_s / 5)
        async with asyncio.timeout(self._ttl_s / 2):
            await self._leases.renew()
            self._more = await self._leases.balance()

    async def release(self) -> None:
        """Cancel the passes in progress, release every lease and acquire none any more. Raise StorageError."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        try:
            if running:
                await asyncio.wait(running, timeout=self._ttl_s / 10)
        finally:
            await self._leases.release()

    def forget(self) -> None:
        """Forget all leases."""
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
                # This task itself is being cancelled.
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
