"""The record log: one row per batch, bytes as they came.

The one idea: an append is one transaction for many partitions, in which Postgres decides offsets and duplicates under
the partitions' row locks (`assign_offsets` in functions/log.sql); a read is one statement whose cost follows what it
returns. Groups of small batches go as one statement; for large ones the bytes follow by binary COPY, which costs more
round trips and less per byte.

What it does not do: it looks at no byte of a batch but to write base offset and leader epoch into its head, keeps
nothing in memory, and wakes nobody. A StorageUnavailable from `append` says nothing about whether the batches are in
the log; a producer that retries with its sequence gets the right answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, cast

from storage.pool import Connection, Database, Row
from storage.queries import statement
from storage.types import (
    Appended,
    NewBatch,
    PartitionKey,
    PartitionState,
    ReadRequest,
    ReadResult,
    Refusal,
    StoredBatch,
)

COPY_FROM_MEAN_BYTES = 64 * 1024
COPY_FROM_GROUP_BYTES = 512 * 1024
"""Groups at least this large, of batches at least so large on average, go by COPY. The mean is within the measured
crossover (16 to 256 KiB); the group's size is a judgement: COPY takes four round trips where a statement takes one."""

HIGH_WATERMARK = -1
"""`delete_records` up to here: everything there is."""

_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_LEADER_EPOCH_AT = 12

_BATCH_COLUMNS = (
    "partition_key",
    "base_offset",
    "last_offset",
    "max_timestamp_ms",
    "running_max_timestamp_ms",
    "append_timestamp_ms",
    "size_bytes",
    "records",
)

_APPEND_BATCHES = statement("append_batches")
_ASSIGN_OFFSETS = statement("assign_offsets")
_READ_BATCHES = statement("read_batches")
_PARTITION_STATES = statement("partition_states")
_BATCH_AT_TIMESTAMP = statement("batch_at_timestamp")
_BATCH_OF_GREATEST_TIMESTAMP = statement("batch_of_greatest_timestamp")
_BATCH_OF_GREATEST_REMAINING_TIMESTAMP = statement("batch_of_greatest_remaining_timestamp")
_RAISE_LOG_START = statement("raise_log_start")


def _assign_arguments(batches: Sequence[NewBatch]) -> tuple[list[int], ...]:
    """The ten array parameters of `assign_offsets`, in its order."""
    partition_keys = sorted({int(batch.partition_key) for batch in batches})
    partition_positions = {key: position for position, key in enumerate(partition_keys, 1)}
    producers: dict[tuple[int, int], int] = {}
    producer_positions: list[int] = []
    for batch in batches:
        if batch.producer_id < 0:
            producer_positions.append(0)
        else:
            pair = (int(batch.partition_key), batch.producer_id)
            producer_positions.append(producers.setdefault(pair, len(producers) + 1))
    return (
        partition_keys,
        [partition_positions[batch.partition_key] for batch in batches],
        [batch.record_count for batch in batches],
        [batch.max_timestamp_ms for batch in batches],
        [len(batch.records) for batch in batches],
        [partition_key for partition_key, _ in producers],
        [producer_id for _, producer_id in producers],
        producer_positions,
        [batch.producer_epoch for batch in batches],
        [batch.base_sequence for batch in batches],
    )


def _outcomes(decided: Row) -> list[Appended | Refusal]:
    """Per batch, from the row of arrays that `assign_offsets` returns."""
    return [
        Refusal(refusal) if refusal is not None else Appended(base_offset, log_start_offset, leader_epoch, duplicate)
        for refusal, duplicate, base_offset, log_start_offset, leader_epoch in zip(
            cast(list[Any], decided["refusals"]),
            cast(list[Any], decided["duplicates"]),
            cast(list[Any], decided["base_offsets"]),
            cast(list[Any], decided["log_start_offsets"]),
            cast(list[Any], decided["leader_epochs"]),
            strict=True,
        )
    ]


def _patch_heads(batches: Sequence[NewBatch], outcomes: Sequence[Appended | Refusal]) -> None:
    for batch, outcome in zip(batches, outcomes, strict=True):
        if isinstance(outcome, Appended) and not outcome.duplicate:
            _BASE_OFFSET.pack_into(batch.records, 0, outcome.base_offset)
            _LEADER_EPOCH.pack_into(batch.records, _LEADER_EPOCH_AT, outcome.leader_epoch)


def _stored_batch(row: Row) -> StoredBatch:
    return StoredBatch(row["base_offset"], row["last_offset"], row["max_timestamp_ms"], row["records"])


