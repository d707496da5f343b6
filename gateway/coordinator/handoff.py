"""Handover of a partition from its previous owner (the source) to its new owner (the target): the values.

The one idea: a handoff has three steps, in a fixed order. The source acknowledges that it has released the partition.
In mode `drain` its commits then reach the offset after the records it was served (the mark). Then the target may read.
A record exists while one of the first two steps is pending, and every wait has a deadline. This module only declares
values; `classic/handoff.py` and `consumer/handoff.py` create and end the records.

Modes. `ack` (the default) waits for the acknowledgement. `drain` also waits for the commits, because a consumer may
hand records to worker threads that commit after the release; a target that began at the old offset would repeat that
work. With `off` the classic machine keeps no record and delivers what the leader assigned. In the consumer machine
`off` drops only the records: KIP-848 itself never gives a partition to a member while another one owns it.

The classic machine. The leader decides who gets a partition, and a cooperative source learns of the revocation from its
own SyncGroup reply. The coordinator therefore stores the whole assignment at once. Only targets wait: each gains a
partition that another member still claims, or has not drained. Their SyncGroup is held for ten seconds or half of their
session at most, so that no client times out. A member is not held while it is a source itself: it must learn what to
revoke, and two members that swap partitions would wait for each other.

A target whose SyncGroup cannot be held, or no longer, gets its assignment. OffsetFetch then returns
UNSTABLE_OFFSET_COMMIT with the committed offset for the pending partitions, if the request asks for stable offsets
(`require_stable`). Every stock client that asks for them retries. A request that does not ask gets the offset; the
target reads on, and its wait ends as `client_cap`. The whole member waits, not one partition, because stock clients ask
for all partitions again if one is unstable.

A source acknowledges by joining again. A cooperative source must not claim the partition in its subscription; an eager
one releases everything by joining. A static member that is absent still holds what it was last delivered. A rebalance
ends the wait, as `acked` or `superseded`; the next assignment is compared with the claims anew. A claim does not prove
that a member reads: a target that was held back claims its partition in the next rebalance. So the first source stays
the source while it claims the partition, even if another member's claim is newer. In mode `drain` the leader
may take a partition from a target that still waits. That target must release it, and then the first source must commit
as before (`Handoff.behind`).

The consumer machine. The coordinator decides, and a heartbeat response tells the source what to revoke. The source
stays the owner until a heartbeat reports its partitions without the revoked ones. The target gets the partition only
once it is free. Until then the target is asked to send a heartbeat every 500 ms at least, because the coordinator
cannot push. Each partition is released by itself. In mode `ack` the records only report, because the owners already
decide. In mode `drain` a member that has released a partition stays its owner (`ConsumerMember.undrained`) until it has
committed.

A full heartbeat does not release a partition that its member has never reported as owned. The application may still be
about to take that partition over, as librdkafka and Java do. Only an acknowledgement of a response without the
partition releases it. A classic member, or the new process of a static one, releases everything by joining.

Draining. A mark is written before the bytes of a Fetch response leave the node, under the connection and under client
id and host, because a Fetch names no member. For Java's consumer the mark is its Fetch offset: everything below has
gone to the application. Other clients prefetch further, so they may be served records that they never process. A mark
never falls, because a source that seeks back has not done more. If the pace of a source's commits shows that it works
on no more, the wait ends as `processed`. The pace is a guess, so the deadline remains. A source has no pace if it never
committed, if another node served it, or if the coordinator is new; then the mark and the deadline decide. If no mark is
known, the wait ends at once (`never_fetched`). Until the drain ends, the classic machine accepts the source's commits
of the generation just ended. Kafka refuses them, and the target would repeat that work.

What else ends a wait. The source or the target leaves or expires, a new process replaces a static source, the partition
is deleted, or the partition gets another target. The last end is `timeout`. In the classic machine
`group.handoff.timeout.ms` counts from the first generation in which the source had to release, over all rebalances
since. The expired record stays, marked `forced`, until the source has released the partition, so that the time does not
begin again. In the consumer machine that time counts from the release and bounds only the drain; a source that does not
release is removed after its own rebalance timeout. After a failover a classic source gets what is left of its time, and
at least enough to find the new coordinator. A consumer source gets the full time again. Ends `timeout` and `client_cap`
are forced: the target reads although the source may not be done. A classic group with pending handoffs may become a
consumer group; `consumer/unsettled.py` continues them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from uuid import UUID

from gateway.coordinator.document import VOLATILE
from gateway.coordinator.facts import Fact, MemberId

LONGEST_HOLD_MS = 10_000
"""A held SyncGroup is answered before any client's own timeout, and before half of the member's session is over."""
DEFAULT_TIMEOUT_MS = 30_000


class HandoffMode(Enum):
    """Values of `group.handoff.mode`."""

    ACK = "ack"
    """The target waits until the source has released the partition."""
    DRAIN = "drain"
    """The target also waits until the source has committed what it was served."""
    OFF = "off"


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    mode: HandoffMode = HandoffMode.ACK
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    """The longest wait of a target, over all rebalances in which the source keeps the partition."""


DEFAULTS = HandoffSettings()


class Awaits(Enum):
    ACKNOWLEDGEMENT = "acknowledgement"
    DRAIN = "drain"


class HandoffEnd(Enum):
    """Reasons for the end of a target's wait; the values are the journal's words."""

    ACKNOWLEDGED = "acked"
    DRAINED = "drained"
    PROCESSED = "processed"
    """The source has committed what it has processed. It was served more records, but does not process the others."""
    NEVER_FETCHED = "never_fetched"
    SOURCE_LEFT = "source_left"
    SOURCE_EXPIRED = "source_expired"
    TARGET_LEFT = "target_left"
    SUPERSEDED = "superseded"
    """Another rebalance began, or the partition was assigned to another member."""
    PARTITION_DELETED = "partition_deleted"
    TIMEOUT = "timeout"
    CLIENT_CAP = "client_cap"
    """The target's client cannot be held any longer, and it does not request stable offsets."""


