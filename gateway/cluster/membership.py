"""Which nodes are alive, and this node's own place among them.

The one idea: the list is a copy of what Postgres says, refreshed by one pass that also prolongs this node's own
registration. Clients are told of it as a routing hint; nothing is decided by it.

A node is known by its name (the advertised address): a process that starts again after a kill takes the same id at
once instead of waiting for its predecessor to expire.
"""

from __future__ import annotations

import asyncio

import structlog

from storage.errors import StorageConflict
from storage.nodes import NodeStore
from storage.types import Node, NodeId, PartitionKey

log = structlog.get_logger(__name__)


class Membership:
    """`join` before anything else; `renew` regularly; `withdraw` at the end."""

    def __init__(self, store: NodeStore, host: str, port: int, rack: str | None, ttl_ms: int) -> None:
        self._store = store
        self._host = host
        self._port = port
        self._rack = rack
        self._ttl_ms = ttl_ms
        self._self_node: Node | None = None
        self._alive: list[Node] = []
        self._alone_since_s = float("-inf")

    @property
    def self_node(self) -> Node:
        if self._self_node is None:
            raise RuntimeError("the node has not joined")
        return self._self_node

    @property
    def address(self) -> str:
        """HOST:PORT as clients are told."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    @property
    def node_id(self) -> NodeId:
        return self.self_node.node_id

    def alive(self) -> list[Node]:
        """Nodes that were alive at the last pass, by id; this one is always among them."""
        return self._alive

    @property
    def alone_since_s(self) -> float:
        """When (loop time) a pass found that the last other node had gone: infinite while there is one, minus infinite
        if there never was."""
        return self._alone_since_s

    def leader_of(self, partition_key: PartitionKey) -> Node:
        """The node that clients are pointed to for a partition: any could serve it, so this spreads the load."""
        return self._alive[partition_key % len(self._alive)]

    async def join(self) -> None:
        """Registers this node. Raises StorageError."""
        node_id = await self._store.register(self._host, self._port, self._rack, self._ttl_ms, name=self.address)
        self._self_node = Node(node_id, self._host, self._port, self._rack)
        self._take(await self._store.alive())

    async def renew(self) -> None:
        """One pass: prolong the registration, learn who else is alive. Raises StorageError.

        A node whose id has gone to another process joins anew. Should that process advertise the same address, the
        two will go on superseding each other, loudly; what they write stays fenced by their leases.
        """
        try:
            await self._store.renew(self.node_id, self._ttl_ms)
        except StorageConflict as error:
            log.error("another process has this node's registration", error=str(error), address=self.address)
            await self.join()
            return
        self._take(await self._store.alive())

    async def withdraw(self) -> None:
        """Says that this node is gone. Raises StorageError."""
        await self._store.withdraw(self.node_id)

    def _take(self, alive: list[Node]) -> None:
        others = [node for node in alive if node.node_id != self.node_id]
        before = {node.node_id for node in self._alive}
        self._alive = sorted([*others, self.self_node], key=lambda node: node.node_id)
        after = {node.node_id for node in self._alive}
        if others:
            self._alone_since_s = float("inf")
        elif len(before) > 1:
            self._alone_since_s = asyncio.get_running_loop().time()
        if before != after:
            log.info("live nodes", nodes=[f"{node.node_id}={node.host}:{node.port}" for node in self._alive])
