"""Read what monitoring shows: ends of partitions, lag and members of groups.

The one idea: a few bounded statements on the cold pool, for a cluster of any size. So a scrape can neither starve
producers nor grow with the number of groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.pool import Database, Row
from storage.queries import statement
from storage.text import loaded
from storage.types import Assignment, Partition, PartitionKey


@dataclass(frozen=True, slots=True)
class PartitionEnds:
    topic: str
    partition: Partition
    log_start_offset: int
    high_watermark: int
    last_stable_offset: int
    """The offset at which the first open transaction began, or the high watermark."""
    size_bytes: int
    """Size of the stored batches."""


@dataclass(frozen=True, slots=True)
class GroupLag:
    group_id: str
    topic: str
    partition_index: int
    committed_offset: int
    lag: int
    """Records left to read, counted from the log start if that has passed the committed offset."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    group_id: str
    state: str
    members: int


@dataclass(frozen=True, slots=True)
class DeletionTotals:
    """Deleted topics that still have rows: their number, the age of the oldest, and how many have failed."""

    pending: int
    oldest_s: float
    failing: int


@dataclass(frozen=True, slots=True)
class TransactionTotals:
    """Open transactions: their number, and the age of the oldest."""

    open: int
    oldest_s: float


class Monitor:
    """Each call returns at most `limit` rows in a stable order, and raises StorageUnavailable if Postgres does not
    answer."""

    def __init__(self, database: Database) -> None:
        self._pool = database.cold

    async def now_ms(self) -> int:
        """Return the time of Postgres' clock, by which offsets, groups, leases and nodes age."""
        return await self._pool.fetch_value(statement("now_ms"))

    async def partitions(self, limit: int) -> list[PartitionEnds]:
        return [
            PartitionEnds(
                row["topic"],
                _partition(row),
                row["log_start_offset"],
                row["log_end_offset"],
                row["last_stable_offset"],
                row["size_bytes"],
            )
            for row in await self._pool.fetch(statement("monitored_partitions"), limit)
        ]

    async def lag(self, limit: int) -> list[GroupLag]:
        return [
            GroupLag(loaded(row["group_id"]), row["topic"], row["partition"], row["committed_offset"], row["lag"])
            for row in await self._pool.fetch(statement("monitored_lag"), limit)
        ]

    async def groups(self, limit: int) -> list[GroupSize]:
        return [
            GroupSize(loaded(row["group_id"]), row["state"], row["members"])
            for row in await self._pool.fetch(statement("monitored_groups"), limit)
        ]

    async def deletions(self) -> DeletionTotals:
        row = await self._pool.fetch_row(statement("deletion_totals"))
        assert row is not None
        return DeletionTotals(row["pending"], row["oldest_s"], row["failing"])

    async def transactions(self) -> TransactionTotals:
        row = await self._pool.fetch_row(statement("transaction_totals"))
        assert row is not None
        return TransactionTotals(row["open"], row["oldest_s"])


def _partition(row: Row) -> Partition:
    assignment = None if row["replicas"] is None else Assignment(tuple(row["replicas"]), row["leader"])
    return Partition(
        row["partition"],
        PartitionKey(row["partition_key"]),
        row["leader_epoch"],
        assignment,
        row["topic_id"],
        row["partition_count"],
    )
