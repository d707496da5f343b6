"""Hands what the catalog holds to the machines: topics as one value, another once they have changed, and settings.

The one idea: many changes at once (a load, a request that creates a thousand topics) make one new value, before the
next request is begun; topics that have not changed stay the same objects, and where none has, so does their mapping.
"""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import Protocol

from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.model import Settings
from gateway.groups.settings import group_settings
from gateway.log.catalog import Catalog
from gateway.operate.logs import NO_REQUEST


class Reader(Protocol):
    settings: Settings

    def cluster_changed(self, cluster: Cluster) -> None: ...


class ClusterFeed:
    """From its making on, `reader` is up to date whenever the loop has turned after a change of the catalog."""

    def __init__(self, catalog: Catalog, reader: Reader) -> None:
        self._catalog = catalog
        self._reader = reader
        self._settings_of: tuple[object, object] | None = None
        self._pending = False
        self._last: Cluster | None = None
        self._loop = asyncio.get_running_loop()
        catalog.changed = self._mark
        self._hand_over()

    def _mark(self) -> None:
        if not self._pending:
            self._pending = True
            self._loop.call_soon(self._hand_over, context=NO_REQUEST.copy())

    def _hand_over(self) -> None:
        self._pending = False
        self._hand_over_settings()
        revision, last = self._catalog.revision, self._last
        known = Cluster().by_id if last is None else last.by_id
        topics: dict[str, ClusterTopic] = {}
        for topic in self._catalog.topics():
            former = known.get(topic.topic_id)
            if former is not None and former.partition_count == len(topic.partitions):
                topics[topic.name] = former
            else:
                topics[topic.name] = ClusterTopic(topic.topic_id, topic.name, len(topic.partitions))
        if last is None or last.topics != topics:
            by_id = {topic.topic_id: topic for topic in topics.values()}
            self._last = Cluster(MappingProxyType(topics), MappingProxyType(by_id), revision)
        elif revision > last.revision:
            self._last = Cluster(last.topics, last.by_id, revision)
        else:
            return
        self._reader.cluster_changed(self._last)

    def _hand_over_settings(self) -> None:
        made_of = (self._catalog.broker, self._catalog.group_configs)
        last = self._settings_of
        if last is None or last[0] is not made_of[0] or last[1] is not made_of[1]:
            self._settings_of = made_of
            self._reader.settings = group_settings(*made_of)
