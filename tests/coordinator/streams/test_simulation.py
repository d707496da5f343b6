"""A seeded simulation of a streams group. Members join, leave, die, respond late and lose answers. Topics change, and
coordinators restart.

No task is ever active twice. Once everything is quiet every task is active once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from gateway.coordinator.facts import AssignmentGiven, TargetComputed
from gateway.coordinator.member_epochs import DURABLE, JOIN_EPOCH
from gateway.coordinator.streams import current_assignment, heartbeat
from gateway.coordinator.streams.current_assignment import HeldByOthers
from gateway.coordinator.streams.draft import Draft
from gateway.coordinator.streams.endpoints import partitions_by_endpoint
from gateway.coordinator.streams.machine import STREAMS
from gateway.coordinator.streams.model import (
    Endpoint,
    EndpointPartitions,
    MemberState,
    StreamsGroupState,
    StreamsMember,
    state_of,
)
from gateway.coordinator.streams.tasks import NO_TASKS, Tasks
from gateway.coordinator.streams.topology import Subtopology, Topology
from protocol.errors import ErrorCode
from tests.steps.seeds import finds, first_always

from .scene import Scene

TOPOLOGY = Topology(0, (Subtopology("0", ("t",)), Subtopology("1", ("u",))))
PROCESSES = 3
STEPS = 120


@dataclass
class Client:
    """A simulated client that behaves like Java's. After an answer it takes over and releases tasks, and reports that
    in a later heartbeat.
    """

    member_id: str
    process_id: str
    epoch: int = JOIN_EPOCH
    owned: Tasks = NO_TASKS
    told: Tasks = NO_TASKS
    reported: Tasks | None = field(default=None)
    heard_ms: int = 0
    instance_id: str | None = None
    endpoint: Endpoint | None = None
    endpoint_epoch: int = -1

    def fenced(self) -> None:
        self.epoch, self.owned, self.told, self.reported = JOIN_EPOCH, NO_TASKS, NO_TASKS, None


class World:
    TOPICS: ClassVar = {"t": 3, "u": 2}

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.scene = Scene(
            self.TOPICS,
            initial_rebalance_delay_ms=self.chance.choice((0, 3_000)),
            num_standby_replicas=self.chance.choice((0, 0, 1)),
        )
        self.clients: list[Client] = []
        self.born = 0

    def act(self) -> None:
        deeds = self.deeds() if self.clients else [(self.come, 1.0)]
        self.chance.choices([deed for deed, _ in deeds], [weight for _, weight in deeds])[0]()
        self.scene.pass_time(self.chance.choice((0, 0, 100, 2_000)))
        self.forget_fenced()
        self.check()

    def deeds(self) -> list[tuple[Callable[[], None], float]]:
        return [(self.come, 3), (self.go, 1), (self.die, 1), (self.restart, 1), (self.grow, 0.5), (self.speak, 25)]

    def come(self) -> None:
        if len(self.clients) < 5:
            self.born += 1
            self.clients.append(self.new_client(f"m{self.born}", f"p{self.chance.randrange(PROCESSES)}"))

    def new_client(self, member_id: str, process_id: str) -> Client:
        return Client(member_id, process_id)

    def go(self) -> None:
        if self.clients:
            client = self.chance.choice(self.clients)
            self.clients.remove(client)
            if client.epoch != JOIN_EPOCH:
                self.scene.beat(client.member_id, -1)

    def die(self) -> None:
        """Stop without a LeaveGroup request. The member's tasks become free once its session has ended."""
        if self.clients:
            self.clients.remove(self.chance.choice(self.clients))

    def restart(self) -> None:
        self.scene.restore(self.chance.choice((None, 0, 30_000)))

    def counts(self) -> dict[str, int]:
        return {name: topic.partition_count for name, topic in self.scene.cluster.topics.items()}

    def grow(self) -> None:
        counts = self.counts()
        name = self.chance.choice(sorted(counts))
        if counts[name] < 6:
            self.scene.topics({**counts, name: counts[name] + 1})

    def speak(self) -> None:
        self.beat(self.chance.choice(self.clients), loses=0.15)

    def beat(self, client: Client, *, loses: float) -> None:
        scene = self.scene
        says: dict[str, Any] = {
            "instance_id": client.instance_id,
            "endpoint_information_epoch": client.endpoint_epoch,
        }
        if client.owned != client.told and self.chance.random() < 0.8:
            client.owned = client.told
        if client.epoch == JOIN_EPOCH:
            says["user_endpoint"] = client.endpoint
            reply = scene.join(client.member_id, TOPOLOGY, process_id=client.process_id, **says)
        else:
            owned = client.owned if client.owned != client.reported else None
            reply = scene.beat(client.member_id, client.epoch, owned=owned, **says)
            client.reported = client.owned
        if self.chance.random() < loses:
            client.reported = None  # the answer is lost, so the next heartbeat is a full one
            return
        if reply.error in (ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID):
            client.fenced()
            return
        assert reply.error is ErrorCode.NONE, reply
        client.epoch, client.heard_ms = reply.member_epoch, scene.now_ms
        client.endpoint_epoch = reply.endpoint_information_epoch
        if reply.tasks is not None:
            client.told = reply.tasks
            # The client releases tasks later. It takes over new tasks before its next heartbeat, or later.
            if self.chance.random() < 0.5:
                client.owned = client.told

    def forget_fenced(self) -> None:
        """A client that the group removed after more than a session timeout of silence stops by itself."""
        for client in self.clients:
            if client.epoch != JOIN_EPOCH and client.member_id not in self.scene.group.members:
                client.fenced()

    def check(self) -> None:
        members = self.scene.group.members
        active = [task for each in members.values() for task in each.held.active]
        assert len(active) == len(set(active)), "a task has two owners"
        in_process = [
            (each.process_id, task) for each in members.values() for task in each.held.active | each.held.standby
        ]
        assert len(in_process) == len(set(in_process)), "two copies of a task share a directory"
        owned = [task for each in self.clients for task in each.owned.active]
        assert len(owned) == len(set(owned)), "two clients process a task"

    def settle(self) -> None:
        if not self.clients:
            self.come()
        for _ in range(200):
            for client in self.clients:
                self.beat(client, loses=0)
                self.check()
            self.scene.pass_time(500)
            self.forget_fenced()
        group = self.scene.group
        assert state_of(group) is StreamsGroupState.STABLE
        assert {each.member_id for each in self.clients} == set(group.members)
        wanted = {
            (subtopology_id, index)
            for subtopology_id, name in (("0", "t"), ("1", "u"))
            for index in range(self.scene.cluster.topics[name].partition_count)
        }
        owned = [task for each in self.clients for task in each.owned.active]
        assert sorted(owned) == sorted(wanted)
        sizes = [len(each.owned.active) for each in self.clients]
        assert max(sizes) - min(sizes) <= 1


