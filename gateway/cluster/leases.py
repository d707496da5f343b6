"""The shards that this node may coordinate: a lease with an epoch per shard, held in Postgres and limited by the clock.

The one idea: a lease counts only as long as this node can prove it: from the moment a renewal was *sent*, for the time
to live less a margin. So this node stops before another can begin, in any state of the network. Every write of a group
is fenced by the lease's epoch in Postgres all the same.

Groups are spread over shards as Kafka spreads them over `__consumer_offsets`, and shards over the live nodes as
`placement` says. A node acquires free leases that it should have, and leases that no other node has acquired for a
while. Leases that another node should have are handed over: this node releases the lease, so that clients are sent to
the successor, and reserves it for the successor, which reads the groups before it answers. Shards that are not in use
are handed over together, the others one after the other, and a shard with a rebalance in progress last.

Shards of other kinds are held and handed over the same way; `jobs.py` describes those of jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import lru_cache

import structlog

from gateway.cluster.clock import boot_time_s
from gateway.cluster.membership import Membership
from gateway.cluster.placement import shares
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageError
from storage.nodes import NodeStore
from storage.types import SHARD_COUNTS, CoordinatorLease, LeaseKind, Node, NodeId

logger = structlog.get_logger(__name__)

SHARDS = SHARD_COUNTS[LeaseKind.GROUPS]

GRACE_MS = 2_000
"""Time for which a free lease is reserved for its preferred node. Afterwards any other node may acquire it."""

HAND_OVER_INTERVAL_S = 0.1
"""Interval between two hand-overs of a shard in use. Because of it, few clients look for their coordinator at the same
time.
"""

UNREST_PATIENCE_S = 60.0
"""Longest wait for a shard whose groups never settle. After it the shard is handed over all the same."""


HASHED_CHARS = 1_024
"""Longest id that is hashed whole. Dispatch refuses longer ids (`gateway/net/ids.py`)."""


def shard_of(group_id: str) -> int:
    """Return the shard of a group."""
    return _shard_of(group_id[:HASHED_CHARS])


@lru_cache(maxsize=16_384)
def _shard_of(hashed: str) -> int:
    """Return the shard of groups whose ids begin with this text. The cache is bounded by its number of entries, so it
    must not keep longer texts: a node looks for the coordinator of an id of eight megabytes before it refuses it."""
    return _positive_hash(hashed) % SHARDS


def partition_of(group_id: str, count: int) -> int:
    """Return the partition in which Kafka would keep a group, if `__consumer_offsets` has `count` partitions."""
    return _positive_hash(group_id) % count


def _positive_hash(group_id: str) -> int:
    """Java's String.hashCode over UTF-16 units, made positive (upstream: Utils.abs)."""
    code = 0
    # No client has a longer id, and hashing costs a step on the event loop for each unit.
    units = group_id[:HASHED_CHARS].encode("utf-16-be", "surrogatepass")
    for high, low in zip(units[::2], units[1::2], strict=True):
        code = (31 * code + (high << 8 | low)) & 0xFFFFFFFF
    signed = code - 2**32 if code >= 2**31 else code
    return 0 if signed == -(2**31) else abs(signed)


@dataclass(slots=True)
class _Held:
    lease: CoordinatorLease
    deadline: float
    """Monotonic seconds from which this node no longer relies on the lease."""


class _Shared:
    """Work on Postgres for all concurrent callers. Callers that arrive during a run share the next run, because the
    present one may be too old for them. A run continues if the caller that began it is cancelled."""

    def __init__(self, run: Callable[[], Coroutine[None, None, None]]) -> None:
        self._run = run
        self._begun = 0
        self._turn = asyncio.Lock()
        self._last: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        begun_before = self._begun
        async with self._turn:
            if self._last is None or self._begun == begun_before:
                if self._last is not None and not self._last.done():
                    await asyncio.wait([self._last])
                self._begun += 1
                self._last = asyncio.create_task(self._run())
            await asyncio.shield(self._last)


