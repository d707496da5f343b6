"""A share partition: deliveries and acknowledgements of records in single steps, then a seeded simulation."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gateway.coordinator.document import dump, load
from gateway.coordinator.facts import MemberId
from gateway.coordinator.share import partition as partition_module
from gateway.coordinator.share.partition import (
    SETTLED,
    Acknowledge,
    AcknowledgedBatch,
    AcknowledgeType,
    Acquire,
    Acquired,
    LocksExpire,
    LogStartMoved,
    PartitionEvent,
    PartitionSettings,
    PartitionStep,
    Range,
    RecordState,
    Release,
    SharePartition,
    durable,
    next_deadline,
    step,
)
from protocol.errors import ErrorCode

A, B = MemberId("a"), MemberId("b")
SETTINGS = PartitionSettings(max_record_locks=100, delivery_count_limit=3, record_lock_duration_ms=1_000)
EMPTY = SharePartition(10)
ACCEPT, RELEASE, REJECT, RENEW, GAP = (
    AcknowledgeType.ACCEPT,
    AcknowledgeType.RELEASE,
    AcknowledgeType.REJECT,
    AcknowledgeType.RENEW,
    AcknowledgeType.GAP,
)


def acquire(
    partition: SharePartition,
    *batches: tuple[int, int],
    member: MemberId = A,
    most: int = 50,
    is_limit: bool = False,
    end: int | None = None,
    now: int = 0,
    settings: PartitionSettings = SETTINGS,
) -> PartitionStep:
    end = batches[-1][1] + 1 if end is None else end
    event = Acquire(member, partition.next_offset, end, batches, most, is_limit)
    return step(partition, event, now, settings)


def acknowledge(
    partition: SharePartition, first: int, last: int, *types: int, member: MemberId = A, now: int = 0
) -> PartitionStep:
    return step(partition, Acknowledge(member, (AcknowledgedBatch(first, last, types),)), now, SETTINGS)


def states(partition: SharePartition) -> dict[int, RecordState]:
    return {
        offset: each.state for each in partition.ranges for offset in range(each.first_offset, each.last_offset + 1)
    }


def test_lock_is_not_renewed_if_the_group_forbids_it():
    settings = replace(SETTINGS, renews=False)
    held = acquire(EMPTY, (10, 14), settings=settings).partition
    event = Acknowledge(A, (AcknowledgedBatch(10, 14, (RENEW,)),))
    taken = step(held, event, 500, settings)
    assert (taken.error, taken.partition) == (ErrorCode.INVALID_RECORD_STATE, held)


# --- acquiring ------------------------------------------------------------------------------------------------------


def test_read_records_are_acquired_batch_by_batch():
    taken = acquire(EMPTY, (10, 14), (15, 19), now=5)
    assert taken.acquired == (Acquired(10, 14, 1), Acquired(15, 19, 1))
    assert taken.partition.ranges == (Range(10, 19, RecordState.ACQUIRED, 1, A, 1_005),)
    assert (taken.partition.start_offset, taken.partition.next_offset) == (10, 20)
    assert not taken.must_store
    assert next_deadline(taken.partition) == 1_005


def test_acquired_record_is_not_given_to_another_member():
    held = acquire(EMPTY, (10, 14)).partition
    again = step(held, Acquire(B, 10, 20, ((10, 14), (15, 19)), 50), 0, SETTINGS)
    assert again.acquired == (Acquired(15, 19, 1),)


def test_the_batch_that_reaches_the_count_is_taken_whole_and_none_after_it():
    assert acquire(EMPTY, (10, 14), (15, 19), (20, 24), most=6).acquired == (Acquired(10, 14, 1), Acquired(15, 19, 1))


def test_a_limit_cuts_a_batch():
    taken = acquire(EMPTY, (10, 14), (15, 19), most=6, is_limit=True)
    assert taken.acquired == (Acquired(10, 14, 1), Acquired(15, 15, 1))
    assert taken.partition.next_offset == 16


def test_the_window_holds_no_more_than_it_may():
    taken = acquire(EMPTY, (10, 500), most=1_000)
    assert taken.acquired == (Acquired(10, 109, 1),)
    assert not acquire(taken.partition, (110, 120)).acquired


def test_record_removed_from_the_log_is_archived():
    taken = acquire(EMPTY, (12, 13), (16, 17), end=20)
    held = states(taken.partition)
    # Offsets below the first record need no state.
    assert taken.partition.start_offset == 12
    assert [offset for offset, state in held.items() if state is RecordState.ARCHIVED] == [14, 15, 18, 19]
    assert taken.partition.next_offset == 20


def test_read_of_markers_alone_moves_the_start():
    assert acquire(EMPTY, end=14).partition == SharePartition(14)


def test_gap_behind_unread_records_stays():
    assert acquire(EMPTY, (10, 14), (18, 19), end=25, most=5).partition.end_offset == 15


def test_hole_wider_than_the_window_is_skipped():
    taken = acquire(EMPTY, (1_000, 1_004))
    assert taken.acquired == (Acquired(1_000, 1_004, 1),)
    assert taken.partition.start_offset == 1_000


def test_hole_behind_acquired_records_does_not_stop_the_window():
    held = acquire(EMPTY, (10, 10))
    waiting = acquire(held.partition, (1_000, 1_000))
    assert not waiting.acquired
    assert waiting.partition.next_offset == 110
    free = acknowledge(waiting.partition, 10, 10, ACCEPT).partition
    assert acquire(free, (1_000, 1_000)).acquired == (Acquired(1_000, 1_000, 1),)


def test_released_record_that_was_compacted_blocks_no_member():
    free = acknowledge(acquire(EMPTY, (10, 12)).partition, 10, 12, RELEASE).partition
    passed = acquire(free, (1_000, 1_000)).partition
    assert acquire(passed, (1_000, 1_000)).acquired == (Acquired(1_000, 1_000, 1),)


def test_records_read_before_a_restore_are_not_acquired():
    taken = step(EMPTY, Acquire(A, 11, 12, ((11, 11),), 5), 0, SETTINGS)
    assert taken == PartitionStep(EMPTY)


# --- acknowledging --------------------------------------------------------------------------------------------------


def test_acceptance_from_the_start_moves_the_start():
    held = acquire(EMPTY, (10, 19)).partition
    taken = acknowledge(held, 10, 14, ACCEPT)
    assert (taken.error, taken.must_store, taken.partition.start_offset) == (ErrorCode.NONE, True, 15)
    assert acknowledge(taken.partition, 15, 19, ACCEPT).partition == SharePartition(20)


def test_each_offset_follows_its_own_acknowledgement():
    held = acquire(EMPTY, (10, 14)).partition
    after = acknowledge(held, 10, 14, RELEASE, ACCEPT, REJECT, GAP, RENEW, now=500).partition
    assert after.ranges == (
        Range(10, 10, RecordState.AVAILABLE, 1),
        Range(11, 11, RecordState.ACKNOWLEDGED, 1),
        Range(12, 13, RecordState.ARCHIVED, 1),
        Range(14, 14, RecordState.ACQUIRED, 1, A, 1_500),
    )
    assert after.next_offset == 10


def test_a_renewal_alone_need_not_be_stored():
    held = acquire(EMPTY, (10, 14)).partition
    taken = acknowledge(held, 10, 14, RENEW, now=700)
    assert not taken.must_store
    assert next_deadline(taken.partition) == 1_700


def test_released_record_is_delivered_again_up_to_the_limit():
    partition = EMPTY
    for count in (1, 2, 3):
        taken = acquire(partition, (10, 10))
        assert taken.acquired == (Acquired(10, 10, count),)
        partition = acknowledge(taken.partition, 10, 10, RELEASE).partition
    assert partition == SharePartition(11)


@pytest.mark.parametrize(
    ("first", "last", "types", "error"),
    [
        (10, 14, (ACCEPT,), ErrorCode.NONE),
        (10, 15, (ACCEPT,), ErrorCode.INVALID_REQUEST),
        (15, 16, (ACCEPT,), ErrorCode.INVALID_REQUEST),
        (12, 11, (ACCEPT,), ErrorCode.INVALID_REQUEST),
        (10, 14, (ACCEPT, ACCEPT), ErrorCode.INVALID_REQUEST),
        (10, 14, (), ErrorCode.INVALID_REQUEST),
        (10, 14, (5,), ErrorCode.INVALID_REQUEST),
        (10, 14, (-1,), ErrorCode.INVALID_REQUEST),
        (3, 9, (ACCEPT,), ErrorCode.NONE),
        (3, 10, (ACCEPT,), ErrorCode.NONE),
    ],
)
def test_invalid_acknowledgements_are_refused(first, last, types, error):
    held = acquire(EMPTY, (10, 14)).partition
    taken = acknowledge(held, first, last, *types)
    assert taken.error is error
    if error is not ErrorCode.NONE:
        assert taken.partition is held


def test_batches_of_one_acknowledgement_succeed_or_fail_together():
    held = acquire(EMPTY, (10, 14)).partition
    batches = (AcknowledgedBatch(10, 11, (ACCEPT,)), AcknowledgedBatch(14, 15, (ACCEPT,)))
    taken = step(held, Acknowledge(A, batches), 0, SETTINGS)
    assert (taken.error, taken.partition) == (ErrorCode.INVALID_REQUEST, held)
    twice = (AcknowledgedBatch(10, 12, (ACCEPT,)), AcknowledgedBatch(12, 14, (RELEASE,)))
    assert step(held, Acknowledge(A, twice), 0, SETTINGS).error is ErrorCode.INVALID_REQUEST


def test_an_acknowledgement_in_an_empty_window_is_refused_as_invalid_record_state():
    assert acknowledge(EMPTY, 10, 10, ACCEPT).error is ErrorCode.INVALID_RECORD_STATE


def test_only_the_acquiring_member_may_acknowledge():
    held = acquire(EMPTY, (10, 14)).partition
    assert acknowledge(held, 10, 14, ACCEPT, member=B).error is ErrorCode.INVALID_RECORD_STATE
    done = acknowledge(held, 12, 12, ACCEPT).partition
    assert acknowledge(done, 12, 12, ACCEPT).error is ErrorCode.INVALID_RECORD_STATE


# --- time, sessions, the log ----------------------------------------------------------------------------------------


def test_expired_lock_releases_its_record():
    held = acquire(EMPTY, (10, 14), now=0).partition
    assert step(held, LocksExpire(), 999, SETTINGS).partition is held
    free = step(held, LocksExpire(), 1_000, SETTINGS)
    assert free.must_store
    assert free.partition.ranges == (Range(10, 14, RecordState.AVAILABLE, 1),)
    assert acknowledge(free.partition, 10, 14, ACCEPT).error is ErrorCode.INVALID_RECORD_STATE
    assert acquire(free.partition, (10, 14), member=B).acquired == (Acquired(10, 14, 2),)


def test_end_of_a_session_releases_its_records_alone():
    both = acquire(acquire(EMPTY, (10, 14)).partition, (15, 19), member=B).partition
    after = step(both, Release(A), 0, SETTINGS).partition
    assert [(each.state, each.member_id) for each in after.ranges] == [
        (RecordState.AVAILABLE, None),
        (RecordState.ACQUIRED, B),
    ]


def test_delivery_that_ends_with_its_session_counts_towards_the_limit():
    partition = EMPTY
    for count in (1, 2, 3):
        taken = acquire(partition, (10, 10))
        assert taken.acquired == (Acquired(10, 10, count),)
        released = step(taken.partition, Release(A), 0, SETTINGS)
        assert released.must_store
        partition = released.partition
    assert partition == SharePartition(11)


def test_records_deleted_from_the_log_are_settled():
    held = acquire(EMPTY, (10, 19)).partition
    moved = step(held, LogStartMoved(15), 0, SETTINGS)
    assert (moved.partition.start_offset, moved.must_store) == (15, True)
    assert acknowledge(moved.partition, 10, 19, ACCEPT).partition == SharePartition(20)
    assert step(held, LogStartMoved(30), 0, SETTINGS).partition == SharePartition(30)
    assert step(held, LogStartMoved(10), 0, SETTINGS).partition is held


def test_restored_record_is_available_with_its_delivery_count():
    held = acquire(EMPTY, (10, 14)).partition
    held = acknowledge(held, 12, 12, ACCEPT).partition
    assert durable(held).ranges == (
        Range(10, 11, RecordState.AVAILABLE, 1),
        Range(12, 12, RecordState.ACKNOWLEDGED, 1),
        Range(13, 14, RecordState.AVAILABLE, 1),
    )


# --- anything at all ------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A log of batches with gaps, members that send arbitrary requests, and a database that keeps what was stored."""

    seed: int
    now_ms: int = 0
    partition: SharePartition = field(default_factory=lambda: SharePartition(0))
    stored: SharePartition = field(default_factory=lambda: SharePartition(0))
    counts: dict[int, int] = field(default_factory=dict[int, int])
    answered: set[int] = field(default_factory=set[int])
    """Offsets of records whose acceptance or rejection was confirmed to the member."""
    delivered: set[int] = field(default_factory=set[int])
    end: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.batches: list[tuple[int, int]] = []
        self.settings = PartitionSettings(
            max_record_locks=self.random.choice((5, 20, 200)),
            delivery_count_limit=self.random.choice((1, 2, 5)),
            record_lock_duration_ms=1_000,
        )

    def append(self) -> None:
        first = self.end + self.random.choice((0, 0, 0, 3, 40))
        last = first + self.random.randrange(6)
        self.batches.append((first, last))
        self.end = last + 1

    def play(self, event: PartitionEvent) -> PartitionStep:
        before = self.partition
        taken = step(before, event, self.now_ms, self.settings)
        if taken.error is not ErrorCode.NONE:
            assert taken.partition is before
        self.check(before, taken, event)
        self.partition = taken.partition
        if taken.must_store:
            document = json.dumps(dump(durable(taken.partition)))
            self.stored = load(SharePartition, json.loads(document))
            assert self.stored == durable(taken.partition)
        return taken

    def check(self, before: SharePartition, taken: PartitionStep, event: PartitionEvent) -> None:
        after = taken.partition
        assert after.start_offset >= before.start_offset
        assert not after.ranges or after.ranges[0].state not in SETTLED
        at = after.start_offset
        for each in after.ranges:
            assert each.first_offset == at
            assert len(each) > 0
            at = each.last_offset + 1
            assert (each.state is RecordState.ACQUIRED) == (each.member_id is not None) == (each.deadline_ms > 0)
            # A coordinator that has read the partition from Postgres does not know of the last delivery, so the record
            # may be delivered once more.
            assert each.delivery_count <= self.settings.delivery_count_limit + self.restarts
        assert after.end_offset - after.start_offset <= self.settings.max_record_locks
        was = {o: each for each in before.ranges for o in range(each.first_offset, each.last_offset + 1)}
        is_ = {o: each for each in after.ranges for o in range(each.first_offset, each.last_offset + 1)}
        for offset, each in is_.items():
            old = was.get(offset)
            assert old is None or each.delivery_count >= old.delivery_count
            assert old is None or old.state not in SETTLED or each.state is old.state
            if old is not None and old.state is RecordState.ACQUIRED and each.state is RecordState.ACQUIRED:
                assert old.member_id == each.member_id
        for acquired in taken.acquired:
            for offset in range(acquired.first_offset, acquired.last_offset + 1):
                assert offset not in was or was[offset].state is RecordState.AVAILABLE
                assert offset not in self.answered
                assert acquired.delivery_count > self.counts.get(offset, 0)
                self.counts[offset] = acquired.delivery_count
                self.delivered.add(offset)

    def restart(self) -> None:
        """Restart: delivery counts since the last write are lost. Acknowledgements that were confirmed to a member are
        not lost.
        """
        self.partition = self.stored
        self.restarts += 1
        self.counts = {
            offset: each.delivery_count
            for each in self.stored.ranges
            for offset in range(each.first_offset, each.last_offset + 1)
        }
        held = states(self.stored)
        for offset in self.answered:
            assert offset < self.stored.start_offset or held.get(offset) in SETTLED

    def turn(self) -> None:
        self.now_ms += self.random.randrange(200)
        member = self.random.choice((A, B, MemberId("c")))
        match self.random.randrange(20):
            case 0 | 1 | 2:
                self.append()
            case 3 | 4 | 5 | 6 | 7 | 8 | 9:
                begin = self.partition.next_offset
                read = [each for each in self.batches if each[1] >= begin][: self.random.randrange(1, 4)]
                end = read[-1][1] + 1 if read else self.end
                if end >= begin:
                    most = self.random.choice((1, 3, 50))
                    self.play(Acquire(member, begin, end, tuple(read), most, self.random.random() < 0.5))
            case 10 | 11 | 12 | 13 | 14 | 15:
                self.acknowledge(member)
            case 16:
                self.play(Release(member))
            case 17:
                self.play(LocksExpire())
            case 18 if self.random.random() < 0.2:
                start = min(self.partition.start_offset + self.random.randrange(4), self.end)
                self.batches = [each for each in self.batches if each[1] >= start]
                assert self.play(LogStartMoved(start)).partition.start_offset >= start
            case _ if self.random.random() < 0.2:
                self.restart()
            case _:
                pass

    def acknowledge(self, member: MemberId) -> None:
        held = [each for each in self.partition.ranges if each.member_id == member]
        if held and self.random.random() < 0.9:
            one = self.random.choice(held)
            first = self.random.randint(one.first_offset, one.last_offset)
            last = self.random.randint(first, one.last_offset)
        else:
            first = self.partition.start_offset + self.random.randint(-3, 10)
            last = first + self.random.randint(-1, 5)
        length = max(last - first + 1, 0)
        count = 1 if self.random.random() < 0.5 else length
        types = tuple(self.random.choice((ACCEPT, ACCEPT, RELEASE, REJECT, RENEW, GAP)) for _ in range(count))
        start = self.partition.start_offset
        taken = self.play(Acknowledge(member, (AcknowledgedBatch(first, last, types),)))
        if taken.error is ErrorCode.NONE:
            for index, offset in enumerate(range(first, last + 1)):
                kind = types[0] if len(types) == 1 else types[index]
                if offset >= start and kind in (ACCEPT, REJECT, GAP):
                    self.answered.add(offset)

    def finish(self) -> None:
        """Finish the run: every record in the log must be settled, and must have been delivered."""
        for _ in range(10 * (self.end + 10)):
            self.now_ms += 1_000
            self.play(LocksExpire())
            begin = self.partition.next_offset
            read = [each for each in self.batches if each[1] >= begin]
            taken = self.play(Acquire(A, begin, max(self.end, begin), tuple(read), 50))
            for each in taken.acquired:
                batch = AcknowledgedBatch(each.first_offset, each.last_offset, (ACCEPT,))
                assert self.play(Acknowledge(A, (batch,))).error is ErrorCode.NONE
            if self.partition == SharePartition(self.end):
                return
        raise AssertionError(f"seed {self.seed}: not settled: {self.partition}, log ends at {self.end}")


