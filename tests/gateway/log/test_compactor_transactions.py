"""Compaction of transactions, without Postgres (upstream: LogCleanerTest): a read_committed reader
sees no difference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from gateway.log.compactor import Cleaned, clean, index_keys
from gateway.log.offset_map import OffsetMap
from protocol.compression import Compression
from protocol.records import ControlType, Record, build_batch, control_type_of, end_marker, iter_records, read_head
from storage.compaction import AbortedSpan
from storage.types import AbortedTransaction, StoredBatch
from tests.storage.transactions import committed_records

NOW_MS = 1_800_000_000_000
RETENTION_MS = 1000
MANY = 10**6

Pair = tuple[str | None, str | None]


def encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


@dataclass
class Log:
    """A partition that the appends of plain and transactional producers have built."""

    batches: list[StoredBatch] = field(default_factory=list[StoredBatch])
    aborted: list[AbortedSpan] = field(default_factory=list[AbortedSpan])
    open_since: dict[int, int] = field(default_factory=dict[int, int])
    next_offset: int = 0
    now_ms: int = NOW_MS

    def plain(self, *pairs: Pair, compression: Compression = Compression.NONE) -> int:
        return self._append(pairs, None, compression)

    def write(self, producer_id: int, *pairs: Pair, compression: Compression = Compression.NONE) -> int:
        """Append in the producer's transaction. Begin a transaction first if the producer has no open one."""
        self.open_since.setdefault(producer_id, self.next_offset)
        return self._append(pairs, producer_id, compression)

    def commit(self, producer_id: int) -> int:
        self.open_since.pop(producer_id, None)
        return self._mark(ControlType.COMMIT, producer_id)

    def abort(self, producer_id: int) -> int:
        if (first_offset := self.open_since.pop(producer_id, None)) is not None:
            self.aborted.append(AbortedSpan(producer_id, first_offset, self.next_offset))
        return self._mark(ControlType.ABORT, producer_id)

    @property
    def last_stable_offset(self) -> int:
        return min(self.open_since.values(), default=self.next_offset)

    def compact(self, *, end_offset: int | None = None, dirty_from: int = 0) -> Cleaned:
        """Compact below `end_offset`, by default below the last batch. Read the log in pieces, as with a long log."""
        if end_offset is None:
            end_offset = self.batches[-1].base_offset
        head = [batch for batch in self.batches if batch.base_offset < end_offset]
        index = OffsetMap(dirty_from, MANY)
        for piece in _pieces([batch for batch in head if batch.base_offset >= dirty_from]):
            assert index_keys(piece, index, self.aborted_among(piece)) is None
        done = Cleaned()
        for piece in _pieces(head):
            cleaned = clean(
                piece, index, self.aborted_among(piece), now_ms=self.now_ms, delete_retention_ms=RETENTION_MS
            )
            done.removed += cleaned.removed
            done.added += cleaned.added
            done.dropped_records += cleaned.dropped_records
        kept = [batch for batch in self.batches if batch.base_offset not in done.removed]
        self.batches = sorted([*kept, *done.added], key=lambda batch: batch.base_offset)
        return done

    def aborted_among(self, batches: Sequence[StoredBatch]) -> list[AbortedSpan]:
        begin, end = batches[0].base_offset, batches[-1].last_offset + 1
        return [span for span in self.aborted if span.first_offset < end and span.last_offset >= begin]

    def committed(self, offset: int = 0, count: int = 10**6) -> list[Record]:
        """Return the records that a read_committed reader receives if each answer has `count` batches."""
        found: list[Record] = []
        stable = [batch for batch in self.batches if batch.base_offset < self.last_stable_offset]
        stable = [batch for batch in stable if batch.last_offset >= offset]
        for begin in range(0, len(stable), count):
            answer = stable[begin : begin + count]
            listed = [
                AbortedTransaction(span.producer_id, span.first_offset)
                for span in self.aborted
                if span.first_offset < answer[-1].last_offset + 1 and span.last_offset >= offset
            ]
            found += [record for record in committed_records(answer, listed) if record.offset >= offset]
            offset = answer[-1].last_offset + 1
        return found

    def content(self) -> list[tuple[int, bytes | None, bytes | None]]:
        """Return all records without markers."""
        return [
            (record.offset, record.key, record.value)
            for batch in self.batches
            if not read_head(batch.records).is_control
            for record in iter_records(batch.records)
        ]

    def bases(self) -> list[int]:
        return [batch.base_offset for batch in self.batches]

    def _append(self, pairs: Sequence[Pair], producer_id: int | None, compression: Compression) -> int:
        base_offset = self.next_offset
        records = build_batch(
            [
                Record(base_offset + delta, self.now_ms, encoded(key), encoded(value))
                for delta, (key, value) in enumerate(pairs)
            ],
            base_offset=base_offset,
            compression=compression,
            **({} if producer_id is None else _fields(producer_id, base_offset)),  # type: ignore[arg-type]
        )
        return self.store(records)

    def _mark(self, control: ControlType, producer_id: int) -> int:
        marker = bytearray(end_marker(control, producer_id=producer_id, producer_epoch=2, timestamp_ms=self.now_ms))
        marker[:8] = self.next_offset.to_bytes(8, "big")
        return self.store(bytes(marker))

    def store(self, records: bytes) -> int:
        head = read_head(records)
        self.batches.append(StoredBatch(head.base_offset, head.last_offset, head.max_timestamp, records))
        self.next_offset = head.last_offset + 1
        return head.base_offset