class Leases:
    """The leases of this node of one kind. `listen` sets the functions that are called when leases
    are gained or lost.
    """

    def __init__(
        self,
        store: NodeStore,
        membership: Membership,
        ttl_ms: int,
        *,
        kind: LeaseKind = LeaseKind.GROUPS,
        monotonic: Callable[[], float] = boot_time_s,
    ) -> None:
        self._store = store
        self._kind = kind
        self._shards = range(SHARD_COUNTS[kind])
        self._membership = membership
        self._ttl_ms = ttl_ms
        self._safe_s = ttl_ms * 0.8 / 1000
        self._monotonic = monotonic
        self._held: dict[int, _Held] = {}
        self._owners: dict[int, Node] = {}
        self._look_up_owners = _Shared(self._read_owners)
        self._pass_for_clients = _Shared(self._pass_with_nodes)
        self._pass = asyncio.Lock()
        self._shares: dict[int, int] = {}
        self._shares_of: tuple[int, ...] = ()
        self._surplus_since: float | None = None
        self._released = False
        self.handed_over = 0
        """Shards that this node has handed over to another node."""
        self._acquired: list[Callable[[CoordinatorLease], None]] = []
        self._lost: list[Callable[[int], None]] = []
        self._in_use: list[Callable[[], set[int]]] = []
        self._in_unrest: list[Callable[[], set[int]]] = []

    def listen(
        self,
        *,
        acquired: Callable[[CoordinatorLease], None] | None = None,
        lost: Callable[[int], None] | None = None,
        in_use: Callable[[], set[int]] | None = None,
        in_unrest: Callable[[], set[int]] | None = None,
    ) -> None:
        """Call `acquired` with each new lease and `lost` with each lost shard from now on. `in_use` returns the shards
        to hand over one by one, and `in_unrest` those of them to hand over last. The listeners need this object
        themselves, so they are made after it and register here."""
        if acquired is not None:
            self._acquired.append(acquired)
        if lost is not None:
            self._lost.append(lost)
        if in_use is not None:
            self._in_use.append(in_use)
        if in_unrest is not None:
            self._in_unrest.append(in_unrest)

    @property
    def held(self) -> int:
        """Number of shards that this node may coordinate at this moment. Any thread may read it."""
        now = self._monotonic()
        return sum(held.deadline > now for held in tuple(self._held.values()))

    def current(self) -> list[CoordinatorLease]:
        """Return the leases on which this node may rely now."""
        now = self._monotonic()
        return [held.lease for held in self._held.values() if held.deadline > now]

    def shard_of(self, group_id: str) -> int:
        return shard_of(group_id)

    def lease_of(self, shard: int) -> CoordinatorLease | None:
        """Return the shard's lease, if this node may rely on it now."""
        held = self._held.get(shard)
        if held is None or held.deadline <= self._monotonic():
            return None
        return held.lease

    def lease_for(self, group_id: str) -> CoordinatorLease | None:
        """Return the lease under which this node coordinates the group. Return None if another node does
        (NOT_COORDINATOR).
        """
        return self.lease_of(shard_of(group_id))

    def coordinator_of(self, group_id: str) -> Node:
        """Return the node that coordinates the group, as far as this node knows. Raise KafkaError
        COORDINATOR_NOT_AVAILABLE while no coordinator is known."""
        if self.lease_for(group_id) is not None:
            return self._membership.self_node
        shard = shard_of(group_id)
        # While a shard has no owner, clients are sent to its next owner, which answers once it has read the groups.
        owner = self._other_owner(shard) or self._successor(shard)
        if owner is None:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"no node holds the lease of shard {shard}")
        return owner

    async def look_up(self, group_ids: Iterable[str]) -> None:
        """Read the coordinators of these groups anew, except of groups that this node coordinates. A read is necessary
        because a stopping node releases its leases long before this node's next pass. A free lease is acquired at once.
        If Postgres does not answer, the last known coordinators remain."""
        shards = {shard_of(group_id) for group_id in group_ids if self.lease_for(group_id) is None}
        if not shards:
            return
        try:
            await self._look_up_owners()
            if any(self._other_owner(shard) is None for shard in shards):
                await self._pass_for_clients()
        except StorageError as error:
            logger.warning("coordinators not refreshed: Postgres does not answer", error=str(error))

    def _successor(self, shard: int) -> Node | None:
        """Return the live node that should have the shard. Return None if that is this node."""
        wanted = self.wanted().get(shard)
        return next(
            (
                node
                for node in self._membership.alive()
                if node.node_id == wanted and wanted != self._membership.node_id
            ),
            None,
        )

    def wanted(self) -> dict[int, int]:
        """Return the live node that should hold each shard."""
        node_ids = self._candidates()
        if node_ids is not self._shares_of:
            self._shares, self._shares_of = shares(self._shards, node_ids), node_ids
        return self._shares

    def _candidates(self) -> tuple[int, ...]:
        """Return the live nodes that should have leases of this kind. The same object is returned until the nodes
        change."""
        of_jobs = self._kind is LeaseKind.JOBS
        return self._membership.controller_ids if of_jobs else self._membership.broker_ids

    def _may_hold(self) -> bool:
        """Return whether this node may hold leases of this kind. Any node may do jobs, because otherwise a cluster
        without a controller would do none."""
        return self._kind is LeaseKind.JOBS or self._membership.roles.is_broker

    def _other_owner(self, shard: int) -> Node | None:
        owner = self._owners.get(shard)
        return None if owner is None or owner.node_id == self._membership.node_id else owner

    async def _read_owners(self) -> None:
        self._owners = await self._store.lease_owners(self._kind)

    async def _pass_with_nodes(self) -> None:
        # The live nodes decide which node should have a shard, so read them first.
        await self._membership.renew()
        await self.renew()

    async def renew(self) -> None:
        """Prolong the leases that this node holds, drop those that it has lost, and acquire free ones. Raise
        StorageError: the leases then end when their time is up."""
        async with self._pass:
            self.drop_lapsed()
            sent = self._monotonic()
            node_id = self._membership.node_id
            if self._held:
                leases = [held.lease for held in self._held.values()]
                self._keep(await self._store.renew_leases(node_id, leases, self._ttl_ms), sent)
            if not self._released and self._may_hold():
                await self._take_free(node_id)
        # Clients do not ask for the owners of jobs.
        if len(self._held) < len(self._shards) and self._kind is not LeaseKind.JOBS:
            await self._look_up_owners()

    async def _take_free(self, node_id: NodeId) -> None:
        wanted = self.wanted()
        missing = [shard for shard in self._shards if shard not in self._held]
        if not missing:
            return
        own = [shard for shard in missing if wanted.get(shard, node_id) == node_id]
        spare = [shard for shard in missing if shard not in own]
        sent = self._monotonic()
        taken = await self._store.acquire_leases(node_id, own, self._ttl_ms, self._kind, spare=spare, grace_ms=GRACE_MS)
        if self._released:
            # This node is stopping by now, so it must not serve these shards.
            await self._store.release_leases(node_id, {lease.shard: None for lease in taken}, self._kind)
            return
        for lease in taken:
            self._held[lease.shard] = _Held(lease, sent + self._safe_s)
            for acquired in self._acquired:
                acquired(lease)

    async def balance(self) -> bool:
        """Hand shards over to the nodes that should have them: all that are not in use, or else one. Return whether
        there are more such shards. Raise StorageError: this node has then given the leases up, and the successors can
        acquire them once they have expired."""
        async with self._pass:
            node_id, wanted = self._membership.node_id, self.wanted()
            surplus = [shard for shard in self._held if wanted.get(shard, node_id) != node_id]
            if not surplus or self._released:
                self._surplus_since = None
                return False
            now = self._monotonic()
            self._surplus_since = now if self._surplus_since is None else self._surplus_since
            moving = _others(surplus, self._in_use)
            if not moving:
                ready = _others(surplus, self._in_unrest)
                if not ready and now - self._surplus_since < UNREST_PATIENCE_S:
                    return True
                moving = (ready or surplus)[:1]
            self._surplus_since = now
            # A lease may come from the node that should have it and that has left since this node last read the live
            # nodes. That node would never acquire it again, so the shard would have no owner for GRACE_MS.
            await self._membership.renew()
            wanted = self.wanted()
            successors = {
                shard: NodeId(wanted[shard])
                for shard in moving
                if shard in self._held and wanted.get(shard, node_id) != node_id
            }
            if not successors or self._released:
                return True
            self._lose(successors)
            await self._store.release_leases(node_id, successors, self._kind)
            self.handed_over += len(successors)
            for shard, successor in successors.items():
                logger.info("shard handed over", kind=self._kind.value, shard=shard, successor=successor)
            return len(surplus) > len(successors)

    async def release(self) -> None:
        """Release every lease at once and acquire none any more, so that other nodes need not wait for the leases to
        expire."""
        self._released = True
        async with self._pass:
            node_id = self._membership.node_id
            others = [node for node in self._candidates() if node != node_id]
            successors = shares(self._shards, others)
            held = list(self._held)
            self._lose(held)
            await self._store.release_leases(
                node_id, {shard: NodeId(successors[shard]) if others else None for shard in held}, self._kind
            )

    def drop_lapsed(self) -> None:
        """Report the leases whose time is up as lost. Call this also while Postgres is away: requests that wait for
        their group are then answered, and their clients look for the new coordinator."""
        now = self._monotonic()
        self._lose([shard for shard, held in self._held.items() if held.deadline <= now])

    def forget(self) -> None:
        """Forget all leases and their owners."""
        self._owners.clear()
        self._lose(list(self._held))

    def _keep(self, renewed: Iterable[CoordinatorLease], sent: float) -> None:
        kept: set[int] = set()
        for lease in renewed:
            held = self._held.get(lease.shard)
            if held is not None and held.lease.lease_epoch == lease.lease_epoch:
                held.deadline = sent + self._safe_s
                kept.add(lease.shard)
        self._lose([shard for shard in self._held if shard not in kept])

    def _lose(self, shards: Iterable[int]) -> None:
        for shard in shards:
            del self._held[shard]
            for lost in self._lost:
                lost(shard)


def _others(shards: Iterable[int], sets: Iterable[Callable[[], set[int]]]) -> list[int]:
    """Return the shards that none of the functions returns."""
    excluded = set[int]().union(*(each() for each in sets))
    return [shard for shard in shards if shard not in excluded]
