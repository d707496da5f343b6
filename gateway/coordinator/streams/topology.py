"""What a topology makes of the cluster's topics: tasks of each subtopology, and internal topics that are missing.

The one idea: topology and topics in, `Configured` out. A topology names its sources; how many partitions a repartition
topic has follows from what is written into it, and how many a changelog has from its tasks. Follows upstream's
InternalTopicManager, with the same order of checks: sources that are missing, then repartition topics, copartitioning,
changelogs, and at last what exists with another number of partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from gateway.coordinator.cluster import Cluster


class StatusCode(IntEnum):
    """Upstream's StreamsGroupHeartbeatResponse.Status."""

    STALE_TOPOLOGY = 0
    MISSING_SOURCE_TOPICS = 1
    INCORRECTLY_PARTITIONED_TOPICS = 2
    MISSING_INTERNAL_TOPICS = 3
    SHUTDOWN_APPLICATION = 4
    ASSIGNMENT_DELAYED = 5


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """An internal topic as the topology wants it."""

    name: str
    partitions: int = 0
    """0: follows from the topology."""
    replication_factor: int = 0
    """0: the broker's default."""
    topic_configs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Subtopology:
    subtopology_id: str
    source_topics: tuple[str, ...] = ()
    repartition_sink_topics: tuple[str, ...] = ()
    state_changelog_topics: tuple[TopicInfo, ...] = ()
    repartition_source_topics: tuple[TopicInfo, ...] = ()
    copartition_groups: tuple[frozenset[str], ...] = ()
    """Names of topics that must have the same number of partitions."""

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.source_topics, *(topic.name for topic in self.repartition_source_topics))


@dataclass(frozen=True, slots=True)
class Topology:
    epoch: int = 0
    subtopologies: tuple[Subtopology, ...] = ()

    @property
    def required_topics(self) -> frozenset[str]:
        """All topics on whose partitions the tasks depend."""
        return frozenset(
            name
            for each in self.subtopologies
            for name in (*each.sources, *(topic.name for topic in each.state_changelog_topics))
        )


@dataclass(frozen=True, slots=True)
class Configured:
    """`task_counts` is empty unless the topology is ready to run."""

    task_counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Subtopology → number of its tasks."""
    missing: tuple[TopicInfo, ...] = ()
    """Internal topics to be created, with their number of partitions."""
    status: StatusCode | None = None
    """What stands in the way."""
    detail: str = ""

    @property
    def is_ready(self) -> bool:
        return self.status is None


class InvalidTopologyError(ValueError):
    """No cluster's topics could make this topology run (STREAMS_INVALID_TOPOLOGY)."""