def _fields(producer_id: int, base_sequence: int) -> dict[str, object]:
    return {
        "producer_id": producer_id,
        "producer_epoch": 2,
        "base_sequence": base_sequence,
        "is_transactional": True,
    }


def _pieces(batches: Sequence[StoredBatch], size: int = 3) -> list[Sequence[StoredBatch]]:
    return [batches[begin : begin + size] for begin in range(0, len(batches), size)]


def test_records_of_committed_transactions_are_compacted_as_others() -> None:
    log = Log()
    log.plain(("a", "1"), ("b", "1"))  # 0, 1
    log.write(7, ("a", "2"), ("c", "1"))  # 2, 3
    log.commit(7)
    log.plain(("c", "2"))  # 5
    log.plain(("end", "1"))
    log.compact()
    assert log.content() == [(1, b"b", b"1"), (2, b"a", b"2"), (5, b"c", b"2"), (6, b"end", b"1")]


@pytest.mark.parametrize("codec", list(Compression))
def test_a_rebuilt_batch_of_a_transaction_stays_one(codec: Compression) -> None:
    log = Log()
    log.write(7, ("a", "1"), ("b", "1"), ("c", None), compression=codec)
    log.commit(7)
    log.plain(("a", "2"))
    log.plain(("end", "1"))
    log.compact()
    head = read_head(log.batches[0].records)
    assert (head.base_offset, head.last_offset, head.records_count) == (0, 2, 2)
    assert (head.producer_id, head.producer_epoch, head.base_sequence) == (7, 2, 0)
    assert head.is_transactional
    assert not head.is_control
    assert head.delete_horizon_ms == NOW_MS + RETENTION_MS, "tombstones wait here, too"


def test_transactional_batch_without_records_left_is_removed() -> None:
    log = Log()
    log.write(7, ("a", "1"))
    log.commit(7)
    log.write(7, ("a", "2"))
    log.commit(7)
    log.plain(("end", "1"))
    cleaned = log.compact()
    assert log.bases() == [2, 4]
    assert (cleaned.removed, cleaned.added, cleaned.dropped_records) == ([0, 1, 3], [], 1), "no marker is a record"


