"""Which partitions are read behind which endpoint: what instances must know to pass queries on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.streams.draft import Draft
from gateway.coordinator.streams.model import EndpointPartitions
from gateway.coordinator.streams.tasks import Task
from gateway.coordinator.streams.topology import Topology


def partitions_by_endpoint(draft: Draft) -> tuple[EndpointPartitions, ...]:
    """Of all members that have one, by what each was told that it may own."""
    topology = draft.topology or Topology()
    return tuple(
        EndpointPartitions(
            member.user_endpoint,
            _read_by(member.assigned.active, topology, draft.cluster),
            _read_by(member.assigned.standby, topology, draft.cluster),
        )
        for member in draft.members.values()
        if member.user_endpoint is not None
    )


def _read_by(tasks: Iterable[Task], topology: Topology, cluster: Cluster) -> Mapping[str, frozenset[int]]:
    """Each task reads the partition of its number of every source topic that has as many."""
    sources = {each.subtopology_id: each.sources for each in topology.subtopologies}
    read: dict[str, set[int]] = {}
    for subtopology_id, index in tasks:
        for name in sources.get(subtopology_id, ()):
            topic = cluster.topics.get(name)
            if topic is not None and index < topic.partition_count:
                read.setdefault(name, set()).add(index)
    return {name: frozenset(indexes) for name, indexes in sorted(read.items())}
