"""Which partitions are read behind which endpoint: what instances must know to pass queries on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.streams.draft import Draft
from gateway.coordinator.streams.model import EndpointPartitions
from gateway.coordinator.streams.tasks import Task
from gateway.coordinator.streams.topology import Topology


def partitions_by_endpoint(draft: Draft) -> tuple[EndpointPartitions, ...]:
    """Of all members that have one, by what each was told that it may own."""
    topology = draft.topology or Topology()
    sources = {each.subtopology_id: tuple(dict.fromkeys(each.sources)) for each in topology.subtopologies}
    return tuple(
        EndpointPartitions(
            member.user_endpoint,
            _read_by(member.assigned.active, sources, draft.cluster),
            _read_by(member.assigned.standby, sources, draft.cluster),
        )
        for member in draft.members.values()
        if member.user_endpoint is not None
    )


def _read_by(
    tasks: Iterable[Task], sources: Mapping[str, Sequence[str]], cluster: Cluster
) -> Mapping[str, frozenset[int]]:
    """Each task reads the partition of its number of every source topic that has as many: so a topic of few partitions
    is read by the first tasks, and the others are not looked at for it."""
    indexes: dict[str, list[int]] = {}
    for subtopology_id, index in sorted(tasks):
        indexes.setdefault(subtopology_id, []).append(index)
    read: dict[str, set[int]] = {}
    for subtopology_id, numbers in indexes.items():
        for name in sources.get(subtopology_id, ()):
            topic = cluster.topics.get(name)
            first = [] if topic is None else numbers[: bisect_left(numbers, topic.partition_count)]
            if first:
                read.setdefault(name, set()).update(first)
    return {name: frozenset(found) for name, found in sorted(read.items())}
