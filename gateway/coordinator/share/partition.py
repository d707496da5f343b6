"""One share partition (KIP-932): what a share group has done with the records of one partition.

The one idea: a window of offsets in ranges. Below the window all records are settled, above it no record was delivered.
A range in it is available, acquired by one member until a deadline, acknowledged or archived. `step` turns the value
and an event into the next value. Its caller stores `durable` of that before the reply leaves, if the step says so.
Values in, values out: no I/O, no clock.

Acquired ranges are not stored as such. A node that reads the partition back finds them available, with their delivery
count of the last write. A record may then be delivered again, but no record is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from operator import attrgetter

from gateway.coordinator.facts import MemberId
from protocol.errors import ErrorCode


class RecordState(Enum):
    AVAILABLE = 0
    ACQUIRED = 1
    ACKNOWLEDGED = 2
    ARCHIVING = 3
    """Will not be delivered, and is a dead letter that is not written yet (KIP-1191)."""
    ARCHIVED = 4
    """Will not be delivered: rejected, delivered too often, or missing in the log."""


SETTLED = frozenset({RecordState.ACKNOWLEDGED, RecordState.ARCHIVED})
NOT_DELIVERED_AGAIN = SETTLED | {RecordState.ARCHIVING}


class AcknowledgeType(IntEnum):
    GAP = 0
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets from `first_offset` to `last_offset`, all in the same state."""

    first_offset: int
    last_offset: int
    state: RecordState = RecordState.AVAILABLE
    delivery_count: int = 0
    member_id: MemberId | None = None
    """The member that has acquired the range or, if it is ARCHIVING, has rejected it. It is not stored."""
    deadline_ms: int = 0
    """Time at which the acquisition lock expires."""

    def __len__(self) -> int:
        return self.last_offset - self.first_offset + 1

    def between(self, first_offset: int, last_offset: int) -> Range:
        """Return the same range with these offsets. Not `replace`, which takes five times as long."""
        return Range(first_offset, last_offset, self.state, self.delivery_count, self.member_id, self.deadline_ms)

    def settled(self, state: RecordState) -> Range:
        """Return the same records in this state, acquired by no member."""
        return Range(self.first_offset, self.last_offset, state, self.delivery_count)

    def went_as(self, other: Range) -> bool:
        return (
            self.state is other.state
            and self.delivery_count == other.delivery_count
            and self.member_id == other.member_id
            and self.deadline_ms == other.deadline_ms
        )


_first_offset, _last_offset = attrgetter("first_offset"), attrgetter("last_offset")


@dataclass(frozen=True, slots=True)
class SharePartition:
    """State of one partition. `ranges` are contiguous from `start_offset` on; the first is not settled, the last was
    delivered or settled."""

    start_offset: int
    ranges: tuple[Range, ...] = ()

    @property
    def end_offset(self) -> int:
        """The first offset that was never delivered."""
        return self.ranges[-1].last_offset + 1 if self.ranges else self.start_offset

    @property
    def next_offset(self) -> int:
        """Return the offset from which records may be acquired."""
        available = (each.first_offset for each in self.ranges if each.state is RecordState.AVAILABLE)
        return next(available, self.end_offset)


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    """Kafka's `group.share.*` settings, and those of one group."""

    max_record_locks: int = 2_000
    """Maximal number of offsets in the window."""
    delivery_count_limit: int = 5
    record_lock_duration_ms: int = 30_000
    renews: bool = True
    """True if members may extend their locks."""
    keeps_dead_letters: bool = False
    """True if records that are rejected or were delivered too often go to a dead-letter topic first."""


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acquire:
    """Records read from the log, from `read_offset` up to before `end_offset`. Offsets in none of the batches are
    not for delivery: compacted away, of an aborted transaction, or a marker. If the window ends below `read_offset`,
    the partition was read back since, and nothing is acquired."""

    member_id: MemberId
    read_offset: int
    end_offset: int
    batches: tuple[tuple[int, int], ...]
    """First and last offsets of the records that may be delivered, in order."""
    max_records: int
    is_limit: bool = False
    """`max_records` may not be passed (KIP-1206); otherwise the batch that reaches it is taken whole."""


