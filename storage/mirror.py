"""Append batches that come from another cluster, at the offsets that they have there.

The one idea: the position in the source is the end of the log. `mirrored_partition` repeats that end, and both change
in the transaction that appends the batches, so a mirror that is killed at any point goes on without a duplicate or a
gap. If the two differ, a client has produced to the partition, and the mirror stops.

The bytes go into Postgres. The roller moves them to the segments or the bucket, as it does with small commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from uuid import UUID

from storage.chunks import CHUNK_BYTES, write_head
from storage.pool import Database
from storage.queries import statement
from storage.types import PartitionKey


class MirrorRefusal(Enum):
    """The reason why Postgres wrote nothing."""

    UNKNOWN_PARTITION = "unknown_partition"
    NOT_EMPTY = "not_empty"
    """The partition has a log that no mirror wrote."""
    OTHER_SOURCE = "other_source"
    """The partition was mirrored from another cluster, or from a topic that has been deleted since."""
    WRITTEN = "written"
    """The log does not end where the mirror left it: a client or another mirror has appended."""
    LEADER_EPOCH = "leader_epoch"
    """The partition's leader epoch differs from the batches' epoch; `begin` returns the present one."""


@dataclass(frozen=True, slots=True)
class MirrorSource:
    """The topic that a partition is copied from."""

    cluster_id: str
    topic_id: UUID


@dataclass(frozen=True, slots=True)
class MirrorPosition:
    """The offset at which the copy of a partition goes on."""

    next_offset: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class MirroredBatch:
    """One whole batch at its offsets. `records` must be writable: `append` writes the leader epoch into its head."""

    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    records: bytearray


class MirrorStore:
    """Writes mirrored partitions."""

    def __init__(self, database: Database) -> None:
        self._pool = database.cold

    async def begin(
        self, key: PartitionKey, source: MirrorSource, log_start_offset: int
    ) -> MirrorPosition | MirrorRefusal:
        """Return where the copy goes on. A partition that has never been written to begins at `log_start_offset`."""
        row = await self._pool.fetch_row(
            statement("begin_mirror"), key, source.cluster_id, source.topic_id, log_start_offset
        )
        assert row is not None
        if row["refusal"] is not None:
            return MirrorRefusal(row["refusal"])
        return MirrorPosition(row["next_offset"], row["leader_epoch"])

    async def append(
        self, key: PartitionKey, position: MirrorPosition, batches: Sequence[MirroredBatch]
    ) -> MirrorPosition | MirrorRefusal:
        """Append the batches, one or more in the order of their offsets, in one durable transaction, and return the
        next position. Offsets may be missing before and between batches. UNKNOWN_PARTITION, WRITTEN and LEADER_EPOCH
        refuse all of them.

        After StorageUnavailable the batches may or may not be in the log; `begin` returns the position in either case.
        """
        chunks: list[list[MirroredBatch]] = []
        size_bytes = CHUNK_BYTES + 1
        for batch in batches:
            write_head(batch.records, batch.base_offset, position.leader_epoch)
            size_bytes += len(batch.records)
            if size_bytes > CHUNK_BYTES:
                chunks.append([])
                size_bytes = len(batch.records)
            chunks[-1].append(batch)
        refusal = await self._pool.fetch_value(
            statement("append_mirrored"),
            key,
            position.next_offset,
            position.leader_epoch,
            [chunk[0].base_offset for chunk in chunks],
            [chunk[-1].last_offset for chunk in chunks],
            [max(batch.max_timestamp_ms for batch in chunk) for chunk in chunks],
            [len(chunk) for chunk in chunks],
            [b"".join(batch.records for batch in chunk) for chunk in chunks],
        )
        if refusal is not None:
            return MirrorRefusal(refusal)
        return MirrorPosition(batches[-1].last_offset + 1, position.leader_epoch)
