"""Time, chance, topics and one simulated node. The node runs the machine as the gateway does, and can fail."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any
from uuid import UUID

from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.consumer.model import (
    ConsumerGroup,
    ConsumerGroupHeartbeat,
    ConsumerGroupHeartbeatReply,
    MemberState,
)
from gateway.coordinator.consumer.partitions import Partitions, difference, only_topics
from gateway.coordinator.facts import MemberId
from gateway.coordinator.handoff import Drained, HandoffMode, HandoffSettings
from gateway.coordinator.machine import ClusterChanged, Machines, Step, StoredGroup, Tick
from gateway.coordinator.requests import HandoffProgress
from gateway.coordinator.settings import ConsumerSettings, Settings
from protocol.errors import ErrorCode

if TYPE_CHECKING:
    from .clients import Client

MACHINES = Machines(CONSUMER)
NAMES = ("t0", "t1", "t2", "logs-a", "logs-b")


class FoulError(AssertionError):
    """The coordinator has violated a rule."""


@dataclass
class Weather:
    lost_request: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0
    store_failure: float = 0.0


class World:
    """Time, chance, topics, and the one node."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.tempers = Random(f"tempers of {seed}")
        """Random source for slow consumers only, so that runs without slow consumers did not change when slow consumers
        were added.
        """
        self.slow_share = self.tempers.choice((0, 0, 0.5, 1))
        self.moves = Random(f"moves of {seed}")
        """Random source for the moves of a group to nodes that know older topics."""
        self.now_ms = 0
        self.told: list[str] = []
        self.weather = Weather()
        self.calm = False
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = 0
        self.partition_counts = {name: self.random.randint(1, 6) for name in NAMES[: self.random.randint(1, 5)]}
        self.name_of: dict[UUID, str] = {}
        """Names of every topic that has ever existed."""
        self.topic_ids = {name: self.new_topic_id(name) for name in self.partition_counts}
        self._revision = 0
        self.clusters: list[Cluster] = []
        """The topics after each change."""
        self.cluster = self._cluster()
        self.clients: list[Client] = []
        self.stuck: list[ConsumerGroupHeartbeat] = []
        """Requests under way whose client no longer waits. Each may still arrive, once."""
        self.server = Server(self)

    def _cluster(self) -> Cluster:
        topics = {
            name: ClusterTopic(self.topic_ids[name], name, count) for name, count in self.partition_counts.items()
        }
        self._revision += 1
        self.clusters.append(Cluster(topics, {topic.topic_id: topic for topic in topics.values()}, self._revision))
        return self.clusters[-1]

    def new_topic_id(self, name: str) -> UUID:
        topic_id = UUID(int=self.random.getrandbits(128))
        self.name_of[topic_id] = name
        return topic_id

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
            self.topic_ids[name] = self.new_topic_id(name)
        elif self.chance(0.5):
            self.partition_counts[name] += self.random.randint(1, 3)
        else:
            del self.partition_counts[name]
        self._topics_changed()

    def recreate_topic(self) -> None:
        """Delete and recreate a topic so quickly that no client sees it missing."""
        if self.partition_counts:
            name = self.random.choice(list(self.partition_counts))
            if self.chance(0.5):
                self.partition_counts[name] = self.random.randint(1, 6)
            self.topic_ids[name] = self.new_topic_id(name)
            self._topics_changed()

    def _topics_changed(self) -> None:
        self.cluster = self._cluster()
        self.tell(f"topics: {self.partition_counts}")
        if self.chance(0.5):
            self.server.apply(ClusterChanged())


@dataclass
class Stored:
    """The stored rows, as documents of the facts that wrote them."""

    group: StoredGroup | None = None
    members: dict[MemberId, Any] = field(default_factory=dict)

    def write(self, taken: Step) -> None:
        self.group = rewritten(CONSUMER.stored(taken.group))
        for member_id in {member_id for fact in taken.facts for member_id in fact.touches()}:
            stored = CONSUMER.stored_member(taken.group, member_id)
            if stored is None:
                self.members.pop(member_id, None)
            else:
                self.members[member_id] = json.loads(json.dumps(stored.document))


def rewritten(stored: StoredGroup) -> StoredGroup:
    return replace(stored, document=json.loads(json.dumps(stored.document)))


