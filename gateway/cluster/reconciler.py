"""Converge what this node holds to the committed state: topics, and through them tails and parked fetches.

The one idea is level-triggered reconciliation. A wake-up says that something may have changed, never what. Each pass
reads the committed revision and decides by values alone what is missing, stale or left over here (`decide`). It passes
the result as operations to the one synchronous function that changes the node's picture (`Catalog.perform`). Topics
become known (install routed), their partitions become this node's (install owned), are refused at once when they are
gone (remove routed), and are dropped when nothing can reach them any more (confirm remove). A hint wakes the loop after
every change and when the live nodes change; a tick wakes it if hints are lost; a client that needs the newest state
wakes it too. A pass that finds the known revision, and nothing left over, does nothing else.

A loop of its own (`keep_place`) reconciles live nodes and leases, so that no number of topics delays a lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from gateway.cluster.leases import HAND_OVER_INTERVAL_S, Leases
from gateway.cluster.membership import Membership
from gateway.cluster.wake import TICK, Wake
from gateway.log.catalog import Catalog

logger = structlog.stdlib.get_logger(__name__)

RENEWALS_PER_TTL = 5
"""How often a node renews its registration although the last renewal is still valid."""

REPEATED_FAILURES = 10
"""Number of equal failures in a row that are logged as an error. The error is logged again each time the number has
doubled."""


MAX_DIGITS = 19
"""Maximal number of digits of a revision, which Postgres keeps in 64 bits."""


class Reconciler:
    """`converge` and `keep_place` are passes of a supervisor, each of which waits for its own wake-up."""

    def __init__(
        self,
        catalog: Catalog,
        membership: Membership,
        leases: Leases,
        *,
        interval_ms: int,
        ttl_ms: int,
        observe_pass: Callable[[str, bool, float], None] = lambda _trigger, _skipped, _seconds: None,
        observe_failure: Callable[[str], None] = lambda _cause: None,
    ) -> None:
        """`observe_pass` is called after every pass with its trigger, whether the pass had nothing to do, and its
        duration in seconds."""
        self._catalog = catalog
        self._membership = membership
        self._leases = leases
        self._interval_s = interval_ms / 1000
        self._ttl_s = ttl_ms / 1000
        self._observe_pass = observe_pass
        self._observe_failure = observe_failure
        self._failures: dict[str, int] = {}
        self._leads = membership.leads
        self._revision_heard = 0
        self._handed_over_s = float("-inf")
        self._more = False
        self._timer: asyncio.TimerHandle | None = None
        self.metadata_wake = Wake()
        self.nodes_wake = Wake()

    # --- hints ----------------------------------------------------------------------------------------------------

    def revision_heard(self, payload: str) -> None:
        """Note that some node has committed a change of the catalog."""
        if len(payload) <= MAX_DIGITS and payload.isascii() and payload.isdigit():
            self._revision_heard = max(self._revision_heard, int(payload))
        if self.revision_lag:
            self.metadata_wake("notified")

    def nodes_heard(self, _payload: str) -> None:
        """Note that a node has joined or left, or has released leases."""
        self.nodes_wake("notified")

    def hearing(self) -> None:
        """Note that hints are received again. Hints that were sent in the meantime are lost."""
        self.metadata_wake("reconnected")
        self.nodes_wake("reconnected")

    @property
    def revision_lag(self) -> int:
        """Number of committed changes that this node has heard of and has not read yet."""
        return max(self._revision_heard - self._catalog.revision, 0)

    # --- passes ---------------------------------------------------------------------------------------------------

    async def converge(self) -> None:
        """Wait for a reason or for the interval, then run one pass. Raise StorageError."""
        trigger = await self.metadata_wake.wait(self._interval_s)
        catalog, started = self._catalog, time.perf_counter()
        before = catalog.revision, catalog.performed.total(), catalog.deferred
        heard = self._revision_heard
        try:
            # A wake-up announces changes, so the check for changes is skipped.
            if trigger != TICK or self.revision_lag or not await catalog.is_converged():
                await catalog.refresh_if_changed()
                await catalog.settle()
        except Exception as error:
            self._failed("look", error)
            raise
        self._failures.pop("look", None)
        if self._revision_heard == heard > catalog.revision:
            # Postgres shows a revision before it is announced, so the announced revision does not exist. Any role can
            # announce one, and Postgres can lose commits.
            self._revision_heard = catalog.revision
        # Postponed operations count as work, even if this pass cannot do them.
        skipped = before == (catalog.revision, catalog.performed.total(), 0)
        self._observe_pass(trigger, skipped, time.perf_counter() - started)

    async def keep_place(self) -> None:
        """Wait for a reason, or for a fifth of the time to live. Then prolong the registration and the leases, read the
        live nodes, acquire the shards that this node should coordinate, and hand over those that another node should.
        Raise StorageError."""
        trigger = await self.nodes_wake.wait(self._ttl_s / RENEWALS_PER_TTL)
        try:
            # A pass that waits for Postgres is given up after half the time to live, so that the next one can start
            # before the leases expire.
            async with asyncio.timeout(self._ttl_s / 2):
                await self._membership.renew()
                if self._leads is not self._membership.leads:
                    self._leads = self._membership.leads
                    self.metadata_wake("nodes")
                await self._leases.renew()
                more = await self._hand_over()
        except Exception as error:
            self._leases.drop_lapsed()
            self._failed("place", error)
            raise
        self._failures.pop("place", None)
        if more and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HAND_OVER_INTERVAL_S, self._hand_over_next)
        elif trigger != TICK:
            logger.debug("place kept", trigger=trigger, leases=self._leases.held)

    def _hand_over_next(self) -> None:
        self._timer = None
        self.nodes_wake("hand over")

    async def _hand_over(self) -> bool:
        """Balance the leases at most once in HAND_OVER_INTERVAL_S, however often the loop wakes. Return whether more
        remain."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._handed_over_s + HAND_OVER_INTERVAL_S:
            return self._more
        self._handed_over_s = now_s
        self._more = await self._leases.balance()
        return self._more

    def _failed(self, cause: str, error: Exception) -> None:
        self._observe_failure(cause)
        count = self._failures[cause] = self._failures.get(cause, 0) + 1
        if (count >= REPEATED_FAILURES and count & (count - 1) == 0) or count == REPEATED_FAILURES:
            logger.error("reconciliation keeps failing", cause=cause, failures=count, error=str(error))
