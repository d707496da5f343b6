"""A simulated group whose members change their protocol while failures happen. One node runs the machines of both
protocols, and a referee checks them.

As in the gateway, the machine of the group's current type handles each event. Changes that are not stored yet are kept
until the next write. This referee checks one more rule than the other referees: the coordinator must know every
partition that a client really reads, before and after a migration.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

from gateway.coordinator.classic.machine import CLASSIC
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.consumer.model import ConsumerGroup, MemberState
from gateway.coordinator.consumer.model import GroupState as ConsumerState
from gateway.coordinator.consumer.partitions import Partitions, difference, only_topics
from gateway.coordinator.consumer.views import state_of
from gateway.coordinator.facts import (
    Conversion,
    Departure,
    GroupTypeChanged,
    MemberId,
    MemberLeft,
)
from gateway.coordinator.handoff import Awaits, Drained, HandoffEnd, HandoffEnded
from gateway.coordinator.machine import (
    ClusterChanged,
    ConnectionClosed,
    ConnectionId,
    Machines,
    Request,
    Step,
    StoredGroup,
    Tick,
)
from gateway.coordinator.requests import HandoffProgress, JoinGroup
from gateway.coordinator.settings import Settings
from gateway.groups.slot import Unstored

from .classic_client import ClassicClient
from .clients import Client, consumer, subscribes
from .node import FoulError, Server, World, require, rewritten
from .play import Outcome, Play

MACHINES = Machines(CLASSIC, CONSUMER)
FOUL_MS = 45_000
SETTLE_MS = 300_000
LATEST_MS = 20_000
CODA_MS = 100_000
MAX_CLIENTS = 4
SEEDS_PER_CLOSE_LOOK = 20
TOLD_TO_LEAD = 9
"""JoinGroup version from which a returning static leader learns that it leads (KIP-814)."""

EAGER, COOPERATIVE = ("range",), ("cooperative-sticky",)
BOTH = (("range", "cooperative-sticky"), ("cooperative-sticky", "range"))
ROLLING = ((EAGER, *BOTH), BOTH, (COOPERATIVE, *BOTH))
"""Offers of the members during a rolling upgrade from the eager protocol to the cooperative one, or back. A client that
offers both is an eager one, also if the group uses the cooperative protocol.
"""

AnyClient = Client | ClassicClient


def run(seed: int, *, topics_change: bool = False, rolls: bool = False, lags: bool = False) -> Outcome:
    return run_with(seed, lambda server: None, topics_change=topics_change, rolls=rolls, lags=lags)


def run_with(
    seed: int,
    begun: Callable[[MixedServer], object],
    *,
    topics_change: bool = False,
    rolls: bool = False,
    lags: bool = False,
) -> Outcome:
    """Run one seed. `begun` is called with the server of the run. If it `rolls`, the classic members are in the middle
    of a rolling upgrade between the eager protocol and the cooperative one. If it `lags`, the group moves to nodes that
    know older topics.
    """
    world = World(seed)
    try:
        server = MixedServer(world, closely=seed % SEEDS_PER_CLOSE_LOOK == 0)
        world.server = server
        begun(server)
        _Play(world, server, topics_change=topics_change, rolls=rolls, lags=lags).run()
    except Exception as error:
        return Outcome(seed, str(error) if isinstance(error, FoulError) else repr(error), world.told)
    return Outcome(seed, None, world.told)


class MixedServer(Server):
    group: Any

    def __init__(self, world: World, *, closely: bool) -> None:
        super().__init__(world)
        self.settings = Settings(
            group_initial_rebalance_delay_ms=world.random.choice((0, 1_000)),
            group_cooperative_guard=True,
            handoff=self.settings.consumer.handoff,
            consumer=replace(self.settings.consumer, max_size=2**31 - 1, session_timeout_ms=10_000),
        )
        self.group = MACHINES.missing("g")
        self.conversions: list[Conversion] = []
        self.row: tuple[str, StoredGroup] | None = None
        self.rows: dict[MemberId, Any] = {}
        self.closely = closely
        self.coda = False
        """True after everything has settled once. From then on only a careful operator acts, so no member may be
        removed.
        """
        self._behind: Cluster | None = None
        """Older topics that the node knows. None: it has read the newest."""
        self._unstored = Unstored()
        self._waiting: dict[int, tuple[str, Callable[[Any], None]]] = {}
        self._given_up: set[str] = set()
        self._closed: set[str] = set()

    # --- a node that is behind ----------------------------------------------------------------------------------------

    @property
    def read_topics(self) -> Cluster:
        """The topics that the node has read, and shows to clients. It lacks no deletion: a classic client names topics,
        so it would take the partitions of a deleted one for those of a new one with the same name.
        """
        newest = self.world.cluster
        if self._behind is None or not self._behind.by_id.keys() <= newest.by_id.keys():
            self._behind = None
            return newest
        return self._behind

    def move_behind(self) -> None:
        """Move the group to a node that has not read the last changes of the topics yet."""
        world, chance = self.world, self.world.moves
        if self.up:
            world.tell("the next node knows older topics")
            self._behind = chance.choice(world.clusters[-3:-1] or world.clusters)
            self._restore()
            self._arm()
            world.after(chance.randint(10, 5_000), self._catch_up)

    def _catch_up(self) -> None:
        self._behind = None
        self.apply(ClusterChanged())

    def _check_what_is_unread(self, before: Any, taken: Step, read: Cluster) -> None:
        """Check that the node neither revokes partitions of topics that it has not read yet, nor takes such a topic for
        deleted.
        """
        unread = frozenset(self.world.cluster.by_id) - read.by_id.keys()
        for fact in taken.facts:
            if isinstance(fact, HandoffEnded) and fact.reason is HandoffEnd.PARTITION_DELETED:
                require(fact.topic not in unread, "{} is not deleted", fact)
        after = taken.group
        if isinstance(before, ConsumerGroup) and isinstance(after, ConsumerGroup):
            for member_id in before.members.keys() & after.members.keys():
                had = only_topics(before.members[member_id].assigned, unread)
                gone = difference(had, after.members[member_id].assigned)
                require(not gone, "{} must release {}, which the node does not know", member_id, gone)

    # --- requests -----------------------------------------------------------------------------------------------------

    def receive(self, event: Any, answered: Callable[[Any], None] | None = None) -> Any:
        """Receive an event. A classic group accepts late requests, as Kafka does. So the simulation delivers no request
        on a connection that its client has given up.
        """
        connection = str(event.connection_id)
        if not self.up or int(connection) <= self.cut or connection in self._closed:
            return None
        if connection in self._given_up and isinstance(self.group, Group):
            return None
        if answered is not None:
            self._waiting[event.request_id] = connection, answered
        return self.apply(event)

    def disconnected(self, client: ClassicClient) -> None:
        connection = str(client.connection_number)
        self._given_up.add(connection)

        def closed() -> None:
            self._closed.add(connection)
            self._waiting = {key: each for key, each in self._waiting.items() if each[0] != connection}
            self.apply(ConnectionClosed(ConnectionId(connection)))

        self.world.after(self.world.random.choice((1, 5_000, 60_000)), closed)

    def apply(self, event: Any) -> Any:
        if not self.up:
            return None
        world, before = self.world, self.group
        copy = repr(before) if self.closely else ""
        cluster = self.read_topics
        taken = MACHINES.step(before, event, cluster, world.now_ms, self.settings)
        require(not self.closely or repr(before) == copy, "the group that was given has been mutated by {}", event)
        if taken.facts or type(event).__name__ != "Heartbeat":
            world.tell(_told(event, taken))
        self._check_what_is_unread(before, taken, cluster)
        asked = event.request_id if isinstance(event, Request) else None
        self._unstored.note(taken.facts)
        if MACHINES.must_store(taken):
            if world.chance(world.weather.store_failure):
                world.tell("  ... could not be stored")
                if world.chance(0.3):
                    self._store(taken)
                self._restore()
                self._arm()
                return None
            self._store(taken)
        self.group = taken.group
        conversions = [fact.conversion for fact in taken.facts if isinstance(fact, GroupTypeChanged)]
        self.conversions.extend(conversions)
        if conversions:
            self._check_still_drained(before)
        if taken.facts or isinstance(event, Tick | ConnectionClosed):
            self._judge()
        if self.coda:
            self._check_nobody_is_put_out(taken)
        self._arm()
        own = None
        for request_id, reply in taken.replies:
            if request_id == asked and request_id not in self._waiting:
                own = reply
            elif (waiting := self._waiting.pop(request_id, None)) is not None:
                waiting[1](reply)
        if isinstance(self.group, ConsumerGroup):
            require(not self._waiting, "{} requests are held by a group that holds none", len(self._waiting))
        return own

    def look_how_far_sources_are(self) -> None:
        """Report how far the sources have committed. The report may come late, after the group has changed its type."""
        chance = self.world.random
        if isinstance(self.group, ConsumerGroup):
            awaited = [(*key, moving.source) for key, moving in self.group.moving.items()]
            awaited += [(each.topic_id, each.partition, each.source) for each in self.group.unsettled]
        else:
            awaited = [(each.topic, each.partition, each.source) for each in self.group.handoffs]
        found = tuple(Drained(*each, chance.choice((None, 5, 9)), chance.choice((-1, 7, 9))) for each in awaited)
        self.world.after(chance.choice((0, 5, 4_000)), lambda: self.apply(HandoffProgress(found)))

    def _check_still_drained(self, before: Any) -> None:
        """Check that partitions released without a commit stay pending after a conversion: either the partition has no
        owner, or its owner must not read yet.
        """
        was, now = self._drained_of(before), self._drained_of(self.group)
        for key, source in was.items():
            if source in self.group.members and key[0] in self.world.cluster.topics:
                has_it = self._owner_of(key) == source
                require(has_it or now.get(key) == source, "{} of {} is not drained", key, source)

    def _owner_of(self, key: tuple[str, int]) -> MemberId | None:
        """Return the partition's owner in the consumer group that the classic group has become."""
        if isinstance(self.group, Group):
            return None
        topic_id = self.world.cluster.topics[key[0]].topic_id
        return next(
            (each for each, member in self.group.members.items() if key[1] in member.assigned.get(topic_id, ())), None
        )

    def _drained_of(self, group: Any) -> dict[tuple[str, int], MemberId]:
        """Return, by topic and partition, the member that must commit before the next owner may read."""
        if isinstance(group, Group):
            awaited = (each for each in group.handoffs if each.awaits is Awaits.DRAIN and not each.forced)
            return {(each.topic, each.partition): each.source for each in awaited}
        by_id = self.world.cluster.by_id
        early = {
            (by_id[each.topic_id].name, each.partition): each.source
            for each in group.unsettled
            if each.topic_id in by_id
        }
        return early | {
            (by_id[topic_id].name, index): member_id
            for member_id, member in group.members.items()
            for topic_id, index in _each(member.undrained)
            if topic_id in by_id
        }

    def _check_nobody_is_put_out(self, taken: Step) -> None:
        clients = self.world.clients
        lively = {client.member_id for client in clients if client.alive and isinstance(client, ClassicClient)}
        for fact in taken.facts:
            if isinstance(fact, MemberLeft) and fact.departure is not Departure.LEFT:
                require(fact.member_id not in lively, "in calm weather {}", fact)

    # --- storing ------------------------------------------------------------------------------------------------------

    def _store(self, taken: Step) -> None:
        machine = MACHINES.of(taken.group)
        self.row = machine.group_type, rewritten(machine.stored(taken.group))
        touched = self._unstored.members
        if self._unstored.whole:
            self.rows.clear()
            touched = set(machine.member_ids(taken.group))
        for member_id in touched:
            stored = machine.stored_member(taken.group, member_id)
            if stored is None:
                self.rows.pop(member_id, None)
            else:
                self.rows[member_id] = json.dumps(stored.document)
        self._unstored.clear()

    def crash(self) -> None:
        if self.up:
            self.world.tell("the node crashes")
            self.up = False
            for client in self.world.clients:
                client.disconnect()
            self.world.after(self.world.random.randint(10, 3_000), self._come_up)

    def _restore(self) -> None:
        self._waiting.clear()
        self._unstored.clear()
        self.group = MACHINES.missing("g")
        if self.row is not None:
            group_type, stored = self.row
            silent_ms = None if stored.all_heard else self.world.random.randint(0, 60_000)
            members = {member_id: json.loads(row) for member_id, row in self.rows.items()}
            machine = MACHINES.of_type(group_type)
            self.group = machine.restore("g", stored, members, silent_ms, self.world.now_ms, self.settings)
        self.cut = self.world.number()
        for client in self.world.clients:
            client.disconnect()
        self._judge()

    def _arm(self) -> None:
        deadline_ms = MACHINES.of(self.group).next_deadline(self.group)
        if deadline_ms is None or (self.tick_at_ms is not None and self.tick_at_ms <= deadline_ms):
            return
        at_ms = max(deadline_ms, self.world.now_ms + 5)
        self.tick_at_ms = at_ms
        self.world.after(at_ms - self.world.now_ms, lambda: self._timer(at_ms))

    # --- the referee --------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        for client in self.world.clients:
            if client.is_member and client.member_id not in self.group.members:
                client.is_member = False
        if isinstance(self.group, ConsumerGroup):
            self._judge_consumer(self.group)
        self.check_clients()

    def _judge_consumer(self, group: ConsumerGroup) -> None:
        owner: dict[tuple[UUID, int], MemberId] = {}
        for member_id, member in group.members.items():
            require(member_id in group.session_deadlines, "{} would never expire", member)
            revoking = member.state is MemberState.UNREVOKED
            require(revoking == (member_id in group.rebalance_deadlines), "{} may take for ever", member)
            for held in (member.assigned, member.pending_revocation, member.undrained):
                for topic_id, indexes in held.items():
                    for index in indexes:
                        other = owner.setdefault((topic_id, index), member_id)
                        require(other == member_id, "{}-{}: {} and {}", topic_id, index, other, member_id)
        for each in group.unsettled:
            require(owner.get((each.topic_id, each.partition)) == each.owner, "{} is another's", each)
            undrained = group.members[each.owner].undrained.get(each.topic_id, ())
            require(each.partition not in undrained, "{} has not been read", each)
            require(each.source in group.members and each.source != each.owner, "{} waits for nobody", each)
            require(each.deadline_ms >= self.world.now_ms - 5 or self.tick_at_ms is not None, "{} never ends", each)
        derived = {(topic, index): each for topic, owned in group.owners.items() for index, each in owned.items()}
        require(derived == owner, "owners are not those of the members")
        for deadlines in (group.join_deadlines, group.sync_deadlines):
            classic = all(group.members[member_id].classic is not None for member_id in deadlines)
            require(classic, "somebody who does not join is waited for")
        if self.closely:
            stored = {each: CONSUMER.stored_member(group, each) for each in group.members}
            rows = {each: json.dumps(row and row.document) for each, row in stored.items()}
            require(rows == self.rows, "stored members are others than in memory")

    def check_client(self, client: AnyClient) -> None:
        self.check_clients()

    def check_clients(self) -> None:
        """Check that the coordinator knows every partition that a member really owns, so that no two members own the
        same one. A deleted topic has no owners, even if another topic has its name now.
        """
        world, group = self.world, self.group
        live = frozenset(world.cluster.by_id)
        owner: dict[tuple[UUID, int], str] = {}
        for client in world.clients:
            member = group.members.get(client.member_id) if client.owned and client.is_member else None
            if member is None:
                continue
            owned = only_topics(client.owned, live)
            if isinstance(group, ConsumerGroup):
                rest = difference(difference(owned, member.assigned), member.pending_revocation)
                require(not rest, "{} owns {}, which may be another's", client.name, rest)
            else:
                for topic_id, index in _each(owned):
                    other = owner.setdefault((topic_id, index), client.name)
                    require(other == client.name, "{}-{} is read by {} and {}", topic_id, index, other, client.name)


