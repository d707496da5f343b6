"""Record every request of every client with its answer, in the order of completion.

The one idea: an operation has two times and an outcome. It took effect at one moment between `invoked_s` and
`completed_s`, or perhaps never if its outcome is unknown. The checks reason about these times alone, so they need no
clock but the one of this process.

Times are seconds of `time.monotonic()`.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

E = TypeVar("E")


UNREADABLE = -1
"""The number of a record that holds none. No producer sends it, so the checks report such a record."""


def number_in(value: bytes | str | None) -> int:
    """Return the number that a record's value holds, or UNREADABLE."""
    return int(value) if value is not None and value.isdigit() else UNREADABLE


class Outcome(StrEnum):
    OK = "ok"
    FAILED = "failed"
    """The operation had no effect, and never will."""
    UNKNOWN = "unknown"
    """The client did not learn the outcome; the operation may take effect later."""


@dataclass(frozen=True, slots=True)
class Produced:
    """One record that a producer sent. Values are unique within a topic."""

    client: str
    topic: str
    partition: int
    key: str | None
    value: int
    invoked_s: float
    completed_s: float
    outcome: Outcome
    offset: int
    """The acknowledged offset; -1 if the client reported none."""


@dataclass(frozen=True, slots=True)
class Consumed:
    group: str
    member: str
    topic: str
    partition: int
    offset: int
    value: int
    at_s: float


class Change(StrEnum):
    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"
    """The client learned that the group had removed it."""


@dataclass(frozen=True, slots=True)
class OwnerChanged:
    """A rebalance callback of one member, with the time at which it was called."""

    group: str
    member: str
    topic: str
    partition: int
    change: Change
    at_s: float


@dataclass(frozen=True, slots=True)
class OffsetCommitted:
    group: str
    member: str
    topic: str
    partition: int
    offset: int
    invoked_s: float
    completed_s: float
    outcome: Outcome


class Settlement(StrEnum):
    """Acknowledgement types of a share group (KIP-932). The group does not deliver an accepted or rejected record
    again.
    """

    ACCEPT = "accept"
    RELEASE = "release"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Delivered:
    """A record that a share group gave to a member."""

    group: str
    member: str
    topic: str
    partition: int
    offset: int
    value: int
    count: int
    """The delivery count that came with the record: 1 at the first delivery."""
    at_s: float


@dataclass(frozen=True, slots=True)
class Settled:
    """The acknowledgement of one delivery by a member of a share group."""

    group: str
    member: str
    topic: str
    partition: int
    offset: int
    count: int
    settlement: Settlement
    invoked_s: float
    completed_s: float
    outcome: Outcome


class Quantity(StrEnum):
    COMMITTED = "committed offset"
    LOG_START = "log start"
    LOG_END = "log end"


@dataclass(frozen=True, slots=True)
class Observed:
    """A number that an observer read. Such a number must never fall."""

    quantity: Quantity
    group: str
    """Empty unless the number is a committed offset."""
    topic: str
    partition: int
    value: int
    invoked_s: float
    completed_s: float


@dataclass(frozen=True, slots=True)
class Faulted:
    nemesis: str
    detail: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Transferred:
    """One transaction that was to turn source records into results."""

    worker: str
    topic: str
    places: Sequence[tuple[int, int, int]]
    """Partition, offset and value of each source record."""
    invoked_s: float
    completed_s: float
    outcome: Outcome
    """FAILED: the transaction was aborted."""
    detail: str
    """The client's error; empty if there was none."""


Event = Produced | Consumed | OwnerChanged | OffsetCommitted | Observed | Faulted | Delivered | Settled | Transferred


class History:
    """All events of a run, in memory. Any thread may add events. The run's rates of requests limit the number of
    events.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind, in the order in which they were added."""
        with self._lock:
            return [event for event in self._events if isinstance(event, kind)]

    def __iter__(self) -> Iterator[Event]:
        with self._lock:
            return iter(list(self._events))

    def write(self, path: Path) -> None:
        """Write one JSON object per line: the event's class as `event`, and its fields."""
        with path.open("w") as file:
            for event in self:
                fields = {"event": type(event).__name__, **dataclasses.asdict(event)}
                file.write(json.dumps(fields, separators=(",", ":")) + "\n")
