"""Storage's side of log compaction: find dirty partitions and replace batches atomically.

The one idea: a run over a partition has a revision, and beginning another run fences it. So of two cleaners only the
later one writes. Offsets never change. A batch is replaced by a batch that lies within the offsets of those it
replaces; if none replaces it, readers continue with the next batch. Chunks with changed batches are written anew,
inline. The newest batches are never replaced, so the log end stays. Neither are batches from the first open transaction
on, so the outcome of every transaction in the replaced part is decided.

This module decodes no record. The caller decides which records stay: it reads through `storage.log.LogStore.read` and
writes back through `replace`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from storage.chunks import CHUNK_BYTES, Chunk, DamagedChunkError
from storage.errors import StorageConflict, StorageError
from storage.log import LogStore
from storage.pool import Connection, Database, Row
from storage.queries import statement
from storage.turns import in_turns
from storage.types import PartitionKey, StoredBatch

_ATTEMPTS = 3
"""Number of times that a replacement is recomputed if the bytes of a chunk were moved concurrently. Sizes are recounted
as often if the log start has moved.
"""

_COUNTED_AT_A_TIME = 20_000
"""Number of chunks that one statement counts."""


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """When a partition is worth cleaning, from its topic's configs."""

    partition_key: PartitionKey
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = 2**63 - 1


@dataclass(frozen=True, slots=True)
class DirtyRange:
    """Keys at [first_dirty_offset, end_offset) may supersede records at [log_start_offset, end_offset)."""

    partition_key: PartitionKey
    log_start_offset: int
    first_dirty_offset: int
    end_offset: int
    """A chunk boundary: the base offset of the first batch that must not be replaced. All transactions below it have
    ended."""
    clean_bytes: int
    dirty_bytes: int


class AbortedSpan(NamedTuple):
    """Batches of the producer's aborted transaction that begin within [first_offset, last_offset)."""

    producer_id: int
    first_offset: int
    last_offset: int
    """Offset of the marker."""


@dataclass(frozen=True, slots=True)
class CompactionRun:
    """Permission to replace batches of one partition below `end_offset`, until another run begins."""

    partition_key: PartitionKey
    revision: int
    end_offset: int


def _dirty_range(row: Row) -> DirtyRange:
    return DirtyRange(
        partition_key=PartitionKey(row["partition_key"]),
        log_start_offset=row["log_start_offset"],
        first_dirty_offset=row["first_dirty_offset"],
        end_offset=row["end_offset"],
        clean_bytes=row["clean_bytes"],
        dirty_bytes=row["dirty_bytes"],
    )


