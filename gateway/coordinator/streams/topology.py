"""Comparison of a topology with the cluster's topics: tasks of each subtopology, and missing internal topics.

The one idea: topology and topics in, `Configured` out. A topology names its sources. The number of partitions of a
repartition topic follows from the subtopologies that write to it, and that of a changelog from its tasks. Follows
upstream's InternalTopicManager, with the same order of checks: missing sources, repartition topics, copartitioning,
changelogs, and last the topics that exist with another number of partitions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.streams.tasks import Task
from protocol.shown import shown


class StatusCode(IntEnum):
    """Upstream's StreamsGroupHeartbeatResponse.Status."""

    STALE_TOPOLOGY = 0
    MISSING_SOURCE_TOPICS = 1
    INCORRECTLY_PARTITIONED_TOPICS = 2
    MISSING_INTERNAL_TOPICS = 3
    SHUTDOWN_APPLICATION = 4
    ASSIGNMENT_DELAYED = 5


MAX_TASKS = 20_000
"""Limit of one group: its tasks are assigned and stored in one step."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """An internal topic with the properties that the topology demands."""

    name: str
    partitions: int = 0
    """Number of partitions. 0 if it follows from the topology."""
    replication_factor: int = 0
    """Replication factor. 0 means the broker's default."""
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

    @property
    def sources_of(self) -> dict[str, tuple[str, ...]]:
        """Maps each subtopology to the topics that its tasks read, each once."""
        return {each.subtopology_id: tuple(dict.fromkeys(each.sources)) for each in self.subtopologies}


def partitions_read(
    tasks: Iterable[Task], sources_of: Mapping[str, Sequence[str]], partition_count_of: Callable[[str], int]
) -> dict[str, set[int]]:
    """Return topic → partitions. Each task reads the partition of its number in every source topic that has one. So
    the first tasks read a topic of few partitions, and the others skip it."""
    indexes: dict[str, list[int]] = {}
    for subtopology_id, index in sorted(tasks):
        indexes.setdefault(subtopology_id, []).append(index)
    read: dict[str, set[int]] = {}
    for subtopology_id, numbers in indexes.items():
        for name in sources_of.get(subtopology_id, ()):
            first = numbers[: bisect_left(numbers, partition_count_of(name))]
            if first:
                read.setdefault(name, set()).update(first)
    return read


