"""The catalog's topics as the values that machines are given.

The one idea: changes are gathered for one turn of the event loop, so that a load of the whole catalog is one snapshot;
topics that have not changed stay the same objects. Settings of topics are nothing that a machine knows, so a change of
those is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import MappingProxyType

from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.log.catalog import Catalog
from gateway.operate.logs import NO_REQUEST


class ClusterView:
    """Calls `publish` at once, and with another snapshot after each change of `catalog`."""

    def __init__(self, catalog: Catalog, publish: Callable[[Cluster], None]) -> None:
        self._catalog = catalog
        self._publish = publish
        self._due = False
        self._cluster = Cluster()
        self._loop = asyncio.get_running_loop()
        catalog.changed = self._changed
        self._look()

    def _changed(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._look, context=NO_REQUEST.copy())

    def _look(self) -> None:
        self._due = False
        known = self._cluster.by_id
        topics: dict[str, ClusterTopic] = {}
        for topic in self._catalog.topics():
            former = known.get(topic.topic_id)
            if former is not None and former.partition_count == len(topic.partitions):
                topics[topic.name] = former
            else:
                topics[topic.name] = ClusterTopic(topic.topic_id, topic.name, len(topic.partitions))
        if topics != self._cluster.topics:
            by_id = {topic.topic_id: topic for topic in topics.values()}
            self._cluster = Cluster(MappingProxyType(topics), MappingProxyType(by_id))
            self._publish(self._cluster)
