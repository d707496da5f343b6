"""Batches that are rewritten for another log."""

from __future__ import annotations

import pytest

from gateway.mirror.batches import mirrored_batches
from protocol.compression import Compression
from protocol.errors import ProtocolError
from protocol.messages.fetch import AbortedTransaction
from protocol.records import (
    ControlType,
    Record,
    TimestampType,
    build_batch,
    control_type_of,
    end_marker,
    iter_records,
    read_head,
    verify_crc,
)
from storage.chunks import write_head

ZSTD = Compression.ZSTD


def batch(base_offset: int, count: int = 3, *, producer_id: int = -1, is_transactional: bool = False) -> bytes:
    epoch, sequence = (5, 7) if producer_id >= 0 else (-1, -1)
    return build_batch(
        [Record(base_offset + n, 1000 + n, b"k", b"%d" % n, (("h", None),)) for n in range(count)],
        compression=ZSTD,
        base_offset=base_offset,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=is_transactional,
    )


def marker(offset: int, control: ControlType, producer_id: int) -> bytes:
    made = bytearray(end_marker(control, producer_id=producer_id, producer_epoch=5, timestamp_ms=1234))
    write_head(made, offset, 9)
    return bytes(made)


def test_a_batch_without_a_producer_keeps_its_bytes() -> None:
    (found,), next_offset = mirrored_batches(batch(10), (), 10)
    assert bytes(found.records) == batch(10)
    assert (found.base_offset, found.last_offset, found.max_timestamp_ms, next_offset) == (10, 12, 1002, 13)


def test_a_batch_loses_its_producer_and_its_transaction_and_keeps_its_records() -> None:
    original = batch(10, producer_id=4711, is_transactional=True)
    (found,), _ = mirrored_batches(original, (), 10)
    head = read_head(found.records)
    assert (head.producer_id, head.producer_epoch, head.base_sequence, head.is_transactional) == (-1, -1, -1, False)
    assert verify_crc(found.records)
    assert bytes(found.records[61:]) == original[61:], "the compressed records are copied as they are"
    assert list(iter_records(found.records)) == list(iter_records(original))


def test_an_aborted_transaction_leaves_only_its_marker() -> None:
    records = (
        batch(0, 2, producer_id=1, is_transactional=True)
        + batch(2, 2, producer_id=2, is_transactional=True)
        + marker(4, ControlType.ABORT, 1)
        + marker(5, ControlType.COMMIT, 2)
    )
    found, next_offset = mirrored_batches(records, [AbortedTransaction(producer_id=1, first_offset=0)], 0)
    assert [(each.base_offset, each.last_offset) for each in found] == [(2, 3), (4, 4), (5, 5)]
    assert [control_type_of(each.records) for each in found] == [None, ControlType.COMMIT, ControlType.COMMIT]
    assert all(read_head(each.records).producer_id == -1 for each in found)
    assert next_offset == 6


def test_records_below_the_position_are_cut_off() -> None:
    original = build_batch(
        [Record(20 + n, 0, None, b"%d" % n) for n in (0, 3, 5)],
        compression=ZSTD,
        base_offset=20,
        last_offset_delta=9,
        timestamp_type=TimestampType.LOG_APPEND_TIME,
        max_timestamp=99,
    )
    (found,), next_offset = mirrored_batches(original, (), 22)
    assert (found.base_offset, found.last_offset, next_offset) == (22, 29, 30)
    assert [(record.offset, record.timestamp) for record in iter_records(found.records)] == [(23, 99), (25, 99)]
    assert read_head(found.records).compression is ZSTD


def test_batches_before_the_position_are_skipped() -> None:
    found, next_offset = mirrored_batches(batch(0) + batch(3), (), 3)
    assert [each.base_offset for each in found] == [3]
    assert next_offset == 6
    assert mirrored_batches(b"", (), 3) == ([], 3)


def test_a_batch_that_was_cut_off_by_the_answer_is_read_next_time() -> None:
    found, next_offset = mirrored_batches(batch(0) + batch(3)[:-1], (), 0)
    assert (len(found), next_offset) == (1, 3)


@pytest.mark.parametrize(
    ("records", "from_offset"),
    [
        (batch(0) + batch(0), 0),
        (batch(0) + batch(2), 1),
        (batch(10) + batch(0), 5),
        (batch(0) + batch(6) + batch(3), 0),
    ],
    ids=["the same again", "the last offset again", "below the position", "between others"],
)
def test_a_batch_that_does_not_follow_the_batch_before_it_is_refused(records: bytes, from_offset: int) -> None:
    with pytest.raises(ProtocolError, match="comes after offset"):
        mirrored_batches(records, (), from_offset)


@pytest.mark.parametrize("base_offset", [-1, 2**63 - 3])
def test_a_batch_without_a_valid_last_offset_is_refused(base_offset: int) -> None:
    moved = bytearray(batch(0))
    write_head(moved, base_offset, 9)
    with pytest.raises(ProtocolError, match="no valid last offset"):
        mirrored_batches(moved, (), 0)


@pytest.mark.parametrize(("at", "reason"), [(-1, "CRC"), (16, "magic")])
def test_a_batch_that_is_damaged_or_old_is_refused(at: int, reason: str) -> None:
    damaged = bytearray(batch(0))
    damaged[at] ^= 1
    with pytest.raises(ProtocolError, match=reason):
        mirrored_batches(damaged, (), 0)
