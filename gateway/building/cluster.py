"""The cluster as one node sees it: who is alive, which leases this node holds, and the announcements of appends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.building.stores import Stores
from gateway.building.undo import STEP_TIMEOUT_S, retrieve_error
from gateway.cluster.figures import Health, NodeFigures
from gateway.cluster.jobs import Jobs
from gateway.cluster.leases import Leases
from gateway.cluster.membership import Membership
from gateway.cluster.wakeups import Wakeups
from gateway.config.broker import BrokerConfig
from gateway.config.settings import Settings
from gateway.log.tail import Tail
from storage.types import Address


@dataclass(frozen=True, slots=True)
class ClusterPart:
    """The part of a node that communicates with other nodes."""

    membership: Membership
    leases: Leases
    jobs: Jobs
    wakeups: Wakeups
    figures: NodeFigures

    def forget(self) -> None:
        """Forget all leases: the history in which this node acquired them has ended."""
        self.leases.forget()
        self.jobs.forget()

    async def drain(self, timeout_s: float) -> None:
        """Withdraw, then release the leases, so that other nodes take over groups and jobs at once. The node withdraws
        first: a node that takes a shard assigned to a live node would hand it back. Raise StorageError."""
        await self.membership.withdraw()
        releasing = asyncio.create_task(self.jobs.release())
        releasing.add_done_callback(retrieve_error)
        try:
            await self.leases.release()
        finally:
            await asyncio.wait((releasing,), timeout=STEP_TIMEOUT_S)
        if releasing.done():
            releasing.result()


def build_cluster(
    settings: Settings,
    broker: BrokerConfig,
    advertised: Mapping[str, Address],
    stores: Stores,
    tail: Tail,
    health: Health,
) -> ClusterPart:
    """Make the parts. The node joins when its log exists (`_join` in `gateway/node.py`)."""
    membership = Membership(
        stores.nodes,
        advertised,
        settings.rack,
        settings.node_ttl_ms,
        broker.node_id,
        settings.roles,
        authorizer=broker.authorizer_class_name,
        shared=[listener.name for listener in settings.listeners if listener.is_shared],
    )
    return ClusterPart(
        membership,
        Leases(stores.nodes, membership, settings.node_ttl_ms),
        Jobs(stores.nodes, membership, settings.node_ttl_ms),
        Wakeups(tail, membership, stores.nodes.announce, stores.log.states),
        NodeFigures(membership, health, stores.nodes.ask_for_figures, stores.nodes.tell_figures),
    )
