"""A share partition: what happens to records by values, then whatever comes in a seeded simulation."""

from __future__ import annotations

import pytest

from gateway.coordinator.facts import MemberId
from gateway.coordinator.share.partition import (
    Acknowledge,
    AcknowledgedBatch,
    AcknowledgeType,
    Acquire,
    Acquired,
    LocksExpire,
    LogStartMoved,
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


# --- acquiring ------------------------------------------------------------------------------------------------------


def test_what_is_read_is_acquired_batch_by_batch():
    taken = acquire(EMPTY, (10, 14), (15, 19), now=5)
    assert taken.acquired == (Acquired(10, 14, 1), Acquired(15, 19, 1))
    assert taken.partition.ranges == (Range(10, 19, RecordState.ACQUIRED, 1, A, 1_005),)
    assert (taken.partition.start_offset, taken.partition.next_offset) == (10, 20)
    assert not taken.must_store
    assert next_deadline(taken.partition) == 1_005


def test_what_one_has_acquired_no_other_gets():
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


def test_what_is_not_in_the_log_any_more_is_archived():
    taken = acquire(EMPTY, (12, 13), (16, 17), end=20)
    held = states(taken.partition)
    # What lies before the first record need not be kept.
    assert taken.partition.start_offset == 12
    assert [offset for offset, state in held.items() if state is RecordState.ARCHIVED] == [14, 15, 18, 19]
    assert taken.partition.next_offset == 20


def test_nothing_but_markers_moves_the_start():
    assert acquire(EMPTY, end=14).partition == SharePartition(14)


def test_a_gap_behind_what_was_not_looked_at_stays():
    assert acquire(EMPTY, (10, 14), (18, 19), end=25, most=5).partition.end_offset == 15


def test_a_hole_wider_than_the_window_is_passed():
    taken = acquire(EMPTY, (1_000, 1_004))
    assert taken.acquired == (Acquired(1_000, 1_004, 1),)
    assert taken.partition.start_offset == 1_000


def test_a_hole_behind_what_is_held_does_not_stop_the_window_for_ever():
    held = acquire(EMPTY, (10, 10))
    waiting = acquire(held.partition, (1_000, 1_000))
    assert not waiting.acquired
    assert waiting.partition.next_offset == 110
    free = acknowledge(waiting.partition, 10, 10, ACCEPT).partition
    assert acquire(free, (1_000, 1_000)).acquired == (Acquired(1_000, 1_000, 1),)


def test_what_was_released_and_is_compacted_since_stops_nobody():
    free = acknowledge(acquire(EMPTY, (10, 12)).partition, 10, 12, RELEASE).partition
    passed = acquire(free, (1_000, 1_000)).partition
    assert acquire(passed, (1_000, 1_000)).acquired == (Acquired(1_000, 1_000, 1),)


def test_what_was_read_before_the_partition_was_read_back_gives_nothing():
    taken = step(EMPTY, Acquire(A, 11, 12, ((11, 11),), 5), 0, SETTINGS)
    assert taken == PartitionStep(EMPTY)


# --- acknowledging --------------------------------------------------------------------------------------------------


def test_accepted_from_the_begin_moves_the_start():
    held = acquire(EMPTY, (10, 19)).partition
    taken = acknowledge(held, 10, 14, ACCEPT)
    assert (taken.error, taken.must_store, taken.partition.start_offset) == (ErrorCode.NONE, True, 15)
    assert acknowledge(taken.partition, 15, 19, ACCEPT).partition == SharePartition(20)


def test_each_offset_goes_its_way():
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


def test_released_is_delivered_again_until_it_was_often_enough():
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
        (10, 15, (ACCEPT,), ErrorCode.INVALID_RECORD_STATE),
        (12, 11, (ACCEPT,), ErrorCode.INVALID_REQUEST),
        (10, 14, (ACCEPT, ACCEPT), ErrorCode.INVALID_REQUEST),
        (10, 14, (), ErrorCode.INVALID_REQUEST),
        (10, 14, (5,), ErrorCode.INVALID_REQUEST),
        (10, 14, (-1,), ErrorCode.INVALID_REQUEST),
        (3, 9, (ACCEPT,), ErrorCode.NONE),
        (3, 10, (ACCEPT,), ErrorCode.NONE),
    ],
)
def test_what_may_be_said_of_which_offsets(first, last, types, error):
    held = acquire(EMPTY, (10, 14)).partition
    taken = acknowledge(held, first, last, *types)
    assert taken.error is error
    if error is not ErrorCode.NONE:
        assert taken.partition is held