@dataclass(frozen=True, slots=True)
class AcknowledgedBatch:
    """Acknowledged offsets. `types` holds one type for all offsets, or one for each."""

    first_offset: int
    last_offset: int
    types: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Acknowledges all of the batches or none."""

    member_id: MemberId
    batches: tuple[AcknowledgedBatch, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """An event: the member's session has ended."""

    member_id: MemberId


@dataclass(frozen=True, slots=True)
class LocksExpire:
    """An event: acquisition locks may have expired."""


@dataclass(frozen=True, slots=True)
class DeadLettersSettled:
    """An event: the dead letters of these offsets have been written, or cannot be written."""

    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class LogStartMoved:
    """An event: records below this offset have been removed from the log."""

    log_start_offset: int


PartitionEvent = Acquire | Acknowledge | Release | LocksExpire | DeadLettersSettled | LogStartMoved


@dataclass(frozen=True, slots=True)
class Acquired:
    first_offset: int
    last_offset: int
    delivery_count: int


@dataclass(frozen=True, slots=True)
class PartitionStep:
    partition: SharePartition
    acquired: tuple[Acquired, ...] = ()
    error: ErrorCode = ErrorCode.NONE
    must_store: bool = False
    """True if `durable` of the partition must be stored in Postgres before the reply is sent."""


def step(partition: SharePartition, event: PartitionEvent, now_ms: int, settings: PartitionSettings) -> PartitionStep:
    """Apply the event at `now_ms`. An event that is refused or changes nothing returns the same object."""
    match event:
        case Acquire():
            return _acquire(partition, event, now_ms, settings)
        case Acknowledge():
            return _acknowledge(partition, event, now_ms, settings)
        case Release():
            return _let_go(partition, lambda each: each.member_id == event.member_id, settings)
        case LocksExpire():
            return _let_go(partition, lambda each: each.deadline_ms <= now_ms, settings)
        case DeadLettersSettled():
            return _dead_letters_settled(partition, event)
        case LogStartMoved():
            return _log_start_moved(partition, event.log_start_offset)


def next_deadline(partition: SharePartition) -> int | None:
    """Return the earliest time at which LocksExpire is due."""
    deadlines = (each.deadline_ms for each in partition.ranges if each.state is RecordState.ACQUIRED)
    return min(deadlines, default=None)


# --- what is stored -------------------------------------------------------------------------------------------------


_STORED_AS = {RecordState.ACQUIRED: RecordState.AVAILABLE}


def durable(partition: SharePartition) -> SharePartition:
    """Return the partition as another coordinator would read it: no member has acquired anything."""
    return _sealed(
        partition.start_offset,
        (
            each.settled(_STORED_AS.get(each.state, each.state)) if each.member_id is not None else each
            for each in partition.ranges
        ),
    )


# --- what events do -------------------------------------------------------------------------------------------------


def _acquire(partition: SharePartition, event: Acquire, now_ms: int, settings: PartitionSettings) -> PartitionStep:
    if event.read_offset > partition.end_offset:
        return PartitionStep(partition)
    partition = _past_hole(partition, event)
    capped = min(event.end_offset, partition.start_offset + settings.max_record_locks)
    ranges = list(partition.ranges)
    if capped > partition.end_offset:
        ranges.append(Range(partition.end_offset, capped - 1))
    after = tuple(ranges)
    end_offset = after[-1].last_offset + 1 if after else partition.start_offset
    acquired: list[Acquired] = []
    pieces: list[Range] = []
    settled_to = max(event.read_offset, partition.start_offset)
    count = 0
    for first_offset, last_offset in event.batches:
        if count >= event.max_records:
            break
        if first_offset > settled_to:
            pieces += _gaps(after, settled_to, first_offset - 1)
        if first_offset >= end_offset:
            # The batch lies after a hole in which the window ends.
            break
        for each in _between(after, max(first_offset, partition.start_offset), last_offset):
            if each.state is not RecordState.AVAILABLE:
                continue
            room = event.max_records - count
            if event.is_limit and room <= 0:
                break
            last_of_it = each.last_offset
            if event.is_limit and len(each) > room:
                last_of_it = each.first_offset + room - 1
            taken = Range(
                each.first_offset,
                last_of_it,
                RecordState.ACQUIRED,
                each.delivery_count + 1,
                event.member_id,
                now_ms + settings.record_lock_duration_ms,
            )
            pieces.append(taken)
            acquired.append(Acquired(taken.first_offset, taken.last_offset, taken.delivery_count))
            count += len(taken)
        settled_to = max(settled_to, last_offset + 1)
    else:
        # The whole read range is known, so offsets after the last batch have no records either.
        if event.end_offset > settled_to:
            pieces += _gaps(after, settled_to, event.end_offset - 1)
    if not pieces:
        return PartitionStep(partition)
    taken_over = _sealed(partition.start_offset, _overlaid(after, pieces))
    return PartitionStep(taken_over, tuple(acquired))


