"""Batches as storage sees them: a header of 61 bytes, of which storage reads a few fields, and a body that it never
reads.
"""

from __future__ import annotations

import struct
from typing import TypedDict

import crc32c

from storage.log import LogStore
from storage.types import Appended, NewBatch, PartitionKey, ReadRequest, ReadResult, StoredBatch

DEADLINE_S = 60


class Limits(TypedDict):
    """Limits of the roller, which moves records out of Postgres. Below these limits a pass leaves them inline."""

    max_bytes: int
    max_age_ms: int


EVERYTHING: Limits = {"max_bytes": 0, "max_age_ms": 0}
"""Limits with which a pass of the roller moves all records, even few and young ones."""


def new_batch(
    key: PartitionKey,
    *,
    size_bytes: int = 100,
    records: int = 1,
    max_timestamp_ms: int = 1_000,
    producer: tuple[int, int, int] = (-1, -1, -1),
    fill: int = 0xAB,
) -> NewBatch:
    """Make a batch. `producer` is (id, epoch, base sequence)."""
    return NewBatch(
        key, batch_bytes(size_bytes, records, max_timestamp_ms, fill=fill), records, max_timestamp_ms, *producer
    )


def batch_bytes(
    size_bytes: int, records: int = 1, max_timestamp_ms: int = 1_000, *, base_offset: int = 0, fill: int = 0xAB
) -> bytearray:
    """Make a batch with a correct header, as a producer sends it. No records follow the header."""
    batch = bytearray([fill]) * size_bytes
    struct.pack_into(
        ">qiibIhiqq", batch, 0, base_offset, size_bytes - 12, -1, 2, 0, 0, records - 1, 0, max_timestamp_ms
    )
    struct.pack_into(">I", batch, 17, crc32c.crc32c(memoryview(batch)[21:]))
    return batch


async def append(log: LogStore, *batches: NewBatch) -> list[int]:
    """Append batches, none of which may be refused, and return their base offsets."""
    outcomes = await log.append(batches)
    for outcome in outcomes:
        assert isinstance(outcome, Appended), outcomes
    return [outcome.base_offset for outcome in outcomes if isinstance(outcome, Appended)]


async def append_each(log: LogStore, *batches: NewBatch) -> list[int]:
    """Append batches, none of which may be refused. Each is a commit of its own, and so becomes a chunk of its own."""
    return [(await append(log, batch))[0] for batch in batches]


async def read(log: LogStore, key: PartitionKey, offset: int = 0, max_bytes: int = 10**8) -> ReadResult:
    (result,) = await log.read([ReadRequest(key, offset, max_bytes)], max_bytes=max_bytes)
    assert isinstance(result, ReadResult)
    return result


def offsets(batches: tuple[StoredBatch, ...]) -> list[tuple[int, int]]:
    return [(batch.base_offset, batch.last_offset) for batch in batches]