class Server:
    """One node: runs `step` as the runner does, and fails as a node does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.settings = Settings(
            consumer=ConsumerSettings(
                session_timeout_ms=world.random.choice((10_000, 45_000)),
                heartbeat_interval_ms=world.random.choice((1_000, 3_000)),
                max_size=world.random.choice((2**31 - 1, 2**31 - 1, 3)),
                handoff=HandoffSettings(
                    world.random.choice((HandoffMode.ACK, HandoffMode.DRAIN, HandoffMode.DRAIN, HandoffMode.OFF)),
                    world.random.choice((2_000, 30_000)),
                ),
            )
        )
        self.group: ConsumerGroup = ConsumerGroup("g")
        self.stored = Stored()
        self.up = True
        self.closely = True
        """True if each step is checked not to mutate the value that it was given. This check takes most of the time."""
        self.tick_at_ms: int | None = None
        self.undrained: dict[tuple[UUID, int], tuple[MemberId, int, int | None]] = {}
        """For each member, the partitions that it has released without committing up to their marks, each with its
        deadline and mark.
        """
        self.cut = 0
        """Connections up to this number, and all requests on them, were lost with an earlier coordinator."""

    def receive(self, event: ConsumerGroupHeartbeat) -> ConsumerGroupHeartbeatReply | None:
        if not self.up or event.connection_number <= self.cut:
            return None
        return self.apply(event)

    def look_how_far_sources_are(self) -> None:
        """Report how far the sources have committed. The report may come late, or concern a member that is no longer a
        source.
        """
        chance = self.world.random
        found = tuple(
            Drained(topic_id, index, source, chance.choice((None, 5, 9)), chance.choice((-1, 7, 9)))
            for (topic_id, index), moving in self.group.moving.items()
            for source in (moving.source, moving.target)
            if source is not None
        )
        self.world.after(chance.choice((0, 5, 4_000)), lambda: self.apply(HandoffProgress(found)) and None)

    def apply(
        self, event: ConsumerGroupHeartbeat | ClusterChanged | Tick | HandoffProgress
    ) -> ConsumerGroupHeartbeatReply | None:
        if not self.up:
            return None
        world = self.world
        before = self.group
        copy = repr(before) if self.closely else ""
        taken = MACHINES.step(before, event, world.cluster, world.now_ms, self.settings)
        require(not self.closely or repr(before) == copy, "the group that was given has been mutated by {}", event)
        world.tell(describe(event, taken))
        replies = dict(taken.replies)
        asked = event.request_id if isinstance(event, ConsumerGroupHeartbeat) else None
        require(list(replies) == ([] if asked is None else [asked]), "{} is answered by {}", event, taken.replies)
        if MACHINES.must_store(taken) and world.chance(world.weather.store_failure):
            world.tell("  ... could not be stored")
            if world.chance(0.3):
                self._store(taken)
                self.group = taken.group
                self._judge_draining(before, event)
                self._restore()
            self._arm()
            return None if asked is None else ConsumerGroupHeartbeatReply(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        self._store(taken)
        self.group = taken.group
        self._judge_draining(before, event)
        self._judge()
        self._arm()
        reply = None if asked is None else replies[asked]
        assert reply is None or isinstance(reply, ConsumerGroupHeartbeatReply)
        return reply

    def _store(self, taken: Step) -> None:
        if not MACHINES.must_store(taken):
            return
        before = set(self.stored.members)
        self.stored.write(taken)
        for client in self.world.clients:
            if client.member_id in before - set(self.stored.members):
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
        self.group = CONSUMER.missing("g")
        if self.stored.group is not None:
            stored, members = self.stored.group, self.stored.members
            silent_ms = None if stored.all_heard else self.world.random.randint(0, 60_000)
            self.group = CONSUMER.restore("g", stored, members, silent_ms, self.world.now_ms, self.settings)
        self.cut = self.world.number()
        until_ms = self.world.now_ms + self.settings.consumer.handoff.timeout_ms
        self.undrained = {key: (source, until_ms, None) for key, (source, _, _) in self.undrained.items()}
        for client in self.world.clients:
            client.disconnect()
        self._judge()

    def _arm(self) -> None:
        deadline_ms = CONSUMER.next_deadline(self.group)
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

    def _judge_draining(self, before: ConsumerGroup, event: object) -> None:
        """Check with separate records: before the deadline, no member receives a partition that another has released
        but not drained.
        """
        world, after, handoff = self.world, self.group, self.settings.consumer.handoff
        if isinstance(event, HandoffProgress):
            for found in event.found:
                assert isinstance(found.topic, UUID), "these groups know topics by their ids"
                key = found.topic, found.partition
                undrained = self.undrained.get(key)
                if undrained is None or undrained[0] != found.source:
                    continue
                source, until_ms, mark = undrained
                mark = max((each for each in (mark, found.mark) if each is not None), default=None)
                self.undrained[key] = source, until_ms, mark
                if mark is None or found.committed >= mark:
                    del self.undrained[key]
        for member_id, member in before.members.items():
            now = after.members.get(member_id)
            if now is None or now.member_epoch < 0 or getattr(event, "member_epoch", 0) == 0:
                continue
            gone = difference(difference(member.pending_revocation, now.pending_revocation), now.assigned)
            for topic_id, indexes in gone.items() if handoff.mode is HandoffMode.DRAIN else ():
                for index in indexes if topic_id in world.cluster.by_id else ():
                    self.undrained[topic_id, index] = member_id, world.now_ms + handoff.timeout_ms, None
        for key, (source, until_ms, _) in list(self.undrained.items()):
            member = after.members.get(source)
            has_it = member is not None and key[1] in member.assigned.get(key[0], ())
            anew = getattr(event, "member_epoch", -1) == 0 and getattr(event, "member_id", "") == source
            if member is None or member.member_epoch <= 0 or anew or has_it or until_ms <= world.now_ms:
                del self.undrained[key]
                continue
            for other in after.members.values():
                require(key[1] not in other.assigned.get(key[0], ()), "{} of {} is not drained: {}", key, source, other)

    # --- the referee --------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        group = self.group
        owner: dict[tuple[UUID, int], MemberId] = {}
        require(
            all(deadline_ms >= self.world.now_ms - 5 for deadline_ms in group.drain_deadlines.values())
            or self.tick_at_ms is not None,
            "nobody looks whether time is over",
        )
        for member in group.members.values():
            require(member.member_id in group.session_deadlines, "{} would never expire", member)
            revoking = member.state is MemberState.UNREVOKED
            require(revoking == (member.member_id in group.rebalance_deadlines), "{} may take for ever", member)
            require(
                revoking == bool(member.pending_revocation),
                "{} revokes {}",
                member.state,
                member.pending_revocation,
            )
            require(
                bool(member.undrained) == (member.member_id in group.drain_deadlines),
                "{} may drain for ever",
                member.member_id,
            )
            for held in (member.assigned, member.pending_revocation, member.undrained):
                for topic_id, indexes in held.items():
                    require(bool(indexes), "an empty set of partitions")
                    for index in indexes:
                        other = owner.setdefault((topic_id, index), member.member_id)
                        require(other == member.member_id, "{}-{}: {} and {}", topic_id, index, other, member.member_id)
        for key, moving in group.moving.items():
            require(owner.get(key) == moving.source, "{} does not move from {}", key, moving.source)
            require(moving.target is None or moving.target in group.members, "{} goes to nobody", moving)
        derived = {(topic, index): each for topic, owned in group.owners.items() for index, each in owned.items()}
        require(derived == owner, "owners are not those of the members")
        shares = {each: CONSUMER.stored_member(group, each) for each in CONSUMER.member_ids(group)}
        require(
            {each: json.loads(json.dumps(row and row.document)) for each, row in shares.items()} == self.stored.members,
            "stored members are others than in memory",
        )
        require(
            self.stored.group is None
            or rewritten(CONSUMER.stored(group)) == replace(self.stored.group, all_heard=not group.unheard),
            "stored epochs are others than in memory",
        )
        for client in self.world.clients:
            self.check_client(client)

    def check_client(self, client: Client) -> None:
        """Check that the coordinator knows every partition that the member really owns. Otherwise two members could own
        one partition.
        """
        member = self.group.members.get(client.member_id)
        if not client.is_member or member is None:
            return
        owned = client.owned
        if self.world.slow_share:
            # A client that takes over a deleted partition late does not take it from another member.
            owned = only_topics(owned, frozenset(self.world.cluster.by_id))
        rest = difference(difference(owned, member.assigned), member.pending_revocation)
        require(not rest, "{} owns {}, which may be another's", client.name, rest)


def require(kept: bool, foul: str, *about: object) -> None:
    """Raise FoulError if `holds` is false. The message is built only then, because building it takes longer than the
    check.
    """
    if not kept:
        raise FoulError(foul.format(*about))


def describe(event: object, taken: Step) -> str:
    facts = "; ".join(map(str, taken.facts))
    if not isinstance(event, ConsumerGroupHeartbeat):
        return f"{type(event).__name__} -> {facts}"
    reply = taken.replies[0][1] if taken.replies else None
    assert reply is None or isinstance(reply, ConsumerGroupHeartbeatReply)
    answer = reply and (reply.error.name, reply.member_epoch, shown(reply.assignment))
    subscription = f"{event.subscribed_topic_names} {event.subscribed_topic_regex!r}"
    return (
        f"{event.member_id}@{event.connection_number} epoch {event.member_epoch} owns {shown(event.owned)} "
        f"{subscription} -> {answer} {facts}"
    )


def shown(held: Partitions | None) -> str:
    if held is None:
        return "-"
    return " ".join(f"{str(topic_id)[:4]}{sorted(indexes)}" for topic_id, indexes in held.items()) or "nothing"
