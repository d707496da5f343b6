"""The job that stores the in-sync replicas of partitions with assigned nodes, on the node that holds its lease.

The one idea: level-triggered. A pass reads which nodes are alive and the catalog, and gives each partition the in-sync
set that `cluster/in_sync.py` computes. No memory of the order in which nodes died is needed. A write takes effect only
if the partition is unchanged since it was read, under the job's lease, so a node that was suspended overwrites nothing.
At `eligible.leader.replicas.version` 1 the in-sync sets are unused. A pass then forgets which nodes were out of sync,
so that a return to 0 begins with all nodes in sync.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import structlog

from gateway.cluster.in_sync import followed
from gateway.cluster.placement import Leaders
from gateway.log.catalog import Catalog
from gateway.net.pieces import in_pieces
from storage.topics import TopicStore
from storage.types import Assignment, CoordinatorLease

logger = structlog.get_logger(__name__)

FOLLOWED_AT_ONCE = 100
"""Partitions written in one transaction. It blocks changes of the catalog. While it waits for an append to one of its
partitions, appends to all of them wait."""

Followed = dict[tuple[UUID, int], tuple[Assignment, tuple[int, ...] | None]]
"""Topic and index of a partition → its assignment as read, and its new in-sync nodes."""


class InSyncReplicas:
    """The job on one node. `run` is a pass."""

    def __init__(
        self,
        store: TopicStore,
        catalog: Catalog,
        leaders: Callable[[], Leaders],
        lease: Callable[[], CoordinatorLease | None],
        knows: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take the job's parts. `knows` returns whether a missing node is gone. After an outage of all nodes, a
        missing node may merely start later than this one."""
        self._store = store
        self._catalog = catalog
        self._leaders = leaders
        self._lease = lease
        self._knows = knows
        self._settled: tuple[Leaders, int] | None = None

    async def run(self) -> None:
        """Run until every partition is as it should be, or the lease is gone. Raise StorageError."""
        leaders = self._leaders()
        if not leaders.only_in_sync:
            await self._forget()
            return
        if not self._knows():
            return
        await self._catalog.refresh_if_changed()
        before = leaders, self._catalog.revision
        if before == self._settled:
            return
        alive = frozenset(leaders.node_ids)
        changed: Followed = {}
        settled = True
        async for topic in in_pieces(self._catalog.topics()):
            unclean = self._catalog.config(topic).unclean_leader_election_enable
            async for partition in in_pieces(topic.partitions):
                known = partition.assignment
                if known is None:
                    continue
                in_sync = followed(known, alive, unclean=unclean)
                if in_sync != known.in_sync:
                    settled = False
                    changed[topic.topic_id, partition.partition_index] = known, in_sync
                    if len(changed) == FOLLOWED_AT_ONCE:
                        await self._write(changed)
                        changed = {}
        if changed:
            await self._write(changed)
        if settled:
            self._settled = before

    async def _write(self, changed: Followed) -> None:
        """Store the changes. A partition that has changed since it was read is left to the next pass."""
        lease = self._lease()
        if lease is None:
            return
        async for topic in in_pieces(await self._store.set_in_sync(changed, lease)):
            self._catalog.apply(topic)
        logger.info("in-sync replicas changed", partitions=len(changed))

    async def _forget(self) -> None:
        while (lease := self._lease()) is not None:
            topics = await self._store.forget_in_sync(FOLLOWED_AT_ONCE, lease)
            async for topic in in_pieces(topics):
                self._catalog.apply(topic)
            if not topics:
                return
