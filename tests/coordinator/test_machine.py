"""Several machines for ids of one namespace: which machine handles an event, and how the group of an id changes its
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.coordinator.classic.machine import CLASSIC
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.cluster import NO_TOPICS, Cluster
from gateway.coordinator.facts import Conversion, Fact, GroupTypeChanged, MemberId, MemberJoined
from gateway.coordinator.machine import Adopted, ClientRequest, ConnectionId, Machines, RequestId, Step, Tick
from gateway.coordinator.requests import Heartbeat, HeartbeatReply
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode


@dataclass(frozen=True)
class Counter:
    """A group of a second type, which only counts."""

    group_id: str
    count: int = 0
    exists: bool = True
    members: Mapping[MemberId, object] = field(default_factory=dict[MemberId, object])


@dataclass(frozen=True)
class Answer:
    error: ErrorCode


@dataclass(frozen=True, slots=True)
class Count(ClientRequest[Answer]):
    by: int = 1


@dataclass
class Counting:
    """A second machine, which takes over classic groups without members. It refuses to count by zero."""

    group_class: type[Counter] = Counter
    group_type: str = "counting"
    events: frozenset[type] = frozenset({Count})
    beats: frozenset[type] = frozenset()
    durable: frozenset[type[Fact]] = field(default_factory=frozenset[type[Fact]])

    def takes(self, group: Counter, event: Any) -> bool:
        """Accept heartbeats only after the group has counted to ten."""
        return isinstance(event, Heartbeat) and group.count >= 10

    def adopt(self, group: Any, event: Any, cluster: Cluster, now_ms: int, settings: Any) -> Adopted[Counter] | None:
        if isinstance(group, Group) and not group.members:
            return Adopted(Counter(group.group_id), Conversion.EMPTY, ((RequestId(7), Answer(ErrorCode.NONE)),))
        return None

    def step(self, group: Counter, event: Any, cluster: Cluster, now_ms: int, settings: Any) -> Step[Counter]:
        if isinstance(event, Heartbeat):
            return Step(group, ((event.request_id, HeartbeatReply(ErrorCode.NONE)),))
        if not isinstance(event, Count):
            return Step(group)
        if not event.by:
            return Step(group, ((event.request_id, Answer(ErrorCode.INVALID_REQUEST)),))
        joined = MemberJoined(MemberId("m"))
        after = Counter(group.group_id, group.count + event.by)
        return Step(after, ((event.request_id, Answer(ErrorCode.NONE)),), (joined,))

    def refuse(self, event: Any, error: ErrorCode, *, loading: bool = False) -> Answer:
        return Answer(error)


MACHINES = Machines(CLASSIC, Counting())  # type: ignore[arg-type]
SETTINGS = Settings()


def step(group: Any, event: Any) -> Step[Counter]:
    return MACHINES.step(group, event, NO_TOPICS, 0, SETTINGS)


def count(by: int = 1) -> Count:
    return Count(RequestId(1), ConnectionId("c"), by)


def beat() -> Heartbeat:
    return Heartbeat(RequestId(1), ConnectionId("c"), MemberId("m"), None, 0)


def test_unused_id_belongs_to_the_first_machine() -> None:
    assert MACHINES.missing("g") == Group("g")


def test_a_request_of_another_machine_takes_the_group_over_and_is_stored_first() -> None:
    taken = step(Group("g", exists=True), count(3))
    assert taken.group == Counter("g", 3)
    assert taken.facts == (GroupTypeChanged("classic", "counting"), MemberJoined(MemberId("m")))
    assert [request_id for request_id, _ in taken.replies] == [7, 1], "who was held is answered by the conversion"
    assert MACHINES.must_store(taken), "though none of the machine's own facts is durable"
    assert not MACHINES.must_store(step(taken.group, count()))
    assert step(taken.group, count()).group == Counter("g", 4)


def test_refused_request_does_not_change_the_machine() -> None:
    group = Group("g", exists=True)
    taken = step(group, count(0))
    assert taken.group is group
    assert not taken.facts
    assert [reply.error for _, reply in taken.replies] == [ErrorCode.INVALID_REQUEST], "nobody else is answered"


def test_a_group_that_cannot_be_taken_over_stays_and_the_request_is_refused_in_its_own_shape() -> None:
    busy = Group("g", GroupState.STABLE, members={MemberId("m"): None})  # type: ignore[dict-item]
    assert step(busy, count()) == Step(busy, ((RequestId(1), Answer(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)),))
    counter = Counter("g")
    refused = step(counter, beat())
    assert refused.group is counter
    assert refused.replies == ((RequestId(1), HeartbeatReply(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)),)


def test_machine_may_answer_another_machines_request() -> None:
    counter = Counter("g", 10)
    taken = step(counter, beat())
    assert taken.group is counter
    assert taken.replies == ((RequestId(1), HeartbeatReply(ErrorCode.NONE)),)


def test_event_without_a_request_goes_to_the_groups_machine() -> None:
    counter = Counter("g")
    assert step(counter, Tick()).group is counter
