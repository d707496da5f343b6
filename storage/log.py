"""The record log: an index in Postgres, and records whose bytes are stored as they arrived.

The one idea: an append is one transaction for many partitions. In it Postgres decides offsets and duplicates under the
partitions' row locks (`append_chunks` in functions/log.sql; `append_plain` and `append_one` for usual commits) and
writes a row per chunk. This module decides where the bytes are stored. The statement of a small commit also writes the
bytes to Postgres. A large one is written and synced to a segment before its statement, so that Postgres holds no lock
while the disk works. A read is one statement whose cost follows what it returns, and the bytes of the chunks it names.

The module reads only the header of a batch, caches only bytes from files, and notifies no reader. A StorageUnavailable
from `append` says nothing about whether the batches are in the log; a producer that retries with its sequence gets the
right answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import structlog

from storage.append_group import AppendGroup
from storage.byte_store import ByteStore
from storage.chunk_reader import Batches, ChunkReader
from storage.chunks import Chunk, DamagedChunkError, chunk_of
from storage.errors import RecordsUnreadable, StorageUnavailable
from storage.pool import Connection, Database, Row
from storage.queries import statement
from storage.segment_writers import Owner, SegmentWriters
from storage.segments import SegmentDirectory
from storage.turns import ROWS_PER_TURN, in_turns
from storage.types import (
    AbortedTransaction,
    Appended,
    NewBatch,
    PartitionKey,
    PartitionState,
    ReadRequest,
    ReadResult,
    Refusal,
    StoredBatch,
    unregistered,
)

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

INLINE_MAX_BYTES = 64 * 1024
"""Commits up to this size stay inline even if there are segments: one record then costs one statement."""

SPARE_BYTES = 8 * 1024 * 1024
"""How many bytes a read may fetch beyond its limits, because chunks are read whole."""

REPORT_INTERVAL_S = 5.0
"""Interval between log lines about one unreadable object. Consumers ask again and again while a store is away."""
REPORTED_OBJECTS = 1_000

HIGH_WATERMARK = -1
"""Value for `delete_records` that deletes everything up to the high watermark."""

_INLINE_COLUMNS = ("slot", "position", "partition_key", "base_offset", "records")

_APPEND_CHUNKS = statement("append_chunks")
_APPEND_ONE = statement("append_one")
_APPEND_PLAIN = statement("append_plain")
_EXPECTED_SEQUENCES = statement("expected_sequences")
_READ_CHUNKS = statement("read_chunks")
_ABORTED_BETWEEN = statement("aborted_between")
_CHUNKS_BETWEEN = statement("chunks_between")
_PARTITION_STATES = statement("partition_states")
_CHUNK_AT_TIMESTAMP = statement("chunk_at_timestamp")
_GREATEST_TIMESTAMP = statement("greatest_timestamp")
_RAISE_LOG_START = statement("raise_log_start")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of single statements."""

    copy_mean_bytes: int = 64 * 1024
    copy_group_bytes: int = 512 * 1024
    """Groups of at least this size, with at least this mean size of a chunk, are written inline by COPY. The limit on
    the mean is within the measured range of break-even points (16 to 256 KiB). The limit on the group's size is an
    estimate, because COPY takes four round trips and a statement takes one.
    """
    requests: int = 500
    """Number of partitions that one statement reads. Its rows are processed without a pause: this number takes some
    milliseconds.
    """
    aborted: int = 5_000
    """Number of aborted transactions that one read returns. If there are more, the read ends before their records. The
    first batch is an exception.
    """
    batches: int = 5_000
    """Number of batches that one statement returns, not counting the rest of a chunk. Each batch costs some
    microseconds, whether large or small.
    """


BOUNDS = Bounds()


