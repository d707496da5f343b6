"""Pass the contents of the catalog to the machines: topics as one value, replaced when they change, and settings.

The one idea: many changes at once (a load, a request that creates a thousand topics) make one new value, before the
next request begins. Unchanged topics stay the same objects, and if none has changed, so does their mapping. The value
also holds the ACLs that decide which topics a client may describe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol
from uuid import UUID

from gateway.coordinator.cluster import Cluster, ClusterTopic, Describing
from gateway.coordinator.settings import Settings
from gateway.groups.settings import group_settings
from gateway.log.catalog import Catalog
from gateway.operate.logs import NO_REQUEST


class Reader(Protocol):
    def settings_changed(self, settings: Settings) -> None: ...

    def cluster_changed(self, cluster: Cluster) -> None: ...


class ClusterFeed:
    """From now on, `reader` gets each change of the catalog before the event loop has run once more."""

    def __init__(
        self, catalog: Catalog, reader: Reader, describing: Callable[[], Describing | None] = lambda: None
    ) -> None:
        """`describing` filters topics by the catalog's ACLs. It is the same object as long as the ACLs are the same."""
        self._catalog = catalog
        self._reader = reader
        self._describing = describing
        self._settings_of: tuple[object, object] | None = None
        self._pending = False
        self._last: Cluster | None = None
        self._read_to = 0
        self._loop = asyncio.get_running_loop()
        catalog.listen(self._mark)
        self._hand_over()

    def _mark(self) -> None:
        if not self._pending:
            self._pending = True
            self._loop.call_soon(self._hand_over, context=NO_REQUEST.copy())

    def _hand_over(self) -> None:
        self._pending = False
        self._hand_over_settings()
        last, changed = self._last, self._catalog.take_changed_topics()
        if last is None:
            last, changed = Cluster(revision=-1), [topic.topic_id for topic in self._catalog.topics()]
        revision = self._newest(last, changed)
        topics, by_id = self._changed(last, changed)
        describing = self._describing()
        if topics is last.topics and revision <= last.revision and describing is last.describing:
            return
        self._last = Cluster(topics, by_id, revision, describing)
        self._reader.cluster_changed(self._last)

    def _newest(self, last: Cluster, topic_ids: Iterable[UUID]) -> int:
        """Return the revision of the newest known change. A topic that this node has just created has a greater one
        than the catalog, which has not read the change yet."""
        read_before, self._read_to = self._read_to, self._catalog.revision
        found = [topic for topic_id in topic_ids if (topic := self._catalog.get_by_id(topic_id)) is not None]
        # After the catalog has forgotten everything, its revision is lower than before.
        revisions = (self._read_to, last.revision if self._read_to >= read_before else -1)
        return max(*revisions, *(topic.changed_revision for topic in found))

    def _changed(
        self, last: Cluster, topic_ids: Iterable[UUID]
    ) -> tuple[Mapping[str, ClusterTopic], Mapping[UUID, ClusterTopic]]:
        """Return the topics, copied if any of these has changed. A change of one topic must not cost a pass over sixty
        thousand."""
        topics, by_id = dict[str, ClusterTopic](), dict[UUID, ClusterTopic]()
        are_copies = False
        for topic_id in topic_ids:
            topic, former = self._catalog.get_by_id(topic_id), last.by_id.get(topic_id)
            count = None if topic is None else len(topic.partitions)
            if count == (None if former is None else former.partition_count):
                continue
            if not are_copies:
                topics, by_id, are_copies = dict(last.topics), dict(last.by_id), True
            if former is not None:
                del by_id[topic_id]
                # Another topic may use the name by now.
                if topics.get(former.name) is former:
                    del topics[former.name]
            if topic is not None:
                topics[topic.name] = by_id[topic_id] = ClusterTopic(topic_id, topic.name, len(topic.partitions))
        if not are_copies:
            return last.topics, last.by_id
        return MappingProxyType(topics), MappingProxyType(by_id)

    def _hand_over_settings(self) -> None:
        made_of = (self._catalog.broker, self._catalog.group_configs)
        last = self._settings_of
        if last is None or last[0] is not made_of[0] or last[1] is not made_of[1]:
            self._settings_of = made_of
            self._reader.settings_changed(group_settings(*made_of))
