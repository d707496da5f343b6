"""Append more than one statement can carry: write the bytes first, and the rows of the index in one short step.

The one idea: a partition's lock decides offsets, and bytes need no offset. So the bytes of a large transaction go to
`inline_records` piece by piece while no partition is locked. At the end one statement locks the partitions, gives all
chunks their offsets and writes their rows of the index. Readers see all of them together, because all of it is one
Postgres transaction, which belongs to the caller. In memory only a few numbers of each chunk are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from storage.append_group import AppendGroup
from storage.pool import Row, lock_not_available
from storage.queries import statement
from storage.types import NewBatch, PartitionKey

COLUMNS = ("slot", "position", "partition_key", "base_offset", "records")
NO_OFFSET = -1
"""The base offset of bytes that belong to no chunk yet. No chunk has it, so such bytes are never alive."""
LOCK_ATTEMPTS = 6
"""How often the partitions' locks are waited for before all that was written is rolled back."""


class Grown(NamedTuple):
    """A partition's new end after an append. `end_offset` is None if the partition was deleted."""

    partition_key: PartitionKey
    record_count: int
    end_offset: int | None


class _Chunk(NamedTuple):
    partition_key: PartitionKey
    position: int
    batch_count: int
    record_count: int
    max_timestamp_ms: int
    size_bytes: int


class WrittenChunks:
    """Chunks of batches without producers, in the caller's Postgres transaction on `connection`."""

    def __init__(self, connection: Any, slot: int) -> None:
        self._connection = connection
        self._slot = slot
        self._chunks: list[_Chunk] = []

    async def write(self, batches: Sequence[NewBatch]) -> None:
        """Write the bytes of further batches, behind those that were written before."""
        group = AppendGroup(batches)
        count = len(group.candidates)
        positions: list[int] = await self._connection.fetchval(statement("inline_positions"), count)
        rows: list[tuple[object, ...]] = []
        for candidate, position in enumerate(positions):
            key = group.partition_key(candidate)
            held = [batches[index] for index in group.candidates[candidate]]
            rows.append((self._slot, position, key, NO_OFFSET, b"".join(batch.records for batch in held)))
            self._chunks.append(
                _Chunk(
                    PartitionKey(key),
                    position,
                    len(held),
                    sum(batch.record_count for batch in held),
                    max(batch.max_timestamp_ms for batch in held),
                    group.candidate_bytes[candidate],
                )
            )
        await self._connection.copy_records_to_table("inline_records", records=rows, columns=COLUMNS)

    async def append(self) -> tuple[Row | None, list[Grown]]:
        """Give all chunks their offsets. The partitions stay locked from now until the caller's transaction ends."""
        if not self._chunks:
            return None, []
        chunks = sorted(self._chunks, key=lambda chunk: (chunk.partition_key, chunk.position))
        decided = await self._patiently(chunks)
        await self._connection.execute(
            statement("place_written"), self._slot, decided["chunk_positions"], decided["chunk_bases"]
        )
        grown: dict[PartitionKey, Grown] = {}
        refusals, bases = cast(list[str | None], decided["refusals"]), cast(list[int], decided["base_offsets"])
        for chunk, refusal, base_offset in zip(chunks, refusals, bases, strict=True):
            before = grown.get(chunk.partition_key)
            count = chunk.record_count + (0 if before is None else before.record_count)
            end_offset = None if refusal is not None else base_offset + chunk.record_count
            grown[chunk.partition_key] = Grown(chunk.partition_key, count, end_offset)
        return decided, list(grown.values())

    async def _patiently(self, chunks: Sequence[_Chunk]) -> Row:
        """Try several times: another transaction may hold a partition for longer than the session waits for a lock,
        and to write all bytes again would take much longer."""
        for attempt in range(1, LOCK_ATTEMPTS + 1):
            savepoint = self._connection.transaction()
            await savepoint.start()
            try:
                decided: Row | None = await self._connection.fetchrow(
                    statement("append_written"), *_arguments(chunks), self._slot
                )
            except Exception as error:
                if attempt == LOCK_ATTEMPTS or not lock_not_available(error):
                    raise
                await savepoint.rollback()
            else:
                await savepoint.commit()
                assert decided is not None
                return decided
        raise AssertionError("unreachable")


def _arguments(chunks: Sequence[_Chunk]) -> tuple[object, ...]:
    """Return the first 17 parameters of `append_chunks`: each chunk is a candidate with one entry."""
    keys = sorted({chunk.partition_key for chunk in chunks})
    places = {key: place for place, key in enumerate(keys, 1)}
    count = len(chunks)
    return (
        keys,
        True,
        None,
        [places[chunk.partition_key] for chunk in chunks],
        [chunk.position for chunk in chunks],
        None,
        list(range(1, count + 1)),
        [chunk.batch_count for chunk in chunks],
        [chunk.record_count for chunk in chunks],
        [chunk.max_timestamp_ms for chunk in chunks],
        [chunk.size_bytes for chunk in chunks],
        [],
        [],
        [0] * count,
        [-1] * count,
        [-1] * count,
        [False] * count,
    )