@dataclass(frozen=True, slots=True)
class Configured:
    """Result of the comparison. `task_counts` is empty unless the topology is ready to run."""

    task_counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Maps each subtopology to its number of tasks."""
    missing: tuple[TopicInfo, ...] = ()
    """Internal topics to be created, with their number of partitions."""
    status: StatusCode | None = None
    """Reason why the topology cannot run."""
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
    """Compare the topology with the topics. Raise InvalidTopologyError if numbers of partitions depend on each other
    in a circle, or on nothing."""
    try:
        return _configured(topology, cluster)
    except _UnusableError as unusable:
        return Configured(status=unusable.status, detail=unusable.detail)


def _configured(topology: Topology, cluster: Cluster) -> Configured:
    _check_numbers(topology)
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
            # A topic that is also read may be its own changelog: it keeps its number of partitions.
            counts.decided.setdefault(topic.name, task_counts[each.subtopology_id])
        for topic in (*each.repartition_source_topics, *each.state_changelog_topics):
            internal[topic.name] = TopicInfo(
                topic.name, counts.decided[topic.name], topic.replication_factor, topic.topic_configs
            )
    if sum(task_counts.values()) > MAX_TASKS:
        raise _UnusableError(
            StatusCode.INCORRECTLY_PARTITIONED_TOPICS,
            f"The topology has {sum(task_counts.values())} tasks, a group may have {MAX_TASKS}.",
        )
    for name, topic in sorted(internal.items()):
        existing = cluster.topics.get(name)
        if existing is not None and existing.partition_count != topic.partitions:
            raise _UnusableError(
                StatusCode.INCORRECTLY_PARTITIONED_TOPICS,
                f"Topic {shown(name)} has {existing.partition_count} partitions, "
                f"the topology needs {topic.partitions}.",
            )
    missing = tuple(topic for name, topic in sorted(internal.items()) if name not in cluster.topics)
    if missing:
        detail = f"Internal topics are missing: {_named(topic.name for topic in missing)}"
        return Configured(missing=missing, status=StatusCode.MISSING_INTERNAL_TOPICS, detail=detail)
    return Configured(task_counts)


def _check_numbers(topology: Topology) -> None:
    for each in topology.subtopologies:
        for topic in each.repartition_source_topics:
            if topic.partitions < 0:
                raise InvalidTopologyError(f"repartition topic {topic.name} has {topic.partitions} partitions")


def _check_sources(topology: Topology, cluster: Cluster) -> None:
    named = {name for each in topology.subtopologies for name in each.source_topics}
    missing = sorted(name for name in named if name not in cluster.topics)
    if missing:
        detail = f"Source topics {_named(missing)} are missing."
        raise _UnusableError(StatusCode.MISSING_SOURCE_TOPICS, detail)


class _Counts:
    """Numbers of partitions: those of existing topics, otherwise those that were decided."""

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


@dataclass(slots=True)
class _Flow:
    """A subtopology while its number of tasks becomes known."""

    width: int
    """The largest number of partitions among those sources whose number is known; 0 if all are unknown."""
    unknown: int
    """Number of source topics whose number of partitions is not known yet."""
    sinks: tuple[str, ...]
    """Topics to which the subtopology writes and whose number of partitions is not known yet."""

    @property
    def is_decided(self) -> bool:
        return self.width > 0 and not self.unknown


def _decide_repartition_topics(topology: Topology, counts: _Counts) -> None:
    """Decide the repartition topics. A topic that names its number has it. Each other topic has as many partitions
    as the widest subtopology that writes to it has tasks. Each is settled once and passed on to its readers, so the
    cost grows with the size of the topology only."""
    for each in topology.subtopologies:
        for topic in each.repartition_source_topics:
            counts.decided[topic.name] = topic.partitions or counts.decided.get(topic.name, 0)
    open_ = {name for name, partitions in counts.decided.items() if not partitions}
    for name in open_:
        del counts.decided[name]
    readers: dict[str, list[_Flow]] = {name: [] for name in open_}
    writers: dict[str, list[_Flow]] = {name: [] for name in open_}
    for each in topology.subtopologies:
        flow, sources = _flow(each, counts, open_)
        for name in sources:
            readers[name].append(flow)
        for name in flow.sinks:
            writers[name].append(flow)
    awaits = {name: sum(not flow.is_decided for flow in flows) for name, flows in writers.items()}
    ready = [name for name, flows in writers.items() if flows and not awaits[name]]
    # Something is known about these already: a subtopology may read what it writes, and its other sources then decide.
    begun = {name for name, flows in writers.items() if any(flow.width for flow in flows)}
    while open_:
        settled = {name: max(flow.width for flow in writers[name]) for name in ready or begun}
        if not settled:
            raise InvalidTopologyError(
                f"the numbers of partitions of {_named(sorted(open_))} follow from nothing: is there a loop?"
            )
        counts.decided.update(settled)
        open_.difference_update(settled)
        begun.difference_update(settled)
        ready = list[str]()
        for name, count in settled.items():
            for flow in readers[name]:
                if not flow.width:
                    begun.update(open_.intersection(flow.sinks))
                flow.width = max(flow.width, count)
                flow.unknown -= 1
                if flow.is_decided:
                    for sink in open_.intersection(flow.sinks):
                        awaits[sink] -= 1
                        if not awaits[sink]:
                            ready.append(sink)


def _flow(subtopology: Subtopology, counts: _Counts, open_: set[str]) -> tuple[_Flow, set[str]]:
    """Return the flow of the subtopology, and its open sources. The number of an existing repartition topic is
    decided too, because it may be wrong."""
    repartition = {topic.name for topic in subtopology.repartition_source_topics}
    known = [counts.decided[name] for name in repartition - open_]
    known += [count for name in subtopology.source_topics if (count := counts.find(name)) is not None]
    sinks = tuple(open_.intersection(subtopology.repartition_sink_topics))
    return _Flow(max(known, default=0), len(repartition & open_), sinks), repartition & open_


def _enforce_copartitioning(topology: Topology, counts: _Counts) -> None:
    """Enforce copartitioning. Source topics of one group must agree, and so must repartition topics that name their
    number; the others of the group follow."""
    repartition = {topic.name: topic for each in topology.subtopologies for topic in each.repartition_source_topics}
    for each in topology.subtopologies:
        for group in each.copartition_groups:
            sources = sorted(name for name in group if name not in repartition)
            fixed = sorted(name for name in group if name in repartition and repartition[name].partitions)
            flexible = [name for name in group if name in repartition and not repartition[name].partitions]
            given = {name: counts.of(name) for name in sources} | {name: counts.decided[name] for name in fixed}
            if len(set(given.values())) > 1:
                told = _named(f"{name} ({count})" for name, count in given.items())
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
    return ", ".join(map(shown, listed[:MAX_NAMED])) + more