def _each(held: Partitions) -> Iterator[tuple[UUID, int]]:
    return ((topic_id, index) for topic_id, indexes in held.items() for index in indexes)


def _reads(client: AnyClient, name: str) -> bool:
    return subscribes(client, name) if isinstance(client, Client) else name in client.names


def _told(event: object, taken: Step) -> str:
    facts = "; ".join(map(str, taken.facts))
    who = getattr(event, "member_id", "")
    epoch = getattr(event, "member_epoch", getattr(event, "generation_id", ""))
    answers = [
        (reply.error.name, getattr(reply, "member_epoch", getattr(reply, "generation_id", "")))
        for _, reply in taken.replies
    ]
    return f"{type(event).__name__} {who} {epoch} -> {answers} {facts}"


# --- a run ----------------------------------------------------------------------------------------------------------


class _Play(Play[AnyClient]):
    def __init__(self, world: World, server: MixedServer, *, topics_change: bool, rolls: bool, lags: bool) -> None:
        super().__init__(world)
        self.server = server
        self.topics_change = topics_change
        self.lags = lags
        self.offers = (world.random.choice((EAGER, COOPERATIVE, COOPERATIVE)),)
        """Each classic client offers one of these lists of protocols. All members can speak one protocol."""
        if rolls:
            self.offers = world.random.choice(ROLLING)
        self.has_eager = any("range" in offer for offer in self.offers)

    @property
    def clients(self) -> list[AnyClient]:
        return cast("list[AnyClient]", self.world.clients)

    def run(self) -> None:
        world = self.world
        for _ in range(world.random.randint(1, 3)):
            world.after(world.random.randint(0, 3_000), self._add_classic)
        self._disturb()
        if self.lags:
            self._move()
        world.run_until(FOUL_MS)
        self.calm_down()
        self.settle(SETTLE_MS)
        # Requests that were sent before the weather (the rate of faults) changed have arrived.
        world.run_until(world.now_ms + LATEST_MS)
        self.settle(SETTLE_MS)
        self.server.coda = True
        for client in world.clients:
            if isinstance(client, ClassicClient):
                client.stubborn = False
        newcomer = Client(world, "c-last", None, 1)
        newcomer.rebalance_timeout_ms = 20_000
        self.start(newcomer)
        self.settle(CODA_MS)
        newcomer.leave()
        self.settle(CODA_MS)

    def _move(self) -> None:
        """Move the group now and then, without any effect on the other random choices."""
        if not self.world.calm:
            self.server.move_behind()
            self.world.after(self.world.moves.randint(1, 4_000), self._move)

    def _disturb(self) -> None:
        server = self.server
        deeds: list[tuple[int, Callable[[], Any]]] = [
            (4, self._add_classic),
            (4, self._add_consumer),
            (5, self._upgrade_one),
            (5, self._downgrade_one),
            (2, self.to_one("leave")),
            (2, self.to_one("die")),
            (2, self.to_one("disconnect")),
            (2, self.to_one("choose_topics")),
            (1, self.to_one("rejoin")),
            (8, self._deliver_something_old),
            (1, server.crash),
            (1, lambda: server.apply(Tick())),
            (4, server.look_how_far_sources_are),
        ]
        if self.topics_change:
            deeds += [(4, self.world.change_topics), (2, self.world.recreate_topic)]
        self.disturb(deeds, within_ms=3_000, every_ms=5_000)

    def _add_classic(self, instance_id: str | None = None, names: tuple[str, ...] = ()) -> None:
        number = self.world.number()
        if instance_id is None and not self.has_eager and self.world.chance(0.3):
            instance_id = f"i{number}"
        if len(self.living()) < MAX_CLIENTS:
            client = ClassicClient(self.world, f"k{number}", instance_id, self._offer())
            if self.topics_change and instance_id is not None:
                # Before KIP-814, a static leader that returns does not learn that it leads, and then no member watches
                # topics (KAFKA-13435).
                client.version = TOLD_TO_LEAD
            client.names = names or client.names
            self.start(client)

    def _offer(self) -> tuple[str, ...]:
        return self.offers[0] if len(self.offers) == 1 else self.world.random.choice(self.offers)

    def _add_consumer(self, instance_id: str | None = None, names: tuple[str, ...] = ()) -> None:
        number = self.world.number()
        if instance_id is None and self.world.chance(0.3):
            instance_id = f"i{number}"
        if len(self.living()) < MAX_CLIENTS:
            client = consumer(self.world, f"c{number}", instance_id, 1)
            if names:
                client.names, client.pattern = names, ""
            self.start(client)

    def _upgrade_one(self) -> None:
        self._replace(ClassicClient, self._add_consumer)

    def _downgrade_one(self) -> None:
        self._replace(Client, self._add_classic)

    def _replace(self, kind: type, add: Callable[[str | None, tuple[str, ...]], None]) -> None:
        """Replace a process by a process that speaks the other protocol. It has the same instance id, if there is one,
        and usually reads the same topics.
        """
        living = [client for client in self.living() if isinstance(client, kind)]
        if living:
            old = self.world.random.choice(living)
            if isinstance(old, ClassicClient) and old.instance_id is not None and self.has_eager:
                old.instance_id = None
            old.leave()
            names = old.names if self.world.chance(0.7) else ()
            add(None if self.has_eager else old.instance_id, names)

    def _deliver_something_old(self) -> None:
        """Deliver an old request. Prefer a join, because a join tells the coordinator which
        partitions a member claims.
        """
        stuck = self.world.stuck
        if stuck:
            joins = [event for event in stuck if isinstance(event, JoinGroup)]
            old = self.world.random.choice(joins or stuck)
            stuck.remove(old)
            self.world.tell("something old arrives")
            self.server.receive(old, lambda reply: None)

    def unsettled(self) -> str:
        server, living = self.server, self.living()
        group = server.group
        if not server.up:
            return "the node is down"
        if {client.member_id for client in living} != set(group.members):
            return f"live: {[client.member_id for client in living]}, members: {list(group.members)}"
        if not living:
            return ""
        if any(isinstance(client, Client) for client in living) != isinstance(group, ConsumerGroup):
            return f"{[client.name for client in living]} are a {type(group).__name__}"
        if isinstance(group, ConsumerGroup):
            if state_of(group) is not ConsumerState.STABLE:
                return f"{state_of(group)}: {group}"
        elif group.state is not GroupState.STABLE or any(each.is_pending for each in group.handoffs):
            return f"{group.state}, awaited: {group.handoffs}"
        owned: dict[tuple[str, int], str] = {}
        for client in living:
            if isinstance(client, ClassicClient) and not client.reading:
                return f"{client.name} is on its way"
            if isinstance(group, ConsumerGroup) and client.owned != group.members[client.member_id].assigned:
                return f"{client.name} owns {client.owned}, not {group.members[client.member_id].assigned}"
            for topic_id, index in _each(client.owned):
                name = self.world.name_of[topic_id]
                if owned.setdefault((name, index), client.name) != client.name:
                    return f"{name}-{index} is read twice"
        if isinstance(group, ConsumerGroup):
            for client in (each for each in living if not each.owned):
                for name in (each for each in self.world.partition_counts if _reads(client, each)):
                    shares = Counter(owner for (topic, _), owner in owned.items() if topic == name)
                    if max(shares.values(), default=0) > 1:
                        return f"{client.name} has nothing, others have more than one partition: {owned}"
        wanted = {(self.world.name_of[topic_id], index) for topic_id, index in self.wanted(_reads)}
        return "" if set(owned) == wanted else f"owned {owned}, wanted {wanted}"
