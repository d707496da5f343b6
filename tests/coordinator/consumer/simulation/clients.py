"""Consumers like stock ones: one request at a time, and a full request after any failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

from gateway.coordinator.consumer.model import (
    ConsumerGroupHeartbeat,
    ConsumerGroupHeartbeatReply,
)
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, contains, intersection, only_topics
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, RequestId
from protocol.errors import ErrorCode

from .node import NAMES, World, require

REQUEST_TIMEOUT_MS = 3_000
PATTERNS = ("", "", "", "logs-.*", "t[01]", ".*")
RETRIED = frozenset({ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS})
FENCED = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH})


class Client:
    """A consumer like stock ones: one request at a time, and a full request after any failure."""

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
        """The last received assignment, if the client has not taken it over completely."""
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
        """Close the connection. Its pending requests receive no answer."""
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
        self._transmit(event, lambda reply: self._answered(event, number, reply))
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

    def _transmit(self, event: ConsumerGroupHeartbeat, answered: Callable[[ConsumerGroupHeartbeatReply], None]) -> None:
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

    def _answered(self, event: ConsumerGroupHeartbeat, number: int, reply: ConsumerGroupHeartbeatReply) -> None:
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
            require(reply.error is not ErrorCode.INVALID_REQUEST, "{} is told that it asks wrongly", self.name)
            self.world.tell(f"{self.name} gives up: {reply.error.name}")
            self.die()
        else:
            if self.epoch == 0:
                self.is_member = True
            self.epoch = reply.member_epoch
            if reply.assignment is not None:
                self._reconcile(reply.assignment)
            if event.owned is not None:
                self._reported()
            self._next_beat(reply.heartbeat_interval_ms)

    def _reconcile(self, assignment: Partitions) -> None:
        """Release partitions first, which may take some time. Then take over new partitions and report them."""
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

    def _reported(self) -> None:
        """Note that the coordinator has answered a request that reports this member's partitions."""

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


class SlowClient(Client):
    """A client whose application takes over its assignment slowly. The client behaves as librdkafka does.

    Until the application is done, full requests report the partitions owned before. A later assignment waits until the
    coordinator has answered a request that reports the earlier one.
    """

    def __init__(self, world: World, name: str, instance_id: str | None, version: int) -> None:
        super().__init__(world, name, instance_id, version)
        self.has_taken = False
        self.next: Partitions | None = None
        self.says_all = world.tempers.random() < 0.3
        """True if the client acknowledges with full heartbeats, which have all fields, as franz-go does."""

    def rejoin(self) -> None:
        self.next = None
        self.has_taken = False
        super().rejoin()

    def _reconcile(self, assignment: Partitions) -> None:
        if self.assignment is not None:
            self.next = None if assignment == self.assignment else assignment
        elif assignment != self.owned:
            self._begin(assignment)

    def _begin(self, assignment: Partitions) -> None:
        tempers = self.world.tempers
        longest_ms = 2_000 if self.world.calm else 2 * self.rebalance_timeout_ms
        delay_ms = tempers.randint(0, longest_ms) if tempers.random() < 0.5 else 0
        self.assignment = assignment
        self.has_taken = False
        self.world.after(delay_ms, lambda: self._take_at_last(assignment))

    def _take_at_last(self, assignment: Partitions) -> None:
        if self.assignment is not assignment or not self.alive:
            return
        self.world.tell(f"{self.name} has taken over {assignment}")
        self.owned = assignment
        self.has_taken = self.acknowledges = True
        self.full = self.full or self.says_all
        if self.is_member:
            self.world.server.check_client(self)
        self.beat()

    def _reported(self) -> None:
        if self.has_taken and not self.acknowledges:
            told, self.next = self.next, None
            self.assignment = None
            self.has_taken = False
            if told is not None and told != self.owned:
                self._begin(told)


class UnawareClient(Client):
    """A client that learns topic names late, and behaves as Java's does.

    It first takes over and acknowledges the partitions of topics whose names it knows. It takes over the rest once it
    has learnt their names, and only then a later assignment.
    """

    def __init__(self, world: World, name: str, instance_id: str | None, version: int) -> None:
        super().__init__(world, name, instance_id, version)
        self.told: Partitions | None = None
        self.has_acknowledged = False
        self.heard_of: set[UUID] = set()

    def rejoin(self) -> None:
        self.told = None
        super().rejoin()

    def _reconcile(self, assignment: Partitions) -> None:
        if assignment != self.told:
            self.told = assignment
            self.has_acknowledged = False
        self._begin()

    def _begin(self) -> None:
        if self.told is None or self.assignment is not None or not self.alive:
            return
        tempers = self.world.tempers
        for topic_id in self.told:
            if topic_id not in self.heard_of:
                self.world.after(tempers.choice((0, 100, 1_000)), lambda topic_id=topic_id: self._hear_of(topic_id))
        named = only_topics(self.told, frozenset(self.heard_of))
        if named == self.owned and self.has_acknowledged:
            return
        self.assignment = named
        longest_ms = 2_000 if self.world.calm else 2 * self.rebalance_timeout_ms
        delay_ms = tempers.randint(0, longest_ms) if named != self.owned and tempers.random() < 0.3 else 0
        self.has_acknowledged = True
        self.world.after(delay_ms, lambda: self._take_what_it_can_name(named))

    def _take_what_it_can_name(self, named: Partitions) -> None:
        if self.assignment is not named or not self.alive:
            return
        self.owned = named
        self.assignment = None
        self.acknowledges = True
        if self.is_member:
            self.world.server.check_client(self)
        self.beat()

    def _hear_of(self, topic_id: UUID) -> None:
        if topic_id in self.world.cluster.by_id:
            self.heard_of.add(topic_id)
            self._begin()

    def _reported(self) -> None:
        self._begin()


def consumer(world: World, name: str, instance_id: str | None, version: int) -> Client:
    """Create a consumer. In some runs, some of the consumers are slow."""
    kind = Client
    if world.tempers.random() < world.slow_share:
        kind = SlowClient if world.tempers.random() < 0.7 else UnawareClient
    return kind(world, name, instance_id, version)


def subscribes(client: Client, name: str) -> bool:
    matching = {"": (), "logs-.*": ("logs-a", "logs-b"), "t[01]": ("t0", "t1"), ".*": NAMES}
    return name in client.names or name in matching[client.pattern]
