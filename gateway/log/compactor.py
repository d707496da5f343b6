"""The decisions of log compaction: which records of a batch stay, and how the batch looks without the others.

The one idea: values in, values out. `index_keys` learns the newest offset of every key in the dirty part of a log.
`clean` judges batches against that index. A record stays if no newer one has its key. A record without a value (a
tombstone) stays until `delete.retention.ms` after the first cleaning that met it (KIP-534), so that a reader on its way
learns of the deletion. Batches keep their offsets, producer, sequence and attributes. Batches that cannot be read are
left alone.

All transactions below the end of a run have ended. Records of committed transactions count as any others do. Records of
aborted transactions are removed and supersede nothing. A COMMIT marker is removed: a reader does not learn of committed
transactions, so it waits for no end of one, and the producer's next sequence is kept elsewhere. An ABORT marker stays,
as does the row that names its transaction. A reader learns where aborted transactions began and leaves out the
producer's batches from there until it meets the marker. Without the marker it would leave out what the producer
committed next.

Mirrors upstream's Cleaner, except that upstream forgets an aborted transaction once none of its records is left and
delete.retention.ms has passed. This module reads and writes no log: `gateway/operate/maintenance.py` does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from gateway.log.offset_map import OffsetMap
from protocol.compression import compress
from protocol.record_reader import DAMAGED, RecordReader, record_spans, shift_timestamp
from protocol.records import (
    DELETE_HORIZON_BIT,
    BatchHead,
    Buffer,
    ControlType,
    TimestampType,
    control_type_of,
    read_head,
    seal_batch,
)
from storage.compaction import AbortedSpan
from storage.types import StoredBatch

logger = structlog.get_logger(__name__)

MAX_KEYS = 12_000_000
"""Distinct keys of one compaction run: 268 MB, and 134 more briefly while the map grows. A log with more keys is
cleaned in several runs."""

LAST_MS = 2**63 - 1
"""The latest time that a batch's header holds. With the greatest delete.retention.ms, tombstones stay for ever."""


@dataclass(slots=True)
class Cleaned:
    """The changes to a log: base offsets of removed batches, and the batches that replace some of them."""

    removed: list[int] = field(default_factory=list[int])
    added: list[StoredBatch] = field(default_factory=list[StoredBatch])
    dropped_records: int = 0


def index_keys(batches: Iterable[StoredBatch], index: OffsetMap, aborted: Iterable[AbortedSpan]) -> int | None:
    """Add the batches' keys, in offset order. `aborted` are all aborted transactions to which the batches may
    belong. If the index fills up, return the offset behind the last batch that is in it."""
    transactions = _Aborted(aborted)
    for batch in batches:
        if not index.covers(batch.last_offset):
            return batch.base_offset
        head = read_head(batch.records)
        reader = None if head.is_control or head in transactions else _reader_of(batch)
        if reader is not None:
            for window in reader.windows():
                for record in window:
                    if record.key is not None:
                        index.put(record.key, record.offset)
        if index.full:
            return batch.last_offset + 1
    return None


def clean(
    batches: Iterable[StoredBatch],
    index: OffsetMap,
    aborted: Iterable[AbortedSpan],
    *,
    now_ms: int,
    delete_retention_ms: int,
) -> Cleaned:
    """Judge every record of the batches, all of which lie below the end of what was indexed. `aborted` are all
    aborted transactions to which the batches may belong."""
    transactions = _Aborted(aborted)
    cleaned = Cleaned()
    for batch in batches:
        head = read_head(batch.records)
        if head.is_control:
            if _says_commit(batch):
                cleaned.removed.append(batch.base_offset)
            continue
        if head in transactions:
            cleaned.removed.append(batch.base_offset)
            cleaned.dropped_records += head.records_count
            continue
        reader = _reader_of(batch)
        if reader is None:
            continue
        horizon_ms = head.delete_horizon_ms
        kept = _judge(reader, index, tombstones_go=horizon_ms is not None and now_ms >= horizon_ms)
        records_count = head.records_count
        if len(kept.numbers) == records_count and (not kept.has_tombstones or horizon_ms is not None):
            continue
        cleaned.removed.append(batch.base_offset)
        cleaned.dropped_records += records_count - len(kept.numbers)
        if kept.numbers:
            if horizon_ms is None and kept.has_tombstones:
                horizon_ms = min(now_ms + delete_retention_ms, LAST_MS)
            cleaned.added.append(_rebuilt(reader, kept, horizon_ms))
    return cleaned


