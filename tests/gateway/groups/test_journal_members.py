"""Journal rows of a streams group's members, and their cost."""

from __future__ import annotations

import time
from uuid import UUID

from gateway.coordinator.facts import MemberId
from gateway.coordinator.streams.model import StreamsGroup, StreamsMember
from gateway.coordinator.streams.tasks import NO_TASKS, Tasks
from gateway.coordinator.streams.topology import Subtopology, TopicInfo, Topology
from gateway.groups.journal_members import owned_by

A = MemberId("a")


class Counts:
    """`Topics` that only knows numbers of partitions."""

    def __init__(self, **counts: int) -> None:
        self._counts = counts

    def name_of(self, topic_id: UUID) -> str:
        raise NotImplementedError

    def id_of(self, name: str) -> UUID | None:
        raise NotImplementedError

    def partition_count_of(self, name: str) -> int:
        return self._counts.get(name, 0)


def group_of(topology: Topology, tasks: Tasks, pending: Tasks = NO_TASKS) -> StreamsGroup:
    return StreamsGroup(
        "g", topology=topology, members={A: StreamsMember(A, assigned=tasks, pending_revocation=pending)}
    )


def test_streams_member_owns_partitions_until_it_has_released_them() -> None:
    topology = Topology(
        0,
        (
            Subtopology("0", ("wide", "narrow", "gone")),
            Subtopology("1", (), (), (TopicInfo("store"),), (TopicInfo("between"),)),
        ),
    )
    active = Tasks(frozenset({("0", 0), ("0", 2)}), standby=frozenset({("0", 1)}))
    group = group_of(topology, active, Tasks(frozenset({("1", 1)})))
    held = owned_by(group, A, Counts(wide=3, narrow=1, between=2, store=2))
    assert held == {("wide", 0), ("wide", 2), ("narrow", 0), ("between", 1)}
    assert owned_by(group_of(topology, Tasks()), A, Counts(wide=3)) == set()


def test_cost_of_a_members_partitions_is_linear() -> None:
    subtopologies = tuple(Subtopology(str(at), ("t",)) for at in range(4_000))
    tasks = Tasks(frozenset((str(at), index) for at in range(4_000) for index in range(10)))
    started = time.process_time()
    held = owned_by(group_of(Topology(0, subtopologies), tasks), A, Counts(t=10))
    assert time.process_time() - started < 1, "seconds: subtopologies by tasks take four"
    assert held == {("t", index) for index in range(10)}