def _past_hole(partition: SharePartition, event: Acquire) -> SharePartition:
    """Begin an empty window at the first record that was read, because a hole may be far wider than the window."""
    if partition.ranges:
        return partition
    begin = event.batches[0][0] if event.batches else event.end_offset
    return SharePartition(begin) if begin > partition.start_offset else partition


def _gaps(ranges: tuple[Range, ...], first_offset: int, last_offset: int) -> list[Range]:
    return [
        each.settled(RecordState.ARCHIVED)
        for each in _between(ranges, first_offset, last_offset)
        if each.state is RecordState.AVAILABLE
    ]


def _acknowledge(
    partition: SharePartition, event: Acknowledge, now_ms: int, settings: PartitionSettings
) -> PartitionStep:
    pieces: list[Range] = []
    stores = False
    acknowledged_to = -1
    for batch in event.batches:
        length = batch.last_offset - batch.first_offset + 1
        known = all(AcknowledgeType.GAP <= each <= AcknowledgeType.RENEW for each in batch.types)
        if length < 1 or len(batch.types) not in (1, length) or not known or batch.first_offset <= acknowledged_to:
            return PartitionStep(partition, error=ErrorCode.INVALID_REQUEST)
        acknowledged_to = batch.last_offset
        if batch.last_offset < partition.start_offset:
            # The log start or a reset has passed the batch, so there is nothing left to acknowledge.
            continue
        if batch.last_offset >= partition.end_offset:
            # As in SharePartition.fetchSubMapForAcknowledgementBatch: an empty window has its own code.
            return PartitionStep(
                partition,
                error=ErrorCode.INVALID_REQUEST if partition.ranges else ErrorCode.INVALID_RECORD_STATE,
            )
        for first_offset, last_offset, kind in _runs(batch):
            for each in _between(partition.ranges, max(first_offset, partition.start_offset), last_offset):
                if each.state is not RecordState.ACQUIRED or each.member_id != event.member_id:
                    return PartitionStep(partition, error=ErrorCode.INVALID_RECORD_STATE)
                if kind is AcknowledgeType.RENEW and not settings.renews:
                    return PartitionStep(partition, error=ErrorCode.INVALID_RECORD_STATE)
                if kind is AcknowledgeType.RENEW:
                    pieces.append(replace(each, deadline_ms=now_ms + settings.record_lock_duration_ms))
                    continue
                stores = True
                if kind is AcknowledgeType.RELEASE:
                    pieces.append(_released(each, settings))
                elif kind is AcknowledgeType.REJECT and settings.keeps_dead_letters:
                    pieces.append(_rejected(each))
                else:
                    is_accepted = kind is AcknowledgeType.ACCEPT
                    state = RecordState.ACKNOWLEDGED if is_accepted else RecordState.ARCHIVED
                    pieces.append(each.settled(state))
    if not pieces:
        return PartitionStep(partition)
    after = _sealed(partition.start_offset, _overlaid(partition.ranges, pieces))
    return PartitionStep(after, must_store=stores)


def _runs(batch: AcknowledgedBatch) -> Iterable[tuple[int, int, AcknowledgeType]]:
    """Return the first and last offset of each run of one type."""
    if len(batch.types) == 1:
        yield batch.first_offset, batch.last_offset, AcknowledgeType(batch.types[0])
        return
    begin = 0
    for index in range(1, len(batch.types) + 1):
        if index == len(batch.types) or batch.types[index] != batch.types[begin]:
            first_offset = batch.first_offset + begin
            yield first_offset, batch.first_offset + index - 1, AcknowledgeType(batch.types[begin])
            begin = index


