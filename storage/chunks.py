"""Chunks: batches of one partition back to back, as they lie in storage, and how they become batches again.

The one idea: where each batch begins is known from the heads alone, so the index needs one row for any number of them.
Bytes that were written before their offsets were known get base offset and leader epoch here, on the way out; both lie
outside a batch's CRC. What comes from a file is checked against it: a chunk is served whole and right, or is damaged.

It reads no record, and knows neither SQL nor files.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import crc32c

from storage.types import PartitionKey, StoredBatch

CHUNK_BYTES = 1024 * 1024
"""Batches are put together up to this; a batch that is larger is a chunk of its own. It bounds what is read in vain
by one who wants a single batch."""

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
    """The bytes of a chunk are missing or are not what was written."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of the index. `records` are its bytes, if they lie inline."""

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
        """The same row with the inline bytes that were fetched for it, in an eighth of `dataclasses.replace`'s time."""
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
    """A row as the statements in queries/ give it."""
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
    """What only the log knows of a batch, into its head."""
    _BASE_OFFSET.pack_into(batch, 0, base_offset)
    _LEADER_EPOCH.pack_into(batch, _LEADER_EPOCH_AT, leader_epoch)


def split(chunk: Chunk, records: bytes | bytearray | memoryview, *, verify: bool) -> tuple[StoredBatch, ...]:
    """The batches of a chunk, in offset order, as views of its bytes; these are written to where the heads are not
    final, so they must be the caller's own (a copy is made of bytes that cannot be written to).

    Raises DamagedChunkError where heads or, with `verify`, CRCs do not fit what the index says.
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
