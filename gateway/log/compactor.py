"""Log compaction's decisions: which records of a batch stay, and what the batch looks like without the others.

The one idea: values in, values out. `index_keys` learns the newest offset of every key in the dirty part of a log;
`clean` judges batches against that index. A record stays if no newer one has its key; a record without a value (a
tombstone) stays until `delete.retention.ms` after the first cleaning that met it (KIP-534), so that a reader that is on
its way learns of the deletion. Batches keep their offsets, producer and sequence; control and transactional batches,
and those that cannot be read, are left alone.

Mirrors upstream's Cleaner. It reads and writes no log: `gateway/operate/maintenance.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import structlog

from protocol.errors import ProtocolError
from protocol.records import (
    BatchHead,
    Buffer,
    Record,
    TimestampType,
    build_batch,
    iter_records,
    read_head,
)
from storage.types import StoredBatch

log = structlog.get_logger(__name__)

DIGEST_BYTES = 16


@dataclass(slots=True)
class KeyIndex:
    """The newest offset of each key, by digest; at most `max_keys` and the keys of one batch more."""

    max_keys: int
    newest: dict[bytes, int] = field(default_factory=dict[bytes, int])

    @property
    def full(self) -> bool:
        return len(self.newest) >= self.max_keys

    def superseded(self, record: Record) -> bool:
        """Whether a newer record has this one's key, or it has none and so no place in a compacted log."""
        return record.key is None or self.newest.get(_digest(record.key), -1) > record.offset


@dataclass(slots=True)
class Cleaned:
    """What is to be replaced: base offsets of batches that go, and what comes in the place of some of them."""

    removed: list[int] = field(default_factory=list[int])
    added: list[StoredBatch] = field(default_factory=list[StoredBatch])
    dropped_records: int = 0


def index_keys(batches: Iterable[StoredBatch], index: KeyIndex) -> int | None:
    """Add the batches' keys, in offset order. If the index fills up: the offset behind the last batch that is in it."""
    for batch in batches:
        for record in _records_of(batch) or ():
            if record.key is not None:
                index.newest[_digest(record.key)] = record.offset
        if index.full:
            return batch.last_offset + 1
    return None


def clean(batches: Iterable[StoredBatch], index: KeyIndex, *, now_ms: int, delete_retention_ms: int) -> Cleaned:
    """Judge every record of the batches, all of which lie below the end of what was indexed."""
    cleaned = Cleaned()
    for batch in batches:
        records = _records_of(batch)
        if records is None:
            continue
        head = read_head(batch.records)
        horizon_ms = head.delete_horizon_ms
        tombstones_go = horizon_ms is not None and now_ms >= horizon_ms
        kept = [
            record
            for record in records
            if not index.superseded(record) and not (record.value is None and tombstones_go)
        ]
        has_tombstones = any(record.value is None for record in kept)
        if len(kept) == len(records) and (not has_tombstones or horizon_ms is not None):
            continue
        cleaned.removed.append(batch.base_offset)
        cleaned.dropped_records += len(records) - len(kept)
        if kept:
            if horizon_ms is None and has_tombstones:
                horizon_ms = now_ms + delete_retention_ms
            cleaned.added.append(_rebuilt(head, kept, horizon_ms))
    return cleaned


def _records_of(batch: StoredBatch) -> list[Record] | None:
    """None for what compaction must not touch."""
    head = read_head(batch.records)
    if head.is_control or head.is_transactional:
        return None
    try:
        return list(iter_records(batch.records))
    except ProtocolError as error:
        log.warning("batch left uncompacted: it cannot be read", base_offset=batch.base_offset, error=str(error))
        return None


def _rebuilt(head: BatchHead, kept: list[Record], horizon_ms: int | None) -> StoredBatch:
    records = build_batch(
        kept,
        compression=head.compression,
        base_offset=head.base_offset,
        last_offset_delta=head.last_offset_delta,
        partition_leader_epoch=head.partition_leader_epoch,
        timestamp_type=head.timestamp_type,
        max_timestamp=head.max_timestamp if head.timestamp_type is TimestampType.LOG_APPEND_TIME else None,
        producer_id=head.producer_id,
        producer_epoch=head.producer_epoch,
        base_sequence=head.base_sequence,
        delete_horizon_ms=horizon_ms,
    )
    return StoredBatch(head.base_offset, head.last_offset, read_head(records).max_timestamp, records)


def _digest(key: Buffer) -> bytes:
    return blake2b(key, digest_size=DIGEST_BYTES).digest()
