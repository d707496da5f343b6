"""The groups of a node, with their journal and what is watched of their members' reading."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.building.cluster import ClusterPart
from gateway.building.log import LogPart
from gateway.building.stores import Stores
from gateway.building.undo import STEP_TIMEOUT_S, Undo
from gateway.cluster.clock import ClusterClock
from gateway.config.broker import BrokerConfig
from gateway.config.broker_clients import principals
from gateway.groups.cluster_feed import ClusterFeed
from gateway.groups.drains import Drains
from gateway.groups.groups import Groups
from gateway.groups.idle_owners import IdleOwners
from gateway.groups.journal import Journal
from gateway.groups.kinds import MACHINES
from gateway.groups.marks import Marks
from gateway.groups.settings import group_settings
from gateway.log.catalog import Catalog
from gateway.log.topic_names import CONSUMER_OFFSETS
from gateway.operate.metrics import Metrics
from gateway.security.authorizer import Authorizer
from storage.journal import JournalStore
from storage.types import Partition

if TYPE_CHECKING:
    from gateway.tracing.traces import Traces


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The groups that this node coordinates."""

    groups: Groups
    journal: Journal | None
    marks: Marks
    idle_owners: IdleOwners
    authorizer: Authorizer | None
    """None if every client may do everything."""

    async def drain(self, timeout_s: float) -> None:
        """Store the steps that are not stored yet."""
        await self.groups.drain(timeout_s)


async def build_groups(
    broker: BrokerConfig,
    stores: Stores,
    cluster: ClusterPart,
    log: LogPart,
    clock: ClusterClock,
    metrics: Metrics,
    undo: Undo,
    *,
    traces: Traces | None,
) -> GroupPart:
    """Make the groups, and connect them with the leases and the catalog. Raise StorageError."""
    catalog, membership, leases = log.catalog, cluster.membership, cluster.leases
    journal = None
    if broker.group_journal_enable:
        journal = Journal(
            JournalStore(stores.database),
            MACHINES,
            catalog,
            lambda: membership.node_id or 0,
            metrics,
            now_ms=clock.now_ms,
            notice=None if traces is None else traces.rebalances,
        )
        undo.push("journal", 2 * STEP_TIMEOUT_S, journal.close)
    groups = Groups(
        stores.groups,
        stores.offsets,
        leases,
        group_settings(broker, catalog.group_configs),
        count_rebalance=metrics.group_rebalances.inc,
        count_violation=lambda violation: metrics.group_violations.labels(violation).inc(),
        count_withheld=metrics.group_withheld.inc,
        count_handoff=metrics.count_handoff,
        journal=journal,
        cluster_ms=clock.now_ms,
        # If groups exist, some client has already looked up their coordinators.
        begun=catalog.get(CONSUMER_OFFSETS) is not None or await stores.groups.any(),
    )
    authorizer = _authorizer(broker, catalog, metrics)
    ClusterFeed(catalog, groups, lambda: None if authorizer is None else authorizer.describing())
    metrics.group_handoffs_pending.set_function(groups.awaited_partitions)
    metrics.groups_half_way.set_function(groups.half_way)
    marks = Marks(
        lambda: groups.settings.drains,
        asyncio.get_running_loop().time,
        alone=lambda: not membership.has_other_brokers,
        nodes_since_s=lambda: max(membership.changed_s, catalog.assigned_s),
    )

    def alone_serves(partition: Partition) -> bool:
        # A consumer that is redirected to the nearest node fetches from that node, so this node does not see its
        # fetches.
        return not broker.selects_nearest and membership.leads(partition)

    drains = Drains(groups, stores.offsets, catalog, stores.log.states, marks, alone_serves)
    undo.push("drains", STEP_TIMEOUT_S, drains.close)
    leases.listen(
        acquired=groups.shard_acquired,
        lost=groups.shard_lost,
        in_use=groups.shards_in_use,
        in_unrest=groups.shards_in_unrest,
    )
    return GroupPart(groups, journal, marks, IdleOwners(groups, catalog, alone_serves), authorizer)


def _authorizer(broker: BrokerConfig, catalog: Catalog, metrics: Metrics) -> Authorizer | None:
    """Return the authorizer, None if every client may do everything."""
    if not broker.authorizer_class_name:
        return None
    return Authorizer(
        lambda: catalog.acls,
        principals(broker.super_users),
        allow_everyone=broker.allow_everyone_if_no_acl_found,
        denied=lambda kind, operation: metrics.denials.labels(kind.name, operation.name).inc(),
    )
