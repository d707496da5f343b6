"""Remove the beginning of the log: by time, by size, and by DeleteRecords. `deletion.py` removes what belongs to a
deleted topic.

The one idea: first the log start moves, in one small update that readers see at once. Index rows below it follow in
bounded steps, each a short transaction, one partition after the other. Chunks are removed whole, from the oldest up to
the first that must stay, so readers always see a suffix of the log. This module removes rows only. Bytes are removed
with their file or slot, once nothing in it is alive (`storage/roller.py`). Time is the database's clock; a chunk
without timestamps ages from its append.

Topic configs are unknown here. The caller passes each partition's limits, −1 for none. It also passes partitions
without a limit, because DeleteRecords leaves rows to remove there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage.pool import Database
from storage.queries import statement
from storage.types import PartitionKey

UNLIMITED = -1

DEFAULT_RETENTION_MS = 7 * 24 * 60 * 60 * 1000
"""Kafka's default of log.retention.ms."""

CHUNKS_PER_STATEMENT = 1000


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The limits of one partition from its topic's configs; `UNLIMITED` (−1) for none."""

    partition_key: PartitionKey
    retention_ms: int = DEFAULT_RETENTION_MS
    retention_bytes: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class RetentionPass:
    """The result of one pass."""

    deleted_batches: int
    deleted_bytes: int
    complete: bool
    """False if a bound ended the pass and more is due."""


class _Removed:
    """How much a pass has removed, and how much it may still remove."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self.chunks = 0
        self.batches = 0
        self.size_bytes = 0

    @property
    def room(self) -> int:
        return min(CHUNKS_PER_STATEMENT, self._max_chunks - self.chunks)

    async def run(self, database: Database, query: str, key: PartitionKey) -> bool:
        """Run one bounded statement. Return True if there may be more to remove."""
        row = await database.cold.fetch_row(query, key, self.room)
        assert row is not None
        self.chunks += row["chunk_count"]
        self.batches += row["batch_count"]
        self.size_bytes += row["size_bytes"]
        return row["has_more"]


async def apply(
    database: Database,
    policies: Sequence[RetentionPolicy],
    *,
    max_chunks: int = 200_000,
    moved: Callable[[PartitionKey, int], object] = lambda _key, _log_start: None,
) -> RetentionPass:
    """Do one pass over `policies`: move log starts as time and size demand, and delete the rows below.

    `moved` is called with each log start that moves, at once, because a later statement may fail. It is also called for
    each log start below which rows are left: the call that moved it may have got no answer.

    Partitions take turns, so that a partition with much to remove does not keep others from their share. Safe beside
    other passes, appends and reads. Upstream: UnifiedLog.deleteOldSegments, with a chunk in the place of a segment and
    without an exception for the newest one.
    """
    waiting = deque(
        await database.cold.fetch(
            statement("retention_candidates"),
            [policy.partition_key for policy in policies],
            [policy.retention_ms for policy in policies],
            [policy.retention_bytes for policy in policies],
        )
    )
    removed = _Removed(max_chunks)
    for candidate in waiting:
        if candidate["below_start"]:
            moved(PartitionKey(candidate["partition_key"]), candidate["log_start_offset"])
    delete = statement("delete_below_log_start")
    while waiting and removed.room > 0:
        candidate = waiting.popleft()
        key = PartitionKey(candidate["partition_key"])
        if await removed.run(database, delete, key):
            waiting.append(candidate)
            continue
        if removed.room <= 0:
            waiting.append(candidate)
            break
        boundary = await database.cold.fetch_value(
            statement("retention_boundary"),
            key,
            candidate["retention_ms"],
            candidate["retention_bytes"],
            removed.room,
        )
        if boundary is None:
            continue
        log_start = await database.cold.fetch_value(statement("raise_log_start"), key, boundary)
        if log_start is not None:
            moved(key, log_start)
            waiting.append(candidate)
    return RetentionPass(removed.batches, removed.size_bytes, not waiting)
