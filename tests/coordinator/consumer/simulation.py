"""A consumer group under a seeded schedule of lost, late, repeated and reordered requests, restarts and moving topics.

The one idea: clients are modelled by what they really own, the coordinator is run as the gateway runs it (store, then
reply), and after every step a referee compares the two. Requests of one connection arrive in order; a client that waited
too long opens the next one, and what is left on the old one may still arrive, at any time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from types import ModuleType
from uuid import UUID

from gateway.coordinator.consumer import machine
from gateway.coordinator.consumer.model import (
    Changes,
    ConsumerGroup,
    ConsumerGroupHeartbeat,
    ConsumerGroupHeartbeatReply,
    ConsumerMember,
    ConsumerSettings,
    ConsumerStep,
    GroupState,
    MemberState,
    TopicsChanged,
)
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, contains, difference, intersection
from gateway.coordinator.consumer.topics import ClusterTopic, cluster_topics
from gateway.coordinator.consumer.views import state_of
from gateway.coordinator.model import ConnectionId, MemberId, RequestId, Tick
from protocol.errors import ErrorCode

FOUL_MS = 120_000
SETTLE_MS = 400_000
MAX_CLIENTS = 5
REQUEST_TIMEOUT_MS = 3_000
NAMES = ("t0", "t1", "t2", "logs-a", "logs-b")
PATTERNS = ("", "", "", "logs-.*", "t[01]", ".*")
RETRIED = frozenset({ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS})
FENCED = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH})


class FoulError(AssertionError):
    """The coordinator broke a rule."""


@dataclass(frozen=True)
class Outcome:
    seed: int
    foul: str | None
    told: list[str]


@dataclass
class Weather:
    lost_request: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0
    store_failure: float = 0.0


class World:
    """Time, chance, topics, and the one node."""

    def __init__(self, seed: int, coordinator: ModuleType) -> None:
        self.random = Random(seed)
        self.coordinator = coordinator
        self.now_ms = 0
        self.told: list[str] = []
        self.weather = Weather()
        self.calm = False
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = 0
        self.partition_counts = {name: self.random.randint(1, 6) for name in NAMES[: self.random.randint(1, 5)]}
        self.topic_ids = {name: self.new_topic_id() for name in self.partition_counts}
        self.topics = cluster_topics(0, self._topics())
        self.clients: list[Client] = []
        self.stuck: list[ConsumerGroupHeartbeat] = []
        """Requests on their way that nobody waits for any more; each may still arrive, once."""
        self.server = Server(self)

    def _topics(self) -> Iterator[ClusterTopic]:
        for name, count in self.partition_counts.items():
            yield ClusterTopic(self.topic_ids[name], name, count)

    def new_topic_id(self) -> UUID:
        return UUID(int=self.random.getrandbits(128))

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def tell(self, line: str) -> None:
        self.told.append(f"{self.now_ms:>7} {line}")

    def after(self, delay_ms: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_ms + delay_ms, self.number(), act))

    def run_until(self, until_ms: int) -> None:
        while self._agenda and self._agenda[0][0] <= until_ms:
            self.now_ms, _, act = heapq.heappop(self._agenda)
            act()
        self.now_ms = until_ms

    def change_topics(self) -> None:
        name = self.random.choice(NAMES)
        if name not in self.partition_counts:
            self.partition_counts[name] = self.random.randint(1, 6)
            self.topic_ids[name] = self.new_topic_id()
        elif self.chance(0.5):
            self.partition_counts[name] += self.random.randint(1, 3)
        else:
            del self.partition_counts[name]
        self.topics = cluster_topics(self.topics.version + 1, self._topics())
        self.tell(f"topics: {self.partition_counts}")
        if self.chance(0.5):
            self.server.apply(TopicsChanged())


@dataclass
class Stored:
    """The rows, as deltas make them."""

    group: ConsumerGroup | None = None
    members: dict[MemberId, ConsumerMember] = field(default_factory=dict)
    targets: dict[MemberId, Partitions] = field(default_factory=dict)

    def write(self, group: ConsumerGroup, changes: Changes) -> None:
        if changes.group:
            self.group = ConsumerGroup(
                group.group_id,
                group_epoch=group.group_epoch,
                assignment_epoch=group.assignment_epoch,
                metadata_hash=group.metadata_hash,
                assignor=group.assignor,
            )
        for member_id in changes.removed_members:
            del self.members[member_id]
        for member_id in changes.removed_targets:
            del self.targets[member_id]
        for member in changes.members:
            self.members[member.member_id] = replace(member, connection_number=-1)
        self.targets.update(changes.targets)


class Server:
    """One node: runs `step` as the runner does, and fails as a node does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.settings = ConsumerSettings(
            session_timeout_ms=world.random.choice((10_000, 45_000)),
            heartbeat_interval_ms=world.random.choice((1_000, 3_000)),
            max_size=world.random.choice((2**31 - 1, 2**31 - 1, 3)),
        )
        self.group = ConsumerGroup("g")
        self.stored = Stored()
        self.up = True
        self.tick_at_ms: int | None = None
        self.cut = 0
        """Connections up to this number went down with a coordinator before, and all that was on them."""

    def receive(self, event: ConsumerGroupHeartbeat) -> ConsumerGroupHeartbeatReply | None:
        if not self.up or event.connection_number <= self.cut:
            return None
        return self.apply(event)

    def apply(self, event: ConsumerGroupHeartbeat | TopicsChanged | Tick) -> ConsumerGroupHeartbeatReply | None:
        if not self.up:
            return None
        world = self.world
        before = self.group
        copy = repr(before)
        taken: ConsumerStep = world.coordinator.step(before, event, world.now_ms, self.settings, world.topics)
        require(repr(before) == copy, f"the group that was given has been mutated by {event}")
        world.tell(describe(event, taken))
        replies = dict(taken.replies)
        asked = event.request_id if isinstance(event, ConsumerGroupHeartbeat) else None
        require(list(replies) == ([] if asked is None else [asked]), f"{event} is answered by {taken.replies}")
        if taken.changes and world.chance(world.weather.store_failure):
            world.tell("  ... could not be stored")
            if world.chance(0.3):
                self._store(taken)
                self._restore()
            self._arm()
            return None if asked is None else ConsumerGroupHeartbeatReply(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        self._store(taken)
        self.group = taken.group
        self._judge()
        self._arm()
        return None if asked is None else replies[asked]

    def _store(self, taken: ConsumerStep) -> None:
        self.stored.write(taken.group, taken.changes)
        for client in self.world.clients:
            if client.member_id in taken.changes.removed_members:
                client.is_member = False

    def crash(self) -> None:
        if self.up:
            self.world.tell("the node crashes")
            self.up = False
            for client in self.world.clients:
                client.disconnect()
            self.world.after(self.world.random.randint(10, 3_000), self._come_up)

    def _come_up(self) -> None:
        self.up = True
        self._restore()
        self._arm()

    def _restore(self) -> None:
        stored = self.stored
        self.group = self.world.coordinator.restore(
            stored.group or ConsumerGroup("g"), stored.members.values(), stored.targets, self.world.now_ms, self.settings
        )
        self.cut = self.world.number()
        for client in self.world.clients:
            client.disconnect()
        self._judge()

    def _arm(self) -> None:
        deadline_ms = self.world.coordinator.next_deadline(self.group)
        if deadline_ms is None or (self.tick_at_ms is not None and self.tick_at_ms <= deadline_ms):
            return
        at_ms = max(deadline_ms, self.world.now_ms + 5)
        self.tick_at_ms = at_ms
        self.world.after(at_ms - self.world.now_ms, lambda: self._timer(at_ms))

    def _timer(self, at_ms: int) -> None:
        if self.tick_at_ms == at_ms:
            self.tick_at_ms = None
            self.apply(Tick())
            if self.up:
                self._arm()

    # --- the referee --------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        group, stored = self.group, self.stored
        owner: dict[tuple[UUID, int], MemberId] = {}
        for member in group.members.values():
            require(member.member_id in group.session_deadlines, f"{member} would never expire")
            revoking = member.state is MemberState.UNREVOKED
            require(revoking == (member.member_id in group.rebalance_deadlines), f"{member} may take for ever")
            require(revoking == bool(member.pending_revocation), f"{member.state} revokes {member.pending_revocation}")
            for held in (member.assigned, member.pending_revocation):
                for topic_id, indexes in held.items():
                    require(bool(indexes), "an empty set of partitions")
                    for index in indexes:
                        other = owner.setdefault((topic_id, index), member.member_id)
                        require(other == member.member_id, f"{topic_id}-{index}: {other} and {member.member_id}")
        derived = {(topic, index): each for topic, owned in group.owners.items() for index, each in owned.items()}
        require(derived == owner, "owners are not those of the members")
        require(
            {each: replace(member, connection_number=-1) for each, member in group.members.items()} == stored.members,
            "stored members are others than in memory",
        )
        require(dict(group.target) == stored.targets, "stored targets are others than in memory")
        epochs = (group.group_epoch, group.assignment_epoch, group.metadata_hash, group.assignor)
        kept = stored.group or ConsumerGroup("g")
        require(
            epochs == (kept.group_epoch, kept.assignment_epoch, kept.metadata_hash, kept.assignor),
            "stored epochs are others than in memory",
        )
        for client in self.world.clients:
            self.check_client(client)

    def check_client(self, client: Client) -> None:
        """What a member really owns, the coordinator must know that it may own; then no two own the same."""
        member = self.group.members.get(client.member_id)
        if not client.is_member or member is None:
            return
        rest = difference(difference(client.owned, member.assigned), member.pending_revocation)
        require(not rest, f"{client.name} owns {rest}, which may be another's")


class Client:
    """A consumer as stock ones are: one request at a time, everything said anew after any mishap."""

    def __init__(self, world: World, name: str, instance_id: str | None, version: int) -> None:
        self.world = world
        self.name = name
        self.instance_id = instance_id
        self.version = version
        self.member_id = MemberId(f"{name}-{world.number()}")
        self.alive = True
        self.is_member = False
        self.epoch = 0
        self.owned: Partitions = NOTHING
        self.assignment: Partitions | None = None
        """What it was last told, where it has not come that far yet."""
        self.connection_number = world.number()
        self.outstanding: int | None = None
        self.full = True
        self.acknowledges = False
        self.names: tuple[str, ...] = ()
        self.pattern = ""
        self.assignor: str | None = world.random.choice((None, None, "uniform", "range"))
        self.rebalance_timeout_ms = world.random.choice((5_000, 20_000))
        self.news = False
        self._heartbeat_number = 0
        self.choose_topics()

    def choose_topics(self) -> None:
        random = self.world.random
        self.names = tuple(random.sample(NAMES, random.randint(0, 3)))
        self.pattern = random.choice(PATTERNS) if self.version >= 1 else ""
        self.news = True

    def start(self) -> None:
        self.world.tell(f"{self.name} starts as {self.member_id}, instance {self.instance_id}")
        self.beat()

    def disconnect(self) -> None:
        """Whatever it asked on its connection is not answered any more."""
        self.connection_number = self.world.number()
        self.full = True
        if self.outstanding is not None:
            self.outstanding = None
            self._next_beat(self.world.random.randint(10, 500))

    def die(self) -> None:
        self.alive = False
        self.owned = NOTHING
        self.is_member = False

    def leave(self) -> None:
        temporarily = self.instance_id is not None and self.world.chance(0.7)
        self.owned = NOTHING
        self.is_member = False
        self.alive = False
        event = replace(self._event(), member_epoch=-2 if temporarily else -1, owned=None)
        self._transmit(event, lambda reply: None)

    def rejoin(self) -> None:
        self.owned = NOTHING
        self.is_member = False
        self.assignment = None
        self.epoch = 0
        self.full = True
        self.beat()

    def beat(self) -> None:
        if not self.alive or self.outstanding is not None:
            return
        event = self._event()
        number = self.outstanding = self.world.number()
        self.full = self.news = self.acknowledges = False
        self._transmit(event, lambda reply: self._answered(number, reply))
        self.world.after(REQUEST_TIMEOUT_MS, lambda: self._timed_out(number))

    def _event(self) -> ConsumerGroupHeartbeat:
        world = self.world
        full = self.full or self.epoch == 0
        event = ConsumerGroupHeartbeat(
            request_id=RequestId(world.number()),
            connection_id=ConnectionId(str(self.connection_number)),
            connection_number=self.connection_number,
            version=self.version,
            client_id=self.name,
            client_host="/127.0.0.1",
            new_member_id=MemberId(f"made-{world.number()}"),
            member_id=self.member_id,
            member_epoch=self.epoch,
            instance_id=self.instance_id,
            owned=self.owned if full or self.acknowledges else None,
        )
        if full:
            event = replace(event, rebalance_timeout_ms=self.rebalance_timeout_ms, server_assignor=self.assignor)
        if full or self.news:
            event = replace(
                event,
                subscribed_topic_names=self.names,
                subscribed_topic_regex=self.pattern if self.version >= 1 else None,
            )
        return event

    def _transmit(
        self, event: ConsumerGroupHeartbeat, answered: Callable[[ConsumerGroupHeartbeatReply], None]
    ) -> None:
        world = self.world
        if world.chance(world.weather.lost_request):
            world.stuck.append(event)
            return
        delay_ms = world.random.randint(0, 5)
        if world.chance(world.weather.late):
            delay_ms += world.random.randint(0, 20_000)

        def arrive() -> None:
            reply = world.server.receive(event)
            if reply is not None and not world.chance(world.weather.lost_reply):
                world.after(world.random.randint(0, 5), lambda: answered(reply))

        world.after(delay_ms, arrive)

    def _timed_out(self, number: int) -> None:
        if self.alive and self.outstanding == number:
            self.disconnect()

    def _answered(self, number: int, reply: ConsumerGroupHeartbeatReply) -> None:
        if not self.alive or self.outstanding != number:
            return
        self.outstanding = None
        random = self.world.random
        if reply.error in FENCED:
            self.rejoin()
        elif reply.error in RETRIED:
            self.full = True
            self._next_beat(random.randint(50, 500))
        elif reply.error is not ErrorCode.NONE:
            self.world.tell(f"{self.name} gives up: {reply.error.name}")
            self.die()
        else:
            if self.epoch == 0:
                self.is_member = True
            self.epoch = reply.member_epoch
            if reply.assignment is not None:
                self._reconcile(reply.assignment)
            self._next_beat(reply.heartbeat_interval_ms)

    def _reconcile(self, assignment: Partitions) -> None:
        """Lets go first, which may take its time; only then takes what is new, and says so."""
        self.assignment = assignment
        epoch = self.epoch
        if assignment == self.owned:
            self.assignment = None
        elif contains(assignment, self.owned):
            self._take(assignment, epoch)
        else:
            slow = 0.05 if self.world.calm else 0.2
            patience_ms = self.rebalance_timeout_ms * (1 if self.world.calm else 2)
            delay_ms = self.world.random.randint(0, patience_ms) if self.world.chance(slow) else 0
            self.world.after(delay_ms, lambda: self._let_go(assignment, epoch))

    def _let_go(self, assignment: Partitions, epoch: int) -> None:
        if self.assignment is not assignment or not self.alive:
            return
        self.owned = intersection(self.owned, assignment)
        self._take(assignment, epoch)

    def _take(self, assignment: Partitions, epoch: int) -> None:
        if self.assignment is not assignment or epoch != self.epoch:
            return
        self.owned = assignment
        self.assignment = None
        self.acknowledges = True
        if self.is_member:
            self.world.server.check_client(self)
        self.beat()

    def _next_beat(self, delay_ms: int) -> None:
        self._heartbeat_number += 1
        number = self._heartbeat_number

        def act() -> None:
            if number == self._heartbeat_number:
                self.beat()

        self.world.after(delay_ms, act)


def run(seed: int, coordinator: ModuleType = machine) -> Outcome:
    world = World(seed, coordinator)
    try:
        _Play(world).run()
    except Exception as error:
        return Outcome(seed, str(error) if isinstance(error, FoulError) else repr(error), world.told)
    return Outcome(seed, None, world.told)


class _Play:
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

    def run(self) -> None:
        world = self.world
        for _ in range(world.random.randint(1, 4)):
            world.after(world.random.randint(0, 5_000), self._add_client)
        self._disturb()
        world.run_until(FOUL_MS)
        world.tell("--- calm")
        world.calm = True
        world.weather = Weather()
        while world.now_ms < FOUL_MS + SETTLE_MS:
            world.run_until(world.now_ms + 1_000)
            unsettled = self._unsettled()
            if not unsettled:
                return
        raise FoulError(f"never settled: {unsettled}")

    def _living(self) -> list[Client]:
        return [client for client in self.world.clients if client.alive]

    def _disturb(self) -> None:
        world = self.world
        deeds: list[tuple[int, Callable[[], None]]] = [
            (5, self._add_client),
            (2, self._to_one(Client.leave)),
            (2, self._to_one(Client.die)),
            (3, self._to_one(Client.disconnect)),
            (3, self._to_one(Client.choose_topics)),
            (3, self._to_one(Client.beat)),
            (2, self._to_one(Client.rejoin)),
            (3, self._restart_static),
            (4, self._deliver_something_old),
            (3, world.change_topics),
            (1, world.server.crash),
            (1, lambda: world.server.apply(Tick()) and None),
        ]
        weights, acts = zip(*deeds, strict=True)

        def act() -> None:
            if not world.calm:
                world.random.choices(acts, weights)[0]()
                world.after(world.random.randint(1, 6_000), act)

        world.after(world.random.randint(1, 5_000), act)

    def _to_one(self, deed: Callable[[Client], None]) -> Callable[[], None]:
        def act() -> None:
            living = self._living()
            if living:
                client = self.world.random.choice(living)
                self.world.tell(f"{client.name}: {deed.__name__}")
                deed(client)

        return act

    def _add_client(self) -> None:
        random = self.world.random
        if len(self._living()) < MAX_CLIENTS:
            number = self.world.number()
            instance_id = f"i{number}" if random.random() < 0.3 else None
            self._start(Client(self.world, f"c{number}", instance_id, random.choice((0, 1, 1))))

    def _start(self, client: Client) -> None:
        self.world.clients.append(client)
        client.start()

    def _restart_static(self) -> None:
        """A process takes the place of one with its instance id, which may be dead, gone for a while, or alive."""
        static = [client for client in self.world.clients if client.instance_id is not None]
        if static:
            old = self.world.random.choice(static)
            if old.alive and self.world.chance(0.7):
                old.leave()
            self._start(Client(self.world, f"{old.name}r", old.instance_id, 1))

    def _deliver_something_old(self) -> None:
        """A request on a connection that its client has given up arrives after all."""
        stuck = self.world.stuck
        if stuck:
            self.world.tell("something old arrives")
            self.world.server.receive(stuck.pop(self.world.random.randrange(len(stuck))))

    def _unsettled(self) -> str:
        """Empty once every live client is a member with its share, nobody else is one, and every partition that
        somebody subscribes to is somebody's."""
        server, living = self.world.server, self._living()
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
        wanted = {
            (topic_id, index)
            for name, topic_id in self.world.topic_ids.items()
            if name in self.world.partition_counts and any(subscribes(client, name) for client in living)
            for index in range(self.world.partition_counts[name])
        }
        return "" if owned == wanted else f"owned {owned}, wanted {wanted}"


def subscribes(client: Client, name: str) -> bool:
    matching = {"": (), "logs-.*": ("logs-a", "logs-b"), "t[01]": ("t0", "t1"), ".*": NAMES}
    return name in client.names or name in matching[client.pattern]


def require(kept: bool, foul: str) -> None:
    if not kept:
        raise FoulError(foul)


def describe(event: object, taken: ConsumerStep) -> str:
    if isinstance(event, ConsumerGroupHeartbeat):
        reply = taken.replies[0][1] if taken.replies else None
        return (
            f"{event.member_id}@{event.connection_number} epoch {event.member_epoch} owns {shown(event.owned)} "
            f"{event.subscribed_topic_names} {event.subscribed_topic_regex!r} -> "
            f"{reply and (reply.error.name, reply.member_epoch, shown(reply.assignment))} {taken.reasons}"
        )
    return f"{type(event).__name__} -> {taken.reasons}"


def shown(held: Partitions | None) -> str:
    if held is None:
        return "-"
    return " ".join(f"{str(topic_id)[:4]}{sorted(indexes)}" for topic_id, indexes in held.items()) or "nothing"
