"""The decisions of compaction, without Postgres (upstream: LogCleanerTest)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gateway.log.compactor import Cleaned, clean, index_keys
from gateway.log.offset_map import MAX_SPAN, OffsetMap
from protocol.compression import Compression
from protocol.record_reader import WINDOW_BYTES, RecordReader
from protocol.records import Record, TimestampType, build_batch, iter_records, read_head, verify_crc
from storage.types import StoredBatch

NOW_MS = 1_800_000_000_000
RETENTION_MS = 1000
LEAST_MS = -(2**63)
MANY = 10**6

Pair = tuple[str | None, str | None]


def encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def stored(base_offset: int, *pairs: Pair, **fields: object) -> StoredBatch:
    """Return a batch of these (key, value) pairs, with one offset each."""
    records = build_batch(
        [
            Record(base_offset + delta, NOW_MS + delta, encoded(key), encoded(value))
            for delta, (key, value) in enumerate(pairs)
        ],
        base_offset=base_offset,
        **fields,  # type: ignore[arg-type]
    )
    head = read_head(records)
    return StoredBatch(base_offset, head.last_offset, head.max_timestamp, records)


def compacted(
    batches: Sequence[StoredBatch], *, now_ms: int = NOW_MS, dirty_from: int = 0
) -> tuple[list[StoredBatch], Cleaned]:
    index = OffsetMap(dirty_from, MANY)
    assert index_keys([batch for batch in batches if batch.base_offset >= dirty_from], index, ()) is None
    cleaned = clean(batches, index, (), now_ms=now_ms, delete_retention_ms=RETENTION_MS)
    kept = [batch for batch in batches if batch.base_offset not in cleaned.removed]
    return sorted([*kept, *cleaned.added], key=lambda batch: batch.base_offset), cleaned


def content(batches: Sequence[StoredBatch]) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(record.offset, record.key, record.value) for batch in batches for record in iter_records(batch.records)]


def test_the_newest_record_of_each_key_stays_at_its_offset() -> None:
    batches = [stored(0, ("a", "1"), ("b", "1")), stored(2, ("a", "2")), stored(3, ("c", "1"), ("b", "2"))]
    log, cleaned = compacted(batches)
    assert content(log) == [(2, b"a", b"2"), (3, b"c", b"1"), (4, b"b", b"2")]
    assert cleaned.removed == [0]
    assert cleaned.dropped_records == 2
    assert log[-1] is batches[-1], "what loses nothing is not rewritten"


@pytest.mark.parametrize("codec", list(Compression))
def test_a_rebuilt_batch_keeps_its_place_and_its_producer(codec: Compression) -> None:
    batch = stored(
        10,
        *[("a", "1"), ("b", "1"), ("c", "1")],
        compression=codec,
        partition_leader_epoch=4,
        producer_id=7,
        producer_epoch=2,
        base_sequence=30,
    )
    (rebuilt, _), _ = compacted([batch, stored(13, ("a", "2"), ("c", "2"))])
    head = read_head(rebuilt.records)
    assert verify_crc(rebuilt.records)
    assert (head.base_offset, head.last_offset, head.records_count) == (10, 12, 1)
    assert (rebuilt.base_offset, rebuilt.last_offset) == (10, 12)
    assert (head.producer_id, head.producer_epoch, head.base_sequence) == (7, 2, 30)
    assert (head.compression, head.partition_leader_epoch) == (codec, 4)
    (record,) = iter_records(rebuilt.records)
    assert (record.offset, record.timestamp, record.key, record.value) == (11, NOW_MS + 1, b"b", b"1")
    assert rebuilt.max_timestamp_ms == head.max_timestamp == NOW_MS + 1


def test_headers_survive_compaction() -> None:
    headers = (("h", b"1"), ("h", None))
    records = build_batch([Record(0, 1, b"a", b"1", headers), Record(1, 1, b"b", b"1")])
    log, _ = compacted([StoredBatch(0, 1, 1, records), stored(2, ("b", "2"))])
    assert next(iter_records(log[0].records)).headers == headers


def test_append_time_survives_compaction() -> None:
    batch = stored(0, ("a", "1"), ("b", "1"), timestamp_type=TimestampType.LOG_APPEND_TIME, max_timestamp=NOW_MS + 99)
    log, _ = compacted([batch, stored(2, ("a", "2"))])
    assert [record.timestamp for record in iter_records(log[0].records)] == [NOW_MS + 99]
    assert log[0].max_timestamp_ms == NOW_MS + 99


@pytest.mark.parametrize("key_bytes", [1, 2 * WINDOW_BYTES])
def test_tombstone_with_the_least_timestamp_stays_readable(key_bytes: int) -> None:
    key = b"k" * key_bytes
    records = build_batch([Record(0, LEAST_MS, key, None), Record(1, NOW_MS, b"b", b"1")])
    log, _ = compacted([StoredBatch(0, 1, NOW_MS, records)])
    batch = log[0].records
    assert read_head(batch).delete_horizon_ms == NOW_MS + RETENTION_MS
    expected = [(LEAST_MS, key), (NOW_MS, b"b")]
    assert [(record.timestamp, record.key) for record in iter_records(batch)] == expected
    found = [record for window in RecordReader(batch).windows() for record in window]
    assert [(record.timestamp, bytes(record.key or b"")) for record in found] == expected


def test_tombstone_is_removed_after_its_retention() -> None:
    first, cleaned = compacted([stored(0, ("a", "1")), stored(1, ("a", None), ("b", "1"))])
    assert content(first) == [(1, b"a", None), (2, b"b", b"1")]
    assert cleaned.removed == [0, 1], "rewritten to note when the tombstone may go"
    assert read_head(first[0].records).delete_horizon_ms == NOW_MS + RETENTION_MS
    assert [record.timestamp for record in iter_records(first[0].records)] == [NOW_MS, NOW_MS + 1]

    before, cleaned = compacted(first, now_ms=NOW_MS + RETENTION_MS - 1)
    assert (content(before), cleaned.removed) == (content(first), []), "no rewrite only to say so again"
    after, _ = compacted(first, now_ms=NOW_MS + RETENTION_MS)
    assert content(after) == [(2, b"b", b"1")]


def test_rewritten_key_outlives_its_tombstone() -> None:
    log, _ = compacted([stored(0, ("a", None)), stored(1, ("a", "2"))])
    assert content(log) == [(1, b"a", b"2")]


def test_records_without_a_key_are_removed() -> None:
    log, _ = compacted([stored(0, (None, "1"), ("a", "1"))])
    assert content(log) == [(1, b"a", b"1")]


def test_an_empty_key_is_a_key() -> None:
    log, _ = compacted([stored(0, ("", "1"), ("a", "1")), stored(2, ("", "2"))])
    assert content(log) == [(1, b"a", b"1"), (2, b"", b"2")]


def test_only_the_dirty_range_is_indexed_but_all_is_cleaned() -> None:
    batches = [stored(0, ("a", "1"), ("b", "1")), stored(2, ("a", "2"))]
    log, _ = compacted(batches, dirty_from=2)
    assert content(log) == [(1, b"b", b"1"), (2, b"a", b"2")]


def test_a_batch_that_cannot_be_read_is_left_alone() -> None:
    damaged = bytearray(stored(0, ("a", "1")).records)
    damaged[61] = 0x7F
    batches = [StoredBatch(0, 0, NOW_MS, bytes(damaged)), stored(1, ("a", "2"))]
    log, cleaned = compacted(batches)
    assert cleaned.removed == []
    assert log == batches


def test_the_keys_of_a_batch_that_ends_in_damage_supersede_nothing() -> None:
    damaged = bytearray(stored(1, ("a", "2"), ("b", "2")).records)
    damaged[-1] = 0x7F
    batches = [stored(0, ("a", "1")), StoredBatch(1, 2, NOW_MS, bytes(damaged)), stored(3, ("c", "1"))]
    log, cleaned = compacted(batches)
    assert cleaned.removed == []
    assert log == batches


@pytest.mark.parametrize("codec", list(Compression))
def test_records_of_all_sizes_are_kept_as_they_are(codec: Compression) -> None:
    """Records may be smaller or larger than the parser's window, and have headers. A tombstone may be among them."""
    chance = random.Random(7)
    for tombstone in (False, True):
        records = [
            Record(
                offset,
                NOW_MS + chance.randrange(-10_000, 10_000),
                b"key %d" % offset,
                bytes(chance.choice([0, 100, 70_000, 200_000])) if offset or not tombstone else None,
                (("h", b"x" * offset), ("g", None)),
            )
            for offset in range(30)
        ]
        batch = StoredBatch(0, 29, NOW_MS, build_batch(records, compression=codec))
        log, _ = compacted([batch, stored(30, *[(f"key {offset}", "2") for offset in range(0, 30, 3) if offset])])
        gone = set(range(3, 30, 3))
        assert list(iter_records(log[0].records)) == [record for record in records if record.offset not in gone]
        assert read_head(log[0].records).delete_horizon_ms == (NOW_MS + RETENTION_MS if tombstone else None)


