"""Where bytes go after their commit: out of Postgres into segments, and out of segments in which little is alive.

The one idea: a chunk's bytes are copied, synced, and only then named by its row; until that moment the old place is
right, and after it the old one is litter. So a pass may end anywhere. What no row names any more is removed: a slot of
inline bytes by TRUNCATE, a segment by deleting its file, each when nobody can come to name anything in it again.

Neighbours that are moved together become one chunk, so that a log of single records does not keep a row for each.
It asks no lease: two passes side by side cost work, not bytes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

import structlog

from storage.chunks import CHUNK_BYTES, Chunk, DamagedChunkError, chunk_of
from storage.errors import StorageError
from storage.log import LogStore
from storage.pool import Connection, Database
from storage.queries import statement
from storage.segment_writers import SegmentWriters
from storage.segments import SegmentDirectory
from storage.types import StoredBatch

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

ROTATE_BYTES = 64 * 1024 * 1024
ROTATE_AGE_MS = 60_000
"""How large or old inline bytes become before they are moved. Without segments they only move for size."""

SEAL_AFTER_MS = 30 * 60_000
"""A segment that is open for so long was left by a process that ended; see segment_writers.MAX_AGE_S."""

GRACE_MS = 60_000
"""What no chunk names is kept this long after its segment was sealed: longer than any append or read may last."""

MOVE_BYTES = 8 * 1024 * 1024
"""What is read, written and synced at a time."""

_CHUNKS_PER_STATEMENT = 20_000
_ALIVE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks of one partition that become one: their offsets follow each other without a gap."""

    chunks: list[Chunk]

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)


