"""Share partitions, transactions and internal topics: the parts between the log and particular kinds of clients."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.apis.coordinator_topics import offsets_partitions, state_partition
from gateway.building.cluster import ClusterPart
from gateway.building.groups import GroupPart
from gateway.building.log import LogPart
from gateway.building.stores import Stores
from gateway.building.undo import STEP_TIMEOUT_S, Undo
from gateway.cluster.clock import ClusterClock
from gateway.config.broker import BrokerConfig
from gateway.internal_log.sources import GroupSource, TransactionSource
from gateway.internal_log.writer import InternalLogs
from gateway.operate.metrics import Metrics
from gateway.share.partitions import SharePartitions
from gateway.share.sessions import ShareSessions
from gateway.transactions.coordinator import Transactions


@dataclass(frozen=True, slots=True)
class SharePart:
    """The share partitions that this node leads, and their readers' sessions."""

    partitions: SharePartitions
    sessions: ShareSessions

    def forget(self) -> None:
        """Forget the share partitions. Their sessions last as long as their connections."""
        self.partitions.forget()

    def connection_closed(self, connection_id: str) -> None:
        self.sessions.connection_closed(connection_id, self.partitions)


def build_share(broker: BrokerConfig, stores: Stores, metrics: Metrics, undo: Undo) -> SharePart:
    """Make the parts. Stopping closes the partitions."""
    partitions = SharePartitions(stores.share)
    sessions = ShareSessions(broker.group_share_max_share_sessions)
    undo.push("share partitions", STEP_TIMEOUT_S, partitions.close)
    metrics.share_partitions.set_function(lambda: partitions.count)
    metrics.share_sessions.set_function(lambda: sessions.count)
    return SharePart(partitions, sessions)


@dataclass(frozen=True, slots=True)
class TransactionPart:
    """The transactions that this node coordinates, and the internal topics that it writes."""

    transactions: Transactions
    internal_logs: InternalLogs

    def forget(self) -> None:
        """Forget the contents of the internal topics. Transactions hold nothing between two requests."""
        self.internal_logs.forget()


def build_transactions(
    stores: Stores, cluster: ClusterPart, log: LogPart, groups: GroupPart, clock: ClusterClock, metrics: Metrics
) -> TransactionPart:
    """Make the parts that coordinate transactions."""
    catalog = log.catalog
    transactions = Transactions(
        stores.transactions,
        stores.producers,
        log.tail,
        cluster.membership,
        listener=cluster.wakeups,
        offsets_committed=groups.groups.transaction_committed,
        observe_end=lambda outcome: metrics.transactions_ended.labels(outcome).inc(),
        state_partition=lambda transactional_id: state_partition(catalog, transactional_id),
        now_ms=clock.now_ms,
    )
    internal_logs = InternalLogs(
        catalog,
        stores.log,
        log.appender,
        (
            GroupSource(groups.groups, cluster.leases, stores.groups, stores.offsets),
            TransactionSource(transactions, lambda: offsets_partitions(catalog)),
        ),
        stores.nodes.tell_followed,
        clock.now_ms,
    )
    cluster.leases.listen(acquired=lambda _lease: internal_logs.shards_moved())
    return TransactionPart(transactions, internal_logs)
