"""The second phase of a topic's deletion: its data is removed in bounded steps, its own row last.

The one idea: the topic's row is the tombstone. Hiding a topic (`TopicStore.delete`) costs the same at any size.
This module removes everything that belongs to the topic step by step. Each step is a short transaction that may be
repeated, so the next caller continues where the last one stopped, and the row exists as long as anything else does. A
topic that cannot be deleted is postponed by itself, longer with each failure, and stays visible until it is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from storage.errors import StorageConflict
from storage.pool import Database, Pool, Row
from storage.queries import statement
from storage.text import loaded
from storage.types import CoordinatorLease, PartitionKey

FIRST_RETRY_MS = 1_000
MAX_RETRY_MS = 60_000
"""Longest postponement of a topic that could not be deleted. It doubles with each failure."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Statements of one turn, and the maximal number of rows that one statement removes."""

    statements: int = 20
    partitions: int = 1_000
    chunks: int = 1_000
    producers: int = 10_000
    offsets: int = 10_000


STEPS = Steps()


@dataclass(frozen=True, slots=True)
class DueDeletion:
    """A hidden topic whose data must be removed now."""

    topic_id: UUID
    name: str
    failures: int


@dataclass(frozen=True, slots=True)
class PendingDeletion:
    """A hidden topic that still has rows, as shown to people."""

    topic_id: UUID
    name: str
    deleted_ms_ago: int
    partitions_left: int
    failures: int
    error: str | None
    retry_in_ms: int | None


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn of the work. With `gone`, nothing is left of the topic."""

    gone: bool
    deleted_batches: int
    deleted_bytes: int


class DeletionStore:
    def __init__(self, database: Database, steps: Steps = STEPS) -> None:
        self._steps = steps
        self._cold = database.cold
        self._control = database.control
        self._fenced: dict[UUID, int | None] = {}
        """For topics in progress, the index of the partition up to which all are fenced. None if all partitions are
        fenced.
        """

    async def due(self, limit: int) -> list[DueDeletion]:
        """Return the oldest due deletions, at most `limit`."""
        rows = await self._control.fetch(statement("due_deletions"), limit)
        in_hand = {row["topic_id"] for row in rows}
        self._fenced = {topic_id: behind for topic_id, behind in self._fenced.items() if topic_id in in_hand}
        return [DueDeletion(row["topic_id"], loaded(row["name"]), row["delete_failures"]) for row in rows]

    async def pending(self, limit: int) -> list[PendingDeletion]:
        rows = await self._control.fetch(statement("pending_deletions"), limit)
        return [
            PendingDeletion(
                row["topic_id"],
                loaded(row["name"]),
                row["deleted_ms_ago"],
                row["partitions_left"],
                row["delete_failures"],
                row["delete_error"],
                row["retry_in_ms"],
            )
            for row in rows
        ]

    async def advance(self, topic_id: UUID) -> Turn:
        """Do one turn of bounded statements. Safe beside other turns, and to be called again after any error.

        Raise StorageError, for example if another transaction holds a row for more than a second.
        """
        turn = _Turn(self._cold, self._steps)
        gone = (
            await self._fence(topic_id, turn) and await self._empty(topic_id, turn) and await self._end(topic_id, turn)
        )
        return Turn(gone, turn.batches, turn.size_bytes)

    async def failed(self, topic_id: UUID, error: str, lease: CoordinatorLease) -> tuple[int, int] | None:
        """Postpone the topic. Return how often it has failed by now and for how many ms it is postponed, or None if
        the lease is not current and another node decides. Raise StorageError."""
        self._fenced.pop(topic_id, None)
        row = await self._control.fetch_row(
            statement("deletion_failed"),
            topic_id,
            error[:500],
            FIRST_RETRY_MS,
            MAX_RETRY_MS,
            lease.shard,
            lease.node_id,
            lease.lease_epoch,
        )
        return None if row is None else (row["delete_failures"], row["retry_in_ms"])

    async def _fence(self, topic_id: UUID, turn: _Turn) -> bool:
        """Fence the partitions before anything is removed: rows that appear behind a completed step would stay for
        ever."""
        behind = self._fenced.get(topic_id, -1)
        while behind is not None:
            if turn.is_over:
                return False
            behind = self._fenced[topic_id] = await turn.value(
                "fence_partitions", topic_id, behind, self._steps.partitions
            )
        return True

    async def _empty(self, topic_id: UUID, turn: _Turn) -> bool:
        while not turn.is_over:
            partitions = await turn.rows("deleted_partitions", topic_id, self._steps.partitions)
            if not partitions:
                return True
            for partition in partitions:
                key = PartitionKey(partition["partition_key"])
                if partition["has_chunks"] and not await turn.remove_chunks(key):
                    return False
                if partition["has_producers"] and not await turn.remove_all(
                    "delete_producer_states", key, self._steps.producers
                ):
                    return False
                if partition["has_aborted"] and not await turn.remove_all(
                    "delete_aborted_transactions", key, self._steps.producers
                ):
                    return False
            if not await turn.value("delete_partitions", [row["partition_key"] for row in partitions]):
                raise StorageConflict("rows are still being written to partitions of the topic")
        return False

    async def _end(self, topic_id: UUID, turn: _Turn) -> bool:
        for offsets in ("delete_offsets_of_topic", "delete_pending_offsets_of_topic"):
            if not await turn.remove_all(offsets, topic_id, self._steps.offsets):
                return False
        if not await turn.value("confirm_deletion", topic_id):
            raise StorageConflict("a running commit refers to the topic")
        return True


class _Turn:
    """The statements that one turn may still run, and how much they have removed."""

    def __init__(self, pool: Pool, steps: Steps) -> None:
        self._pool = pool
        self._steps = steps
        self._left = steps.statements
        self.batches = 0
        self.size_bytes = 0

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    async def rows(self, name: str, *arguments: object) -> Sequence[Row]:
        self._left -= 1
        return await self._pool.fetch(statement(name), *arguments)

    async def value(self, name: str, *arguments: object) -> Any:
        self._left -= 1
        return await self._pool.fetch_value(statement(name), *arguments)

    async def remove_all(self, name: str, of: object, limit: int) -> bool:
        """Repeat a statement that removes up to `limit` rows until no rows are left. Return False if the turn's budget
        is used up before.
        """
        while not self.is_over:
            if await self.value(name, of, limit) < limit:
                return True
        return False

    async def remove_chunks(self, key: PartitionKey) -> bool:
        """Remove the partition's chunks in the same steps, and count them."""
        while not self.is_over:
            (row,) = await self.rows("delete_chunks", key, self._steps.chunks)
            self.batches += row["batch_count"]
            self.size_bytes += row["size_bytes"]
            if row["chunk_count"] < self._steps.chunks:
                return True
        return False