FORCED = frozenset({HandoffEnd.TIMEOUT, HandoffEnd.CLIENT_CAP})
"""Outcomes of a hand-over in which the target receives the partition although the source may still process it."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """A partition being handed over in a classic group. Stored with the group. A coordinator that takes the group
    over gives the source what is left of its time, and some time to find the new coordinator."""

    topic: str
    partition: int
    source: MemberId
    target: MemberId | None
    """The new owner. None while the leader has assigned the partition to no present member."""
    generation_id: int
    """Generation in which the target was assigned the partition."""
    awaits: Awaits
    mark: int | None = None
    """The offset after the records that the source was served, if known. It only rises."""
    forced: bool = False
    """True if its time is over. Remembered until the source has released the partition, so that the time does not
    begin again."""
    since_ms: int = 0
    """Start of the wait by the clock of the coordinator that stores it (see `StoredGroup.clock_lead_ms`)."""
    deadline_ms: int = field(default=0, metadata=VOLATILE)
    behind: MemberId | None = None
    """A member that has released the partition and must still commit. The source was its target, and the leader takes
    the partition from the source before that. So the source may not read, and the target waits for both."""
    topic_id: UUID | None = None
    """Id of the topic to which the mark belongs. A topic that is created again has the same name."""

    @property
    def is_pending(self) -> bool:
        """True if a target waits for the partition."""
        return self.target is not None and not self.forced


def released(handoff: Handoff) -> Handoff:
    """Return the wait for the commits of a partition that its source has released."""
    if handoff.behind is None:
        return replace(handoff, awaits=Awaits.DRAIN)
    return replace(handoff, source=handoff.behind, behind=None, awaits=Awaits.DRAIN, mark=None)


# --- facts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandoffBegun(Fact):
    """A target waits for partitions that the source has not released or not drained."""

    source: MemberId
    target: MemberId
    generation_id: int
    mode: HandoffMode
    left_ms: int
    """Time until the target gets the partitions in any case."""
    partitions: tuple[tuple[str | UUID, int], ...]

    def __str__(self) -> str:
        return f"{len(self.partitions)} partition(s) of {self.target} wait for {self.source}"


@dataclass(frozen=True, slots=True)
class HandoffAcknowledged(Fact):
    """The source has released partitions; it still has to commit what it was served."""

    source: MemberId
    partition_count: int

    def __str__(self) -> str:
        return f"{self.source} let go of {self.partition_count} partition(s), which are to be drained"


@dataclass(frozen=True, slots=True)
class HandoffEnded(Fact):
    """The end of one partition's handoff, which `HandoffBegun` announced."""

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
    """Pending handoffs of a classic group changed; they must be stored before any reply is sent."""

    def __str__(self) -> str:
        return "awaited partitions changed"


# --- progress of sources ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drained:
    """Progress of one partition that must be drained, as known outside the group."""

    topic: str | UUID
    partition: int
    source: MemberId
    mark: int | None
    """The offset after the last record served to the source. None if no such record is known."""
    committed: int
    """The committed offset. −1 if nothing is committed."""
    otherwise: HandoffEnd = HandoffEnd.NEVER_FETCHED
    """Reason for not waiting, if there is no mark."""
    stopped: bool = False
    """True if, by its own pace, the source would have committed more by now if it worked on more."""
    topic_id: UUID | None = None
    """Id of the topic that these offsets belong to."""


def settled(found: Drained, mark: int | None) -> tuple[HandoffEnd | None, int | None]:
    """Return why the wait is over, or None; and the mark, which never falls: a source that seeks back has not done
    more."""
    known = [each for each in (mark, found.mark) if each is not None]
    if not known:
        return found.otherwise, None
    highest = max(known)
    if found.committed >= highest:
        return HandoffEnd.DRAINED, highest
    return (HandoffEnd.PROCESSED if found.stopped else None), highest


@dataclass(frozen=True, slots=True)
class Draining:
    """A partition whose source must commit what it was served, with all that is needed to find its mark."""

    topic: str | UUID
    partition: int
    source: MemberId
    client_id: str
    client_host: str
    connection_id: str | None
    mark: int | None
    asked_ms: int | None = None
    """Time at which the source was asked to revoke the partition, if known."""
    asked_by_rebalance: bool = False
    """True if the preceding rebalance already asked the source: an eager member revokes before it joins again."""


def by_pair(
    facts: Iterable[tuple[MemberId, MemberId, str | UUID, int]],
) -> Mapping[tuple[MemberId, MemberId], tuple[tuple[str | UUID, int], ...]]:
    """Return (source, target, topic, partition) grouped by source and target."""
    found: dict[tuple[MemberId, MemberId], list[tuple[str | UUID, int]]] = {}
    for source, target, topic, partition in facts:
        found.setdefault((source, target), []).append((topic, partition))
    return {pair: tuple(partitions) for pair, partitions in found.items()}