class CompactionStore:
    """Finds dirty partitions and writes what the cleaner decided."""

    def __init__(self, database: Database, log: LogStore) -> None:
        self._pool = database.cold
        self._log = log

    async def dirty_ranges(self, policies: Sequence[CompactionPolicy], *, limit: int = 10) -> list[DirtyRange]:
        """Return the dirtiest partitions among `policies`, at most `limit`. Upstream: LogCleanerManager."""
        rows = await self._pool.fetch(
            statement("dirty_ranges"),
            [policy.partition_key for policy in policies],
            [policy.min_cleanable_dirty_ratio for policy in policies],
            [policy.min_compaction_lag_ms for policy in policies],
            [policy.max_compaction_lag_ms for policy in policies],
            limit,
        )
        return [_dirty_range(row) for row in rows]

    async def cleaned_to(self, keys: Sequence[PartitionKey]) -> dict[PartitionKey, int]:
        """Return the offset below which each partition's batches may have been replaced. Partitions that were never
        cleaned are omitted."""
        rows = await self._pool.fetch(statement("cleaned_to"), list(keys))
        return {PartitionKey(row["partition_key"]): row["first_dirty_offset"] for row in rows}

    async def aborted_between(self, key: PartitionKey, from_offset: int, end_offset: int) -> list[AbortedSpan]:
        """Return aborted transactions whose batches or marker may lie in [from_offset, end_offset). If no
        transaction is open, as below the end of a dirty range, no further one can appear."""
        rows = await self._pool.fetch(statement("aborted_between"), [key], [from_offset], [end_offset], None)
        spans: list[AbortedSpan] = []
        async for row in in_turns(rows, 1):
            if row["producer_ids"][0] is not None:
                spans += map(AbortedSpan, row["producer_ids"], row["first_offsets"], row["last_offsets"])
        return spans

    async def begin(self, dirty: DirtyRange) -> CompactionRun:
        """Begin a run and end any other run of the partition. Raise StorageConflict if the partition has been
        deleted."""
        revision = await self._pool.fetch_value(statement("begin_compaction"), dirty.partition_key)
        if revision is None:
            raise StorageConflict(f"partition {dirty.partition_key} has been deleted")
        return CompactionRun(dirty.partition_key, revision, dirty.end_offset)

    async def replace(self, run: CompactionRun, removed: Sequence[int], added: Sequence[StoredBatch]) -> None:
        """Replace the batches with the base offsets `removed` by `added`, in one transaction.

        Each added batch must lie within the offsets of removed ones and below the run's end. `records` is stored as
        given. Raise StorageConflict, and write nothing, if another run began or retention removed one of the batches:
        the caller must begin again. Raise StorageError if the offsets do not fit.
        """
        if not removed:
            if added:
                raise StorageError("batches can only be added in the place of others")
            return
        refusal: str | None = None
        for _ in range(_ATTEMPTS):
            chunks = await self._log.chunks_between(run.partition_key, min(removed), max(removed))
            held = await self._log.reader.batches(chunks)
            batches: list[tuple[StoredBatch, ...]] = []
            for chunk, result in zip(chunks, held, strict=True):
                if isinstance(result, DamagedChunkError):
                    raise StorageError(f"offset {chunk.base_offset} of partition {chunk.partition_key}: {result}")
                batches.append(result)
            replacement = _replace(run, list(zip(chunks, batches, strict=True)), set(removed), added)
            refusal = await self._pool.fetch_value(
                statement("replace_chunks"),
                run.partition_key,
                run.revision,
                run.end_offset,
                [chunk.base_offset for chunk in replacement.removed],
                [chunk.object_id for chunk in replacement.removed],
                [chunk.position for chunk in replacement.removed],
                [batches[0].base_offset for batches in replacement.added],
                [batches[-1].last_offset for batches in replacement.added],
                [max(batch.max_timestamp_ms for batch in batches) for batches in replacement.added],
                [len(batches) for batches in replacement.added],
                replacement.leader_epochs,
                [sum(len(batch.records) for batch in batches) for batches in replacement.added],
                None,
                None,
                [b"".join(batch.records for batch in batches) for batches in replacement.added],
            )
            if refusal == "outside":
                raise StorageError(f"batches of partition {run.partition_key} from {run.end_offset} on must stay")
            if refusal is None:
                return
            if refusal != "changed":
                break
        raise StorageConflict(f"compaction of partition {run.partition_key} was overtaken: {refusal}")

    async def finish(self, run: CompactionRun) -> None:
        """Record that the log is clean below the run's end, and its size there. Raise StorageConflict if another run
        began."""
        for _ in range(_ATTEMPTS):
            clean_bytes, oldest = await self._clean_bytes(run)
            outcome = await self._end(run, clean_bytes, oldest)
            if outcome is None:
                raise StorageConflict(f"compaction of partition {run.partition_key} was overtaken")
            if outcome == "finished":
                return
        raise StorageConflict(f"the log of partition {run.partition_key} kept moving")

    async def _end(self, run: CompactionRun, clean_bytes: int, oldest: int | None) -> str | None:
        async def end(connection: Connection) -> str | None:
            # Retention removes chunks under this lock. The next statement begins later, so it sees the removal.
            await connection.execute(statement("lock_compaction"), run.partition_key)
            return await connection.fetchval(
                statement("finish_compaction"), run.partition_key, run.revision, run.end_offset, clean_bytes, oldest
            )

        return await self._pool.transact(end)

    async def _clean_bytes(self, run: CompactionRun) -> tuple[int, int | None]:
        """Return the bytes below the run's end, counted in bounded steps, and the oldest chunk's base offset. Only
        the oldest chunks can disappear in the meantime, because another run would have ended this one. Merged chunks
        keep their bytes."""
        size_bytes, offset = 0, 0
        oldest: int | None = None
        while True:
            row = await self._pool.fetch_row(
                statement("chunk_sizes"), run.partition_key, offset, run.end_offset, _COUNTED_AT_A_TIME
            )
            assert row is not None
            size_bytes += row["size_bytes"]
            oldest = row["first_offset"] if oldest is None else oldest
            if row["chunk_count"] < _COUNTED_AT_A_TIME:
                return size_bytes, oldest
            offset = row["last_offset"] + 1