class _UnusableError(Exception):
    def __init__(self, status: StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def configure(topology: Topology, cluster: Cluster) -> Configured:
    """Raises InvalidTopologyError where numbers of partitions depend on each other in a circle, or on nothing."""
    try:
        return _configured(topology, cluster)
    except _UnusableError as unusable:
        return Configured(status=unusable.status, detail=unusable.detail)


def _configured(topology: Topology, cluster: Cluster) -> Configured:
    _check_sources(topology, cluster)
    counts = _Counts(cluster)
    _decide_repartition_topics(topology, counts)
    _enforce_copartitioning(topology, counts)
    task_counts: dict[str, int] = {}
    internal: dict[str, TopicInfo] = {}
    for each in topology.subtopologies:
        if not each.sources:
            raise InvalidTopologyError(f"subtopology {each.subtopology_id} reads no topic")
        task_counts[each.subtopology_id] = max(counts.of(name) for name in each.sources)
        for topic in each.state_changelog_topics:
            # A topic that is read as well may be its own changelog: it has the partitions that it has.
            counts.decided.setdefault(topic.name, task_counts[each.subtopology_id])
        for topic in (*each.repartition_source_topics, *each.state_changelog_topics):
            internal[topic.name] = TopicInfo(
                topic.name, counts.decided[topic.name], topic.replication_factor, topic.topic_configs
            )
    for name, topic in sorted(internal.items()):
        existing = cluster.topics.get(name)
        if existing is not None and existing.partition_count != topic.partitions:
            raise _UnusableError(
                StatusCode.INCORRECTLY_PARTITIONED_TOPICS,
                f"Topic {name} has {existing.partition_count} partitions, the topology needs {topic.partitions}.",
            )
    missing = tuple(topic for name, topic in sorted(internal.items()) if name not in cluster.topics)
    if missing:
        detail = f"Internal topics are missing: {_named(topic.name for topic in missing)}"
        return Configured(missing=missing, status=StatusCode.MISSING_INTERNAL_TOPICS, detail=detail)
    return Configured(task_counts)


def _check_sources(topology: Topology, cluster: Cluster) -> None:
    named = {name for each in topology.subtopologies for name in each.source_topics}
    missing = sorted(name for name in named if name not in cluster.topics)
    if missing:
        detail = f"Source topics {_named(missing)} are missing."
        raise _UnusableError(StatusCode.MISSING_SOURCE_TOPICS, detail)


class _Counts:
    """Numbers of partitions: those of topics that exist, else those that were decided."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.decided: dict[str, int] = {}

    def find(self, name: str) -> int | None:
        topic = self._cluster.topics.get(name)
        return self.decided.get(name) if topic is None else topic.partition_count

    def of(self, name: str) -> int:
        found = self.find(name)
        if found is None:
            raise InvalidTopologyError(f"nothing says how many partitions {name} has")
        return found


def _decide_repartition_topics(topology: Topology, counts: _Counts) -> None:
    """Those that name their number have it; each other has as many partitions as the widest subtopology that writes
    to it has tasks. Each round settles at least one, so there are no more rounds than topics."""
    open_: set[str] = set()
    for each in topology.subtopologies:
        for topic in each.repartition_source_topics:
            if topic.partitions:
                counts.decided[topic.name] = topic.partitions
            else:
                open_.add(topic.name)
    writers: dict[str, list[Subtopology]] = {name: [] for name in open_}
    for each in topology.subtopologies:
        for name in each.repartition_sink_topics:
            if name in writers:
                writers[name].append(each)
    while open_:
        settled = _settled(open_, writers, counts, all_known=True)
        if not settled:
            # A subtopology may read what it writes: what else it reads decides.
            settled = _settled(open_, writers, counts, all_known=False)
        if not settled:
            raise InvalidTopologyError(
                f"the numbers of partitions of {_named(sorted(open_))} follow from nothing: is there a loop?"
            )
        counts.decided.update(settled)
        open_ -= settled.keys()


def _settled(
    open_: Iterable[str], writers: Mapping[str, list[Subtopology]], counts: _Counts, *, all_known: bool
) -> dict[str, int]:
    """Those of the topics whose number of partitions follows from what is known so far."""
    settled: dict[str, int] = {}
    for name in open_:
        widths = [_width(writer, counts, all_known=all_known) for writer in writers[name]]
        known = [width for width in widths if width]
        if known and (len(known) == len(widths) or not all_known):
            settled[name] = max(known)
    return settled


def _width(subtopology: Subtopology, counts: _Counts, *, all_known: bool) -> int:
    """How many tasks it has; 0 while that is open: where not `all_known` of its sources are, or none is. A repartition
    topic that exists has the number that it shall have all the same, for it may be wrong."""
    widths = [
        counts.decided.get(topic.name) if not topic.partitions else topic.partitions
        for topic in subtopology.repartition_source_topics
    ]
    widths += [counts.find(name) for name in subtopology.source_topics]
    known = [width for width in widths if width is not None]
    return max(known, default=0) if len(known) == len(widths) or not all_known else 0


def _enforce_copartitioning(topology: Topology, counts: _Counts) -> None:
    """Source topics of one group must agree, and repartition topics that name their number with them; the others of
    the group follow."""
    repartition = {topic.name: topic for each in topology.subtopologies for topic in each.repartition_source_topics}
    for each in topology.subtopologies:
        for group in each.copartition_groups:
            sources = sorted(name for name in group if name not in repartition)
            fixed = sorted(name for name in group if name in repartition and repartition[name].partitions)
            flexible = [name for name in group if name in repartition and not repartition[name].partitions]
            given = {name: counts.of(name) for name in sources} | {name: counts.decided[name] for name in fixed}
            if len(set(given.values())) > 1:
                told = ", ".join(f"{name} ({count})" for name, count in given.items())
                raise _UnusableError(
                    StatusCode.INCORRECTLY_PARTITIONED_TOPICS,
                    f"Topics that are read together have different numbers of partitions: {told}.",
                )
            if flexible:
                number = next(iter(given.values()), None) or max(counts.decided[name] for name in flexible)
                counts.decided.update(dict.fromkeys(flexible, number))


MAX_NAMED = 10


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more