def test_batches_of_one_request_stand_or_fall_together():
    held = acquire(EMPTY, (10, 14)).partition
    batches = (AcknowledgedBatch(10, 11, (ACCEPT,)), AcknowledgedBatch(14, 15, (ACCEPT,)))
    taken = step(held, Acknowledge(A, batches), 0, SETTINGS)
    assert (taken.error, taken.partition) == (ErrorCode.INVALID_RECORD_STATE, held)
    twice = (AcknowledgedBatch(10, 12, (ACCEPT,)), AcknowledgedBatch(12, 14, (RELEASE,)))
    assert step(held, Acknowledge(A, twice), 0, SETTINGS).error is ErrorCode.INVALID_REQUEST


def test_only_who_has_acquired_it_may_say():
    held = acquire(EMPTY, (10, 14)).partition
    assert acknowledge(held, 10, 14, ACCEPT, member=B).error is ErrorCode.INVALID_RECORD_STATE
    done = acknowledge(held, 12, 12, ACCEPT).partition
    assert acknowledge(done, 12, 12, ACCEPT).error is ErrorCode.INVALID_RECORD_STATE


# --- time, sessions, the log ----------------------------------------------------------------------------------------


def test_a_lock_that_ran_out_is_no_more():
    held = acquire(EMPTY, (10, 14), now=0).partition
    assert step(held, LocksExpire(), 999, SETTINGS).partition is held
    free = step(held, LocksExpire(), 1_000, SETTINGS)
    assert free.must_store
    assert free.partition.ranges == (Range(10, 14, RecordState.AVAILABLE, 1),)
    assert acknowledge(free.partition, 10, 14, ACCEPT).error is ErrorCode.INVALID_RECORD_STATE
    assert acquire(free.partition, (10, 14), member=B).acquired == (Acquired(10, 14, 2),)


def test_a_session_that_ends_frees_what_it_held_and_nothing_else():
    both = acquire(acquire(EMPTY, (10, 14)).partition, (15, 19), member=B).partition
    after = step(both, Release(A), 0, SETTINGS).partition
    assert [(each.state, each.member_id) for each in after.ranges] == [
        (RecordState.AVAILABLE, None),
        (RecordState.ACQUIRED, B),
    ]


def test_a_delivery_that_ended_with_its_session_does_not_count():
    partition = EMPTY
    for _ in range(5):
        taken = acquire(partition, (10, 10))
        assert taken.acquired == (Acquired(10, 10, 1),)
        partition = step(taken.partition, Release(A), 0, SETTINGS).partition
    assert partition == EMPTY
    once = acknowledge(acquire(partition, (10, 10)).partition, 10, 10, RELEASE).partition
    again = step(acquire(once, (10, 10)).partition, Release(A), 0, SETTINGS)
    assert again.must_store
    assert again.partition == once


def test_records_that_are_gone_from_the_log_are_settled():
    held = acquire(EMPTY, (10, 19)).partition
    moved = step(held, LogStartMoved(15), 0, SETTINGS)
    assert (moved.partition.start_offset, moved.must_store) == (15, True)
    assert acknowledge(moved.partition, 10, 19, ACCEPT).partition == SharePartition(20)
    assert step(held, LogStartMoved(30), 0, SETTINGS).partition == SharePartition(30)
    assert step(held, LogStartMoved(10), 0, SETTINGS).partition is held


def test_what_is_read_back_is_available_with_its_count():
    held = acquire(EMPTY, (10, 14)).partition
    held = acknowledge(held, 12, 12, ACCEPT).partition
    assert durable(held).ranges == (
        Range(10, 11, RecordState.AVAILABLE, 1),
        Range(12, 12, RecordState.ACKNOWLEDGED, 1),
        Range(13, 14, RecordState.AVAILABLE, 1),
    )