def test_aborted_records_are_removed_and_supersede_nothing() -> None:
    """In another gateway, an uncommitted record superseded a committed one, which compaction then deleted."""
    log = Log()
    log.plain(("a", "1"))  # 0
    log.write(7, ("a", "2"), ("b", "1"))  # 1, 2
    log.write(8, ("c", "1"))  # 3
    log.write(7, ("d", None))  # 4
    log.abort(7)  # 5
    log.commit(8)
    log.plain(("end", "1"))  # 7
    cleaned = log.compact()
    assert log.content() == [(0, b"a", b"1"), (3, b"c", b"1"), (7, b"end", b"1")]
    assert cleaned.dropped_records == 3
    assert log.bases() == [0, 3, 5, 7], "the marker that says COMMIT is gone, the one that says ABORT is not"


def test_only_batches_between_the_first_and_the_marker_were_aborted() -> None:
    log = Log()
    log.write(7, ("a", "1"))
    log.commit(7)  # 1
    log.write(7, ("b", "1"))
    log.abort(7)  # 3
    log.write(7, ("c", "1"))
    log.commit(7)  # 5
    log.write(7, ("d", "1"))
    log.write(8, ("e", "1"))
    log.abort(7)  # 8
    log.plain(("f", "1"))
    log.commit(8)  # 10
    log.plain(("end", "1"))
    log.compact()
    assert [key for _, key, _ in log.content()] == [b"a", b"c", b"e", b"f", b"end"]
    log.compact()
    assert [key for _, key, _ in log.content()] == [b"a", b"c", b"e", b"f", b"end"]


def test_batches_of_the_producer_outside_of_transactions_were_not_aborted() -> None:
    """A producer may continue without a transactional id and keep its producer id. The client decides that."""
    log = Log(aborted=[AbortedSpan(7, 0, 5)])
    records = build_batch([Record(0, NOW_MS, b"a", b"1")], producer_id=7, producer_epoch=2, base_sequence=0)
    log.store(records)
    log.plain(("end", "1"))
    log.compact()
    assert log.content() == [(0, b"a", b"1"), (1, b"end", b"1")]


def test_abort_marker_is_kept_through_every_compaction() -> None:
    """The aborted transaction stays in the list. Without its marker, a reader would not see the transaction's end, and
    would skip the producer's later commits.
    """
    log = Log()
    log.write(7, ("a", "1"))
    log.abort(7)
    log.write(7, ("a", "2"))
    log.commit(7)
    log.plain(("end", "1"))
    for _ in range(3):
        log.compact()
        log.now_ms += 10 * RETENTION_MS
    assert log.bases() == [1, 2, 4]
    assert [(record.offset, record.value) for record in log.committed()] == [(2, b"2"), (4, b"1")]


def test_a_transaction_whose_marker_lies_behind_the_range_is_known_to_be_aborted() -> None:
    log = Log()
    log.plain(("a", "1"))
    log.write(7, ("a", "2"))
    log.plain(("b", "1"))
    log.abort(7)
    log.compact(end_offset=3)
    assert log.content() == [(0, b"a", b"1"), (2, b"b", b"1")]


def test_aborted_records_need_not_be_readable() -> None:
    log = Log()
    log.write(7, ("a", "1"))
    torn = bytearray(log.batches[0].records)
    torn[61] = 0x7F
    log.batches[0] = replace(log.batches[0], records=bytes(torn))
    log.abort(7)
    log.plain(("end", "1"))
    log.compact()
    assert log.bases() == [1, 2]


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([Record(1, NOW_MS, bytes.fromhex("0000 0002"), b"")], id="a type that is not known"),
        pytest.param([Record(1, NOW_MS, b"", b"")], id="no type"),
        pytest.param([], id="no record"),
    ],
)
def test_other_control_batches_are_left_alone(records: list[Record]) -> None:
    log = Log()
    log.plain(("a", "1"))
    log.store(build_batch(records, base_offset=1, is_control=True, is_transactional=True, producer_id=7))
    log.plain(("end", "1"))
    before = list(log.batches)
    assert log.compact().removed == []
    assert log.batches == before


