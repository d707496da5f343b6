"""Turn batches of a Fetch response into batches for another log, at the same offsets.

The one idea: a batch keeps its bytes, compressed as they are. Only its producer goes, because ids and epochs mean
nothing in another cluster. A read of committed records says which transactions were aborted, so their records are left
out and their offsets stay empty. A marker stays as the marker of a commit. So the copy of a log ends where its source
ends, and no reader waits for an offset that has no record.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.commands.reader import Aborted
from protocol.buffer import Buffer
from protocol.errors import ProtocolError
from protocol.messages.fetch import AbortedTransaction
from protocol.records import (
    HEAD_BYTES,
    MAGIC,
    BatchHead,
    ControlType,
    build_batch,
    end_marker,
    iter_records,
    read_head,
    seal_batch,
    split_batches,
    verify_crc,
    without_producer,
)
from storage.mirror import MirroredBatch

NO_PRODUCER = -1
MAX_OFFSET = 2**63 - 2
"""Largest offset. No offset can follow it."""


def mirrored_batches(
    records: Buffer, aborted_transactions: Iterable[AbortedTransaction], from_offset: int
) -> tuple[list[MirroredBatch], int]:
    """Return the batches to append, and the offset to read next, for an answer to a read from `from_offset`.

    Raise ProtocolError if a batch is older than magic 2, does not match its CRC, or does not lie behind the last one.
    """
    aborted = Aborted(aborted_transactions)
    found: list[MirroredBatch] = []
    next_offset = from_offset
    for batch in split_batches(records, fetched=True):
        head = read_head(batch)
        if head.magic != MAGIC:
            raise ProtocolError(f"the batch at offset {head.base_offset} has the old format of magic {head.magic}")
        if not verify_crc(batch, head):
            raise ProtocolError(f"the batch at offset {head.base_offset} does not match its CRC")
        if head.last_offset_delta < 0 or not 0 <= head.base_offset <= MAX_OFFSET - head.last_offset_delta:
            raise ProtocolError(f"the batch at offset {head.base_offset} has no valid last offset")
        left_out = aborted.leaves_out(batch, head)
        if next_offset == from_offset and head.last_offset < from_offset:
            continue
        if next_offset > from_offset and head.base_offset < next_offset:
            raise ProtocolError(f"the batch at offset {head.base_offset} comes after offset {next_offset - 1}")
        next_offset = head.last_offset + 1
        if head.is_control:
            found.append(_marker(head))
        elif not left_out:
            found.append(_mirrored(batch, head, from_offset))
    return found, next_offset


def _marker(head: BatchHead) -> MirroredBatch:
    marker = end_marker(
        ControlType.COMMIT, producer_id=NO_PRODUCER, producer_epoch=NO_PRODUCER, timestamp_ms=head.max_timestamp
    )
    return MirroredBatch(head.last_offset, head.last_offset, head.max_timestamp, bytearray(marker))


def _mirrored(batch: memoryview, head: BatchHead, from_offset: int) -> MirroredBatch:
    if head.base_offset < from_offset:
        batch = memoryview(_from(batch, head, from_offset))
        head = read_head(batch)
    own = without_producer(head)
    made = bytearray(batch) if own == head else seal_batch(own, batch[HEAD_BYTES:])
    return MirroredBatch(head.base_offset, head.last_offset, head.max_timestamp, made)


def _from(batch: memoryview, head: BatchHead, from_offset: int) -> bytes:
    """Return the batch without the records below an offset: a log may begin, or end in the target, within a batch."""
    return build_batch(
        [record for record in iter_records(batch) if record.offset >= from_offset],
        compression=head.compression,
        base_offset=from_offset,
        last_offset_delta=head.last_offset - from_offset,
        timestamp_type=head.timestamp_type,
        max_timestamp=head.max_timestamp,
        delete_horizon_ms=head.delete_horizon_ms,
    )
