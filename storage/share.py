"""State of share groups in partitions (KIP-932).

The one idea: a row belongs to the node that read it last. Reading it raises its epoch, so later writes of a former
leader of the partition are refused. A change from outside raises the epoch too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from storage.pool import Database, Row
from storage.queries import statement
from storage.text import stored
from storage.turns import in_turns

WRITTEN_AT_A_TIME = 500
"""Rows written by one statement. One may hold a few kilobytes."""


class ShareKey(NamedTuple):
    """A share partition: what one share group has done with the records of one partition."""

    group_id: str
    topic_id: UUID
    partition_index: int


class StoredRange(NamedTuple):
    """Consecutive records with the same state. Each range begins directly behind the previous one."""

    length: int
    state: int
    """0 available, 2 acknowledged, 3 archiving, 4 archived."""
    delivery_count: int


@dataclass(frozen=True, slots=True)
class ShareRow:
    state_epoch: int
    start_offset: int
    ranges: Sequence[StoredRange] = ()
    write_number: int = 0
    """Orders the writes of one epoch. A write that arrives after a later one changes nothing."""


class ShareStand(NamedTuple):
    """Position of a group in a partition, in the terms of the clients' APIs."""

    start_offset: int
    settled: int
    """Records behind it that will not be delivered (again)."""


class ShareStore:
    """Reads, writes and removes the state of share groups."""

    def __init__(self, database: Database) -> None:
        self._hot = database.hot

    async def lead(self, key: ShareKey) -> ShareRow | None:
        """Read the row, which from here on only the caller may write; None if no node has read the partition.

        Raise StorageError, like all methods here.
        """
        row = await self._hot.fetch_row(statement("lead_share_partition"), *_columns(key))
        return None if row is None else _row(row)

    async def begin(self, key: ShareKey, start_offset: int) -> ShareRow | None:
        """Read the row as `lead` does; if there is no row, or one without an offset, begin it at `start_offset`, unless
        another node was faster.

        Return None if no such share group, topic or partition exists.
        """
        row = await self._hot.fetch_row(statement("begin_share_partition"), *_columns(key), start_offset)
        return None if row is None else _row(row)

    async def write(self, rows: Sequence[tuple[ShareKey, ShareRow]]) -> list[bool]:
        """Write rows, at most WRITTEN_AT_A_TIME, durably; return whether each was written.

        A row is not written if another node has read or changed it since, if it is gone, or if a write of a higher
        number was faster.
        """
        found = await self._hot.fetch(
            statement("write_share_partitions"),
            [stored(key.group_id) for key, _ in rows],
            [key.topic_id for key, _ in rows],
            [key.partition_index for key, _ in rows],
            [row.state_epoch for _, row in rows],
            [row.start_offset for _, row in rows],
            [json.dumps(row.ranges, separators=(",", ":")) for _, row in rows],
            [row.write_number for _, row in rows],
        )
        written = {row["position"] for row in found}
        return [position in written for position in range(1, len(rows) + 1)]

    async def epochs(self, keys: Sequence[ShareKey]) -> list[int | None]:
        """Return the epoch with which each row may be written now; None if there is no row."""
        found = await self._hot.fetch(
            statement("share_epochs"),
            [stored(key.group_id) for key in keys],
            [key.topic_id for key in keys],
            [key.partition_index for key in keys],
        )
        epochs: dict[int, int] = {row["position"]: row["state_epoch"] for row in found}
        return [epochs.get(position) for position in range(1, len(keys) + 1)]

    async def offsets(self, group_id: str, settled: Collection[int]) -> dict[tuple[UUID, int], ShareStand]:
        """Return the position of the group in every partition of live topics in which it has one.

        `settled`: the states of records that will not be delivered (again).
        """
        rows = await self._hot.fetch(statement("share_offsets"), stored(group_id), list(settled))
        return {
            (row["topic_id"], row["partition_index"]): ShareStand(row["start_offset"], row["settled"])
            async for row in in_turns(rows)
        }

    async def alter(self, group_id: str, starts: Mapping[tuple[UUID, int], int]) -> bool:
        """Restart partitions of a share group at these offsets. Return False if the group has members or does not
        exist."""
        altered = await self._hot.fetch_value(
            statement("alter_share_offsets"),
            stored(group_id),
            [topic_id for topic_id, _ in starts],
            [partition_index for _, partition_index in starts],
            list(starts.values()),
        )
        return altered == len(starts)

    async def delete(self, group_id: str, topic_ids: Collection[UUID]) -> set[UUID]:
        """Remove the state of a share group without members in these topics; return the topics in which it had any."""
        rows = await self._hot.fetch(statement("delete_share_offsets"), stored(group_id), list(topic_ids))
        return {row["topic_id"] for row in rows}


def _columns(key: ShareKey) -> tuple[str, UUID, int]:
    return stored(key.group_id), key.topic_id, key.partition_index


def _row(row: Row) -> ShareRow:
    ranges = tuple(StoredRange(*each) for each in json.loads(row["ranges"]))
    return ShareRow(row["state_epoch"], row["start_offset"], ranges, row["write_number"])
