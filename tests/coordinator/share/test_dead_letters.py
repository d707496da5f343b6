"""Dead letters of a share partition (KIP-1191): when a record becomes a dead letter, and that every one is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.coordinator.facts import MemberId
from gateway.coordinator.share.partition import (
    Acknowledge,
    AcknowledgedBatch,
    AcknowledgeType,
    Acquire,
    DeadLettersSettled,
    LocksExpire,
    LogStartMoved,
    PartitionSettings,
    Range,
    RecordState,
    Release,
    SharePartition,
    dead_letters,
    durable,
    step,
)
from protocol.errors import ErrorCode

A = MemberId("a")
KEEPS = PartitionSettings(delivery_count_limit=2, record_lock_duration_ms=1_000, keeps_dead_letters=True)
ARCHIVING, ARCHIVED, AVAILABLE = RecordState.ARCHIVING, RecordState.ARCHIVED, RecordState.AVAILABLE


def acquired(partition: SharePartition, first: int, last: int, settings: PartitionSettings = KEEPS) -> SharePartition:
    event = Acquire(A, partition.next_offset, last + 1, ((first, last),), 50)
    return step(partition, event, 0, settings).partition


def said(partition: SharePartition, kind: AcknowledgeType, first: int, last: int) -> SharePartition:
    taken = step(partition, Acknowledge(A, (AcknowledgedBatch(first, last, (kind,)),)), 0, KEEPS)
    assert (taken.error, taken.must_store) == (ErrorCode.NONE, True)
    return taken.partition


def test_a_rejected_record_waits_to_be_written_and_holds_the_window() -> None:
    rejected = said(acquired(SharePartition(0), 0, 4), AcknowledgeType.REJECT, 0, 1)
    assert rejected.start_offset == 0
    assert dead_letters(rejected, 0, 9) == [Range(0, 1, ARCHIVING, 1, A)]
    assert rejected.next_offset == 5, "it is not delivered again"


@pytest.mark.parametrize("event", [LocksExpire(), Release(A)])
def test_a_record_that_was_delivered_too_often_waits_to_be_written(event: LocksExpire | Release) -> None:
    once = step(acquired(SharePartition(0), 0, 1), event, 2_000, KEEPS).partition
    assert [each.state for each in once.ranges] == [AVAILABLE]
    twice = step(acquired(once, 0, 1), event, 2_000, KEEPS).partition
    assert dead_letters(twice, 0, 1) == [Range(0, 1, ARCHIVING, 2)]


@pytest.mark.parametrize("kind", [AcknowledgeType.ACCEPT, AcknowledgeType.GAP])
def test_accepted_record_or_gap_is_no_dead_letter(kind: AcknowledgeType) -> None:
    assert said(acquired(SharePartition(0), 0, 1), kind, 0, 1) == SharePartition(2)


def test_a_group_without_a_dead_letter_topic_archives_at_once() -> None:
    settings = replace(KEEPS, keeps_dead_letters=False)
    partition = acquired(SharePartition(0), 0, 1, settings)
    event = Acknowledge(A, (AcknowledgedBatch(0, 1, (AcknowledgeType.REJECT,)),))
    assert step(partition, event, 0, settings).partition == SharePartition(2)


def test_dead_letters_are_read_back_without_their_rejecting_member() -> None:
    rejected = said(acquired(SharePartition(0), 0, 4), AcknowledgeType.REJECT, 1, 1)
    stored = durable(rejected)
    assert stored.ranges == (Range(0, 0, AVAILABLE, 1), Range(1, 1, ARCHIVING, 1), Range(2, 4, AVAILABLE, 1))


def test_settled_dead_letter_is_archived_and_the_window_advances() -> None:
    rejected = said(acquired(SharePartition(0), 0, 4), AcknowledgeType.REJECT, 0, 2)
    part = step(rejected, DeadLettersSettled(1, 2), 0, KEEPS)
    assert part.must_store
    assert [(each.first_offset, each.state) for each in part.partition.ranges[:2]] == [(0, ARCHIVING), (1, ARCHIVED)]
    assert part.partition.start_offset == 0
    assert step(part.partition, DeadLettersSettled(0, 0), 0, KEEPS).partition.start_offset == 3


def test_settling_other_records_changes_nothing() -> None:
    held = acquired(SharePartition(0), 0, 4)
    assert step(held, DeadLettersSettled(0, 9), 0, KEEPS).partition is held


def test_a_dead_letter_cannot_be_acknowledged_again() -> None:
    rejected = said(acquired(SharePartition(0), 0, 4), AcknowledgeType.REJECT, 0, 1)
    again = step(rejected, Acknowledge(A, (AcknowledgedBatch(0, 1, (AcknowledgeType.ACCEPT,)),)), 0, KEEPS)
    assert again.error is ErrorCode.INVALID_RECORD_STATE


@pytest.mark.parametrize("log_start", [3, 4, 1_000])
def test_dead_letter_below_a_new_log_start_is_kept(log_start: int) -> None:
    rejected = said(acquired(SharePartition(0), 0, 3), AcknowledgeType.REJECT, 1, 2)
    moved = step(rejected, LogStartMoved(log_start), 0, KEEPS)
    assert moved.must_store
    assert dead_letters(moved.partition, 0, 9) == [Range(1, 2, ARCHIVING, 1, A)]
    assert (moved.partition.start_offset, moved.partition.next_offset) == (1, max(log_start, 4))
    assert step(moved.partition, LogStartMoved(log_start), 0, KEEPS).partition is moved.partition
    assert step(moved.partition, DeadLettersSettled(1, 2), 0, KEEPS).partition.start_offset == log_start
