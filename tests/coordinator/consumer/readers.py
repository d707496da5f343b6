"""Readers of a consumer group in mode `drain`, with a log and committed offsets, as far as a coordinator can tell.

The one idea: a reader owns a partition from the answer that gives it to the heartbeat that no longer lists it, and
whenever somebody is given one, nobody else may own it. What is delivered is written down, so that a test can ask what
was read twice, and by whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

from gateway.coordinator.consumer.handoff import draining
from gateway.coordinator.consumer.machine import step
from gateway.coordinator.consumer.model import ConsumerGroupHeartbeatReply
from gateway.coordinator.consumer.offsets import commit_refusal
from gateway.coordinator.facts import MemberId
from gateway.coordinator.handoff import Drained, HandoffEnd, HandoffEnded, HandoffMode, HandoffSettings
from gateway.coordinator.machine import Tick
from gateway.coordinator.model import ConsumerSettings, HandoffProgress
from protocol.errors import ErrorCode

from .scene import TOPIC_NAMES, Scene, named

Partition = tuple[str, int]
ROUNDS = 200
BEAT_MS = 1_000


@dataclass
class Reader:
    epoch: int = 0
    owned: set[Partition] = field(default_factory=set[Partition])
    told: set[Partition] = field(default_factory=set[Partition])
    """What it may own by the last answer; it lets go of the rest with its next heartbeat."""
    reported: set[Partition] | None = None
    positions: dict[Partition, int] = field(default_factory=dict[Partition, int])
    """Also of what it has let go of: that it may still commit."""


class Readers(Scene):
    def __init__(self, partitions: int, *, timeout_ms: int = 30_000, topics: tuple[str, ...] = ("t",)) -> None:
        drain = HandoffSettings(HandoffMode.DRAIN, timeout_ms)
        super().__init__(dict.fromkeys(topics, partitions), ConsumerSettings(handoff=drain))
        self.topics = topics
        self.readers: dict[str, Reader] = {}
        self.ends: dict[Partition, int] = {}
        self.committed: dict[Partition, int] = {}
        self.delivered: list[tuple[Partition, int, str]] = []
        self.served: dict[tuple[str, Partition], int] = {}
        self.ended: list[HandoffEnd] = []

    def play(self, event: object) -> ConsumerGroupHeartbeatReply | None:
        taken = step(self.group, event, self.cluster, self.now_ms, self.settings)
        self.ended += [fact.reason for fact in taken.facts if isinstance(fact, HandoffEnded)]
        self.group = taken.group
        return taken.replies[0][1] if taken.replies else None

    # --- what readers do ----------------------------------------------------------------------------------------------

    def come(self, *names: str) -> None:
        """They join; one that is known begins anew, with nothing."""
        for name in names:
            self.readers[name] = Reader()
            self._take(name, self.join(name, *self.topics))

    def beat(self, *names: str) -> None:
        """They let go of what they were told to, and say so."""
        for name in names:
            reader = self.readers[name]
            reader.owned &= reader.told
            says = reader.owned if reader.owned != reader.reported else None
            owned = None if says is None else {topic: {i for t, i in says if t == topic} for topic, _ in says}
            reader.reported = set(reader.owned)
            self._take(name, self.heartbeat(name, reader.epoch, owned))

    def _take(self, name: str, reply: ConsumerGroupHeartbeatReply) -> None:
        reader = self.readers[name]
        assert reply.error is ErrorCode.NONE, reply
        reader.epoch = reply.member_epoch
        if reply.assignment is None:
            return
        reader.told = {(topic, index) for topic, indexes in named(reply.assignment).items() for index in indexes}
        for partition in reader.told - reader.owned:
            others = [other for other, each in self.readers.items() if partition in each.owned]
            assert not others, f"{partition} is given to {name}, and {others} own it"
            reader.positions[partition] = self.committed.get(partition, 0)
        reader.owned |= reader.told

    def poll(self, *names: str, at_most: int = 1_000) -> set[Partition]:
        """Each reads on in what it has; the partitions of which it got something."""
        found: set[Partition] = set()
        for name in names:
            reader = self.readers[name]
            for partition in sorted(reader.owned & reader.told):
                position, end = reader.positions[partition], self.ends.get(partition, 0)
                for offset in range(position, min(end, position + at_most)):
                    self.delivered.append((partition, offset, name))
                    reader.positions[partition] = offset + 1
                    self.served[name, partition] = max(offset + 1, self.served.get((name, partition), 0))
                    found.add(partition)
        return found

    def commit(self, *names: str, only: Iterable[Partition] | None = None) -> None:
        """All that they were served, whoever owns it by now."""
        for name in names:
            reader = self.readers[name]
            assert commit_refusal(self.group, 9, MemberId(name), None, reader.epoch) is None
            for partition in reader.positions if only is None else only:
                if (name, partition) in self.served:
                    self.committed[partition] = reader.positions[partition]

    def leave(self, *names: str) -> None:
        for name in names:
            self.heartbeat(name, -1)
            del self.readers[name]

    def die(self, *names: str) -> None:
        """They say nothing more; the others wait until they are gone."""
        for name in names:
            del self.readers[name]
        self.wait(self.settings.session_timeout_ms + BEAT_MS)

    # --- what happens -------------------------------------------------------------------------------------------------

    def produce(self, records: int = 1) -> None:
        """So many to each partition that there is."""
        for partition in self.partitions():
            self.ends[partition] = self.ends.get(partition, 0) + records

    def partitions(self) -> set[Partition]:
        return {(name, index) for name, topic in self.cluster.topics.items() for index in range(topic.partition_count)}

    def grow(self, **topics: int) -> None:
        """Topics have so many partitions from here on; those that are left out are deleted."""
        self.topics_changed(topics)

    def look(self) -> None:
        """The coordinator is told how far its sources are."""
        found: list[Drained] = []
        for each in draining(self.group):
            assert isinstance(each.topic, UUID)
            partition = TOPIC_NAMES[each.topic], each.partition
            mark = self.served.get((each.source, partition))
            found.append(Drained(each.topic, each.partition, each.source, mark, self.committed.get(partition, -1)))
        if found:
            self.play(HandoffProgress(tuple(found)))

    def settle(self, *, work: bool = False) -> None:
        """Everybody speaks until nothing changes any more; time stands still. With `work` they read and commit, too."""
        for _ in range(ROUNDS):
            before = self._picture()
            for name in list(self.readers):
                if work:
                    self.poll(name)
                    self.commit(name)
                self.beat(name)
            self.look()
            if self._picture() == before:
                return
        raise AssertionError("it goes on for ever")

    def _picture(self) -> object:
        readers = {name: (each.epoch, frozenset(each.owned)) for name, each in self.readers.items()}
        return readers, self.group.members, len(self.delivered)

    def wait(self, ms: int) -> None:
        """Time passes; whoever is there speaks every second."""
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.now_ms += min(BEAT_MS, until_ms - self.now_ms)
            self.play(Tick())
            self.beat(*self.readers)
            self.look()

    # --- what tests ask -----------------------------------------------------------------------------------------------

    def owned(self, name: str) -> set[Partition]:
        return self.readers[name].owned

    @property
    def pending(self) -> int:
        """Partitions that somebody waits for."""
        return sum(each.target is not None for each in self.group.moving.values())

    def duplicates(self) -> list[tuple[Partition, int]]:
        """What two members have read. One that is given back what it let go of reads its own work again."""
        seen = {(partition, offset, name) for partition, offset, name in self.delivered}
        return sorted(each for each, count in Counter((p, offset) for p, offset, _ in seen).items() if count > 1)

    def readers_of(self, partition: Partition) -> set[str]:
        return {name for each, _, name in self.delivered if each == partition}

    def is_even(self) -> None:
        """All partitions have an owner, and shares differ by one at most."""
        shares = [each.owned for each in self.readers.values()]
        assert sum(map(len, shares)) == len(set[Partition]().union(*shares)) == len(self.partitions()), shares
        assert max(map(len, shares)) - min(map(len, shares)) <= 1, shares
        assert set(self.group.members) == set(self.readers)
        assert not self.group.moving
