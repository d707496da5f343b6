"""The partitions that are read behind each endpoint, so that instances can forward queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.streams.draft import Draft
from gateway.coordinator.streams.model import Endpoint, EndpointPartitions
from gateway.coordinator.streams.tasks import NO_TASKS, Task, Tasks
from gateway.coordinator.streams.topology import Topology, partitions_read


def partitions_by_endpoint(draft: Draft) -> tuple[EndpointPartitions, ...]:
    """Return the partitions of all members that have an endpoint, from the tasks that each may own.

    Each thread of an instance is a member, and all have the instance's endpoint. Java keeps only the last of several
    entries of an endpoint (KAFKA-20782), so each has one.
    """
    tasks: dict[Endpoint, Tasks] = {}
    for member in draft.members.values():
        if member.user_endpoint is not None:
            tasks[member.user_endpoint] = tasks.get(member.user_endpoint, NO_TASKS) | member.assigned
    sources_of = (draft.topology or Topology()).sources_of
    return tuple(
        EndpointPartitions(
            endpoint,
            _read_by(each.active, sources_of, draft.cluster),
            _read_by(each.standby, sources_of, draft.cluster),
        )
        for endpoint, each in tasks.items()
    )


def _read_by(
    tasks: Iterable[Task], sources_of: Mapping[str, Sequence[str]], cluster: Cluster
) -> Mapping[str, frozenset[int]]:
    def partition_count_of(name: str) -> int:
        topic = cluster.topics.get(name)
        return 0 if topic is None else topic.partition_count

    read = partitions_read(tasks, sources_of, partition_count_of)
    return {name: frozenset(indexes) for name, indexes in sorted(read.items())}
