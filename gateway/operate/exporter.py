"""Topics, groups and lag under kafka_exporter's metric names, so that its dashboards and alerts work unchanged.

The one idea: nothing is kept. A scrape reads Postgres through `storage.monitor`. The size of a scrape is bounded, and a
truncated scrape says so. Every node would read the same, so only one node exports it, by a lease: Prometheus scrapes
every node, and a sum over targets must not count a group's lag once for each of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.cluster.membership import Membership
from gateway.config.listeners import render_address
from gateway.net.shared_read import retrieve_error
from storage.errors import StorageError
from storage.monitor import DeletionTotals, GroupLag, GroupSize, Monitor, PartitionEnds, TransactionTotals
from storage.types import Node

READ_TIMEOUT_S = 3.0
"""Below a scraper's own timeout (Prometheus: 10 s), because exceeding that would lose the node's own metrics too."""
MAX_AGE_S = 60.0
"""Age up to which the next scrape shows a read that took too long for its own scrape."""

_Read = tuple[Sequence[PartitionEnds], Sequence[GroupLag], Sequence[GroupSize], DeletionTotals, TransactionTotals]


@dataclass(frozen=True, slots=True)
class Snapshot(Collector):
    """One state of the cluster, as metrics. `read` is False if storage did not answer: then only brokers are shown."""

    brokers: tuple[Node, ...]
    partitions: tuple[tuple[PartitionEnds, int], ...] = ()
    """Partitions, each with the id of the node that clients use as its leader; -1 if no node may lead it."""
    lag: tuple[GroupLag, ...] = ()
    groups: tuple[GroupSize, ...] = ()
    deletions: DeletionTotals | None = None
    transactions: TransactionTotals | None = None
    read: bool = True
    truncated: bool = False
    exporting: bool = True
    """True if this node exports the cluster's metrics."""

    def collect(self) -> Iterator[Metric]:
        yield _gauge(
            "sluice_exporter_up",
            "1 on the one node that exports the cluster's metrics, if it could read them; else 0.",
            (),
            [((), int(self.exporting and self.read))],
        )
        if self.exporting:
            yield from self._of_cluster()

    def _of_cluster(self) -> Iterator[Metric]:
        yield _gauge("kafka_brokers", "Live brokers.", (), [((), len(self.brokers))])
        yield _gauge(
            "kafka_broker_info",
            "Live brokers by id, and where clients of each listener find them.",
            ("id", "listener", "address"),
            [
                ((str(node.node_id), listener, render_address(address)), 1)
                for node in self.brokers
                for listener, address in node.listeners.items()
            ],
        )
        yield _gauge(
            "sluice_exporter_truncated",
            "Whether there are more series than metrics-max-series lets through.",
            (),
            [((), int(self.truncated))],
        )
        yield from self._of_topics()
        yield from self._of_groups()
        if self.deletions is not None:
            yield from _of_deletions(self.deletions)
        if self.transactions is not None:
            yield from _of_transactions(self.transactions)

    def _of_topics(self) -> Iterator[Metric]:
        counts: dict[str, int] = {}
        for ends, _ in self.partitions:
            counts[ends.topic] = counts.get(ends.topic, 0) + 1
        yield _gauge(
            "kafka_topic_partitions", "Partitions of a topic.", ("topic",), [((t,), n) for t, n in counts.items()]
        )
        labels = ("topic", "partition")
        rows = [((ends.topic, str(ends.partition.partition_index)), ends, leader) for ends, leader in self.partitions]
        yield _gauge(
            "kafka_topic_partition_current_offset",
            "Offset of the next record.",
            labels,
            [(values, ends.high_watermark) for values, ends, _ in rows],
        )
        yield _gauge(
            "kafka_topic_partition_oldest_offset",
            "Offset of the oldest record.",
            labels,
            [(values, ends.log_start_offset) for values, ends, _ in rows],
        )
        yield _gauge(
            "sluice_topic_partition_size_bytes",
            "Size of the record batches that are stored.",
            labels,
            [(values, ends.size_bytes) for values, ends, _ in rows],
        )
        yield _gauge(
            "kafka_topic_partition_leader",
            "Node that clients are pointed to.",
            labels,
            [(values, leader) for values, _, leader in rows],
        )
        yield _gauge(
            "sluice_topic_partition_last_stable_offset_lag",
            "Offsets that readers of committed records wait for; only partitions in which a transaction is open.",
            labels,
            [
                (values, ends.high_watermark - ends.last_stable_offset)
                for values, ends, _ in rows
                if ends.last_stable_offset < ends.high_watermark
            ],
        )

    def _of_groups(self) -> Iterator[Metric]:
        labels = ("consumergroup", "topic", "partition")
        rows = [((lag.group_id, lag.topic, str(lag.partition_index)), lag) for lag in self.lag]
        yield _gauge(
            "kafka_consumergroup_current_offset",
            "Committed offset.",
            labels,
            [(values, lag.committed_offset) for values, lag in rows],
        )
        yield _gauge(
            "kafka_consumergroup_lag",
            "Records left to read.",
            labels,
            [(values, lag.lag) for values, lag in rows],
        )
        offset_sums: dict[tuple[str, str], int] = {}
        lag_sums: dict[tuple[str, str], int] = {}
        for lag in self.lag:
            key = (lag.group_id, lag.topic)
            offset_sums[key] = offset_sums.get(key, 0) + lag.committed_offset
            lag_sums[key] = lag_sums.get(key, 0) + lag.lag
        yield _gauge(
            "kafka_consumergroup_current_offset_sum",
            "Sum of committed offsets over a topic's partitions.",
            labels[:2],
            offset_sums.items(),
        )
        yield _gauge(
            "kafka_consumergroup_lag_sum",
            "Records left to read over a topic's partitions.",
            labels[:2],
            lag_sums.items(),
        )
        yield _gauge(
            "kafka_consumergroup_members",
            "Members of a group.",
            labels[:1],
            [((group.group_id,), group.members) for group in self.groups],
        )


