"""A partition that moves from one member to another: what is remembered of it, and what is told.

The one idea: a partition is given away in three steps that are never skipped: the source lets go (it acknowledges), in
mode `drain` its commits reach what it was served (the mark), then the target has it. A record exists for as long as
one of the first two is awaited, and every wait has a deadline. These are values; when they come and go is decided in
`classic_handoff.py` and in `consumer/handoff.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from gateway.coordinator.document import VOLATILE
from gateway.coordinator.facts import Fact, MemberId

LONGEST_HOLD_MS = 10_000
"""A held SyncGroup is answered before any client's own timeout, and before half of the member's session is over."""
DEFAULT_TIMEOUT_MS = 30_000


class HandoffMode(Enum):
    """`group.handoff.mode`."""

    ACK = "ack"
    """The target waits until the source has let go."""
    DRAIN = "drain"
    """And until the source has committed what it was served."""
    OFF = "off"


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    mode: HandoffMode = HandoffMode.ACK
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    """How long a target waits at most, over all rebalances in which the source keeps the partition."""


DEFAULTS = HandoffSettings()


class Awaits(Enum):
    ACKNOWLEDGEMENT = "acknowledgement"
    DRAIN = "drain"


class HandoffEnd(Enum):
    """Why a target need not wait any more; by the journal's words."""

    ACKNOWLEDGED = "acked"
    DRAINED = "drained"
    PROCESSED = "processed"
    """The source has committed what it has processed. It was served more and does not work on that."""
    NEVER_FETCHED = "never_fetched"
    NOT_ATTRIBUTABLE = "not_attributable"
    SOURCE_LEFT = "source_left"
    SOURCE_EXPIRED = "source_expired"
    TARGET_LEFT = "target_left"
    SUPERSEDED = "superseded"
    """Another rebalance began, or the partition went to somebody else."""
    PARTITION_DELETED = "partition_deleted"
    TIMEOUT = "timeout"
    CLIENT_CAP = "client_cap"
    """The target's client cannot be held any longer, nor told to ask again."""


FORCED = frozenset({HandoffEnd.TIMEOUT, HandoffEnd.CLIENT_CAP})
"""The target has the partition although the source may not be done with it."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """One partition on its way, in a classic group. Stored with the group; a coordinator that takes it over gives the
    source what is left of its time, and some time to find it."""

    topic: str
    partition: int
    source: MemberId
    target: MemberId | None
    """None while the leader has given it to nobody, or to nobody who is still there."""
    generation_id: int
    """In which the target was given it."""
    awaits: Awaits
    mark: int | None = None
    """The offset after what the source was served, if known. It only rises."""
    forced: bool = False
    """Its time is over. Remembered until the source has let go, so that the time does not begin again."""
    since_ms: int = 0
    """By the clock of the coordinator that stores it (see `StoredGroup.clock_lead_ms`)."""
    deadline_ms: int = field(default=0, metadata=VOLATILE)

    @property
    def is_pending(self) -> bool:
        """A target waits for it."""
        return self.target is not None and not self.forced


# --- what is told -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandoffBegun(Fact):
    """A target waits for partitions that the source has not let go of, or not drained."""

    source: MemberId
    target: MemberId
    generation_id: int
    mode: HandoffMode
    left_ms: int
    """Until the target has them in any case."""
    partitions: tuple[tuple[str | UUID, int], ...]

    def __str__(self) -> str:
        return f"{len(self.partitions)} partition(s) of {self.target} wait for {self.source}"


@dataclass(frozen=True, slots=True)
class HandoffAcknowledged(Fact):
    """The source has let go; what it was served is still to be committed."""

    source: MemberId
    partition_count: int

    def __str__(self) -> str:
        return f"{self.source} let go of {self.partition_count} partition(s), which are to be drained"


@dataclass(frozen=True, slots=True)
class HandoffEnded(Fact):
    """As `HandoffBegun`, which it ends, of one partition."""

    source: MemberId
    target: MemberId
    generation_id: int
    mode: HandoffMode
    topic: str | UUID
    partition: int
    reason: HandoffEnd
    waited_ms: int
    mark: int | None = None

    def __str__(self) -> str:
        waited = f"after {self.waited_ms} ms"
        return f"{self.topic}-{self.partition} goes from {self.source} to {self.target}: {self.reason.value} {waited}"


@dataclass(frozen=True, slots=True)
class HandoffsChanged(Fact):
    """Which partitions of a classic group are awaited is to be stored, before anyone is answered."""

    def __str__(self) -> str:
        return "awaited partitions changed"


# --- how far a source is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drained:
    """What is known, outside the group, of one partition that is to be drained."""

    topic: str | UUID
    partition: int
    source: MemberId
    mark: int | None
    """None: nothing that the source was served is known."""
    committed: int
    """−1: nothing."""
    otherwise: HandoffEnd = HandoffEnd.NEVER_FETCHED
    """Why there is nothing to wait for, if there is no mark."""
    stopped: bool = False
    """By its own pace the source would have committed more by now, if it worked on more."""


def settled(found: Drained, mark: int | None) -> tuple[HandoffEnd | None, int | None]:
    """Why the wait is over, or None; and the mark, which never falls: a source that goes back has not done more."""
    known = [each for each in (mark, found.mark) if each is not None]
    if not known:
        return found.otherwise, None
    highest = max(known)
    if found.committed >= highest:
        return HandoffEnd.DRAINED, highest
    return (HandoffEnd.PROCESSED if found.stopped else None), highest


@dataclass(frozen=True, slots=True)
class Draining:
    """A partition whose source is to commit what it was served, as whoever looks for its mark must know it."""

    topic: str | UUID
    partition: int
    source: MemberId
    client_id: str
    client_host: str
    connection_id: str | None
    mark: int | None
    asked_ms: int | None = None
    """When the source was asked to revoke it, if that is known."""
    asked_by_rebalance: bool = False
    """The source was asked by the rebalance that came before: an eager member revokes before it joins again."""


def by_pair(
    facts: Iterable[tuple[MemberId, MemberId, str | UUID, int]],
) -> Mapping[tuple[MemberId, MemberId], tuple[tuple[str | UUID, int], ...]]:
    """(source, target, topic, partition), gathered by source and target."""
    found: dict[tuple[MemberId, MemberId], list[tuple[str | UUID, int]]] = {}
    for source, target, topic, partition in facts:
        found.setdefault((source, target), []).append((topic, partition))
    return {pair: tuple(partitions) for pair, partitions in found.items()}
