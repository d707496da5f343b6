"""The background work of a node: converging, hearing from the other nodes, and the passes of maintenance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.building.cluster import ClusterPart
from gateway.building.groups import GroupPart
from gateway.building.log import LogPart
from gateway.building.readers import TransactionPart
from gateway.building.stores import Stores
from gateway.building.undo import STEP_TIMEOUT_S, Undo
from gateway.cluster.clock import ClusterClock
from gateway.cluster.jobs import Job
from gateway.cluster.reconciler import Reconciler
from gateway.config.broker import BrokerConfig
from gateway.config.settings import Settings
from gateway.operate.deletions import Deletions
from gateway.operate.maintenance import Maintenance
from gateway.operate.metrics import Metrics
from gateway.operate.supervisor import Supervisor
from storage import notify
from storage.deletion import DeletionStore

LAG_PROBE_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Background:
    """The passes that keep the node up to date. `start` runs them."""

    reconciler: Reconciler
    maintenance: Maintenance
    listener: notify.Listener
    cluster: ClusterPart
    metrics: Metrics

    def start(self, supervisor: Supervisor, undo: Undo) -> None:
        """Start all passes."""
        reconciler, jobs, wakeups, listener = self.reconciler, self.cluster.jobs, self.cluster.wakeups, self.listener

        def hearing() -> None:
            self.metrics.listener_reconnects.inc()
            wakeups.hearing()
            reconciler.hearing()
            jobs.wake("reconnected")

        start = supervisor.start
        start("leases", reconciler.keep_place, interval_ms=0)
        start("reconciliation", reconciler.converge, interval_ms=0)
        start("listening", lambda: listener.listen(hearing, wakeups.deaf), interval_ms=0, regular=False)
        start("announcements", wakeups.announce_all, interval_ms=0, regular=False)
        start("look at what is waited for", wakeups.look, interval_ms=0, regular=False)
        start("event loop lag", self._probe_lag, interval_ms=0)
        for each in self.maintenance.passes():
            if each.job is None:
                start(each.name, each.run, interval_ms=each.interval_ms)
            else:
                start(each.name, jobs.paced(each.job, each.name, each.run, each.interval_ms), interval_ms=0)
        start("jobs", jobs.keep, interval_ms=0)
        undo.push("background loops", STEP_TIMEOUT_S, supervisor.stop)

    async def _probe_lag(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + LAG_PROBE_INTERVAL_S
        await asyncio.sleep(LAG_PROBE_INTERVAL_S)
        self.metrics.event_loop_lag.observe(max(0.0, loop.time() - due))


def build_background(
    settings: Settings,
    broker: BrokerConfig,
    stores: Stores,
    cluster: ClusterPart,
    log: LogPart,
    groups: GroupPart,
    transactions: TransactionPart,
    clock: ClusterClock,
    metrics: Metrics,
) -> Background:
    """Make the parts that keep the node up to date."""
    membership, jobs, leases, wakeups = cluster.membership, cluster.jobs, cluster.leases, cluster.wakeups
    reconciler = Reconciler(
        log.catalog,
        membership,
        leases,
        interval_ms=broker.reconcile_periodic_interval_ms,
        ttl_ms=settings.node_ttl_ms,
        observe_pass=metrics.observe_reconcile_pass,
        observe_failure=metrics.observe_reconcile_failure,
    )
    metrics.watch_cluster(
        revision_lag=lambda: reconciler.revision_lag,
        leases_moved={"groups": lambda: leases.handed_over, "jobs": lambda: jobs.handed_over},
        jobs_held=lambda: jobs.held,
        owned=lambda: log.catalog.owned,
        deferred=lambda: log.catalog.deferred,
        performed=log.catalog.performed,
        merged=lambda: reconciler.metadata_wake.merged + reconciler.nodes_wake.merged,
        wakeups=wakeups.counts,
    )
    deletions = Deletions(
        DeletionStore(stores.database),
        lambda: jobs.lease(Job.DELETION),
        count_gone=metrics.topics_removed.inc,
        count_failure=lambda: metrics.observe_reconcile_failure("delete"),
    )
    maintenance = Maintenance(
        database=stores.database,
        log=stores.log,
        roller=stores.roller,
        catalog=log.catalog,
        tail=log.tail,
        leases=leases.current,
        groups=groups.groups.in_use,
        deletions=deletions,
        transactions=transactions.transactions,
        journal=groups.journal,
        job_lease=jobs.lease,
        clock=clock,
        node_id=lambda: membership.node_id or 0,
    )
    # A node that is only a controller writes no internal topics for consumers.
    followed = transactions.internal_logs.heard if settings.roles.is_broker else None
    hints = _hints(reconciler, cluster, followed)
    listener = notify.Listener(stores.database, hints, lambda: membership.node_id)
    return Background(reconciler, maintenance, listener, cluster, metrics)


def _hints(
    reconciler: Reconciler, cluster: ClusterPart, followed: Callable[[str], None] | None
) -> dict[str, Callable[[str], None]]:
    """Return the functions that receive other nodes' notifications, by channel."""

    def nodes_heard(payload: str) -> None:
        reconciler.nodes_heard(payload)
        cluster.jobs.wake("notified")

    return {
        notify.REVISIONS: reconciler.revision_heard,
        notify.NODES: nodes_heard,
        notify.APPENDS: cluster.wakeups.heard,
        notify.LOOKS: cluster.figures.question_heard,
        notify.FIGURES: cluster.figures.answer_heard,
        **({} if followed is None else {notify.FOLLOWED: followed}),
    }