class LogStore:
    """Appends to and reads from the log. Safe for any number of processes on one database."""

    def __init__(self, database: Database) -> None:
        self._hot = database.hot
        self._cold = database.cold

    async def append(self, batches: Sequence[NewBatch]) -> list[Appended | Refusal]:
        """Appends in the order given, in one durable transaction; one outcome per batch.

        The `records` of every batch newly appended hold base offset and leader epoch when this returns (they must be
        writable). UNKNOWN_PARTITION, OUT_OF_ORDER_SEQUENCE and INVALID_PRODUCER_EPOCH refuse one batch and leave the
        others. On StorageUnavailable the batches may or may not be in the log.

        Idempotence follows upstream's ProducerStateManager: a lower epoch is refused, a higher one must begin at
        sequence 0, one of the last five batches (epoch, first and last sequence) is answered with its first offset, any
        sequence is accepted of a producer not known here.
        """
        if not batches:
            return []
        arguments = _assign_arguments(batches)
        group_bytes = sum(len(batch.records) for batch in batches)
        if group_bytes >= COPY_FROM_GROUP_BYTES and group_bytes >= COPY_FROM_MEAN_BYTES * len(batches):
            return await self._append_by_copy(batches, arguments)
        decided = await self._hot.fetch_row(_APPEND_BATCHES, *arguments, [batch.records for batch in batches])
        assert decided is not None
        outcomes = _outcomes(decided)
        _patch_heads(batches, outcomes)
        return outcomes

    async def _append_by_copy(
        self, batches: Sequence[NewBatch], arguments: tuple[list[int], ...]
    ) -> list[Appended | Refusal]:
        async def append(connection: Connection) -> list[Appended | Refusal]:
            decided = await connection.fetchrow(_ASSIGN_OFFSETS, *arguments)
            assert decided is not None
            outcomes = _outcomes(decided)
            _patch_heads(batches, outcomes)
            rows = _rows(batches, outcomes, decided["running_max_timestamps_ms"], decided["now_ms"])
            if rows:
                await connection.copy_records_to_table("batch", records=rows, columns=_BATCH_COLUMNS)
            return outcomes

        return await self._hot.transact(append)

    async def read(self, requests: Sequence[ReadRequest], *, max_bytes: int) -> list[ReadResult | Refusal]:
        """States and batches of all requests from one snapshot, limits counted in the order given.

        Whole batches only. The first batch found is returned whatever its size; after it, those that fit into both its
        request's `max_bytes` and what is left of the call's. An offset outside the log gives the state without batches.
        UNKNOWN_PARTITION is the only refusal.
        """
        if not requests:
            return []
        rows = await self._cold.fetch(
            _READ_BATCHES,
            [request.partition_key for request in requests],
            [request.offset for request in requests],
            [request.max_bytes for request in requests],
            max_bytes,
        )
        states: dict[int, PartitionState] = {}
        batches: dict[int, list[StoredBatch]] = {}
        for row in rows:
            position: int = row["request_position"]
            if row["base_offset"] is None:
                states[position] = PartitionState(
                    row["log_start_offset"], row["high_watermark"], row["leader_epoch"], row["partition_size_bytes"]
                )
                batches[position] = []
            else:
                batches[position].append(_stored_batch(row))
        return [
            ReadResult(states[position], tuple(batches[position])) if position in states else Refusal.UNKNOWN_PARTITION
            for position in range(1, len(requests) + 1)
        ]

    async def states(self, keys: Iterable[PartitionKey]) -> dict[PartitionKey, PartitionState]:
        """The state of each live partition among `keys`; unknown and deleted ones are absent."""
        rows = await self._hot.fetch(_PARTITION_STATES, list(keys))
        return {
            PartitionKey(row["partition_key"]): PartitionState(
                row["log_start_offset"], row["next_offset"], row["leader_epoch"], row["size_bytes"]
            )
            for row in rows
        }

    async def batch_at_timestamp(
        self, key: PartitionKey, timestamp_ms: int, from_offset: int = 0
    ) -> StoredBatch | None:
        """The first batch that begins at `from_offset` or later and whose head says that it has a record at or after
        `timestamp_ms`; None if there is none."""
        row = await self._cold.fetch_row(_BATCH_AT_TIMESTAMP, key, max(timestamp_ms, 0), from_offset)
        return None if row is None else _stored_batch(row)

    async def batch_of_max_timestamp(self, key: PartitionKey) -> StoredBatch | None:
        """The first batch that holds the greatest timestamp in the log; None if no batch has timestamps."""
        row = await self._cold.fetch_row(_BATCH_OF_GREATEST_TIMESTAMP, key)
        if row is None:
            row = await self._cold.fetch_row(_BATCH_OF_GREATEST_REMAINING_TIMESTAMP, key)
        return None if row is None else _stored_batch(row)

    async def delete_records(self, key: PartitionKey, before_offset: int) -> int | Refusal:
        """Moves the log start up to `before_offset` (−1: the high watermark) and returns it; it never moves back.

        The rows below are removed by retention. OFFSET_OUT_OF_RANGE beyond the high watermark or below −1,
        UNKNOWN_PARTITION.
        """
        row = await self._hot.fetch_row(_RAISE_LOG_START, key, before_offset)
        if row is None:
            return Refusal.UNKNOWN_PARTITION
        log_start_offset: int | None = row["log_start_offset"]
        return Refusal.OFFSET_OUT_OF_RANGE if log_start_offset is None else log_start_offset


def _rows(
    batches: Sequence[NewBatch],
    outcomes: Sequence[Appended | Refusal],
    running_max_timestamps_ms: Sequence[int],
    now_ms: int,
) -> list[tuple[object, ...]]:
    """Rows of the table `batch` for what was accepted, in the order of `_BATCH_COLUMNS`."""
    return [
        (
            batch.partition_key,
            outcome.base_offset,
            outcome.base_offset + batch.record_count - 1,
            batch.max_timestamp_ms,
            running_max_timestamp_ms,
            now_ms if batch.max_timestamp_ms < 0 else None,
            len(batch.records),
            batch.records,
        )
        for batch, outcome, running_max_timestamp_ms in zip(batches, outcomes, running_max_timestamps_ms, strict=True)
        if isinstance(outcome, Appended) and not outcome.duplicate
    ]
