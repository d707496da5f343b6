"""Readers of a consumer group in mode `drain`, under any coordinator, and a record of what they own and read.

The one idea: a reader owns a partition from the answer that assigns the partition until the heartbeat that no longer
lists it. `Readers` keeps all these intervals and every delivered record. Whenever a reader is assigned a partition,
every other reader's interval must have ended. A record is delivered only within its reader's interval.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.coordinator.handoff import HandoffEnd

Partition = tuple[str, int]


@dataclass
class Reader:
    epoch: int = 0
    owned: set[Partition] = field(default_factory=set[Partition])
    told: set[Partition] = field(default_factory=set[Partition])
    """Partitions that the last answer assigned. With its next heartbeat the reader releases all others."""
    reported: set[Partition] | None = None
    positions: dict[Partition, int] = field(default_factory=dict[Partition, int])
    """Positions in partitions. They include released partitions, whose positions the reader may still commit."""
    served: set[Partition] = field(default_factory=set[Partition])
    """Partitions from which the reader has read a record."""


@dataclass
class Interval:
    reader: str
    began_ms: float
    ended_ms: float | None = None


class Delivery(NamedTuple):
    partition: Partition
    offset: int
    reader: str
    at_ms: float


class Readers(ABC):
    """A group of readers, known by their names. They act only when a scenario tells them to, one after the other."""

    def __init__(self, partitions: int, topics: tuple[str, ...]) -> None:
        self.topics = topics
        self.partition_counts = dict.fromkeys(topics, partitions)
        self.readers: dict[str, Reader] = {}
        self.intervals: defaultdict[Partition, list[Interval]] = defaultdict(list)
        self.ends: dict[Partition, int] = {}
        self.delivered: list[Delivery] = []

    # --- what readers do ----------------------------------------------------------------------------------------------

    @abstractmethod
    def come(self, *names: str) -> None:
        """Let readers join. A reader that was there before begins anew and owns nothing."""

    @abstractmethod
    def beat(self, *names: str) -> None:
        """Let readers release the partitions that they must revoke, and report that."""

    @abstractmethod
    def poll(self, *names: str, at_most: int | None = None) -> set[Partition]:
        """Let each reader read from its partitions, to the end, or at most `at_most` records of each partition. Return
        the partitions that delivered a record.
        """

    @abstractmethod
    def commit(self, *names: str, only: Iterable[Partition] | None = None) -> None:
        """Let readers commit all records that they were served, even if another member owns the partition by now."""

    @abstractmethod
    def leave(self, *names: str) -> None: ...

    @abstractmethod
    def die(self, *names: str) -> None:
        """Let readers fall silent. All other readers wait until the coordinator has removed them."""

    # --- what happens -------------------------------------------------------------------------------------------------

    @abstractmethod
    def produce(self, records: int = 1, *, only: Iterable[Partition] | None = None) -> None:
        """Append this many records to each existing partition."""

    @abstractmethod
    def grow(self, **topics: int) -> None:
        """Set the partition counts of topics. Topics that are left out are deleted."""

    @abstractmethod
    def settle(self, *, waiting: int = 0, work: bool = False) -> None:
        """Let every reader send heartbeats until all own their target partitions. Exceptions are `waiting` partitions,
        on which their old owners still work. With `work` readers also read and commit until everything is read.
        """

    @abstractmethod
    def rest(self) -> None:
        """Let every reader send heartbeats until nothing changes any more, even if some readers still wait."""

    @abstractmethod
    def outlast(self) -> None:
        """Advance the time until no reader waits."""

    # --- books --------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def now_ms(self) -> float: ...

    def begin(self, name: str) -> None:
        """Start a new process for the reader of that name. No process reads the previous process's
        partitions any more.
        """
        self.end(name)
        self.readers[name] = Reader()

    def end(self, name: str) -> None:
        known = self.readers.pop(name, None)
        if known is not None:
            self._let_go(name, known.owned)

    def about_to_beat(self, name: str) -> set[Partition] | None:
        """Return the partitions that the heartbeat must list: all partitions that the reader owns, if they have changed
        since its last report.
        """
        reader = self.readers[name]
        self._let_go(name, reader.owned - reader.told)
        reader.owned &= reader.told
        says = None if reader.owned == reader.reported else set(reader.owned)
        reader.reported = set(reader.owned)
        return says

    def answered(self, name: str, epoch: int, told: set[Partition] | None) -> set[Partition]:
        """Record the answer to a heartbeat, and return the partitions that the reader gained."""
        reader = self.readers[name]
        reader.epoch = epoch
        if told is None:
            return set()
        reader.told = told
        gained = told - reader.owned
        for partition in gained:
            intervals = self.intervals[partition]
            assert not intervals or intervals[-1].ended_ms is not None, (
                f"{partition} is given to {name}, and {intervals[-1].reader} owns it"
            )
            intervals.append(Interval(name, self.now_ms))
        reader.owned |= told
        return gained

    def deliver(self, name: str, partition: Partition, offset: int) -> None:
        last = self.intervals[partition][-1]
        assert last.reader == name, f"{partition} is read by {name}, and {last.reader} owns it"
        assert last.ended_ms is None, f"{partition} is read by {name}, which has let go of it"
        reader = self.readers[name]
        assert reader.positions[partition] == offset, f"{name} is to read on at {reader.positions[partition]}"
        self.delivered.append(Delivery(partition, offset, name, self.now_ms))
        reader.positions[partition] = offset + 1
        reader.served.add(partition)

    def to_commit(self, name: str, only: Iterable[Partition] | None) -> dict[Partition, int]:
        """Return the offsets to commit by partition, without deleted partitions."""
        reader = self.readers[name]
        wanted = reader.served & (reader.served if only is None else set(only)) & self.partitions()
        return {partition: reader.positions[partition] for partition in wanted}

    def _let_go(self, name: str, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            last = self.intervals[partition][-1]
            assert last.reader == name
            last.ended_ms = self.now_ms

    # --- what tests ask -----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def ended(self) -> set[HandoffEnd]:
        """Reasons for which waits of this group ended."""

    def partitions(self) -> set[Partition]:
        return {(name, index) for name, count in self.partition_counts.items() for index in range(count)}

    def owned(self, name: str) -> set[Partition]:
        return self.readers[name].owned

    def duplicates(self) -> list[tuple[Partition, int]]:
        """Return records that two members have read. If a member receives a partition again that it released, it may
        repeat records that it read itself; these do not count.
        """
        seen = {(each.partition, each.offset, each.reader) for each in self.delivered}
        return sorted(each for each, count in Counter((p, offset) for p, offset, _ in seen).items() if count > 1)

    def readers_of(self, partition: Partition) -> set[str]:
        return {each.reader for each in self.delivered if each.partition == partition}

    def is_even(self) -> None:
        """Assert that all partitions have an owner, and that shares differ by one at most."""
        shares = [each.owned for each in self.readers.values()]
        assert sum(map(len, shares)) == len(set[Partition]().union(*shares)) == len(self.partitions()), shares
        assert max(map(len, shares)) - min(map(len, shares)) <= 1, shares