def test_a_damaged_marker_is_left_alone() -> None:
    log = Log()
    log.commit(7)
    torn = bytearray(log.batches[0].records)
    torn[61] = 0x7F
    log.batches[0] = replace(log.batches[0], records=bytes(torn))
    log.plain(("end", "1"))
    assert log.compact().removed == []


def test_full_index_ends_behind_the_last_batch_of_any_kind() -> None:
    log = Log()
    log.write(7, ("a", "1"), ("b", "1"))
    log.abort(7)
    log.write(7, ("c", "1"), ("d", "1"))
    log.commit(7)
    log.plain(("e", "1"))
    index = OffsetMap(0, max_keys=2)
    assert index_keys(log.batches, index, log.aborted) == 5
    assert len(index) == 2, "of what was committed"


@pytest.mark.parametrize("seed", range(60))
def test_read_committed_reader_ends_with_the_same_table(seed: int) -> None:
    """The result is the same for any number of compactions at any time, any start of the read, and any division into
    answers.
    """
    chance = random.Random(seed)
    log = Log()
    history: dict[int, Pair] = {}
    under_way: dict[int, set[int]] = {producer_id: set() for producer_id in range(1, 5)}
    aborted: set[int] = set()
    cleaned_to = dropped_records = 0

    def check() -> None:
        count = chance.choice((1, 2, 5, 1000))
        seen = log.committed(count=count)
        right = {offset: pair for offset, pair in history.items() if offset < log.last_stable_offset}
        right = {offset: pair for offset, pair in right.items() if offset not in aborted}
        assert all(right[record.offset] == (_text(record.key), _text(record.value)) for record in seen)
        table = {_text(record.key): _text(record.value) for record in seen}
        assert {key: value for key, value in table.items() if value is not None} == {
            key: value for key, value in dict(right.values()).items() if value is not None
        }
        offset = chance.randrange(log.next_offset + 1)
        assert log.committed(offset, count) == [record for record in seen if record.offset >= offset]

    for step in range(120):
        log.now_ms += chance.randrange(RETENTION_MS // 4)
        pairs: list[Pair] = [
            (chance.choice("abcdefg"), None if chance.random() < 0.2 else f"{step}.{number}")
            for number in range(chance.randrange(1, 4))
        ]
        producer_id = chance.choice(list(under_way))
        what, codec = chance.random(), chance.choice(list(Compression))
        if what < 0.7:
            plain = what < 0.2
            base_offset = (
                log.plain(*pairs, compression=codec) if plain else log.write(producer_id, *pairs, compression=codec)
            )
            history |= dict(enumerate(pairs, base_offset))
            if not plain:
                under_way[producer_id] |= set(range(base_offset, log.next_offset))
        else:
            if what < 0.85:
                log.commit(producer_id)
            else:
                log.abort(producer_id)
                aborted |= under_way[producer_id]
            under_way[producer_id] = set()
        if chance.random() < 0.25:
            check()
            # The range is limited as by dirty_ranges: it ends below open transactions and below the newest batch, at
            # the beginning of a batch.
            stable = min(log.last_stable_offset, log.batches[-1].base_offset)
            end_offset = max((base for base in log.bases() if base <= stable), default=0)
            if end_offset > cleaned_to:
                dropped_records += log.compact(end_offset=end_offset, dirty_from=cleaned_to).dropped_records
                cleaned_to = end_offset
            check()
    for producer_id in under_way:
        log.commit(producer_id)
        check()
    log.plain(("end", "1"))
    history[log.next_offset - 1] = ("end", "1")
    dropped_records += log.compact(dirty_from=cleaned_to).dropped_records
    check()
    assert dropped_records > 50
    markers = [control_type_of(batch.records) for batch in log.batches if read_head(batch.records).is_control]
    assert ControlType.COMMIT not in markers


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
