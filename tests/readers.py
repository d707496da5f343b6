"""Readers of a consumer group in mode `drain`, whoever coordinates it, and the books that are kept of them.

The one idea: a reader owns a partition from the answer that gives it to the heartbeat that no longer lists it. All
these intervals are written down, with every record that is delivered; whenever somebody is given a partition, everybody
else's interval must have ended, and a record is delivered only within its reader's.
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
    """What it may own by the last answer; it lets go of the rest with its next heartbeat."""
    reported: set[Partition] | None = None
    positions: dict[Partition, int] = field(default_factory=dict[Partition, int])
    """Also of what it has let go of: that it may still commit."""
    served: set[Partition] = field(default_factory=set[Partition])
    """Of which it has read anything."""


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
    """They do what they are told to, one thing after the other; a reader is known by its name."""

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
        """They join; one that is known begins anew, with nothing."""

    @abstractmethod
    def beat(self, *names: str) -> None:
        """They let go of what they were told to, and say so."""

    @abstractmethod
    def poll(self, *names: str, at_most: int | None = None) -> set[Partition]:
        """Each reads on in what it has, to the end or so many records of each; the partitions of which it got
        something."""

    @abstractmethod
    def commit(self, *names: str, only: Iterable[Partition] | None = None) -> None:
        """All that they were served, whoever owns it by now."""

    @abstractmethod
    def leave(self, *names: str) -> None: ...

    @abstractmethod
    def die(self, *names: str) -> None:
        """They say nothing more; the others wait until they are gone."""

    # --- what happens -------------------------------------------------------------------------------------------------

    @abstractmethod
    def produce(self, records: int = 1, *, only: Iterable[Partition] | None = None) -> None:
        """So many to each partition that there is."""

    @abstractmethod
    def grow(self, **topics: int) -> None:
        """Topics have so many partitions from here on; those that are left out are deleted."""

    @abstractmethod
    def settle(self, *, waiting: int = 0, work: bool = False) -> None:
        """Everybody speaks until all have what they are to have, but for so many partitions that somebody is not done
        with. With `work` they read and commit, too, until everything is read."""

    @abstractmethod
    def rest(self) -> None:
        """Everybody speaks until nothing changes any more, whether or not somebody waits."""

    @abstractmethod
    def outlast(self) -> None:
        """Time passes until nobody waits."""

    # --- books --------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def now_ms(self) -> float: ...

    def begin(self, name: str) -> None:
        """A process of that name; what the last one had, nobody reads any more."""
        self.end(name)
        self.readers[name] = Reader()

    def end(self, name: str) -> None:
        known = self.readers.pop(name, None)
        if known is not None:
            self._let_go(name, known.owned)

    def about_to_beat(self, name: str) -> set[Partition] | None:
        """What the heartbeat is to list: all that the reader owns, where that has changed since it last said so."""
        reader = self.readers[name]
        self._let_go(name, reader.owned - reader.told)
        reader.owned &= reader.told
        says = None if reader.owned == reader.reported else set(reader.owned)
        reader.reported = set(reader.owned)
        return says

    def answered(self, name: str, epoch: int, told: set[Partition] | None) -> set[Partition]:
        """What the reader has from now on and had not before."""
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
        """By partition; of none that is gone."""
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
        """Why waits of this group were over."""

    def partitions(self) -> set[Partition]:
        return {(name, index) for name, count in self.partition_counts.items() for index in range(count)}

    def owned(self, name: str) -> set[Partition]:
        return self.readers[name].owned

    def duplicates(self) -> list[tuple[Partition, int]]:
        """What two members have read. One that is given back what it let go of reads its own work again."""
        seen = {(each.partition, each.offset, each.reader) for each in self.delivered}
        return sorted(each for each, count in Counter((p, offset) for p, offset, _ in seen).items() if count > 1)

    def readers_of(self, partition: Partition) -> set[str]:
        return {each.reader for each in self.delivered if each.partition == partition}

    def is_even(self) -> None:
        """All partitions have an owner, and shares differ by one at most."""
        shares = [each.owned for each in self.readers.values()]
        assert sum(map(len, shares)) == len(set[Partition]().union(*shares)) == len(self.partitions()), shares
        assert max(map(len, shares)) - min(map(len, shares)) <= 1, shares