def _base_offset(batch: StoredBatch) -> int:
    return batch.base_offset


def _last_offset(batch: StoredBatch) -> int:
    return batch.last_offset


@dataclass(frozen=True, slots=True)
class _Replacement:
    """Chunks to remove, and the batches of each new chunk."""

    removed: list[Chunk]
    added: list[list[StoredBatch]]
    leader_epochs: list[int]


def _replace(
    run: CompactionRun,
    held: Sequence[tuple[Chunk, tuple[StoredBatch, ...]]],
    removed: set[int],
    added: Sequence[StoredBatch],
) -> _Replacement:
    """Compute the new chunks for the chunks in which batches change."""
    going = [batch for _, batches in held for batch in batches if batch.base_offset in removed]
    if len(going) != len(removed):
        raise StorageConflict(f"compaction of partition {run.partition_key} was overtaken: a batch is gone")
    if going[-1].last_offset >= run.end_offset:
        raise StorageError(f"batches of partition {run.partition_key} from {run.end_offset} on must stay")
    ordered = sorted(added, key=_base_offset)
    staying = [batch for _, batches in held for batch in batches if batch.base_offset not in removed]
    _check_places(ordered, going, staying)
    chunks: list[Chunk] = []
    come: list[list[StoredBatch]] = []
    epochs: list[int] = []
    next_added = 0
    size_bytes = CHUNK_BYTES + 1
    for chunk, batches in held:
        kept = [batch for batch in batches if batch.base_offset not in removed]
        if len(kept) == len(batches):
            # This chunk does not change, so its neighbours on both sides become chunks of their own.
            size_bytes = CHUNK_BYTES + 1
            continue
        chunks.append(chunk)
        while next_added < len(ordered) and ordered[next_added].base_offset <= chunk.last_offset:
            kept.append(ordered[next_added])
            next_added += 1
        for batch in sorted(kept, key=_base_offset):
            size_bytes += len(batch.records)
            if size_bytes > CHUNK_BYTES:
                come.append([])
                epochs.append(chunk.leader_epoch)
                size_bytes = len(batch.records)
            come[-1].append(batch)
    return _Replacement(chunks, come, epochs)


def _check_places(added: Sequence[StoredBatch], going: Sequence[StoredBatch], staying: Sequence[StoredBatch]) -> None:
    """Raise StorageError unless each added batch lies within the offsets of removed batches and overlaps no other."""
    previous_last = -1
    for batch in added:
        first = bisect_left(going, batch.base_offset, key=_last_offset)
        last = bisect_left(going, batch.last_offset, key=_last_offset)
        stays = bisect_left(staying, batch.base_offset, key=_last_offset)
        if (
            last == len(going)
            or not max(previous_last + 1, going[first].base_offset) <= batch.base_offset <= batch.last_offset
            or going[last].base_offset > batch.last_offset
            or (stays < len(staying) and staying[stays].base_offset <= batch.last_offset)
        ):
            raise StorageError(f"a batch cannot be put at offsets {batch.base_offset} to {batch.last_offset}")
        previous_last = batch.last_offset
