"""What leaves the log: by time, by size, by DeleteRecords, and with its topic.

The one idea: the log start moves first, in one small update that readers see at once; rows below it follow in bounded
pieces, each a short transaction. Batches go from the oldest, whole, up to the first that must stay, so what readers see
is always a suffix of the log. Time is the database's clock; a batch without timestamps ages from its append.

What it does not do: it knows no topic configs. The caller passes each partition's limits, −1 where there is none, and
passes partitions without any limit too, since DeleteRecords leaves rows to remove there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.pool import Connection, Database
from storage.queries import statement
from storage.types import PartitionKey

UNLIMITED = -1

DEFAULT_RETENTION_MS = 7 * 24 * 60 * 60 * 1000
"""Kafka's log.retention.ms when nothing is set."""

_ROWS_PER_STATEMENT = 1000
_BYTES_PER_STATEMENT = 64 * 1024 * 1024
"""Deleting a row deletes its TOAST chunks, about 500 per MB: this bounds how long one statement takes."""

_PARTITIONS_PER_PURGE = 1000


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Limits of one partition as its topic's configs give them; `UNLIMITED` (−1) for none."""

    partition_key: PartitionKey
    retention_ms: int = DEFAULT_RETENTION_MS
    retention_bytes: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class RetentionPass:
    """What one pass did."""

    log_starts: Mapping[PartitionKey, int]
    """New log start of each partition where it moved."""
    deleted_batches: int
    deleted_bytes: int
    complete: bool
    """False if a bound ended the pass: more is due."""


class _Budget:
    """How much a pass may still delete."""

    def __init__(self, batches: int, size_bytes: int) -> None:
        self._batches = batches
        self._bytes = size_bytes
        self.deleted_batches = 0
        self.deleted_bytes = 0

    @property
    def batches(self) -> int:
        return self._batches - self.deleted_batches

    @property
    def exhausted(self) -> bool:
        return self.batches <= 0 or self.deleted_bytes >= self._bytes

    async def delete(self, database: Database, query: str, key: PartitionKey) -> None:
        """Runs a bounded delete statement until it finds nothing more or the budget is spent."""
        while not self.exhausted:
            rows = min(_ROWS_PER_STATEMENT, self.batches)
            size_bytes = min(_BYTES_PER_STATEMENT, self._bytes - self.deleted_bytes)
            row = await database.cold.fetch_row(query, key, rows, size_bytes)
            assert row is not None
            if row["batch_count"] == 0:
                return
            self.deleted_batches += row["batch_count"]
            self.deleted_bytes += row["size_bytes"]


async def apply(
    database: Database,
    policies: Sequence[RetentionPolicy],
    *,
    max_batches: int = 20_000,
    max_bytes: int = 1024 * 1024 * 1024,
) -> RetentionPass:
    """One pass over `policies`: moves log starts as time and size demand and deletes what lies below.

    Safe beside other passes, appends and reads. Upstream: UnifiedLog.deleteOldSegments, with a batch in the place of a
    segment and no exception for the newest one.
    """
    candidates = await database.cold.fetch(
        statement("retention_candidates"),
        [policy.partition_key for policy in policies],
        [policy.retention_ms for policy in policies],
        [policy.retention_bytes for policy in policies],
    )
    budget = _Budget(max_batches, max_bytes)
    log_starts: dict[PartitionKey, int] = {}
    delete = statement("delete_below_log_start")
    for candidate in candidates:
        key = PartitionKey(candidate["partition_key"])
        await budget.delete(database, delete, key)
        while not budget.exhausted:
            looked_at = min(_ROWS_PER_STATEMENT, budget.batches)
            boundary = await database.cold.fetch_value(
                statement("retention_boundary"),
                key,
                candidate["retention_ms"],
                candidate["retention_bytes"],
                looked_at,
            )
            if boundary is None:
                break
            log_start = await database.cold.fetch_value(statement("advance_log_start"), key, boundary)
            if log_start is None:
                break
            log_starts[key] = log_start
            await budget.delete(database, delete, key)
        if budget.exhausted:
            break
    return RetentionPass(log_starts, budget.deleted_batches, budget.deleted_bytes, not budget.exhausted)


async def purge(
    database: Database,
    *,
    max_batches: int = 20_000,
    max_bytes: int = 1024 * 1024 * 1024,
    grace_ms: int = 60_000,
) -> RetentionPass:
    """One pass over the rows of topics deleted at least `grace_ms` ago, which is longer than any call that began before
    the deletion may last. The topic's own row goes last."""
    budget = _Budget(max_batches, max_bytes)
    partitions = await database.cold.fetch(statement("deleted_partitions"), grace_ms, _PARTITIONS_PER_PURGE)
    for partition in partitions:
        key = PartitionKey(partition["partition_key"])
        await budget.delete(database, statement("delete_batches"), key)
        if budget.exhausted:
            break
        await database.cold.fetch(statement("delete_producer_states"), key, max_batches)
        await database.cold.fetch(statement("delete_partition"), key)

    async def delete_emptied(connection: Connection) -> None:
        rows = await connection.fetch(statement("lock_emptied_topics"), grace_ms, _PARTITIONS_PER_PURGE)
        topic_ids = [row["topic_id"] for row in rows]
        if topic_ids:
            await connection.execute(statement("delete_offsets_of_topics"), topic_ids)
            await connection.execute(statement("delete_emptied_topics"), topic_ids)

    await database.cold.transact(delete_emptied)
    complete = not budget.exhausted and len(partitions) < _PARTITIONS_PER_PURGE
    return RetentionPass({}, budget.deleted_batches, budget.deleted_bytes, complete)
