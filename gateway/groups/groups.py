"""The groups that this node coordinates: which machines run them, where they are stored, and which parts receive their
facts.

The one idea: everything here is choice and wiring. `runtime.py` plays a machine, and `kinds.py` lists the machines.
Offsets never pass through a slot: see `offset_committer.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import structlog

from gateway.cluster.clock import wall_ms
from gateway.cluster.leases import Leases, shard_of
from gateway.coordinator.classic.model import Group
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.facts import Fact, PartitionsWithheld, ProtocolViolated, RebalanceBegun, TransactionCommitted
from gateway.coordinator.handoff import FORCED, HandoffEnded
from gateway.coordinator.machine import Machines, Summary
from gateway.coordinator.settings import Settings
from gateway.groups.journal import Journal
from gateway.groups.kinds import MACHINES, AnyGroup
from gateway.groups.offset_committer import OffsetCommitter
from gateway.groups.records import GroupRecords
from gateway.groups.runtime import BOUNDS, Bounds, Runtime
from gateway.log.topic_names import CONSUMER_OFFSETS
from gateway.net.pieces import in_pieces
from gateway.net.shared_read import SharedRead
from protocol.errors import KafkaError
from storage.groups import GroupStore
from storage.offsets import OffsetStore
from storage.types import GroupRecord, Node

logger = structlog.stdlib.get_logger(__name__)

STORE_PATIENCE_MS = 15_000
"""How long a read or write is tried again before its callers get an error."""
MAX_FACTS_LOGGED = 20
UNREST = frozenset({"PreparingRebalance", "CompletingRebalance"})
"""States of a join phase that exists only in memory."""


class Groups(Runtime[AnyGroup, Settings, GroupRecord]):
    """The consumer groups of every type on this node."""

    def __init__(
        self,
        store: GroupStore,
        offsets: OffsetStore,
        leases: Leases,
        settings: Settings,
        *,
        machines: Machines[AnyGroup, Settings] = MACHINES,
        store_patience_ms: int = STORE_PATIENCE_MS,
        count_rebalance: Callable[[], None] = lambda: None,
        count_violation: Callable[[str], None] = lambda _violation: None,
        count_withheld: Callable[[int], None] = lambda _partitions: None,
        count_handoff: Callable[[str, bool, int], None] = lambda _reason, _forced, _waited_ms: None,
        journal: Journal | None = None,
        cluster_ms: Callable[[], int] = wall_ms,
        begun: bool = True,
        bounds: Bounds = BOUNDS,
    ) -> None:
        self.offset_committer = OffsetCommitter(offsets)
        self._group_records = GroupRecords(store, machines, store_patience_ms, cluster_ms)
        self._stored = SharedRead(self._group_records.list)
        self._leases = leases
        self._count_rebalance = count_rebalance
        self._count_violation = count_violation
        self._count_withheld = count_withheld
        self._count_handoff = count_handoff
        self.journal = journal
        """The journal. None if this node writes no journal."""
        self.readers: list[Callable[[str, tuple[Fact, ...]], None]] = []
        """Functions that are called with a group's id and the facts of a step. The step is settled, but no member has
        been answered yet. If the facts are empty, the group was only read.
        """
        super().__init__(machines, self._group_records, leases, settings, self._happened, begun=begun, bounds=bounds)

    def cluster_changed(self, cluster: Cluster) -> None:
        """Handle the change as `Runtime.cluster_changed` does. Group coordinators exist from the moment their topic
        exists."""
        if CONSUMER_OFFSETS in cluster.topics:
            self.begin()
        super().cluster_changed(cluster)

    def summary(self, group: AnyGroup) -> Summary:
        return self._machines.of(group).summary(group)

    def as_stored(self, record: GroupRecord) -> AnyGroup:
        """Return the value of a row, as its machine would continue with it now. For read-only use; thread-safe."""
        return self._group_records.restored(record, 0, self.settings)

    async def list(self) -> list[Summary]:
        """Return the summaries of all groups that this node coordinates.

        Groups that are not in memory have only the values of their columns. Raise StorageUnavailable.
        """
        listed = {
            group_id: Summary(group_id, group_type, True, state, protocol_type or "", 0, 0, None, False)
            async for group_id, group_type, protocol_type, state in in_pieces(await self._stored.get())
            if self.lease_for(group_id) is not None
        }
        async for slot in in_pieces(list(self._slots.values())):
            summary = self._machines.of(slot.group).summary(slot.group)
            if summary.exists:
                listed[slot.group_id] = summary
        return list(listed.values())

    async def ids(self) -> set[str]:
        """Return the id of every group: including stored groups of which this node has no lease, and ids in memory
        whose group is still being read and may not exist. Raise StorageUnavailable.
        """
        return {group_id async for group_id, *_ in in_pieces(await self._stored.get())} | set(self.group_ids())

    def in_use(self, shard: int) -> list[Summary]:
        """Return the shard's groups with members or pending ids, as last settled. Offset expiry needs facts that are
        not stored: the topics that a Stable group reads, and whether a rebalance is in progress."""
        groups = [slot.group for slot in self._slots.values() if slot.lease.shard == shard]
        machines = self._machines
        return [machines.of(group).summary(group) for group in groups if not machines.of(group).is_idle(group)]

    def shards_in_use(self) -> set[int]:
        """Return the shards with a group in memory or being read. Few clients look for the coordinators of others."""
        return {slot.lease.shard for slot in self._slots.values()} | self.shards_loading

    def shards_in_unrest(self) -> set[int]:
        """Return the shards with a group that is being rebalanced, stored or read. They are handed over last."""
        return self.shards_where(lambda group: self._machines.of(group).summary(group).state in UNREST)

    async def coordinators_of(self, group_ids: Sequence[str]) -> list[Node | KafkaError]:
        """Return the coordinators of the groups as Postgres has them now; COORDINATOR_NOT_AVAILABLE if no node holds
        the shard."""
        async for group_id in in_pieces(group_ids):
            # To hash a long id takes a tenth of a millisecond. `shard_of` remembers the result for the calls below.
            shard_of(group_id)
        await self._leases.look_up(group_ids)
        found: list[Node | KafkaError] = []
        for group_id in group_ids:
            try:
                found.append(self._leases.coordinator_of(group_id))
            except KafkaError as refused:
                found.append(refused)
        return found

    def awaited_partitions(self) -> int:
        """Number of partitions whose new owner waits for the old owner."""
        groups = self.in_memory()
        classic = sum(each.is_pending for group in groups if isinstance(group, Group) for each in group.handoffs)
        return classic + sum(
            each.target is not None
            for group in groups
            if isinstance(group, ConsumerGroup)
            for each in group.moving.values()
        )

    def half_way(self) -> int:
        """Number of groups in which some members still use the eager protocol and others the cooperative one."""
        return sum(group.watch.half_way for group in self.in_memory() if isinstance(group, Group))

    async def drain(self, timeout_s: float = 3.0, also: Sequence[Awaitable[None]] = ()) -> None:
        """Drain as `Runtime.drain` does, and finish offset commits in progress."""
        await super().drain(timeout_s, (*also, self.offset_committer.drain()))

    def told(self, group_id: str, facts: tuple[Fact, ...]) -> None:
        """Pass facts about a group, or about what was stored for it, to their readers."""
        for read in self.readers:
            read(group_id, facts)

    def noticed(self, group_id: str, fact: ProtocolViolated) -> None:
        """Record a violation that was observed outside the group's steps."""
        group = self.settled(group_id)
        if group is not None:
            self._happened(group, group, (fact,))

    def transaction_committed(self, group_id: str) -> None:
        """Note that a transaction that this node has ended has made offsets of the group durable. If another node
        coordinates the group, that coordinator finds them by itself."""
        if self.readers and self.lease_for(group_id) is not None:
            self.told(group_id, (TransactionCommitted(),))

    def _happened(self, before: AnyGroup, after: AnyGroup, facts: tuple[Fact, ...]) -> None:
        """Turn facts into rows of the journal, log lines and metrics."""
        if self.journal is not None:
            self.journal.happened(before, after, facts)
        if not facts:
            self.told(self._machines.of(after).summary(after).group_id, ())
            return
        for fact in facts:
            self._count(fact)
        was, now = self._machines.of(before).summary(before), self._machines.of(after).summary(after)
        self.told(now.group_id, facts)
        for fact in facts:
            if isinstance(fact, ProtocolViolated | PartitionsWithheld):
                logger.warning(
                    "group observed", group_id=now.group_id, generation_id=fact.generation_id, seen=str(fact)
                )
            elif isinstance(fact, HandoffEnded) and fact.reason in FORCED:
                logger.warning(
                    "handoff forced", group_id=now.group_id, generation_id=fact.generation_id, handoff=str(fact)
                )
        moved = (was.group_type, was.state, was.generation_id) != (now.group_type, now.state, now.generation_id)
        level = logging.INFO if moved else logging.DEBUG
        told = [str(fact) for fact in facts[:MAX_FACTS_LOGGED]]
        if len(facts) > MAX_FACTS_LOGGED:
            told.append(f"and {len(facts) - MAX_FACTS_LOGGED} more")
        logger.log(
            level,
            "group moved" if moved else "group changed",
            group_id=now.group_id,
            state=now.state,
            generation_id=now.generation_id,
            members=now.member_count,
            facts=told,
        )

    def _count(self, fact: Fact) -> None:
        if isinstance(fact, RebalanceBegun):
            self._count_rebalance()
        elif isinstance(fact, ProtocolViolated):
            self._count_violation(fact.violation.name.lower())
        elif isinstance(fact, PartitionsWithheld):
            self._count_withheld(fact.partition_count)
        elif isinstance(fact, HandoffEnded):
            self._count_handoff(fact.reason.value, fact.reason in FORCED, fact.waited_ms)
