"""The forwarding of requests between nodes, if a listener is shared by all nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from gateway.apis.routing import GroupRouter
from gateway.building.cluster import ClusterPart
from gateway.config.definition import ConfigError
from gateway.config.settings import Settings
from gateway.net.forwarding import Forwarder
from gateway.net.node_proof import NodeDoor, NodeGuard, derive_key
from gateway.net.requests import Guard, Requests
from gateway.net.upstream import Called
from gateway.operate.metrics import Metrics
from gateway.security.tls import Certificates
from gateway.transactions.coordinator import Transactions
from storage.types import Node
from storage.users import UserStore

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Both ends of forwarding: the handler of shared listeners, and the handler of the listener that nodes call."""

    forwarder: Forwarder
    door: NodeDoor
    inter_broker: str
    shared: tuple[str, ...]

    def handlers(self) -> dict[str, Requests]:
        """Return the handlers of these listeners, by name."""
        return {self.inter_broker: self.door, **dict.fromkeys(self.shared, self.forwarder)}

    def guards(self, made: Mapping[str, Callable[[], Guard]]) -> Mapping[str, Callable[[], Guard]]:
        """Return the guards with one that lets nodes in without a login."""
        clients = made.get(self.inter_broker)
        if clients is None:
            return made
        return {**made, self.inter_broker: lambda: NodeGuard(self.door, clients())}


async def build_forwarding(
    settings: Settings,
    requests: Requests,
    cluster: ClusterPart,
    transactions: Transactions,
    users: UserStore,
    certificates: Certificates,
    metrics: Metrics,
) -> Forwarding | None:
    """Make both ends, around the handler of brokers' requests. Return None if no listener is shared. Raise
    StorageError."""
    shared = tuple(listener.name for listener in settings.listeners if listener.is_shared)
    if not shared:
        return None
    inter_broker = next(listener.name for listener in settings.listeners if listener.is_inter_broker)
    key, membership = derive_key(await users.decoy_secret()), cluster.membership

    def call(node: Node) -> Called | None:
        address = node.listeners.get(inter_broker)
        if address is None:
            return None
        try:
            return Called(node, address, key, certificates.between_nodes())
        except ConfigError as error:
            logger.error("other nodes cannot be called with these certificates", error=str(error))
            return None

    router = GroupRouter(cluster.leases, transactions, membership)
    forwarder = Forwarder(requests, router, call, metrics)
    return Forwarding(forwarder, NodeDoor(requests, key, lambda: membership.node_id), inter_broker, shared)