class LogStore:
    """Appends to and reads from the log. Safe for any number of processes on one database.

    With a directory of segments as `store`, commits of more than `inline_max_bytes` go there. With a bucket, bytes move
    to it later (`roller.py`). Every process on the database must have the same store.
    """

    def __init__(
        self,
        database: Database,
        store: ByteStore | None = None,
        owner: Owner = unregistered,
        *,
        inline_max_bytes: int = INLINE_MAX_BYTES,
        bounds: Bounds = BOUNDS,
    ) -> None:
        """`owner` returns the registration of this process' node, which new segments carry."""
        self._bounds = bounds
        self._hot = database.hot
        self._cold = database.cold
        self._guard = database.guard
        self._inline_max_bytes = inline_max_bytes
        self._segments = SegmentWriters(database, store, owner) if isinstance(store, SegmentDirectory) else None
        self.reader = ChunkReader(store)
        self.damaged_chunks = 0
        """Number of requested chunks whose bytes were missing or wrong."""
        self._reported_at: dict[int | None, float] = {}

    async def close(self) -> None:
        """Close the store. No call may be in progress."""
        if self._segments is not None:
            await self._segments.close()
        self.reader.close()

    # --- appending ------------------------------------------------------------------------------------------------

    async def append(self, batches: Sequence[NewBatch], *, wait: bool = True) -> list[Appended | Refusal]:
        """Append the batches in the order given, in one durable transaction; return one outcome per batch.

        When this returns, the `records` of every newly appended batch hold base offset and leader epoch (they must be
        writable). UNKNOWN_PARTITION, OUT_OF_ORDER_SEQUENCE, INVALID_PRODUCER_EPOCH, NOT_IN_TRANSACTION and
        INVALID_TXN_STATE refuse one batch and leave the others. So does PARTITION_BUSY, returned without `wait` if
        another transaction holds the partition. On StorageUnavailable the batches may or may not be in the log.

        Idempotence follows upstream's ProducerStateManager. A lower epoch is refused; a higher one must begin at
        sequence 0. One of the last five batches (epoch, first and last sequence) is answered with its first offset. A
        producer unknown here may begin with any sequence.
        """
        if not batches:
            return []
        group = AppendGroup(batches)
        asked = self._guard.history
        if self._segments is not None and group.size_bytes > self._inline_max_bytes:
            decided, outcomes = await self._append_to_segment(self._segments, group, wait=wait)
        elif (
            group.size_bytes >= self._bounds.copy_group_bytes
            and group.size_bytes >= self._bounds.copy_mean_bytes * len(group.candidates)
        ):  # fmt: skip
            decided = await self._append_by_copy(group, wait=wait)
            outcomes = group.settle(decided)
        else:
            records = [_joined(group, candidate) for candidate in range(len(group.candidates))]
            decided, outcomes = await self._decide(group, wait=wait, records=records)
        if decided["transaction_id"] is not None:
            self._guard.acknowledged(asked, decided["transaction_id"], decided["written_lsn"])
        return outcomes

    async def expected_sequences(
        self, streams: Collection[tuple[PartitionKey, int]]
    ) -> dict[tuple[PartitionKey, int], tuple[int, int]]:
        """Return, for each pair of partition and producer, the producer's epoch and the sequence that must come next.
        Producers that the partition does not know are absent."""
        rows = await self._hot.fetch(
            _EXPECTED_SEQUENCES, [key for key, _ in streams], [producer_id for _, producer_id in streams]
        )
        return {
            (PartitionKey(row["partition_key"]), row["producer_id"]): (row["producer_epoch"], row["next_sequence"])
            for row in rows
        }

    async def _decide(
        self,
        group: AppendGroup,
        *,
        wait: bool,
        object_id: int | None = None,
        position: int | None = None,
        records: Sequence[bytes | bytearray | memoryview] | None = None,
    ) -> tuple[Row, list[Appended | Refusal]]:
        """Decide and write the index by one statement, or by two if the group only looks like a usual one. Return what
        Postgres decided and the outcome of each batch. Nothing was written if the segment is sealed."""
        if not wait:
            if records is not None and (arguments := group.one_arguments(records)) is not None:
                decided = await self._hot.fetch_row(_APPEND_ONE, *arguments)
                assert decided is not None
                if not decided["undecided"]:
                    return decided, group.settle_one(decided)
            elif arguments := group.plain_arguments(object_id=object_id, position=position, records=records):
                decided = await self._hot.fetch_row(_APPEND_PLAIN, *arguments)
                assert decided is not None
                if decided["sealed"]:
                    return decided, []
                if not decided["undecided"]:
                    return decided, group.settle_plain(decided)
        arguments = group.arguments(wait=wait, object_id=object_id, position=position, records=records)
        decided = await self._hot.fetch_row(_APPEND_CHUNKS, *arguments)
        assert decided is not None
        return decided, [] if decided["sealed"] else group.settle(decided)

    async def _append_by_copy(self, group: AppendGroup, *, wait: bool) -> Row:
        async def append(connection: Connection) -> Row:
            decided = await connection.fetchrow(_APPEND_CHUNKS, *group.arguments(wait=wait))
            assert decided is not None
            rows: list[tuple[object, ...]] = []
            for candidate, skipped, size_bytes, base_offset, position in zip(
                decided["chunk_candidates"] or (),
                decided["chunk_skipped"] or (),
                decided["chunk_sizes"] or (),
                decided["chunk_bases"] or (),
                decided["chunk_positions"] or (),
                strict=True,
            ):
                records = _joined(group, candidate - 1)
                if size_bytes != len(records):
                    records = memoryview(records)[skipped : skipped + size_bytes]
                rows.append(
                    (decided["inline_slot"], position, group.partition_key(candidate - 1), base_offset, records)
                )
            if rows:
                await connection.copy_records_to_table("inline_records", records=rows, columns=_INLINE_COLUMNS)
            return decided

        return await self._hot.transact(append)

    async def _append_to_segment(
        self, segments: SegmentWriters, group: AppendGroup, *, wait: bool
    ) -> tuple[Row, list[Appended | Refusal]]:
        """Write and sync the bytes, then decide and write the index. Repeat in another segment if this one was sealed
        because of its age."""
        buffers = [buffer for candidate in range(len(group.candidates)) for buffer in group.buffers(candidate)]
        while True:
            try:
                async with segments.written(buffers, group.size_bytes) as (segment, position):
                    decided, outcomes = await self._decide(
                        group, wait=wait, object_id=segment.object_id, position=position
                    )
            except OSError as error:
                raise StorageUnavailable(f"the log's directory cannot be written: {error}") from error
            if not decided["sealed"]:
                return decided, outcomes
            segments.retire(segment)

    # --- reading --------------------------------------------------------------------------------------------------

    async def read(self, requests: Sequence[ReadRequest], *, max_bytes: int) -> list[ReadResult | Refusal]:
        """Return states and batches of all requests, with limits counted in the order given. Each `Bounds.requests`
        consecutive requests come from one snapshot.

        Only whole batches are returned, and no more than about `Bounds.batches` of one statement. The first batch found
        is returned even if it exceeds the limits. After it, only batches that fit into both their request's `max_bytes`
        and the rest of the call's limit. An offset outside the log gives the state without batches. UNKNOWN_PARTITION
        refuses a request; DAMAGED refuses one at whose offset the bytes are missing or wrong.
        """
        asked = self._guard.history
        results: list[ReadResult | Refusal] = []
        remaining_bytes = max_bytes
        returned_any = False
        leaving_out: list[int] = []
        for begin in range(0, len(requests), self._bounds.requests):
            piece = requests[begin : begin + self._bounds.requests]
            states_only = returned_any and remaining_bytes <= 0
            states, aborting, found, batches = await self._read(piece, remaining_bytes, states_only=states_only)
            if any(isinstance(result, DamagedChunkError) for result in batches):
                # Compaction or the roller may have moved the bytes since the index was read. Or they are damaged, and
                # what lies before them in joined chunks can still be read.
                states, aborting, found, batches = await self._read(
                    piece, remaining_bytes, states_only=states_only, joined=False
                )
            per_request: list[list[tuple[Chunk, Batches | DamagedChunkError]]] = [[] for _ in piece]
            for (position, chunk), result in zip(found, batches, strict=True):
                per_request[position].append((chunk, result))
            leaving_out += [begin + position for position in aborting]
            for request, state, chunks in zip(piece, states, per_request, strict=True):
                if state is None:
                    results.append(Refusal.UNKNOWN_PARTITION)
                    continue
                end_offset = state.last_stable_offset if request.committed else state.high_watermark
                taken, damaged = self._take(request, end_offset, chunks, remaining_bytes, returned_any=returned_any)
                remaining_bytes -= sum(len(batch.records) for batch in taken)
                returned_any = returned_any or bool(taken)
                results.append(Refusal.DAMAGED if damaged and not taken else ReadResult(state, tuple(taken)))
        if leaving_out:
            results = await self._with_aborted(requests, results, leaving_out)
        self._guard.require(asked)
        return results

    async def _with_aborted(
        self, requests: Sequence[ReadRequest], results: list[ReadResult | Refusal], leaving_out: Sequence[int]
    ) -> list[ReadResult | Refusal]:
        """Add the aborted transactions to the results at the positions `leaving_out`.

        This is a statement of its own. It is safe: a transaction that ends after the batches were read began at or
        behind the last stable offset of that read. If retention has removed an aborted transaction in the meantime, the
        requested records lie below the log start by now.
        """
        asking = [
            (index, result)
            for index in leaving_out
            if isinstance(result := results[index], ReadResult) and result.batches
        ]
        if not asking:
            return results
        keys = [requests[index].partition_key for index, _ in asking]
        offsets = [requests[index].offset for index, _ in asking]
        ends = [result.batches[-1].last_offset + 1 for _, result in asking]
        most = self._bounds.aborted + len(asking)
        rows = await self._cold.fetch(_ABORTED_BETWEEN, keys, offsets, ends, most)
        if sum(len(row["first_offsets"]) for row in rows) == most:
            ends = _shortened(asking, ends, rows[-1])
            rows = await self._cold.fetch(_ABORTED_BETWEEN, keys, offsets, ends, None)
        log_starts: dict[int, int] = {}
        found: dict[int, list[AbortedTransaction]] = {}
        taken = 0
        for row in rows:
            position: int = row["request_position"]
            log_starts[position] = row["log_start_offset"]
            producer_ids, first_offsets = row["producer_ids"], row["first_offsets"]
            if producer_ids[0] is None:
                continue
            found.setdefault(position, []).extend(map(AbortedTransaction, producer_ids, first_offsets))
            taken += len(producer_ids)
            if taken >= ROWS_PER_TURN:
                taken = 0
                await asyncio.sleep(0)
        for position, ((index, result), end_offset) in enumerate(zip(asking, ends, strict=True), 1):
            log_start = log_starts.get(position)
            if log_start is None:
                results[index] = Refusal.UNKNOWN_PARTITION
            elif requests[index].offset < log_start:
                results[index] = ReadResult(_behind(result.state, log_start), ())
            else:
                batches = result.batches
                if batches[-1].base_offset >= end_offset:
                    batches = tuple(batch for batch in batches if batch.base_offset < end_offset)
                results[index] = ReadResult(result.state, batches, tuple(found.get(position, ())))
        return results

    def _take(
        self,
        request: ReadRequest,
        end_offset: int,
        chunks: list[tuple[Chunk, Batches | DamagedChunkError]],
        remaining_bytes: int,
        *,
        returned_any: bool,
    ) -> tuple[list[StoredBatch], bool]:
        """Select the batches of these chunks that answer the request; return whether they end at a damaged chunk."""
        limit_bytes = min(request.max_bytes, remaining_bytes)
        taken: list[StoredBatch] = []
        for chunk, held in chunks:
            if isinstance(held, DamagedChunkError):
                self._report(chunk, held)
                return taken, True
            for batch in held:
                if batch.last_offset < request.offset:
                    continue
                if batch.base_offset >= end_offset:
                    return taken, False
                size_bytes = len(batch.records)
                if (size_bytes > limit_bytes or limit_bytes <= 0) and (returned_any or taken):
                    return taken, False
                taken.append(batch)
                limit_bytes -= size_bytes
        return taken, False

    async def _read(
        self, requests: Sequence[ReadRequest], max_bytes: int, *, states_only: bool, joined: bool = True
    ) -> tuple[list[PartitionState | None], list[int], list[tuple[int, Chunk]], list[Batches | DamagedChunkError]]:
        """Read the index and the bytes for these requests. Inline chunks that follow each other are one if `joined`.

        Return per request its state, None if there is no such partition; the positions of requests that may have to
        omit aborted records; the chunks with their request's position; and the batches of each chunk.
        """
        rows = await self._cold.fetch(
            _READ_CHUNKS,
            [request.partition_key for request in requests],
            # No log begins below offset 0.
            [-1 if states_only else request.offset for request in requests],
            [request.max_bytes for request in requests],
            [request.committed for request in requests],
            max_bytes,
            SPARE_BYTES,
            self._bounds.batches,
            joined,
        )
        states: list[PartitionState | None] = [None] * len(requests)
        aborting: list[int] = []
        chunks: list[tuple[int, Chunk]] = []
        async for row in in_turns(rows):
            position: int = row["request_position"] - 1
            if row["base_offset"] is None:
                states[position] = PartitionState(
                    row["log_start_offset"],
                    row["high_watermark"],
                    row["last_stable_offset"],
                    row["leader_epoch"],
                    row["partition_size_bytes"],
                )
                if row["any_aborted"]:
                    aborting.append(position)
            else:
                chunks.append((position, chunk_of(row)))
        return states, aborting, chunks, await self.reader.batches([chunk for _, chunk in chunks])

    def _report(self, chunk: Chunk, error: DamagedChunkError) -> None:
        self.damaged_chunks += 1
        now = time.monotonic()
        if now - self._reported_at.get(chunk.object_id, -REPORT_INTERVAL_S) < REPORT_INTERVAL_S:
            return
        if len(self._reported_at) >= REPORTED_OBJECTS:
            self._reported_at.clear()
        self._reported_at[chunk.object_id] = now
        logger.error(
            "records cannot be read: run sluice check",
            partition_key=chunk.partition_key,
            base_offset=chunk.base_offset,
            last_offset=chunk.last_offset,
            object_id=chunk.object_id,
            position=chunk.position,
            reason=str(error),
        )

    async def states(self, keys: Iterable[PartitionKey]) -> dict[PartitionKey, PartitionState]:
        """Return the state of each live partition among `keys`. Unknown and deleted partitions are absent."""
        rows = await self._hot.fetch(_PARTITION_STATES, list(keys))
        return {
            PartitionKey(row["partition_key"]): PartitionState(
                row["log_start_offset"],
                row["high_watermark"],
                row["last_stable_offset"],
                row["leader_epoch"],
                row["size_bytes"],
            )
            for row in rows
        }

    async def chunks_between(self, key: PartitionKey, from_offset: int, to_offset: int) -> list[Chunk]:
        """Return the rows of the index that lie at least in part within these offsets, both included."""
        rows = await self._cold.fetch(_CHUNKS_BETWEEN, key, from_offset, to_offset)
        return [chunk_of(row) for row in rows]

    async def batch_at_timestamp(
        self, key: PartitionKey, timestamp_ms: int, from_offset: int = 0
    ) -> StoredBatch | None:
        """Return the first batch still in the log that begins at `from_offset` or later and whose head names a record
        at or after `timestamp_ms`.

        None if there is no such batch. Raise RecordsUnreadable if its chunk is unreadable.
        """
        timestamp_ms = max(timestamp_ms, 0)
        at_offset = from_offset
        while True:
            row = await self._cold.fetch_row(_CHUNK_AT_TIMESTAMP, key, timestamp_ms, at_offset)
            if row is None:
                return None
            chunk = chunk_of(row)
            for batch in await self._batches_of(chunk):
                if (
                    batch.max_timestamp_ms >= timestamp_ms
                    and batch.base_offset >= from_offset
                    and batch.last_offset >= row["log_start_offset"]
                ):
                    return batch
            at_offset = chunk.last_offset + 1

    async def batches_of_max_timestamp(self, key: PartitionKey) -> list[StoredBatch]:
        """Return the batches of which one holds the first record with the greatest timestamp in the log, in offset
        order. Empty if no batch has timestamps.

        The log may begin inside the first of two, below the record that gave this batch's head its timestamp.
        """
        row = await self._cold.fetch_row(_GREATEST_TIMESTAMP, key)
        if row is None:
            return []
        log_start_offset: int = row["log_start_offset"]
        timestamp_ms: int = -1 if row["max_timestamp_ms"] is None else row["max_timestamp_ms"]
        divided: list[StoredBatch] = []
        first: StoredBatch | None = None
        for chunk in await self.chunks_between(key, log_start_offset, log_start_offset):
            # Only the chunk that contains the log start may be partly below it.
            for batch in await self._batches_of(chunk):
                if batch.base_offset < log_start_offset <= batch.last_offset:
                    divided = [batch]
                elif batch.last_offset >= log_start_offset and batch.max_timestamp_ms > (
                    timestamp_ms - 1 if first is None else first.max_timestamp_ms
                ):
                    first = batch
        if first is None and timestamp_ms >= 0:
            first = await self.batch_at_timestamp(key, timestamp_ms, log_start_offset)
        whole = [] if first is None else [first]
        return [batch for batch in divided + whole if batch.max_timestamp_ms >= 0]

    async def _batches_of(self, chunk: Chunk) -> Batches:
        (result,) = await self.reader.batches([chunk])
        if isinstance(result, DamagedChunkError):
            self._report(chunk, result)
            raise RecordsUnreadable(f"records of partition {chunk.partition_key} cannot be read: {result}")
        return result

    async def delete_records(self, key: PartitionKey, before_offset: int) -> int | Refusal:
        """Move the log start up to `before_offset` (−1: the high watermark) and return it; it never moves back.

        Retention removes the chunks below it. Return OFFSET_OUT_OF_RANGE for an offset beyond the high watermark or
        below −1, or UNKNOWN_PARTITION.
        """
        row = await self._hot.fetch_row(_RAISE_LOG_START, key, before_offset)
        if row is None:
            return Refusal.UNKNOWN_PARTITION
        log_start_offset: int | None = row["log_start_offset"]
        return Refusal.OFFSET_OUT_OF_RANGE if log_start_offset is None else log_start_offset


def _shortened(asking: Sequence[tuple[int, ReadResult]], ends: Sequence[int], last: Row) -> list[int]:
    """Return the offset at which each answer ends if there are more aborted transactions than one read returns, and
    `last` is the first one omitted.

    The records behind that offset wait for the next read, except for the first batch of all.
    """
    cut_at: int = last["request_position"]
    cut_offset: int | None = last["first_offsets"][-1]
    cut_end = ends[cut_at - 1] if cut_offset is None else min(cut_offset, ends[cut_at - 1])
    shortened = [*ends[: cut_at - 1], cut_end, *([-1] * (len(ends) - cut_at))]
    shortened[0] = max(shortened[0], asking[0][1].batches[0].last_offset + 1)
    return shortened


def _behind(state: PartitionState, log_start_offset: int) -> PartitionState:
    """Return the state after the log start has moved."""
    return replace(
        state,
        log_start_offset=log_start_offset,
        high_watermark=max(state.high_watermark, log_start_offset),
        last_stable_offset=max(state.last_stable_offset, log_start_offset),
    )


def _joined(group: AppendGroup, candidate: int) -> bytes | bytearray | memoryview:
    buffers = group.buffers(candidate)
    return buffers[0] if len(buffers) == 1 else b"".join(buffers)
