"""The partitions that are read behind each endpoint, so that instances can forward queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.streams.draft import Draft
from gateway.coordinator.streams.model import EndpointPartitions
from gateway.coordinator.streams.tasks import Task
from gateway.coordinator.streams.topology import Topology, partitions_read


def partitions_by_endpoint(draft: Draft) -> tuple[EndpointPartitions, ...]:
    """Return the partitions of all members that have an endpoint, from the tasks that each may own."""
    sources_of = (draft.topology or Topology()).sources_of
    return tuple(
        EndpointPartitions(
            member.user_endpoint,
            _read_by(member.assigned.active, sources_of, draft.cluster),
            _read_by(member.assigned.standby, sources_of, draft.cluster),
        )
        for member in draft.members.values()
        if member.user_endpoint is not None
    )


def _read_by(
    tasks: Iterable[Task], sources_of: Mapping[str, Sequence[str]], cluster: Cluster
) -> Mapping[str, frozenset[int]]:
    def partition_count_of(name: str) -> int:
        topic = cluster.topics.get(name)
        return 0 if topic is None else topic.partition_count

    read = partitions_read(tasks, sources_of, partition_count_of)
    return {name: frozenset(indexes) for name, indexes in sorted(read.items())}
