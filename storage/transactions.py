"""Transactional producers, and the partitions and groups that their transactions have enlisted.

The one idea: a producer's transaction ends in one transaction of Postgres. The markers in every partition, the offsets
of every group and the producer's row become visible together. So a crash leaves nothing half-done, and any node may do
it. A large transaction ends in several, so that none locks its partitions for long: the first writes down how it ends,
and any node goes on with the next partitions. Each partition's share becomes visible at once. A caller reads a row,
decides by its values, and writes by the revision of that row. If another node was faster, nothing is written and the
caller decides anew.

It does not decide (`gateway/coordinator/transactions.py` does), and knows of a marker only that it is a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import repeat
from typing import NamedTuple, cast
from uuid import UUID

from storage.chunks import write_head
from storage.errors import TransactionTooLarge
from storage.pool import Database, Row
from storage.queries import statement
from storage.text import loaded, stored
from storage.turns import in_turns
from storage.types import PartitionKey


@dataclass(frozen=True, slots=True)
class ProducerRecord:
    """Row of a transactional id. `state`: Empty, Ongoing, CompleteCommit or CompleteAbort; while partitions of a
    large transaction are still to be marked, PrepareCommit or PrepareAbort."""

    producer_id: int
    producer_epoch: int
    last_producer_epoch: int
    previous_producer_id: int
    timeout_ms: int
    state: str


class Ending(NamedTuple):
    """Decided end of a transaction that has partitions without its marker."""

    producer_id: int
    marker: bytes
    committed: bool


@dataclass(frozen=True, slots=True)
class StoredProducer:
    """Row of a producer as it was read. `revision` 0: there is no row."""

    transactional_id: str
    revision: int = 0
    record: ProducerRecord | None = None
    started_ms: int | None = None
    """Begin of the ongoing transaction, by Postgres' clock (Unix ms)."""
    last_started_ms: int | None = None
    """Begin of the last transaction that has ended; None: none since the producer was initialized."""
    ending: Ending | None = None
    """None: no decided end is still to be carried out."""

    @property
    def enlisted_id(self) -> int | None:
        """The producer id under which the ongoing transaction has enlisted partitions; None: there is no transaction.
        The record has another id if the end is decided and the epochs of this one are used up."""
        if self.record is None or self.started_ms is None:
            return None
        return self.record.producer_id if self.ending is None else self.ending.producer_id


@dataclass(frozen=True, slots=True)
class RecordedProducer:
    """Row of a producer with its times, for read-only callers: Unix ms, by Postgres' clock."""

    transactional_id: str
    record: ProducerRecord
    updated_ms: int
    enlisted_id: int | None
    started_ms: int | None
    """Time at which the transaction began; None: no transaction is open."""
    last_started_ms: int | None
    """Begin of the last transaction that has ended; None: none since the producer was initialized."""


class OverdueTransaction(NamedTuple):
    """A transaction that has exceeded its timeout. `started_ms` identifies it, because the same id may begin another
    one later.
    """

    transactional_id: str
    started_ms: int
    started_at: datetime
    """The same time, without rounding to milliseconds."""


@dataclass(frozen=True, slots=True)
class ListedProducer:
    transactional_id: str
    producer_id: int
    state: str
    begun_ms: int | None
    """Time since its last transaction began, which may be over; None: no transaction since it was initialized."""


@dataclass(frozen=True, slots=True)
class TransactionPartition:
    topic: str
    topic_id: UUID
    partition_index: int
    partition_key: PartitionKey
    first_offset: int | None
    """First offset that the transaction appended; None: it appended nothing."""


class AppendedMarker(NamedTuple):
    """Data of a durable marker that a reader needs."""

    partition_key: PartitionKey
    base_offset: int
    log_start_offset: int
    leader_epoch: int
    last_stable_offset: int
    first_offset: int | None
    """First offset that the transaction had appended to the partition; None: it appended nothing."""
    marker: bytes
    """Bytes of the marker, as the caller passed them."""

    @property
    def records(self) -> bytearray:
        """The marker with its offset, as it is in the log."""
        records = bytearray(self.marker)
        write_head(records, self.base_offset, self.leader_epoch)
        return records


@dataclass(frozen=True, slots=True)
class EndedTransaction:
    markers: tuple[AppendedMarker, ...]
    group_ids: tuple[str, ...]
    """Groups with offsets that were committed in the transaction."""
    has_more: bool = False
    """True if partitions are left to mark: `StoredProducer.ending`."""


@dataclass(frozen=True, slots=True)
class ProducerInPartition:
    """A producer as one partition knows it, and its transaction, from one statement."""

    read: StoredProducer | None
    """None: no transactional id has the producer's id now."""
    is_enlisted: bool
    """True if its transaction has enlisted the partition."""
    remembered_epoch: int
    """Latest epoch with which it appended to the partition; -1: the partition does not remember it."""


