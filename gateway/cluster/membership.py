"""The live nodes, and this node's own registration among them.

The one idea: the list is a copy of Postgres' state, refreshed by the pass that also renews this node's registration.
Clients use it as a routing hint; it decides nothing.

A node is a broker, a controller, or both (`process.roles`). Brokers lead partitions and coordinate groups, and clients
see only brokers. Controllers do background work that one node does for all. While no controller is alive the brokers do
it.

A node is known by its name (the advertised address of its first listener): a process that starts again after a kill
gets the same id at once instead of waiting for its predecessor to expire.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

import structlog

from gateway.cluster.clock import boot_time_s
from gateway.cluster.placement import Leaders
from gateway.config.listeners import render_address, render_listeners
from storage.errors import StorageConflict
from storage.nodes import NodeStore, Unregistered
from storage.types import BOTH, Address, LeaseKind, MetadataLog, Node, NodeId, Partition, Roles

logger = structlog.get_logger(__name__)

RIVAL_PATIENCE_S, RIVAL_POLL_S = 2.0, 0.05
"""Longest time for which this node waits until another process with its name ends."""


class Announcements(Protocol):
    """The announcements of appends between nodes: `gateway.cluster.wakeups.Wakeups`."""

    @property
    def announced(self) -> int:
        """Announcements that this node has sent. Each renewal stores the number for the other nodes."""
        ...

    def nodes_seen(self, alive: Sequence[Node], gone: bool) -> None:
        """Receive the live nodes of a pass. `gone` is true if a process is missing that was there before."""
        ...

    def registered(self) -> None:
        """Note that this node has registered again."""
        ...


async def _nothing() -> None:
    pass


class _NoAnnouncements:
    announced = 0

    def nodes_seen(self, alive: Sequence[Node], gone: bool) -> None:
        pass

    def registered(self) -> None:
        pass


class Membership:
    """The live nodes, and this node's registration. Call `join` before anything else, `renew` regularly, and `withdraw`
    at the end."""

    def __init__(
        self,
        store: NodeStore,
        listeners: Mapping[str, Address],
        rack: str | None,
        ttl_ms: int,
        node_id: int | None = None,
        roles: Roles = BOTH,
        *,
        authorizer: str = "",
        shared: Collection[str] = (),
        monotonic: Callable[[], float] = boot_time_s,
    ) -> None:
        """`listeners` maps each name to the address that its clients are sent to; at least one. `node_id` is the
        only id that the node may have; None: Postgres assigns one. `authorizer` is the class name that each
        registration stores. `shared` are the names of listeners whose address other nodes may have, too. `monotonic`
        measures how long a registration lasts."""
        self._store = store
        self._listeners = dict(listeners)
        self._own = {name: address for name, address in listeners.items() if name not in shared}
        self._rack = rack
        self._ttl_ms = ttl_ms
        self._wanted_id = node_id
        self._roles = roles
        self._self_node: Node | None = None
        self._alive: list[Node] = []
        self._brokers: list[Node] = []
        self._controllers: list[Node] = []
        self.has_other_brokers = False
        """True if another node serves clients and must receive announcements of appends."""
        self.broker_ids: tuple[NodeId, ...] = ()
        """Ids of `brokers()`; a new object only if they change."""
        self.controller_ids: tuple[NodeId, ...] = ()
        """Ids of `controllers()`; a new object only if they change."""
        self._levels: Mapping[str, int] = {}
        self._read_ms = 0
        self._reads_begun = self._read_taken = 0
        self._leaders = Leaders(())
        self.leads: Callable[[Partition], bool] = lambda _partition: False
        """Returns whether clients of a partition are sent to this node. Whenever `leaders` changes, this becomes a new
        object, too.
        """
        self._known_since_s = float("-inf")
        self._changed_s = float("inf")
        self._monotonic = monotonic
        self._registered_until_s = float("-inf")
        self._returning = False
        """True if this node must read the catalog before it counts itself as registered."""
        self._withdrawn = False
        self._announcements: Announcements = _NoAnnouncements()
        self._catalog_revision: Callable[[], int] = lambda: 0
        self._catch_up: Callable[[], Awaitable[None]] = _nothing
        self._placed: Callable[[], None] = lambda: None
        self._authorizer = authorizer
        self._told_of: frozenset[int] = frozenset()
        self.superseded: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM)
        """Called when this node has lost the id that its settings name: the process is to end."""

    def connect(
        self,
        announcements: Announcements | None = None,
        *,
        catalog_revision: Callable[[], int] | None = None,
        catch_up: Callable[[], Awaitable[None]] | None = None,
        placed: Callable[[], None] | None = None,
    ) -> None:
        """Connect the parts that need the membership themselves, so that they are made after it.

        `catalog_revision` returns the revision that this node follows. Each renewal stores it, because the name of a
        deleted topic is free only when every broker knows of the deletion. `catch_up` reads the catalog's changes. This
        node calls it when it registers again, because others did not wait for it in the meantime. `placed` is called
        when `leaders` becomes a new object.
        """
        if announcements is not None:
            self._announcements = announcements
        if catalog_revision is not None:
            self._catalog_revision = catalog_revision
        if catch_up is not None:
            self._catch_up = catch_up
        if placed is not None:
            self._placed = placed

    @property
    def self_node(self) -> Node:
        if self._self_node is None:
            raise RuntimeError("the node has not joined")
        return self._self_node

    @property
    def address(self) -> str:
        """Return the name of the node: HOST:PORT to which clients of the first listener are sent."""
        return render_address(next(iter(self._listeners.values())))

    @property
    def node_id(self) -> NodeId:
        return self.self_node.node_id

    def alive(self) -> list[Node]:
        """Return the nodes that were alive at the last pass, by id. This node is always among them."""
        return self._alive

    def brokers(self) -> list[Node]:
        """Return the live nodes that clients see, by id."""
        return self._brokers

    def controllers(self) -> list[Node]:
        """Return the live nodes that do background work, by id: the brokers if no controller is alive."""
        return self._controllers

    @property
    def roles(self) -> Roles:
        """Roles of this node."""
        return self._roles

    async def fenced(self) -> list[Node]:
        """Return the brokers that are registered and not alive, by id. Raise StorageError."""
        return await self._store.fenced()

    @property
    def known_since_s(self) -> float:
        """Loop time from which every other live node knows this node. A node reads the live nodes when it renews its
        own registration, and a node that has not renewed it by then is no longer alive."""
        return self._known_since_s

    @property
    def registered_until_s(self) -> float:
        """Time of `boot_time_s` at which this node's registration expires unless it is renewed. Until then the other
        nodes count this node as alive."""
        return self._registered_until_s

    @property
    def is_registered(self) -> bool:
        """False if other nodes may take this node for dead. A process or a machine that was suspended sees this at
        once, before it asks Postgres."""
        return self._monotonic() <= self._registered_until_s

    @property
    def changed_s(self) -> float:
        """Loop time at which this node last saw the set of live nodes change."""
        return self._changed_s

    def leader_of(self, key: int) -> Node:
        """Return the node to which clients are sent for a key that is not a partition."""
        leader = self._leaders.heaviest(key)
        return next(node for node in self._brokers if node.node_id == leader)

    def leader_of_partition(self, partition: Partition) -> Node | None:
        """Return the node to which clients of the partition are sent, or None if no broker is alive."""
        leader = self._leaders.leader(partition)
        return next((node for node in self._brokers if node.node_id == leader), None)

    @property
    def levels(self) -> Mapping[str, int]:
        """Levels of the features whose level an administrator has set."""
        return self._levels

    @property
    def read_ms(self) -> int:
        """Time at which `levels` was read, by Postgres' clock (Unix ms). Of two nodes, the one with the later time has
        the newer levels."""
        return self._read_ms

    @property
    def leaders(self) -> Leaders:
        """The leaders of partitions; a new object whenever the live nodes change."""
        return self._leaders

    async def require_own_addresses(self) -> None:
        """Check, before `join`, that no live node has this node's name, node.id or an address of it. Raise
        StorageConflict.

        A killed predecessor does not count: Postgres soon ends its session, so the check waits a little for that.
        """
        deadline_s = time.monotonic() + RIVAL_PATIENCE_S
        while rivals := await self._store.rivals(self.address, self._own, self._wanted_id):
            if time.monotonic() > deadline_s:
                taken = next((node for node in rivals if node.node_id == self._wanted_id), None)
                if taken is not None and self.address != render_address(next(iter(taken.listeners.values()))):
                    raise StorageConflict(
                        f"node.id {self._wanted_id} is that of the live node at {render_listeners(taken.listeners)}:"
                        " each node needs a node.id of its own"
                    )
                mine = set(self._own.values())
                rival, shared = rivals[0], [each for each in rivals[0].listeners.values() if each in mine]
                address = render_address(shared[0]) if shared else self.address
                raise StorageConflict(
                    f"node {rival.node_id} is alive and advertises {address} too: give each node its own addresses"
                    " (see --advertise, advertised.listeners), or name what they share in shared.listener.names"
                )
            await asyncio.sleep(RIVAL_POLL_S)

    async def join(self) -> None:
        """Register this node. Raise StorageError."""
        started_s = self._monotonic()
        node_id = await self._store.register(
            self.address, self._listeners, self._rack, self._ttl_ms, self._wanted_id, self._authorizer, self._roles
        )
        self._self_node = Node(
            node_id, self._listeners, self._rack, self._store.incarnation(node_id), roles=self._roles
        )
        self._returning = True
        await self._catch_up()
        number, alive = await self._read_alive()
        self._registered_until_s = started_s + self._ttl_ms / 1000
        self._take(number, alive)
        self._registered()

    async def renew(self) -> None:
        """Prolong the registration, and read the live nodes. Raise StorageError.

        If another process has taken over this node's id, this node registers again. If both processes advertise the
        same address, they take the id from each other again and again, with an error in the log each time. Their writes
        stay fenced by their leases. If this node may have no other id, it ends: otherwise two nodes would lead the same
        partitions.
        """
        if self._withdrawn:
            return
        started_s = self._monotonic()
        try:
            lapsed = await self._store.renew(
                self.node_id, self._ttl_ms, self._announcements.announced, self._catalog_revision()
            )
        except StorageConflict as error:
            if self._withdrawn:
                return
            logger.error(
                "another process has taken this node's registration: registering again",
                error=str(error),
                address=self.address,
            )
            try:
                await self.join()
            except StorageConflict as taken:
                logger.critical(
                    "another process has this node.id: this node ends", node_id=self._wanted_id, error=str(taken)
                )
                self.superseded()
                raise
            return
        # Another attempt, or one without an answer, may have prolonged the registration since it expired.
        self._returning = self._returning or lapsed or not self.is_registered
        if self._returning:
            await self._catch_up()
        number, alive = await self._read_alive()
        self._registered_until_s = started_s + self._ttl_ms / 1000
        self._take(number, alive)
        if self._returning:
            logger.warning("the registration had expired: other nodes may have taken this node for dead")
            self._registered()

    async def look(self) -> None:
        """Read the live nodes now. Raise StorageError."""
        self._take(*await self._read_alive())

    async def withdraw(self) -> None:
        """Remove this node's registration for good, if it has one. Raise StorageError."""
        self._withdrawn = True
        if self._self_node is not None:
            await self._store.withdraw(self.node_id)

    async def unregister(self, node_id: NodeId) -> Unregistered:
        """Remove the registration of another node, which must not be alive. Raise StorageError."""
        return await self._store.unregister(node_id)

    async def metadata_log(self, kind: LeaseKind, shard: int) -> MetadataLog:
        """Return how far each live node follows the catalog, and which node holds this lease. Raise StorageError."""
        return await self._store.metadata_log(kind, shard)

    async def finalize(self, levels: Mapping[str, int]) -> None:
        """Set the levels of features for all nodes. This node obeys them when the call returns. Raise StorageError."""
        await self._store.finalize(levels)
        await self.look()

    def _registered(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._returning = False
        self._known_since_s = now_s + (self._ttl_ms / 1000 if len(self._alive) > 1 else 0)
        self._announcements.registered()

    async def _read_alive(self) -> tuple[int, list[Node]]:
        """Read the live nodes. Return the number of this read, for `_take`."""
        self._reads_begun += 1
        number = self._reads_begun
        return number, await self._store.alive()

    def _take(self, number: int, alive: list[Node]) -> None:
        if number < self._read_taken:
            # Reads run concurrently. Older values would hide nodes, and levels of features, that are known already.
            return
        self._read_taken = number
        if alive:
            self._levels = alive[0].levels  # all nodes were read in one statement, so these values are the same for all
        self._read_ms = max((node.read_ms for node in alive), default=self._read_ms)
        others = [node for node in alive if node.node_id != self.node_id]
        before, processes = {node.node_id for node in self._alive}, self._other_processes()
        self._alive = sorted([*others, self.self_node], key=lambda node: node.node_id)
        after = {node.node_id for node in self._alive}
        self._brokers = [node for node in self._alive if node.roles.is_broker]
        self._controllers = [node for node in self._alive if node.roles.is_controller] or self._brokers
        self.has_other_brokers = any(node.node_id != self.node_id for node in self._brokers)
        self.controller_ids = _renewed(self.controller_ids, self._controllers)
        brokers, self.broker_ids = self.broker_ids, _renewed(self.broker_ids, self._brokers)
        if brokers is not self.broker_ids:
            leaders = Leaders(self.broker_ids)
            node_id = self.node_id
            self._leaders = leaders
            self.leads = lambda part: leaders.leader(part) == node_id
            self._placed()
        if before != after or brokers is not self.broker_ids:
            self._changed_s = asyncio.get_running_loop().time()
            logger.info(
                "live nodes", nodes=[f"{node.node_id}={render_listeners(node.listeners)}" for node in self._alive]
            )
        self._compare_authorizers(others)
        self._announcements.nodes_seen(self._alive, bool(processes - self._other_processes()))

    def _other_processes(self) -> set[tuple[NodeId, int]]:
        """Return node ids with incarnations. A node that was killed and returned counts twice; its first process may
        have left appends unannounced."""
        return {(node.node_id, node.incarnation) for node in self._alive if node.node_id != self.node_id}

    def _compare_authorizers(self, others: Sequence[Node]) -> None:
        """Log nodes with another authorizer: clients choose their node, so one would allow what another refuses."""
        differing = {node.node_id: node.authorizer for node in others if node.authorizer != self._authorizer}
        if differing.keys() - self._told_of:
            logger.error(
                "nodes disagree about authorizer.class.name: a node without one permits every request",
                here=self._authorizer,
                others=differing,
            )
        self._told_of = frozenset(differing)


def _renewed(ids: tuple[NodeId, ...], nodes: Sequence[Node]) -> tuple[NodeId, ...]:
    """Return the ids of the nodes. It is the same object as before if the ids have not changed."""
    found = tuple(node.node_id for node in nodes)
    return ids if found == ids else found
