"""Chunks: batches of one partition back to back, as they lie in storage, and how they become batches again.

The one idea: the heads alone show where each batch begins, so the index needs one row for any number of batches. If
bytes were written before their offsets were known, base offset and leader epoch are patched in here, on the way out;
both lie outside a batch's CRC. Bytes from a file are checked against the CRC: a chunk is served whole and right, or it
is damaged.

This module reads no record, and knows neither SQL nor files.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import crc32c

from storage.types import PartitionKey, StoredBatch

CHUNK_BYTES = 1024 * 1024
"""Batches are combined up to this size; a larger batch is a chunk of its own. The size limits how many unneeded bytes
are read for a single batch.
"""

_HEAD = struct.Struct(">qiibIhiqq")
"""base offset, length, leader epoch, magic, CRC, attributes, last offset delta, base and max timestamp."""

_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_LEADER_EPOCH_AT = 12
_LENGTH_END = 12
_COVERED_AT = 21
_HEAD_BYTES = 61
_MAGIC = 2


class DamagedChunkError(Exception):
    """The bytes of a chunk are missing or differ from what was written."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of the index. `records` holds the chunk's bytes if they are inline."""

    partition_key: PartitionKey
    base_offset: int
    last_offset: int
    object_id: int | None
    position: int
    size_bytes: int
    batch_count: int
    leader_epoch: int
    final_heads: bool
    records: bytes | None

    def with_records(self, records: bytes | None) -> Chunk:
        """Return the same row with the inline bytes that were fetched for it, eight times faster than
        `dataclasses.replace`."""
        return Chunk(
            self.partition_key,
            self.base_offset,
            self.last_offset,
            self.object_id,
            self.position,
            self.size_bytes,
            self.batch_count,
            self.leader_epoch,
            self.final_heads,
            records,
        )


def chunk_of(row: Mapping[str, Any]) -> Chunk:
    """Build a chunk from a row of the statements in queries/."""
    return Chunk(
        PartitionKey(row["partition_key"]),
        row["base_offset"],
        row["last_offset"],
        row["object_id"],
        row["position"],
        row["size_bytes"],
        row["batch_count"],
        row["leader_epoch"],
        row["final_heads"],
        row["records"],
    )


def write_head(batch: bytearray | memoryview, base_offset: int, leader_epoch: int) -> None:
    """Write into a batch's header the fields that only the log knows: base offset and leader epoch."""
    _BASE_OFFSET.pack_into(batch, 0, base_offset)
    _LEADER_EPOCH.pack_into(batch, _LEADER_EPOCH_AT, leader_epoch)


def split(chunk: Chunk, records: bytes | bytearray | memoryview, *, verify: bool) -> tuple[StoredBatch, ...]:
    """Return the batches of a chunk in offset order, as views of its bytes. If the heads are not final, they are
    written into these bytes, so the bytes must belong to the caller; read-only bytes are copied.

    Raise DamagedChunkError if heads or, with `verify`, CRCs do not match the index.
    """
    if len(records) != chunk.size_bytes:
        raise DamagedChunkError(f"{len(records)} bytes instead of {chunk.size_bytes}")
    view = memoryview(records)
    if view.readonly and not chunk.final_heads:
        view = memoryview(bytearray(records))
    batches: list[StoredBatch] = []
    offset = chunk.base_offset
    at = 0
    end = chunk.size_bytes
    while at < end:
        if end - at < _HEAD_BYTES:
            raise DamagedChunkError(f"a torn head at byte {at}")
        base_offset, length, _, magic, crc, _, last_offset_delta, _, max_timestamp_ms = _HEAD.unpack_from(view, at)
        batch_end = at + _LENGTH_END + length
        if magic != _MAGIC or not at + _HEAD_BYTES <= batch_end <= end or last_offset_delta < 0:
            raise DamagedChunkError(f"no batch at byte {at}")
        batch = view[at:batch_end]
        if verify and crc32c.crc32c(batch[_COVERED_AT:]) != crc:
            raise DamagedChunkError(f"the batch at byte {at} does not match its CRC")
        if chunk.final_heads:
            if base_offset < offset:
                raise DamagedChunkError(f"the batch at byte {at} begins at offset {base_offset}, not {offset} or later")
            offset = base_offset
        else:
            write_head(batch, offset, chunk.leader_epoch)
        last_offset = offset + last_offset_delta
        batches.append(StoredBatch(offset, last_offset, max_timestamp_ms, batch))
        offset = last_offset + 1
        at = batch_end
    if len(batches) != chunk.batch_count or offset != chunk.last_offset + 1:
        raise DamagedChunkError(
            f"{len(batches)} batches to offset {offset - 1} instead of {chunk.batch_count} to {chunk.last_offset}"
        )
    return tuple(batches)
