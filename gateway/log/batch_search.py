"""Search a log by time. ListOffsets, and a share group that begins at a time, look inside batches for it.

The one idea: a search ends at the first match, and runs in a thread unless the batch is too small to matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from protocol.record_reader import DAMAGED, RecordReader
from protocol.records import read_head
from storage.log import LogStore
from storage.types import PartitionKey, StoredBatch

logger = structlog.get_logger(__name__)

AT_ONCE_BYTES = 16 * 1024
"""An uncompressed batch up to this size is searched on the event loop."""

Place = tuple[int, int]
"""Timestamp and offset of a record."""


async def first_of_log_since(
    log_store: LogStore, key: PartitionKey, timestamp: int, log_start_offset: int
) -> Place | None:
    """Return the partition's first record that is not older, from the log's start on. Return None if no such record
    exists.
    """
    batch = await log_store.batch_at_timestamp(key, timestamp)
    while batch is not None:
        if place := await first_since(batch, timestamp, log_start_offset):
            return place
        # This has two possible causes. The matching records of this batch lie below a log start inside it, or the
        # producer put a greater timestamp into the header than into any record.
        batch = await log_store.batch_at_timestamp(key, timestamp, batch.last_offset + 1)
    return None


async def first_since(batch: StoredBatch, timestamp: int, log_start_offset: int) -> Place | None:
    """Return the first record that is not older, from the log's start on. Return None if no such record exists."""
    return await _searched(batch, lambda: _first_since(batch, timestamp, log_start_offset))


async def newest(batch: StoredBatch, log_start_offset: int) -> Place | None:
    """Return the first record with the greatest timestamp from the log's start on; None if no record is left."""
    return await _searched(batch, lambda: _newest(batch, log_start_offset))


async def _searched(batch: StoredBatch, search: Callable[[], Place | None]) -> Place | None:
    small = len(batch.records) <= AT_ONCE_BYTES and not read_head(batch.records).attributes & 0x07
    return search() if small else await asyncio.to_thread(search)


def _first_since(batch: StoredBatch, timestamp: int, log_start_offset: int) -> Place | None:
    try:
        for window in RecordReader(batch.records).windows():
            for record in window:
                if record.timestamp >= timestamp and record.offset >= log_start_offset:
                    return record.timestamp, record.offset
    except DAMAGED as error:
        place = _of_whole(batch, log_start_offset, error)
        return place if place[0] >= timestamp else None
    return None


def _newest(batch: StoredBatch, log_start_offset: int) -> Place | None:
    best: Place | None = None
    try:
        for window in RecordReader(batch.records).windows():
            for record in window:
                if record.offset >= log_start_offset and (best is None or record.timestamp > best[0]):
                    best = record.timestamp, record.offset
    except DAMAGED as error:
        return _of_whole(batch, log_start_offset, error)
    return best


def _of_whole(batch: StoredBatch, log_start_offset: int, error: Exception) -> Place:
    # The CRC was right, so the producer wrote these bytes. The answer can only refer to the whole batch.
    logger.warning("stored batch cannot be read", base_offset=batch.base_offset, error=str(error))
    return batch.max_timestamp_ms, max(batch.base_offset, log_start_offset)
