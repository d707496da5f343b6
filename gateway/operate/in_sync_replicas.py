"""The job that writes down who is in sync of partitions whose nodes have been named, on the node with its lease.

The one idea: level-triggered. A pass looks at who is alive and at the catalog, and makes each partition what
`cluster/in_sync.py` says it should be; nobody remembers who died in what order. What it writes stands only where the
partition is still as it knew it, under the job's lease, so a node that was asleep overwrites nothing. At
`eligible.leader.replicas.version` 1 nobody asks who is in sync, and a pass has all forgotten who was not, so that the
way back to 0 begins with all.
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
"""Partitions that are written by one transaction: it holds up changes of the catalog, and appends to all of them behind
one to any."""

Followed = dict[tuple[UUID, int], tuple[Assignment, tuple[int, ...] | None]]
"""Topic and index of a partition → as it was known, and who is to be in sync of it."""


class InSyncReplicas:
    """`run` is a pass."""

    def __init__(
        self,
        store: TopicStore,
        catalog: Catalog,
        leaders: Callable[[], Leaders],
        lease: Callable[[], CoordinatorLease | None],
        knows: Callable[[], bool] = lambda: True,
    ) -> None:
        """`knows`: whether who is missing is gone, and not merely later than this node after an outage of all."""
        self._store = store
        self._catalog = catalog
        self._leaders = leaders
        self._lease = lease
        self._knows = knows
        self._settled: tuple[Leaders, int] | None = None

    async def run(self) -> None:
        """Until every partition is as it should be, or the lease is gone. Raises StorageError."""
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
        """What was no longer as it was known is left to the next pass."""
        lease = self._lease()
        if lease is None:
            return
        async for topic in in_pieces(await self._store.set_in_sync(changed, lease)):
            self._catalog.apply(topic)
        logger.info("replicas in sync are others", partitions=len(changed))

    async def _forget(self) -> None:
        while (lease := self._lease()) is not None:
            topics = await self._store.forget_in_sync(FOLLOWED_AT_ONCE, lease)
            async for topic in in_pieces(topics):
                self._catalog.apply(topic)
            if not topics:
                return