def _gauge(
    name: str, documentation: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _of_deletions(deletions: DeletionTotals) -> Iterator[Metric]:
    yield _gauge(
        "sluice_pending_tombstones",
        "Deleted topics of the cluster whose data is not all removed yet.",
        (),
        [((), deletions.pending)],
    )
    yield _gauge(
        "sluice_pending_tombstone_age_seconds",
        "Since when the oldest of them has been deleted; 0 where there is none.",
        (),
        [((), deletions.oldest_s)],
    )
    yield _gauge(
        "sluice_failing_tombstones",
        "Those of them whose data could not be removed when it was last tried.",
        (),
        [((), deletions.failing)],
    )


def _of_transactions(transactions: TransactionTotals) -> Iterator[Metric]:
    yield _gauge(
        "sluice_open_transactions", "Transactions of the cluster that are under way.", (), [((), transactions.open)]
    )
    yield _gauge(
        "sluice_open_transaction_age_seconds",
        "For how long the oldest of them has been under way; 0 where there is none.",
        (),
        [((), transactions.oldest_s)],
    )


class Exporter:
    """Take snapshots. `max_series` bounds partitions, committed offsets and groups, each on its own. `exports`
    returns whether this node exports the cluster's metrics now, and `clock` seconds."""

    def __init__(
        self,
        monitor: Monitor,
        membership: Membership,
        max_series: int,
        exports: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exports = exports
        self._monitor = monitor
        self._membership = membership
        self._max_series = max_series
        self._clock = clock
        self._reading: asyncio.Task[_Read] | None = None
        self._began_s = 0.0

    async def snapshot(self) -> Snapshot:
        """Return the state of the cluster; never raise for storage, so that the node's own metrics are always shown."""
        if not self._exports():
            return Snapshot((), exporting=False)
        brokers = tuple(self._membership.brokers())
        limit = self._max_series
        reading = await self._recent(limit + 1)
        if reading is None:
            return Snapshot(brokers, read=False)
        if not self._exports():
            return Snapshot((), exporting=False)
        try:
            partitions, lag, groups, deletions, transactions = reading.result()
        except StorageError:
            return Snapshot(brokers, read=False)
        leaders = self._membership.leaders
        return Snapshot(
            brokers,
            tuple((ends, leaders.leader(ends.partition)) for ends in partitions[:limit]),
            tuple(lag[:limit]),
            tuple(groups[:limit]),
            deletions,
            transactions,
            truncated=max(len(partitions), len(lag), len(groups)) > limit,
        )

    async def _recent(self, limit: int) -> asyncio.Task[_Read] | None:
        """Return a finished read that began at most MAX_AGE_S ago, or None if it takes too long."""
        # A late read is not cancelled, because asyncpg waits for an unresponsive Postgres even then. A second read does
        # not start.
        while True:
            if self._reading is None:
                self._reading, self._began_s = asyncio.create_task(self._read(limit)), self._clock()
                self._reading.add_done_callback(retrieve_error)
            reading, began_s = self._reading, self._began_s
            finished, _ = await asyncio.wait({reading}, timeout=READ_TIMEOUT_S)
            if not finished:
                return None
            if self._reading is reading:
                self._reading = None
            if self._clock() <= began_s + MAX_AGE_S:
                return reading

    async def _read(self, limit: int) -> _Read:
        monitor = self._monitor
        return await asyncio.gather(
            monitor.partitions(limit),
            monitor.lag(limit),
            monitor.groups(limit),
            monitor.deletions(),
            monitor.transactions(),
        )
