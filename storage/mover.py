"""Move bytes to another place: copy them, sync them, and only then change the rows that name them.

The one idea: until one transaction names the new place, the old place is valid; afterwards the old bytes are garbage.
So a move may stop anywhere. That transaction also decides, in Postgres, whether the lease and the rows are still the
same.

Neighbouring chunks that move together become one chunk, so that a log of single records does not keep a row for each
record. This module neither chooses what to move nor removes anything: `roller.py` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import structlog

from storage.byte_store import ByteStore
from storage.chunks import CHUNK_BYTES, Chunk, DamagedChunkError
from storage.errors import StorageConflict
from storage.log import LogStore
from storage.pool import Database
from storage.queries import statement
from storage.segment_writers import Owner, SegmentWriters, register_object
from storage.segments import SegmentDirectory
from storage.types import CoordinatorLease, PartitionKey, StoredBatch, unregistered

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

MOVE_BYTES = 8 * 1024 * 1024
"""How much is read at a time, and how much is written and synced to a segment at a time."""

SORTED_CHUNKS = 50_000
"""Chunks that are sorted into log order together before they are cut into moves."""
RUNS_PER_OBJECT = 2_048
"""Bounds the one transaction that names an object, as `SORTED_CHUNKS` does: it must end in time on a busy server
too."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of objects and of single steps."""

    object_bytes: int = 32 * 1024 * 1024
    """Approximate size of an object in a bucket, held in memory until it is written. An object may be half as large
    again or half as small; only the last one of a move is smaller."""
    listed_chunks: int = 250
    """Chunks that the event loop turns into values at once, which takes a millisecond."""
    moved_chunks: int = 250
    """Chunks that are read at a time, merged into at most one chunk, and renamed at a time in a segment. During the
    rename producers of their partitions wait. During the read the event loop is blocked for two milliseconds.
    """

    @property
    def sorted_bytes(self) -> int:
        """Number of bytes of chunks that are sorted into log order together."""
        return 2 * self.object_bytes


SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks of one partition that become one chunk: their offsets follow each other without a gap."""

    chunks: list[Chunk]

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)


_Copied = list[tuple[_Run, list[StoredBatch]]]
_OfPartitions = dict[PartitionKey, list[Chunk]]


class Mover:
    """Moves chunks to segments, objects, or the current slot of inline bytes."""

    def __init__(
        self,
        database: Database,
        log_store: LogStore,
        store: ByteStore | None,
        owner: Owner = unregistered,
        sizes: Sizes = SIZES,
    ) -> None:
        """`owner` returns the registration of this process' node, which new objects carry."""
        self._pool = database.cold
        self._sizes = sizes
        self._log = log_store
        self._store = store
        self._owner = owner
        self._writers = SegmentWriters(database, store, owner) if isinstance(store, SegmentDirectory) else None

    async def close(self) -> None:
        if self._writers is not None:
            await self._writers.close()

    async def move(
        self,
        pages: AsyncIterable[list[Chunk]],
        *,
        inline_slot: int | None = None,
        lease: CoordinatorLease | None = None,
    ) -> int:
        """Copy chunks that are all inline in one slot, or all in objects, to the present destination. Return the
        number of bytes moved. With `lease`, raise StorageConflict once another node holds it. Bytes that cannot be
        read or written stay at their place."""
        into_objects = self._store is not None and self._writers is None
        moved_bytes = 0
        async for gathered in _gathered(pages, self._sizes):
            runs = _runs(_in_order(gathered), self._sizes)
            # An object is cut from the whole list: sorting tens of thousands of chunks would block the event loop for
            # too long.
            parts = await asyncio.to_thread(_evenly, runs, self._sizes) if into_objects else _pieces(runs, self._sizes)
            for part in parts:
                moved_bytes += await self._move_part(part, inline_slot, lease)
        return moved_bytes

    async def _move_part(self, runs: Sequence[_Run], inline_slot: int | None, lease: CoordinatorLease | None) -> int:
        copied: _Copied = []
        for piece in _pieces(runs, self._sizes):
            copied += await self._read(piece, inline_slot)
        if not copied:
            return 0
        if self._store is None:
            return sum([await self._swap_inline(run, batches) for run, batches in copied])
        if self._writers is not None:
            return await self._to_segment(self._writers, copied, lease)
        return await self._to_object(self._store, copied, lease)

    async def _read(self, runs: Sequence[_Run], inline_slot: int | None) -> _Copied:
        """Read the runs that can be moved: those whose chunks are all present and undamaged."""
        wanted = [chunk for run in runs for chunk in run.chunks]
        records: dict[int, bytes] = {}
        if inline_slot is not None:
            positions = [chunk.position for chunk in wanted]
            for row in await self._pool.fetch(statement("inline_bytes"), inline_slot, positions):
                records[row["position"]] = row["records"]
        held = await self._log.reader.batches_uncached(
            [chunk if inline_slot is None else chunk.with_records(records.get(chunk.position)) for chunk in wanted]
        )
        told = iter(held)
        copied: _Copied = []
        for run in runs:
            batches: list[StoredBatch] = []
            whole = True
            for chunk in run.chunks:
                result = next(told)
                if isinstance(result, DamagedChunkError):
                    logger.error(
                        "records cannot be moved",
                        partition_key=chunk.partition_key,
                        base_offset=chunk.base_offset,
                        reason=str(result),
                    )
                    whole = False
                else:
                    batches.extend(result)
            if whole:
                copied.append((run, batches))
        return copied

    async def _to_segment(self, writers: SegmentWriters, copied: _Copied, lease: CoordinatorLease | None) -> int:
        size_bytes = sum(run.size_bytes for run, _ in copied)
        buffers = [batch.records for _, batches in copied for batch in batches]
        try:
            async with writers.written(buffers, size_bytes) as (segment, position):
                refusal, moved_bytes = await self._name(copied, segment.object_id, position, None, lease)
        except OSError as error:
            logger.warning("records could not be moved", reason=str(error))
            return 0
        if refusal == "sealed":
            writers.retire(segment)
        return moved_bytes

    async def _to_object(self, store: ByteStore, copied: _Copied, lease: CoordinatorLease | None) -> int:
        size_bytes = sum(run.size_bytes for run, _ in copied)
        object_id = await register_object(self._pool, self._owner)
        try:
            await store.put(object_id, [batch.records for _, batches in copied for batch in batches])
        except OSError as error:
            logger.warning("records could not be moved", place=store.name(object_id), reason=str(error) or "no answer")
            # The object may exist in spite of the error. A sweep removes it.
            await self._pool.fetch_value(statement("seal_object"), object_id, size_bytes)
            return 0
        _, moved_bytes = await self._name(copied, object_id, 0, size_bytes, lease)
        return moved_bytes

    async def _name(
        self,
        copied: _Copied,
        object_id: int,
        position: int,
        object_size_bytes: int | None,
        lease: CoordinatorLease | None,
    ) -> tuple[str | None, int]:
        """Let the rows name the new place. Skip runs that have changed since they were read. Return Postgres' refusal,
        if any, and the number of bytes that are named there now. Raise StorageConflict if the lease is lost."""
        positions: list[int] = []
        for run, _ in copied:
            positions.append(position)
            position += run.size_bytes
        chunks = [chunk for run, _ in copied for chunk in run.chunks]
        row = await self._pool.fetch_row(
            statement("move_chunks"),
            None if lease is None else lease.shard,
            None if lease is None else lease.node_id,
            None if lease is None else lease.lease_epoch,
            object_id,
            object_size_bytes,
            [run.chunks[0].partition_key for run, _ in copied],
            [len(run.chunks) for run, _ in copied],
            [max(batch.max_timestamp_ms for batch in batches) for _, batches in copied],
            [len(batches) for _, batches in copied],
            [run.chunks[-1].leader_epoch for run, _ in copied],
            [run.size_bytes for run, _ in copied],
            positions,
            [chunk.base_offset for chunk in chunks],
            [chunk.last_offset for chunk in chunks],
            [chunk.object_id for chunk in chunks],
            [chunk.position for chunk in chunks],
        )
        assert row is not None
        if row["refusal"] == "fenced":
            if object_size_bytes is not None:
                await self._pool.fetch_value(statement("seal_object"), object_id, object_size_bytes)
            raise StorageConflict("another node moves records now")
        if row["refusal"] is not None:
            logger.info("records could not be moved", reason=row["refusal"], object_id=object_id)
        return row["refusal"], row["moved_bytes"]

    async def _swap_inline(self, run: _Run, batches: Sequence[StoredBatch]) -> int:
        """Copy a run into the current slot. Return 0 if its chunks have changed since they were read."""
        refusal = await self._pool.fetch_value(
            statement("replace_chunks"),
            run.chunks[0].partition_key,
            None,
            None,
            [chunk.base_offset for chunk in run.chunks],
            [chunk.object_id for chunk in run.chunks],
            [chunk.position for chunk in run.chunks],
            [run.chunks[0].base_offset],
            [run.chunks[-1].last_offset],
            [max(batch.max_timestamp_ms for batch in batches)],
            [len(batches)],
            [run.chunks[-1].leader_epoch],
            [run.size_bytes],
            None,
            None,
            [b"".join(batch.records for batch in batches)],
        )
        return 0 if refusal is not None else run.size_bytes


