"""Readers that call the coordinator directly. They share a log with committed offsets.

The coordinator sees as much of this log as in a gateway. The clock stands still while the readers settle, so that a
decision cannot be mistaken for the effect of a timeout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from gateway.coordinator.consumer.handoff import draining
from gateway.coordinator.consumer.machine import step
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeatReply
from gateway.coordinator.handoff import Drained, HandoffEnd, HandoffEnded, HandoffMode, HandoffSettings
from gateway.coordinator.machine import Event, Tick
from gateway.coordinator.requests import HandoffProgress
from gateway.coordinator.settings import ConsumerSettings
from protocol.errors import ErrorCode
from tests.readers import Partition, Readers

from .scene import TOPIC_NAMES, Scene, named

ROUNDS = 200
BEAT_MS = 1_000


class PlayedReaders(Readers):
    def __init__(
        self, partitions: int, *, topics: tuple[str, ...] = ("t",), timeout_ms: int = 30_000, mortal: bool = False
    ) -> None:
        super().__init__(partitions, topics)
        drain = HandoffSettings(HandoffMode.DRAIN, timeout_ms)
        self._scene = _Told(dict.fromkeys(topics, partitions), ConsumerSettings(handoff=drain))
        self.committed: dict[Partition, int] = {}
        self.served: dict[tuple[str, Partition], int] = {}

    @property
    def now_ms(self) -> float:
        return self._scene.now_ms

    @property
    def ended(self) -> set[HandoffEnd]:
        return set(self._scene.ended)

    # --- what readers do ----------------------------------------------------------------------------------------------

    def come(self, *names: str) -> None:
        for name in names:
            self.begin(name)
            self._take(name, self._scene.join(name, *self.topics))

    def beat(self, *names: str) -> None:
        for name in names:
            says = self.about_to_beat(name)
            owned = None if says is None else {topic: {i for t, i in says if t == topic} for topic, _ in says}
            self._take(name, self._scene.heartbeat(name, self.readers[name].epoch, owned))

    def _take(self, name: str, reply: ConsumerGroupHeartbeatReply) -> None:
        assert reply.error is ErrorCode.NONE, reply
        told = None if reply.assignment is None else named(reply.assignment).items()
        partitions = None if told is None else {(topic, index) for topic, indexes in told for index in indexes}
        for partition in self.answered(name, reply.member_epoch, partitions):
            self.readers[name].positions[partition] = self.committed.get(partition, 0)

    def poll(self, *names: str, at_most: int | None = None) -> set[Partition]:
        found: set[Partition] = set()
        for name in names:
            reader = self.readers[name]
            for partition in sorted(reader.owned & reader.told):
                position, end = reader.positions[partition], self.ends.get(partition, 0)
                for offset in range(position, end if at_most is None else min(end, position + at_most)):
                    self.deliver(name, partition, offset)
                    self.served[name, partition] = max(offset + 1, self.served.get((name, partition), 0))
                    found.add(partition)
        return found

    def commit(self, *names: str, only: Iterable[Partition] | None = None) -> None:
        for name in names:
            refused = self._scene.commit(name, self.readers[name].epoch).error
            assert refused is ErrorCode.NONE, refused
            self.committed.update(self.to_commit(name, only))

    def leave(self, *names: str) -> None:
        for name in names:
            self._scene.heartbeat(name, -1)
            self.end(name)

    def die(self, *names: str) -> None:
        for name in names:
            self.end(name)
        self._wait(self._scene.settings.session_timeout_ms + BEAT_MS)
        assert set(self._scene.group.members) == set(self.readers)

    # --- what happens -------------------------------------------------------------------------------------------------

    def produce(self, records: int = 1, *, only: Iterable[Partition] | None = None) -> None:
        for partition in self.partitions() if only is None else only:
            self.ends[partition] = self.ends.get(partition, 0) + records

    def grow(self, **topics: int) -> None:
        self.partition_counts = topics
        self._scene.topics_changed(topics)

    def settle(self, *, waiting: int = 0, work: bool = False) -> None:
        self._speak(work=work)
        assert self._waiting == waiting, self._scene.group.moving

    def rest(self) -> None:
        self._speak()

    def outlast(self) -> None:
        for _ in range(ROUNDS):
            if not self._waiting:
                break
            self._wait(BEAT_MS)
        self.settle()

    def is_even(self) -> None:
        super().is_even()
        assert set(self._scene.group.members) == set(self.readers)
        assert not self._scene.group.moving

    @property
    def _waiting(self) -> int:
        return sum(each.target is not None for each in self._scene.group.moving.values())

    def _look(self) -> None:
        """Report to the coordinator how far the sources of its handoffs have committed."""
        found: list[Drained] = []
        for each in draining(self._scene.group):
            assert isinstance(each.topic, UUID)
            partition = TOPIC_NAMES[each.topic], each.partition
            mark = self.served.get((each.source, partition))
            found.append(Drained(each.topic, each.partition, each.source, mark, self.committed.get(partition, -1)))
        if found:
            self._scene.play(HandoffProgress(tuple(found)))

    def _speak(self, *, work: bool = False) -> None:
        for _ in range(ROUNDS):
            before = self._picture()
            for name in list(self.readers):
                if work:
                    self.poll(name)
                    self.commit(name)
                self.beat(name)
            self._look()
            if self._picture() == before:
                return
        raise AssertionError("it goes on for ever")

    def _picture(self) -> object:
        readers = {name: (each.epoch, frozenset(each.owned)) for name, each in self.readers.items()}
        return readers, self._scene.group.members, len(self.delivered)

    def _wait(self, ms: int) -> None:
        """Let time pass; every live member sends a heartbeat each second."""
        until_ms = self._scene.now_ms + ms
        while self._scene.now_ms < until_ms:
            self._scene.now_ms += min(BEAT_MS, until_ms - self._scene.now_ms)
            self._scene.play(Tick())
            self.beat(*self.readers)
            self._look()


class _Told(Scene):
    """Records why each wait ended."""

    def __init__(self, topics: dict[str, int], settings: ConsumerSettings) -> None:
        super().__init__(topics, settings)
        self.ended: list[HandoffEnd] = []

    def play(self, event: Event) -> Any:
        taken = step(self.group, event, self.cluster, self.now_ms, self.settings)
        self.ended += [fact.reason for fact in taken.facts if isinstance(fact, HandoffEnded)]
        self.group: ConsumerGroup = taken.group
        return taken.replies[0][1] if taken.replies else None
