"""Storage's side of log compaction: which partitions are dirty, and replacing batches atomically.

The one idea: a run over a partition has a revision; beginning another run fences it, so of two cleaners only the later
one writes. Offsets never change: a batch is replaced by one that lies within the offsets of those it replaces, and
where none does, readers go on to the next batch. The newest batch is never touched, so the log end stays where it is.

What it does not do: it decodes no record. Which records stay is decided by the caller, who reads through
`storage.log.LogStore.read` and writes back through `replace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage.errors import StorageConflict, StorageError
from storage.pool import Database, Row
from storage.queries import statement
from storage.types import PartitionKey, StoredBatch


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """When a partition is worth cleaning, as its topic's configs say."""

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
    """A batch boundary: the base offset of the first batch that must stay as it is."""
    clean_bytes: int
    dirty_bytes: int


@dataclass(frozen=True, slots=True)
class CompactionRun:
    """Leave to replace batches of one partition below `end_offset`, until another run begins."""

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

    def __init__(self, database: Database) -> None:
        self._pool = database.cold

    async def dirty_ranges(self, policies: Sequence[CompactionPolicy], *, limit: int = 10) -> list[DirtyRange]:
        """The dirtiest partitions among `policies`, at most `limit`. Upstream: LogCleanerManager."""
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
        """The offset below which each partition's batches may have been replaced; those never cleaned are left out."""
        rows = await self._pool.fetch(statement("cleaned_to"), list(keys))
        return {PartitionKey(row["partition_key"]): row["first_dirty_offset"] for row in rows}

    async def begin(self, dirty: DirtyRange) -> CompactionRun:
        """Begins a run, ending any other of the partition. StorageConflict if the partition has been deleted."""
        revision = await self._pool.fetch_value(statement("begin_compaction"), dirty.partition_key)
        if revision is None:
            raise StorageConflict(f"partition {dirty.partition_key} has been deleted")
        return CompactionRun(dirty.partition_key, revision, dirty.end_offset)

    async def replace(self, run: CompactionRun, removed: Sequence[int], added: Sequence[StoredBatch]) -> None:
        """Removes the batches with the base offsets `removed` and puts `added` in their place, in one transaction.

        Each added batch lies within the offsets of removed ones, below the run's end; `records` is stored as given.
        StorageConflict if another run began or a removed batch is gone (retention): nothing was written, start afresh.
        StorageError if the offsets do not fit.
        """
        ordered = sorted(added, key=_base_offset)
        refusal = await self._pool.fetch_value(
            statement("replace_batches"),
            run.partition_key,
            run.revision,
            run.end_offset,
            list(removed),
            [batch.base_offset for batch in ordered],
            [batch.last_offset for batch in ordered],
            [batch.max_timestamp_ms for batch in ordered],
            [batch.records for batch in ordered],
        )
        if refusal == "outside":
            raise StorageError(f"batches of partition {run.partition_key} from {run.end_offset} on must stay")
        if refusal is not None:
            raise StorageConflict(f"compaction of partition {run.partition_key} was overtaken: {refusal}")

    async def finish(self, run: CompactionRun) -> None:
        """Records that the log is clean below the run's end. StorageConflict if another run began."""
        finished = await self._pool.fetch_value(
            statement("finish_compaction"), run.partition_key, run.revision, run.end_offset
        )
        if finished is None:
            raise StorageConflict(f"compaction of partition {run.partition_key} was overtaken")


def _base_offset(batch: StoredBatch) -> int:
    return batch.base_offset