class RestlessWorld(World):
    """A world in which static members leave for a while, topics vanish and return, and the number of standbys changes.
    Some instances have an endpoint, which is the same for all members of a process.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.away: list[Client] = []
        self.gone: dict[str, int] = {}
        self.known: dict[int, Mapping[Endpoint, EndpointPartitions]] = {}
        """The partitions behind endpoints, by the epoch at which members know them."""

    def deeds(self) -> list[tuple[Callable[[], None], float]]:
        others = [(self.pause, 1), (self.come_back, 2), (self.vanish, 0.5), (self.change_standbys, 0.5)]
        return [*super().deeds(), *others]

    def new_client(self, member_id: str, process_id: str) -> Client:
        instance_id = f"instance of {member_id}" if self.chance.random() < 0.5 else None
        endpoint = Endpoint(process_id, 1) if process_id != "p0" else None
        return Client(member_id, process_id, instance_id=instance_id, endpoint=endpoint)

    def pause(self) -> None:
        static = [each for each in self.clients if each.instance_id is not None and each.epoch != JOIN_EPOCH]
        if static:
            client = self.chance.choice(static)
            self.clients.remove(client)
            self.away.append(client)
            assert self.scene.beat(client.member_id, -2, instance_id=client.instance_id).error is ErrorCode.NONE

    def come_back(self) -> None:
        """Start a new process of a static member, sometimes with another process id."""
        if self.away and len(self.clients) < 5:
            former = self.away.pop(self.chance.randrange(len(self.away)))
            process_id = former.process_id if self.chance.random() < 0.7 else f"p of m{self.born}"
            self.born += 1
            client = self.new_client(f"m{self.born}", process_id)
            self.clients.append(replace(client, instance_id=former.instance_id))

    def vanish(self) -> None:
        """Delete a topic, or create it again."""
        counts = self.counts()
        if not self.gone:
            name = self.chance.choice(sorted(counts))
            self.gone = {name: counts.pop(name)}
            self.scene.topics(counts)
        else:
            self.find_topics()

    def find_topics(self) -> None:
        self.scene.topics({**self.counts(), **self.gone})
        self.gone = {}

    def grow(self) -> None:
        if not self.gone:
            super().grow()

    def change_standbys(self) -> None:
        self.scene.set(num_standby_replicas=self.chance.choice((0, 1, 2)))

    def check(self) -> None:
        super().check()
        group, settings = self.scene.group, self.scene.settings.streams
        if group.seen is None:
            return
        behind = partitions_by_endpoint(Draft(group, self.scene.now_ms, settings, group.seen))
        read = {each.endpoint: each for each in behind if each.active or each.standby}
        assert len(read) == sum(bool(each.active or each.standby) for each in behind), "an endpoint has two entries"
        assert self.known.setdefault(group.endpoint_epoch, read) == read, "an epoch of the endpoints has two meanings"
        for member in group.members.values():
            is_revoking = member.state is MemberState.UNREVOKED
            assert is_revoking == bool(member.pending_revocation) == (member.member_id in group.rebalance_deadlines)
            assert member.member_id in group.session_deadlines
            since = [task for _, tasks in member.active_since for task in tasks]
            assert sorted(since) == sorted(member.held.active)

    def settle(self) -> None:
        self.find_topics()
        super().settle()


def run(seed: int, kind: type[World] = World) -> None:
    """Run one seed. Raise AssertionError if a rule is broken."""
    world = kind(seed)
    for _ in range(STEPS):
        world.act()
    world.settle()


@pytest.mark.parametrize("seed", first_always(range(150), 50))
def test_no_task_is_ever_active_twice_and_all_are_active_in_the_end(seed: int) -> None:
    run(seed)


@pytest.mark.parametrize("seed", first_always(range(150), 40))
def test_tasks_of_absent_static_members_and_of_vanished_topics_have_one_owner(seed: int) -> None:
    run(seed, RestlessWorld)


# --- planted bugs that it must find -----------------------------------------------------------------------------------


def nothing(*_: Any, **__: Any) -> None:
    pass


def no_others(*_: Any) -> HeldByOthers:
    return HeldByOthers(frozenset(), frozenset())


def others_everywhere(member: StreamsMember, members: Iterable[StreamsMember]) -> HeldByOthers:
    return replace(held_by_others(member, members), in_process=frozenset())


def no_topics_change(draft: Draft) -> bool:
    """Ignore changes of topics: see only the topics that the group has first."""
    if draft.configured is None:
        return see_topics(draft)
    draft.seen = draft.cluster
    return False


FIND_THE_RAREST = (33,)
"""Seeds that find a coordinator which does not store targets."""

held_by_others, see_topics = current_assignment.held_by_others, Draft.see_topics


@pytest.mark.parametrize(
    ("holder", "name", "mutant"),
    [
        pytest.param(heartbeat, "held_by_others", no_others, id="tasks are given before they are free"),
        pytest.param(heartbeat, "held_by_others", others_everywhere, id="copies of a task share a directory"),
        pytest.param(current_assignment, "_has_let_go", lambda *_: True, id="nobody is asked to let go"),
        pytest.param(current_assignment, "_has_let_go", lambda *_: False, id="nobody ever lets go"),
        pytest.param(Draft, "hear", nothing, id="sessions never begin"),
        pytest.param(Draft, "see_topics", no_topics_change, id="topics stay as they were"),
        pytest.param(type(STREAMS), "durable", DURABLE - {AssignmentGiven}, id="assignments are not stored"),
        pytest.param(type(STREAMS), "durable", DURABLE - {TargetComputed}, id="targets are not stored"),
    ],
)
def test_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, mutant: Any) -> None:
    monkeypatch.setattr(holder, name, mutant)
    assert finds(range(60), goes_wrong, found_before=FIND_THE_RAREST)


def goes_wrong(seed: int) -> bool:
    try:
        run(seed)
    except AssertionError:
        return True
    return False