def _let_go(partition: SharePartition, is_due: Callable[[Range], bool], settings: PartitionSettings) -> PartitionStep:
    """Release the ranges that are due. However a delivery ends without an acknowledgement, it counts (upstream:
    SharePartition.releaseAcquiredRecords): a record that kills each of its consumers is archived at the limit."""
    acquired = (each for each in partition.ranges if each.state is RecordState.ACQUIRED)
    pieces = [_released(each, settings) for each in acquired if is_due(each)]
    if not pieces:
        return PartitionStep(partition)
    after = _sealed(partition.start_offset, _overlaid(partition.ranges, pieces))
    return PartitionStep(after, must_store=True)


def _released(each: Range, settings: PartitionSettings) -> Range:
    """Return the range as available to all members, or archived once it has been delivered often enough."""
    if each.delivery_count < settings.delivery_count_limit:
        return each.settled(RecordState.AVAILABLE)
    return each.settled(RecordState.ARCHIVING if settings.keeps_dead_letters else RecordState.ARCHIVED)


def _rejected(each: Range) -> Range:
    return Range(each.first_offset, each.last_offset, RecordState.ARCHIVING, each.delivery_count, each.member_id)


def dead_letters(partition: SharePartition, first_offset: int, last_offset: int) -> list[Range]:
    """Return the ranges between these offsets that wait to be written as dead letters, in order."""
    return [
        each for each in _between(partition.ranges, first_offset, last_offset) if each.state is RecordState.ARCHIVING
    ]


def _dead_letters_settled(partition: SharePartition, event: DeadLettersSettled) -> PartitionStep:
    waiting = dead_letters(partition, event.first_offset, event.last_offset)
    if not waiting:
        return PartitionStep(partition)
    pieces = [each.settled(RecordState.ARCHIVED) for each in waiting]
    return PartitionStep(_sealed(partition.start_offset, _overlaid(partition.ranges, pieces)), must_store=True)


def _log_start_moved(partition: SharePartition, log_start_offset: int) -> PartitionStep:
    """Settle the records that were deleted, except those that wait for their dead letters. A member that has acquired
    deleted records may still acknowledge them without an error, if no such record lies before them."""
    kept = [
        each if each.state in NOT_DELIVERED_AGAIN else each.settled(RecordState.ARCHIVED)
        for each in _between(partition.ranges, partition.start_offset, log_start_offset - 1)
    ]
    if log_start_offset > partition.end_offset:
        kept.append(Range(partition.end_offset, log_start_offset - 1, RecordState.ARCHIVED))
    kept += _between(partition.ranges, log_start_offset, partition.end_offset - 1)
    moved = _sealed(partition.start_offset, kept)
    return PartitionStep(partition) if moved == partition else PartitionStep(moved, must_store=True)


# --- ranges ---------------------------------------------------------------------------------------------------------


def _between(ranges: tuple[Range, ...], first_offset: int, last_offset: int) -> list[Range]:
    """Return the parts of the ranges between these offsets."""
    found: list[Range] = []
    index = bisect_right(ranges, first_offset - 1, key=_last_offset)
    while index < len(ranges) and ranges[index].first_offset <= last_offset:
        each = ranges[index]
        if each.first_offset < first_offset or each.last_offset > last_offset:
            each = each.between(max(each.first_offset, first_offset), min(each.last_offset, last_offset))
        found.append(each)
        index += 1
    return found


def _overlaid(ranges: tuple[Range, ...], pieces: list[Range]) -> Iterable[Range]:
    """Return the ranges with these pieces in their places. The pieces are in order, and each lies within the ranges."""
    at = ranges[0].first_offset if ranges else 0
    for piece in pieces:
        if piece.first_offset > at:
            yield from _between(ranges, at, piece.first_offset - 1)
        yield piece
        at = piece.last_offset + 1
    if ranges and at <= ranges[-1].last_offset:
        yield from _between(ranges, at, ranges[-1].last_offset)


def _sealed(start_offset: int, ranges: Iterable[Range]) -> SharePartition:
    """Return the window without settled ranges at its start and undelivered ones at its end. Neighbours in the same
    state become one range."""
    sealed: list[Range] = []
    for each in ranges:
        if not sealed and each.state in SETTLED:
            start_offset = each.last_offset + 1
            continue
        last = sealed[-1] if sealed else None
        if last is not None and last.went_as(each):
            sealed[-1] = last.between(last.first_offset, each.last_offset)
        else:
            sealed.append(each)
    while sealed and sealed[-1].state is RecordState.AVAILABLE and not sealed[-1].delivery_count:
        sealed.pop()
    return SharePartition(start_offset, tuple(sealed))