class _Aborted:
    """Tells which batches were aborted. The transactions of one producer follow each other."""

    __slots__ = ("_spans",)

    def __init__(self, spans: Iterable[AbortedSpan]) -> None:
        self._spans: dict[int, list[AbortedSpan]] = {}
        for span in sorted(spans, key=_first_offset):
            self._spans.setdefault(span.producer_id, []).append(span)

    def __contains__(self, head: BatchHead) -> bool:
        if not head.is_transactional:
            return False
        spans: Sequence[AbortedSpan] = self._spans.get(head.producer_id, ())
        at = bisect_right(spans, head.base_offset, key=_first_offset)
        return at > 0 and head.base_offset < spans[at - 1].last_offset


def _first_offset(span: AbortedSpan) -> int:
    return span.first_offset


def _says_commit(marker: StoredBatch) -> bool:
    """Return True if the marker can be read and says COMMIT."""
    try:
        return control_type_of(marker.records) is ControlType.COMMIT
    except DAMAGED as error:
        logger.warning("marker kept: it cannot be read", base_offset=marker.base_offset, error=str(error))
        return False


@dataclass(slots=True)
class _Kept:
    """The records of a batch that compaction keeps, by their position in the batch."""

    numbers: list[int] = field(default_factory=list[int])
    has_tombstones: bool = False
    max_timestamp_ms: int = -1


def _judge(reader: RecordReader, index: OffsetMap, *, tombstones_go: bool) -> _Kept:
    kept = _Kept()
    number = -1
    for window in reader.windows():
        for record in window:
            number += 1
            # A record without a key must not be in a compacted log.
            if record.key is None or index.newest(record.key) > record.offset:
                continue
            if record.value is None:
                if tombstones_go:
                    continue
                kept.has_tombstones = True
            kept.numbers.append(number)
            kept.max_timestamp_ms = max(kept.max_timestamp_ms, record.timestamp)
    return kept


def _rebuilt(reader: RecordReader, kept: _Kept, horizon_ms: int | None) -> StoredBatch:
    """Return the batch with fewer records, each as its producer wrote it. The exception: if a delete horizon
    replaces the base timestamp, the records' distances to it are rewritten."""
    head, body = reader.head, reader.body
    spans = list(record_spans(body))
    records: Iterable[Buffer] = (body[slice(*spans[number])] for number in kept.numbers)
    attributes, base_timestamp = head.attributes, head.base_timestamp
    if horizon_ms is not None:
        attributes |= DELETE_HORIZON_BIT
        if horizon_ms != base_timestamp:
            by_ms, base_timestamp = base_timestamp - horizon_ms, horizon_ms
            records = (shift_timestamp(body[slice(*spans[number])], by_ms) for number in kept.numbers)
    append_time = head.timestamp_type is TimestampType.LOG_APPEND_TIME
    sealed = seal_batch(
        head._replace(
            attributes=attributes,
            base_timestamp=base_timestamp,
            max_timestamp=head.max_timestamp if append_time else kept.max_timestamp_ms,
            records_count=len(kept.numbers),
        ),
        compress(head.compression, b"".join(records)),
    )
    return StoredBatch(head.base_offset, head.last_offset, read_head(sealed).max_timestamp, sealed)


def _reader_of(batch: StoredBatch) -> RecordReader | None:
    """Return a reader of a batch that can be read to its end. Return None for a batch that compaction must not
    touch, because the keys of half a batch must not supersede readable records."""
    try:
        reader = RecordReader(batch.records)
        for window in reader.windows():
            for _ in window:
                pass
    except DAMAGED as error:
        logger.warning("batch not compacted: it cannot be read", base_offset=batch.base_offset, error=str(error))
        return None
    return reader
