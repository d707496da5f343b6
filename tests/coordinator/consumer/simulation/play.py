"""One run: first a phase with faults and disturbances of clients ("foul weather"), then a calm phase in which the group
must settle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from gateway.coordinator.consumer.model import GroupState
from gateway.coordinator.consumer.views import state_of
from gateway.coordinator.machine import Tick

from .clients import Client, consumer, subscribes
from .node import FoulError, Weather, World

C = TypeVar("C", bound=Any)
"""Type of the clients. A play does not depend on their protocol."""
FOUL_MS = 120_000
SETTLE_MS = 400_000
MAX_CLIENTS = 5
SEEDS_PER_CLOSE_LOOK = 10


@dataclass(frozen=True)
class Outcome:
    seed: int
    foul: str | None
    told: list[str]


def run(seed: int) -> Outcome:
    world = World(seed)
    world.server.closely = seed % SEEDS_PER_CLOSE_LOOK == 0
    try:
        _Play(world).run()
    except Exception as error:
        return Outcome(seed, str(error) if isinstance(error, FoulError) else repr(error), world.told)
    return Outcome(seed, None, world.told)


class Play(ABC, Generic[C]):
    """Common parts of the runs of all kinds of groups: a world, the rates of its faults (its weather), and clients to
    disturb.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        world.weather = world.random.choice(
            (
                Weather(),
                Weather(late=0.1),
                Weather(lost_request=0.05, lost_reply=0.1, late=0.05),
                Weather(0.03, 0.05, 0.05, store_failure=0.1),
            )
        )

    @property
    @abstractmethod
    def clients(self) -> list[C]: ...

    @abstractmethod
    def unsettled(self) -> str:
        """Return why the group has not settled; empty if it has settled."""

    def living(self) -> list[C]:
        return [client for client in self.clients if client.alive]

    def start(self, client: C) -> None:
        self.clients.append(client)
        client.start()

    def to_one(self, deed: str) -> Callable[[], None]:
        """Return an action that calls this method on a random client."""

        def act() -> None:
            living = self.living()
            if living:
                client = self.world.random.choice(living)
                self.world.tell(f"{client.name}: {deed}")
                getattr(client, deed)()

        return act

    def disturb(self, deeds: Sequence[tuple[int, Callable[[], object]]], *, within_ms: int, every_ms: int) -> None:
        """Perform one of the actions at random intervals while the weather is foul (faults happen)."""
        world = self.world
        weights, acts = zip(*deeds, strict=True)

        def act() -> None:
            if not world.calm:
                world.random.choices(acts, weights)[0]()
                world.after(world.random.randint(1, every_ms), act)

        world.after(world.random.randint(1, within_ms), act)

    def calm_down(self) -> None:
        self.world.tell("--- calm")
        self.world.calm = True
        self.world.weather = Weather()

    def settle(self, within_ms: int) -> None:
        world = self.world
        until_ms, unsettled = world.now_ms + within_ms, "?"
        while world.now_ms < until_ms:
            world.run_until(world.now_ms + 1_000)
            unsettled = self.unsettled()
            if not unsettled:
                return
        raise FoulError(f"never settled: {unsettled}")

    def wanted(self, reads: Callable[[C, str], bool]) -> set[tuple[UUID, int]]:
        """Return the partitions that at least one client wants to read."""
        living = self.living()
        return {
            (topic_id, index)
            for name, topic_id in self.world.topic_ids.items()
            if name in self.world.partition_counts and any(reads(client, name) for client in living)
            for index in range(self.world.partition_counts[name])
        }


class _Play(Play[Client]):
    @property
    def clients(self) -> list[Client]:
        return self.world.clients

    def run(self) -> None:
        world = self.world
        for _ in range(world.random.randint(1, 4)):
            world.after(world.random.randint(0, 5_000), self._add_client)
        self._disturb()
        world.run_until(FOUL_MS)
        self.calm_down()
        self.settle(SETTLE_MS)

    def _disturb(self) -> None:
        world = self.world
        deeds: list[tuple[int, Callable[[], object]]] = [
            (5, self._add_client),
            (2, self.to_one("leave")),
            (2, self.to_one("die")),
            (3, self.to_one("disconnect")),
            (3, self.to_one("choose_topics")),
            (3, self.to_one("beat")),
            (2, self.to_one("rejoin")),
            (3, self._restart_static),
            (4, self._deliver_something_old),
            (3, world.change_topics),
            (1, world.server.crash),
            (1, lambda: world.server.apply(Tick())),
            (4, world.server.look_how_far_sources_are),
        ]
        self.disturb(deeds, within_ms=5_000, every_ms=6_000)

    def _add_client(self) -> None:
        random = self.world.random
        if len(self.living()) < MAX_CLIENTS:
            number = self.world.number()
            instance_id = f"i{number}" if random.random() < 0.3 else None
            self.start(consumer(self.world, f"c{number}", instance_id, random.choice((0, 1, 1))))

    def _restart_static(self) -> None:
        """Let a new process take over an instance id. The old process may be dead, absent for a while, or alive."""
        static = [client for client in self.world.clients if client.instance_id is not None]
        if static:
            old = self.world.random.choice(static)
            if old.alive and self.world.chance(0.7):
                old.leave()
            self.start(consumer(self.world, f"{old.name}r", old.instance_id, 1))

    def _deliver_something_old(self) -> None:
        """Deliver a request on a connection that its client has given up."""
        stuck = self.world.stuck
        if stuck:
            self.world.tell("something old arrives")
            self.world.server.receive(stuck.pop(self.world.random.randrange(len(stuck))))

    def unsettled(self) -> str:
        """Return why the group has not settled.

        It has settled if every live client is a member with its share, no other member exists, and every subscribed
        partition has an owner.
        """
        server, living = self.world.server, self.living()
        group = server.group
        if not server.up:
            return "the node is down"
        if {client.member_id for client in living} != set(group.members):
            return f"live: {[client.member_id for client in living]}, members: {list(group.members)}"
        if not living:
            return ""
        if state_of(group) is not GroupState.STABLE:
            return f"{state_of(group)}: {group}"
        owned: set[tuple[UUID, int]] = set()
        for client in living:
            member = group.members[client.member_id]
            if not client.owned == member.assigned == group.target[client.member_id]:
                return f"{client.name} owns {client.owned}, {member.assigned}, {group.target[client.member_id]}"
            if (tuple(sorted(set(client.names))), client.pattern) != (
                member.subscribed_topic_names,
                member.subscribed_topic_regex,
            ):
                return f"{client.name}'s subscription is {client.names}, {client.pattern!r}, not {member}"
            owned.update((topic_id, index) for topic_id, indexes in client.owned.items() for index in indexes)
        wanted = self.wanted(subscribes)
        return "" if owned == wanted else f"owned {owned}, wanted {wanted}"