def run(seed: int) -> None:
    """Run one seed. Raise AssertionError if a rule is broken."""
    world = World(seed)
    moved = False
    for _ in range(200):
        before = world.partition.start_offset
        world.turn()
        moved = moved or world.partition.start_offset > before
    world.finish()
    assert moved
    lost = [o for first, last in world.batches for o in range(first, last + 1) if o not in world.delivered]
    # The log's start has cut off the front of these batches.
    assert all(offset < world.batches[0][1] for offset in lost)


@pytest.mark.parametrize("seed", range(150))
def test_no_record_is_lost_or_held_by_two(seed: int):
    run(seed)


def kept(partition: SharePartition, *_: object) -> PartitionStep:
    return PartitionStep(partition)


def unstored(*given: Any) -> PartitionStep:
    return replace(acknowledged(*given), must_store=False)


def for_ever(each: Range, settings: PartitionSettings) -> Range:
    return each.settled(RecordState.AVAILABLE)


acknowledged = vars(partition_module)["_acknowledge"]


@pytest.mark.parametrize(
    ("holder", "name", "mutant"),
    [
        pytest.param(partition_module, "_let_go", kept, id="locks never end"),
        pytest.param(partition_module, "_acknowledge", unstored, id="acknowledgements are not stored"),
        pytest.param(partition_module, "_released", for_ever, id="there is no limit to deliveries"),
        pytest.param(partition_module, "_gaps", lambda *_: [], id="gaps of the log are waited for"),
        pytest.param(partition_module, "_log_start_moved", kept, id="the log's start is not followed"),
        pytest.param(partition_module, "_overlaid", lambda ranges, _: ranges, id="nothing is ever settled"),
        pytest.param(Range, "went_as", lambda *_: True, id="neighbours are alike"),
    ],
)
def test_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, mutant: Any):
    monkeypatch.setattr(holder, name, mutant)
    assert any(goes_wrong(seed) for seed in range(60))


def goes_wrong(seed: int) -> bool:
    try:
        run(seed)
    except AssertionError:
        return True
    return False


def test_settings_are_kafkas():
    assert PartitionSettings() == PartitionSettings(2_000, 5, 30_000)
    assert replace(PartitionSettings(), delivery_count_limit=2).delivery_count_limit == 2