class Roller:
    """Moves and removes bytes. `roll` and `sweep` are passes; each brings what is there nearer to how it should be."""

    def __init__(self, database: Database, log_store: LogStore, directory: SegmentDirectory | None) -> None:
        self._pool = database.cold
        self._log = log_store
        self._directory = directory
        self._writers = SegmentWriters(database, directory) if directory is not None else None

    async def close(self) -> None:
        if self._writers is not None:
            await self._writers.close()

    # --- inline bytes ---------------------------------------------------------------------------------------------

    async def roll(self, *, max_bytes: int = ROTATE_BYTES, max_age_ms: int = ROTATE_AGE_MS) -> int:
        """One pass over inline bytes: moves what is old or much, empties slots; how many bytes it moved."""
        await self._pool.fetch_value(
            statement("rotate_inline"), max_bytes, max_age_ms if self._directory is not None else -1
        )
        moved_bytes = 0
        for row in await self._pool.fetch(statement("inline_slots")):
            slot: int = row["slot"]
            if self._directory is None:
                alive_bytes = sum([_size(page) async for page in self._alive_inline(slot)])
                if alive_bytes >= _ALIVE_SHARE * row["size_bytes"]:
                    continue
            async for page in self._alive_inline(slot):
                moved_bytes += await self._move(page, inline_slot=slot)
            await self._truncate(slot)
        return moved_bytes

    async def _alive_inline(self, slot: int) -> AsyncGenerator[list[Chunk]]:
        """What is alive in a slot, in the order in which it was written, a bounded number of chunks at a time."""
        position = 0
        while True:
            rows = await self._pool.fetch(statement("live_inline_chunks"), slot, position, _CHUNKS_PER_STATEMENT)
            if rows:
                yield [chunk_of(row) for row in rows]
            if len(rows) < _CHUNKS_PER_STATEMENT:
                return
            position = rows[-1]["position"]

    async def _truncate(self, slot: int) -> None:
        try:
            await self._pool.fetch_value(statement("truncate_inline"), slot)
        except StorageError as error:
            # Whoever reads it, a dump for instance, may take long: the next pass tries again.
            log.info("inline bytes not removed yet", slot=slot, reason=str(error))

    # --- segments -------------------------------------------------------------------------------------------------

    async def sweep(self, *, grace_ms: int = GRACE_MS) -> int:
        """One pass over segments: rewrites those of which little is alive, deletes what no chunk names; how many files
        it deleted."""
        directory = self._directory
        if directory is None:
            return 0
        await self._pool.fetch(statement("seal_old_objects"), SEAL_AFTER_MS)
        found = {segment.object_id: segment for segment in directory.found()}
        sealed = {
            row["object_id"]: row["size_bytes"] for row in await self._pool.fetch(statement("sealed_objects"), grace_ms)
        }
        alive_bytes = dict.fromkeys(sealed, 0)
        async for chunk in self._in_objects():
            if chunk.object_id in alive_bytes:
                alive_bytes[chunk.object_id] += chunk.size_bytes
        dead = [object_id for object_id, size_bytes in alive_bytes.items() if not size_bytes]
        known = {row["object_id"] for row in await self._pool.fetch(statement("known_objects"), list(found))}
        orphans = [
            object_id
            for object_id, segment in found.items()
            if object_id not in known and segment.age_s * 1000 >= grace_ms
        ]
        if not await self._delete(directory, dead, orphans):
            return 0
        thin = {
            object_id
            for object_id, size_bytes in alive_bytes.items()
            if size_bytes
            and object_id in found
            and size_bytes < _ALIVE_SHARE * (sealed[object_id] or found[object_id].size_bytes)
        }
        if thin:
            await self._move([chunk async for chunk in self._in_objects() if chunk.object_id in thin])
        return len(dead) + len(orphans)

    async def _delete(self, directory: SegmentDirectory, dead: Sequence[int], orphans: Sequence[int]) -> bool:
        """Files first, so that none is ever without a row; False while a backup copies them."""

        async def delete(connection: Connection) -> bool:
            if not await connection.fetchval(statement("try_lock_deletion")):
                return False
            for object_id in (*dead, *orphans):
                directory.delete(object_id)
            await connection.execute(statement("forget_objects"), dead)
            return True

        if not dead and not orphans:
            return True
        deleted = await self._pool.transact(delete)
        log.info("segments deleted" if deleted else "segments kept for a backup", dead=len(dead), unknown=len(orphans))
        return deleted

    async def _in_objects(self) -> AsyncGenerator[Chunk]:
        """Every chunk that does not lie inline, in bounded statements. One that is moved meanwhile may be met where it
        was; one that stays is met for certain."""
        key, offset = 0, -1
        while True:
            rows = await self._pool.fetch(statement("chunks_in_objects"), key, offset, _CHUNKS_PER_STATEMENT)
            for row in rows:
                if row["object_id"] is not None:
                    yield chunk_of(row)
            if len(rows) < _CHUNKS_PER_STATEMENT:
                return
            key, offset = rows[-1]["partition_key"], rows[-1]["base_offset"]

    # --- moving ---------------------------------------------------------------------------------------------------

    async def _move(self, chunks: Iterable[Chunk], *, inline_slot: int | None = None) -> int:
        """Copies chunks, all inline in one slot or all in segments, to where bytes go now; how many bytes moved."""
        moved_bytes = 0
        for runs in _pieces(_runs(sorted(chunks, key=_by_place))):
            moved_bytes += await self._move_piece(runs, inline_slot)
        return moved_bytes

    async def _move_piece(self, runs: Sequence[_Run], inline_slot: int | None) -> int:
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
        moving: list[tuple[_Run, list[StoredBatch]]] = []
        for run in runs:
            batches: list[StoredBatch] = []
            whole = True
            for chunk in run.chunks:
                result = next(told)
                if isinstance(result, DamagedChunkError):
                    log.error(
                        "records cannot be moved",
                        partition_key=chunk.partition_key,
                        base_offset=chunk.base_offset,
                        reason=str(result),
                    )
                    whole = False
                else:
                    batches.extend(result)
            if whole:
                moving.append((run, batches))
        if not moving:
            return 0
        if self._writers is None:
            return sum([await self._swap(run, batches, None, None) for run, batches in moving])
        size_bytes = sum(run.size_bytes for run, _ in moving)
        segment = await self._writers.take(size_bytes)
        position = first = segment.reserve(size_bytes)
        try:
            await self._writers.write(segment, [batch.records for _, batches in moving for batch in batches], first)
        except OSError as error:
            self._writers.drop(segment)
            log.warning("records could not be moved", reason=str(error))
            return 0
        self._writers.give_back(segment)
        moved_bytes = 0
        for run, batches in moving:
            moved_bytes += await self._swap(run, batches, segment.object_id, position)
            position += run.size_bytes
        return moved_bytes

    async def _swap(
        self, run: _Run, batches: Sequence[StoredBatch], object_id: int | None, position: int | None
    ) -> int:
        """Names the new place; 0 where the chunks have changed since they were looked at."""
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
            object_id,
            None if position is None else [position],
            [b"".join(batch.records for batch in batches)] if object_id is None else None,
        )
        return 0 if refusal is not None else run.size_bytes


def _size(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.size_bytes for chunk in chunks)


def _by_place(chunk: Chunk) -> tuple[int, int]:
    return chunk.partition_key, chunk.base_offset


def _runs(chunks: Iterable[Chunk]) -> list[_Run]:
    """Neighbours that make one chunk together."""
    runs: list[_Run] = []
    size_bytes = 0
    for chunk in chunks:
        last = runs[-1].chunks[-1] if runs else None
        size_bytes += chunk.size_bytes
        if (
            last is not None
            and last.partition_key == chunk.partition_key
            and last.last_offset + 1 == chunk.base_offset
            and size_bytes <= CHUNK_BYTES
        ):
            runs[-1].chunks.append(chunk)
        else:
            runs.append(_Run([chunk]))
            size_bytes = chunk.size_bytes
    return runs


def _pieces(runs: Iterable[_Run]) -> list[list[_Run]]:
    """What is moved at a time."""
    pieces: list[list[_Run]] = []
    size_bytes = MOVE_BYTES
    for run in runs:
        if size_bytes + run.size_bytes > MOVE_BYTES:
            pieces.append([])
            size_bytes = 0
        pieces[-1].append(run)
        size_bytes += run.size_bytes
    return pieces