@dataclass(frozen=True, slots=True)
class RememberedProducer:
    """State of a producer in a partition. `open_since_offset`: begin of its open transaction; None: it has no open
    transaction."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    appended_ms: int
    open_since_offset: int | None
    is_transactional: bool
    """True if the producer belongs to a transactional id."""


MAX_SIZE = 20_000
MARKED_AT_A_TIME = 500
"""Number of partitions whose rows one statement locks, for some 50 ms. Appends to these partitions wait for it."""
_EPOCH = datetime.fromtimestamp(0, UTC)


class TransactionStore:
    """Reads and writes transactional producers; safe for any number of processes."""

    def __init__(
        self, database: Database, *, max_size: int = MAX_SIZE, marked_at_a_time: int = MARKED_AT_A_TIME
    ) -> None:
        """Use `database`; `max_size` limits the partitions and groups that one transaction may enlist."""
        self._hot = database.hot
        self._cold = database.cold
        self._guard = database.guard
        self._max_size = max_size
        self._marked_at_a_time = marked_at_a_time

    async def read(self, transactional_id: str) -> StoredProducer:
        """Read the producer of a transactional id; revision 0 if the id has never been used."""
        return (await self.read_many((transactional_id,)))[transactional_id]

    async def read_many(self, transactional_ids: Collection[str]) -> Mapping[str, StoredProducer]:
        """Read the producers by id, including ids without a row."""
        rows = await self._hot.fetch(
            statement("transactional_producers"), [stored(transactional_id) for transactional_id in transactional_ids]
        )
        found = {transactional_id: StoredProducer(transactional_id) for transactional_id in transactional_ids}
        for row in rows:
            transactional_id = loaded(row["transactional_id"])
            found[transactional_id] = _stored_producer(transactional_id, row)
        return found

    async def recorded(self, transactional_ids: Collection[str]) -> list[RecordedProducer]:
        """Return the rows of those ids that exist."""
        rows = await self._cold.fetch(
            statement("transactional_producers"), [stored(transactional_id) for transactional_id in transactional_ids]
        )
        read = [(_stored_producer(loaded(row["transactional_id"]), row), row["updated_ms"]) for row in rows]
        return [
            RecordedProducer(
                each.transactional_id,
                each.record,
                updated_ms,
                each.enlisted_id,
                each.started_ms,
                each.last_started_ms,
            )
            for each, updated_ms in read
            if each.record is not None
        ]

    async def save(self, read: StoredProducer, record: ProducerRecord) -> bool:
        """Write a row that has no transaction under way, before or after. Return False if `read` is outdated."""
        saved = await self._hot.fetch_value(
            statement("save_transactional_producer"), stored(read.transactional_id), read.revision, *_columns(record)
        )
        return bool(saved)

    async def confirm(self, read: StoredProducer) -> bool:
        """Wait until the row is as durable as a commit. Return False if `read` is outdated.

        Postgres ends a cancelled wait for a synchronous standby by a commit that others see. So the row may say that a
        transaction has ended, although a failover would lose the end.
        """
        return bool(
            await self._hot.fetch_value(
                statement("confirm_transactional_producer"), stored(read.transactional_id), read.revision
            )
        )

    async def add(
        self,
        read: StoredProducer,
        partition_keys: Sequence[PartitionKey],
        group_ids: Sequence[str] = (),
        *,
        begins_at_zero: bool = False,
    ) -> bool:
        """Enlist partitions and groups in the transaction, which begins unless it is under way. Return False if `read`
        is outdated.

        Raise TransactionTooLarge, and enlist none of them, if the transaction would exceed the limit. `begins_at_zero`:
        the producer numbers batches anew in each transaction, so a partition that does not know the producer waits for
        the batch with sequence 0.
        """
        added = await self._hot.fetch_value(
            statement("add_to_transaction"),
            stored(read.transactional_id),
            read.revision,
            list(partition_keys),
            [stored(group_id) for group_id in group_ids],
            begins_at_zero,
            self._max_size,
        )
        if added is None:
            raise TransactionTooLarge(f"a transaction may enlist {self._max_size} partitions and groups")
        return bool(added)

    async def end(
        self, read: StoredProducer, record: ProducerRecord, marker: bytes, *, committed: bool, timestamp_ms: int
    ) -> EndedTransaction | None:
        """End the ongoing transaction: write `marker` to its partitions, settle its offsets, and replace the row by
        `record`.

        If it has more partitions than are marked at a time, `continue_end` marks the others. Return None if `read` is
        outdated. On StorageUnavailable the transaction may or may not have ended.
        """
        asked = self._guard.history
        row = await self._hot.fetch_row(
            statement("end_transaction"),
            stored(read.transactional_id),
            read.revision,
            *_columns(record),
            committed,
            marker,
            timestamp_ms,
            self._marked_at_a_time,
        )
        return self._ended(row, marker, asked)

    async def continue_end(self, read: StoredProducer) -> EndedTransaction | None:
        """Mark the next partitions of a transaction whose end is decided. Return None if `read` is outdated.

        On StorageUnavailable the partitions may or may not be marked.
        """
        assert read.ending is not None
        asked = self._guard.history
        row = await self._hot.fetch_row(
            statement("continue_end"), stored(read.transactional_id), read.revision, self._marked_at_a_time
        )
        return self._ended(row, read.ending.marker, asked)

    def _ended(self, row: Row | None, marker: bytes, asked: int) -> EndedTransaction | None:
        assert row is not None
        if not row["ended"]:
            return None
        if row["transaction_id"] is not None:
            self._guard.acknowledged(asked, row["transaction_id"], row["written_lsn"])
        markers = map(
            AppendedMarker,
            cast(list[PartitionKey], row["partition_keys"] or ()),
            cast(list[int], row["base_offsets"] or ()),
            cast(list[int], row["log_start_offsets"] or ()),
            cast(list[int], row["leader_epochs"] or ()),
            cast(list[int], row["last_stable_offsets"] or ()),
            cast(list[int | None], row["first_offsets"] or ()),
            repeat(marker),
        )
        group_ids = tuple(loaded(group) for group in row["group_ids"] or ())
        return EndedTransaction(tuple(markers), group_ids, row["has_more"])

    async def partitions(self, producer_ids: Collection[int]) -> Mapping[int, list[TransactionPartition]]:
        """Return the partitions that each producer's transaction has enlisted, by topic and partition, without
        deleted topics."""
        rows = await self._cold.fetch(statement("partitions_in_transaction"), list(producer_ids))
        found: dict[int, list[TransactionPartition]] = {}
        async for row in in_turns(rows):
            found.setdefault(row["producer_id"], []).append(
                TransactionPartition(
                    loaded(row["topic"]),
                    row["topic_id"],
                    row["partition_index"],
                    PartitionKey(row["partition_key"]),
                    row["first_offset"],
                )
            )
        return found

    async def groups(self, producer_ids: Collection[int]) -> Mapping[int, list[str]]:
        """Return the groups whose offsets each producer's transaction has enlisted."""
        rows = await self._cold.fetch(statement("groups_in_transaction"), list(producer_ids))
        found: dict[int, list[str]] = {}
        async for row in in_turns(rows):
            found.setdefault(row["producer_id"], []).append(loaded(row["group_id"]))
        return found

    async def list_behind(self, transactional_id: str, limit: int) -> list[ListedProducer]:
        """List the next producers behind a transactional id, in the order of their ids."""
        rows = await self._cold.fetch(statement("all_transactional_producers"), stored(transactional_id), limit)
        return [
            ListedProducer(loaded(row["transactional_id"]), row["producer_id"], row["state"], row["begun_ms"])
            for row in rows
        ]

    async def overdue(self, limit: int, behind: OverdueTransaction | None = None) -> list[OverdueTransaction]:
        """List the next transactions, the oldest first, that have exceeded their timeout by Postgres' clock, or
        whose decided end no node is carrying out."""
        started_at, transactional_id = (_EPOCH, "") if behind is None else (behind.started_at, behind.transactional_id)
        rows = await self._hot.fetch(statement("overdue_transactions"), started_at, stored(transactional_id), limit)
        return [
            OverdueTransaction(loaded(row["transactional_id"]), row["started_ms"], row["started_at"]) for row in rows
        ]

    async def expire(self, idle_ms: int, limit: int) -> int:
        """Remove ids that have begun no transaction for `idle_ms`; return how many.

        Upstream: transactional.id.expiration.ms.
        """
        return int(await self._cold.fetch_value(statement("expire_transactional_producers"), idle_ms, limit))

    async def in_partition(self, producer_id: int, partition_key: PartitionKey) -> ProducerInPartition:
        """Return the state of a producer and of its transaction with respect to one partition."""
        row = await self._hot.fetch_row(statement("producer_in_partition"), producer_id, partition_key)
        assert row is not None
        name = row["transactional_id"]
        return ProducerInPartition(
            None if name is None else _stored_producer(loaded(name), row),
            row["is_enlisted"],
            -1 if row["remembered_epoch"] is None else row["remembered_epoch"],
        )

    async def producers(self, partition_key: PartitionKey, limit: int, *, behind: int = -1) -> list[RememberedProducer]:
        """Return the next producers that the partition remembers, by id, at most `limit`."""
        rows = await self._cold.fetch(statement("producers_of"), partition_key, behind, limit)
        return [
            RememberedProducer(
                row["producer_id"],
                row["producer_epoch"],
                (row["next_sequence"] - 1) % 2**31,
                row["appended_ms"],
                row["first_offset"],
                row["is_transactional"],
            )
            for row in rows
        ]


def _stored_producer(transactional_id: str, row: Row) -> StoredProducer:
    return StoredProducer(
        transactional_id,
        row["revision"],
        ProducerRecord(
            row["producer_id"],
            row["producer_epoch"],
            row["last_producer_epoch"],
            row["previous_producer_id"],
            row["timeout_ms"],
            row["state"],
        ),
        row["started_ms"],
        row["last_started_ms"],
        None
        if row["ending_producer_id"] is None
        else Ending(row["ending_producer_id"], row["ending_marker"], row["state"] == "PrepareCommit"),
    )


def _columns(record: ProducerRecord) -> tuple[object, ...]:
    return (
        record.producer_id,
        record.producer_epoch,
        record.last_producer_epoch,
        record.previous_producer_id,
        record.timeout_ms,
        record.state,
    )