async def _gathered(pages: AsyncIterable[list[Chunk]], sizes: Sizes) -> AsyncIterator[_OfPartitions]:
    """Yield the same chunks in lists, each of which is sorted together."""
    gathered: _OfPartitions = {}
    count = size_bytes = 0
    async for page in pages:
        for chunk in page:
            gathered.setdefault(chunk.partition_key, []).append(chunk)
            count += 1
            size_bytes += chunk.size_bytes
            if size_bytes >= sizes.sorted_bytes or count >= SORTED_CHUNKS:
                yield gathered
                gathered, count, size_bytes = {}, 0, 0
    if gathered:
        yield gathered


def _in_order(gathered: _OfPartitions) -> Iterator[Chunk]:
    """Sort one partition at a time, when its turn comes. Chunks of one partition mostly arrive sorted, which is
    cheap. Sorting all of them together would hold the interpreter for longer than the event loop may be blocked."""
    for partition_key in sorted(gathered):
        yield from sorted(gathered[partition_key], key=attrgetter("base_offset"))


def _runs(chunks: Iterable[Chunk], sizes: Sizes) -> Iterator[_Run]:
    """Yield groups of neighbouring chunks. Each group becomes one chunk."""
    run: list[Chunk] = []
    size_bytes = 0
    for chunk in chunks:
        size_bytes += chunk.size_bytes
        if run and not (
            run[-1].partition_key == chunk.partition_key
            and run[-1].last_offset + 1 == chunk.base_offset
            and size_bytes <= CHUNK_BYTES
            and len(run) < sizes.moved_chunks
        ):
            yield _Run(run)
            run, size_bytes = [], chunk.size_bytes
        run.append(chunk)
    if run:
        yield _Run(run)


def _pieces(runs: Iterable[_Run], sizes: Sizes) -> Iterator[list[_Run]]:
    """Yield lists of runs, each of which is read at once and written to a segment at once."""
    piece: list[_Run] = []
    size_bytes = chunks = 0
    for run in runs:
        size_bytes += run.size_bytes
        chunks += len(run.chunks)
        if piece and (size_bytes > MOVE_BYTES or chunks > sizes.moved_chunks):
            yield piece
            piece, size_bytes, chunks = [], run.size_bytes, len(run.chunks)
        piece.append(run)
    if piece:
        yield piece


def _evenly(found: Iterable[_Run], sizes: Sizes) -> list[list[_Run]]:
    """Return groups of chunks, each of which becomes one object. The sizes of the objects are similar."""
    runs = list(found)
    total_bytes = sum(run.size_bytes for run in runs)
    count = max(1, round(total_bytes / sizes.object_bytes))
    parts: list[list[_Run]] = []
    before_bytes = 0
    for run in runs:
        if before_bytes * count >= total_bytes * len(parts) or len(parts[-1]) >= RUNS_PER_OBJECT:
            parts.append([])
        parts[-1].append(run)
        before_bytes += run.size_bytes
    return parts
