"""Producers that write in transactions, directly to the stores, and a reader that skips aborted records."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protocol.records import ControlType, Record, build_batch, control_type_of, end_marker, iter_records, read_head
from storage.log import LogStore
from storage.pool import Database
from storage.transactions import EndedTransaction, ProducerRecord, TransactionStore
from storage.types import AbortedTransaction, NewBatch, PartitionKey, ReadRequest, ReadResult, StoredBatch
from tests.storage.batches import append

Pair = tuple[bytes | None, bytes | None]


@dataclass
class Producer:
    """One transactional id, with one constant producer id and epoch. A transaction begins with the first append."""

    database: Database
    log: LogStore
    producer_id: int
    timestamp_ms: int = 1_000
    _sequences: dict[PartitionKey, int] = field(default_factory=dict[PartitionKey, int])

    @property
    def transactional_id(self) -> str:
        return f"transactional-{self.producer_id}"

    async def take_in(self, *keys: PartitionKey) -> None:
        """Enlist partitions, as AddPartitionsToTxn does."""
        store = TransactionStore(self.database)
        read = await store.read(self.transactional_id)
        if read.record is None:
            assert await store.save(read, self._record("Empty"))
            read = await store.read(self.transactional_id)
        assert await store.add(read, keys)

    def batch(self, key: PartitionKey, *pairs: Pair) -> NewBatch:
        """The next batch of the producer in the partition, with a record for each (key, value)."""
        sequence = self._sequences.get(key, 0)
        self._sequences[key] = sequence + len(pairs)
        records = build_batch(
            [Record(number, self.timestamp_ms, *pair) for number, pair in enumerate(pairs)],
            producer_id=self.producer_id,
            producer_epoch=0,
            base_sequence=sequence,
            is_transactional=True,
        )
        return NewBatch(
            key,
            bytearray(records),
            len(pairs),
            self.timestamp_ms,
            self.producer_id,
            0,
            sequence,
            is_transactional=True,
        )

    async def append(self, key: PartitionKey, *pairs: Pair) -> int:
        """Append a batch in the transaction, which enlists the partition, and return its base offset."""
        await self.take_in(key)
        (base_offset,) = await append(self.log, self.batch(key, *pairs))
        return base_offset

    async def end(self, *, committed: bool) -> EndedTransaction:
        """Commit or abort the open transaction in every partition."""
        store = TransactionStore(self.database)
        read = await store.read(self.transactional_id)
        marker = end_marker(
            ControlType.COMMIT if committed else ControlType.ABORT,
            producer_id=self.producer_id,
            producer_epoch=0,
            timestamp_ms=self.timestamp_ms,
        )
        ended = await store.end(
            read,
            self._record("CompleteCommit" if committed else "CompleteAbort"),
            marker,
            committed=committed,
            timestamp_ms=self.timestamp_ms,
        )
        assert ended is not None
        return ended

    def _record(self, state: str) -> ProducerRecord:
        return ProducerRecord(self.producer_id, 0, -1, -1, 60_000, state)


def plain_batch(key: PartitionKey, *pairs: Pair, timestamp_ms: int = 1_000) -> NewBatch:
    """Make a batch outside any transaction."""
    records = build_batch([Record(number, timestamp_ms, *pair) for number, pair in enumerate(pairs)])
    return NewBatch(key, bytearray(records), len(pairs), timestamp_ms)


def committed_records(batches: Iterable[StoredBatch], aborted: Iterable[AbortedTransaction]) -> list[Record]:
    """Return the records of one answer that a consumer with read_committed delivers.

    A producer's records are left out from where a transaction of the list begins up to the next marker that says ABORT.
    Upstream: CompletedFetch.nextFetchedRecord.
    """
    waiting = [(transaction.first_offset, transaction.producer_id) for transaction in aborted]
    heapq.heapify(waiting)
    active: set[int] = set()
    records: list[Record] = []
    for batch in batches:
        head = read_head(batch.records)
        while waiting and waiting[0][0] <= head.last_offset:
            active.add(heapq.heappop(waiting)[1])
        if head.is_control:
            if control_type_of(batch.records) is ControlType.ABORT:
                active.discard(head.producer_id)
        elif not (head.is_transactional and head.producer_id in active):
            records += iter_records(batch.records)
    return records


async def read_committed(
    log: LogStore, key: PartitionKey, offset: int = 0, *, max_bytes: int = 10**8
) -> tuple[list[Record], Sequence[ReadResult]]:
    """Return all that such a consumer receives from `offset` on, and the answers that contained it."""
    records: list[Record] = []
    answers: list[ReadResult] = []
    while True:
        (result,) = await log.read([ReadRequest(key, offset, max_bytes, committed=True)], max_bytes=max_bytes)
        assert isinstance(result, ReadResult)
        if offset < result.state.log_start_offset:
            offset = result.state.log_start_offset
            continue
        if not result.batches:
            return records, answers
        answers.append(result)
        records += [each for each in committed_records(result.batches, result.aborted) if each.offset >= offset]
        offset = result.batches[-1].last_offset + 1