def test_run_ends_before_keys_that_its_index_cannot_distinguish() -> None:
    index = OffsetMap(10, MANY)
    assert index_keys([stored(10, ("a", "1")), stored(10 + MAX_SPAN, ("b", "1"))], index, ()) == 10 + MAX_SPAN
    assert index.newest(b"b") == -1


def test_full_index_reports_its_end() -> None:
    batches = [stored(0, ("a", "1"), ("b", "1")), stored(2, ("c", "1"), ("d", "1")), stored(4, ("e", "1"))]
    index = OffsetMap(0, max_keys=3)
    assert index_keys(batches, index, ()) == 4
    assert len(index) == 4


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_of_the_compacted_log_ends_with_the_same_table(seed: int) -> None:
    """After any number of compactions at any time, a replay gives the last value of each key, in offset order."""
    chance = random.Random(seed)
    log: list[StoredBatch] = []
    expected: dict[str, str | None] = {}
    offset, cleaned_to, now_ms = 0, 0, NOW_MS
    for step in range(60):
        pairs: list[Pair] = []
        for _ in range(chance.randrange(1, 6)):
            key = chance.choice("abcdefg")
            value = None if chance.random() < 0.3 else f"{step}"
            expected[key] = value
            pairs.append((key, value))
        log.append(stored(offset, *pairs, compression=chance.choice(list(Compression))))
        offset += len(pairs)
        now_ms += chance.randrange(RETENTION_MS)
        if chance.random() < 0.3:
            head, newest = log[:-1], log[-1:]
            head, _ = compacted(head, now_ms=now_ms, dirty_from=cleaned_to)
            cleaned_to = newest[0].base_offset
            log = head + newest
    offsets = [record[0] for record in content(log)]
    assert offsets == sorted(set(offsets))
    table = {key: value for _, key, value in content(log)}
    for key, value in expected.items():
        assert table.get(key.encode()) == encoded(value)
