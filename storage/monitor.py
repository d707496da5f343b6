"""What monitoring reads: ends of partitions, lag and members of groups.

The one idea: a few bounded statements on the cold pool, whatever the size of the cluster, so that a scrape can neither
starve producers nor grow with the number of groups.
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
    """Where the first transaction that is open began; the high watermark if none is."""


@dataclass(frozen=True, slots=True)
class GroupLag:
    group_id: str
    topic: str
    partition_index: int
    committed_offset: int
    lag: int
    """Records left to read, counted from the log's start if that has passed the committed offset."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    group_id: str
    state: str
    members: int


@dataclass(frozen=True, slots=True)
class DeletionTotals:
    """Deleted topics that still have rows: how many, the age of the oldest, how many of them have failed."""

    pending: int
    oldest_s: float
    failing: int


@dataclass(frozen=True, slots=True)
class TransactionTotals:
    """Transactions that are under way: how many, and for how long the oldest has been."""

    open: int
    oldest_s: float


class Monitor:
    """Each call gives at most `limit` rows, in a stable order, and raises StorageUnavailable when Postgres is away."""

    def __init__(self, database: Database) -> None:
        self._pool = database.cold

    async def now_ms(self) -> int:
        """Postgres' clock, by which offsets, groups, leases and nodes age."""
        return await self._pool.fetch_value(statement("now_ms"))

    async def partitions(self, limit: int) -> list[PartitionEnds]:
        return [
            PartitionEnds(
                row["topic"],
                _partition(row),
                row["log_start_offset"],
                row["log_end_offset"],
                row["last_stable_offset"],
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
    assignment = None
    if row["replicas"] is not None:
        in_sync = row["in_sync"]
        assignment = Assignment(tuple(row["replicas"]), row["leader"], None if in_sync is None else tuple(in_sync))
    return Partition(
        row["partition"],
        PartitionKey(row["partition_key"]),
        row["leader_epoch"],
        assignment,
        row["topic_id"],
        row["partition_count"],
    )
