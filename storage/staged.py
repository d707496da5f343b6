"""Read what user transactions have staged (storage/sql_door), and append it to the log exactly once.

The one idea: a staged transaction has a place, `staged_commit.seq`, which it drew while it committed. One session at a
time owns the staged records, by a lock that ends with the session. It appends transactions in the order of their places
and deletes them in the same Postgres transaction. So a crash at any point leaves a record either staged or appended.
The records of a large transaction are read and written in pieces, so that they need little memory. All of it is one
Postgres transaction, which locks the partitions only at its end (`written_chunks.py`).

A place is drawn a moment before it becomes visible, so a later place may be visible first. A place that was skipped is
a gap: it is looked up by itself until it appears, or until every transaction that could have drawn it has ended. The
search so never walks over rows that were deleted, which a long transaction of some user keeps from being vacuumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from uuid import UUID

from storage.append_group import AppendGroup
from storage.errors import StorageError
from storage.pool import APPLICATION_NAME, SESSION_SETTINGS, Database, Row, connect, translated_errors
from storage.queries import statement
from storage.types import Appended, NewBatch, Refusal
from storage.written_chunks import Grown, WrittenChunks

CHANNEL = "sluice_staged"
"""A transaction with staged records committed while no relay polled."""

TRANSACTIONS_AT_ONCE = 2_000
RECORDS_AT_ONCE = 10_000
BYTES_AT_ONCE = 8 * 1024 * 1024
"""Bounds of one statement. A larger transaction is read and written in pieces of these sizes."""
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""How long a postponed transaction waits, doubled each time."""

RECENT_PLACES = 1_000
"""Places below the last that a new owner looks up one by one: more than a server has sessions that commit at once."""
YOUNG_GAP_S = 1.0
OLD_GAP_INTERVAL_S = 0.5
DEEP_LOOK_INTERVAL_S = 30.0
"""Interval of looks at all places, until every transaction has ended that was running when the owner began."""
MAX_GAPS = 10_000

TIMEOUT_S = 15

_AWAKE, _ASLEEP = 2, 1


class StagedTransaction(NamedTuple):
    """A committed transaction whose records wait to be appended."""

    seq: int
    xid: int
    record_count: int
    """At most RECORDS_AT_ONCE + 1 are counted."""
    size_bytes: int
    """At least the bytes of the counted records."""
    creates: bool
    """True if a topic of the counted records did not exist."""

    @property
    def is_small(self) -> bool:
        """True if one append takes all records."""
        return self.record_count <= RECORDS_AT_ONCE and self.size_bytes <= BYTES_AT_ONCE


class StagedRecord(NamedTuple):
    """One record as its transaction staged it. `topic_id` is None if the topic did not exist."""

    xid: int
    position: int
    topic_id: UUID | None
    topic: str | None
    partition_index: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


@dataclass(slots=True)
class _Gap:
    since_s: float
    looked_s: float
    bound: int | None = None
    """Transactions from this one on began after the gap was found."""


class StagedRecords:
    """One session that relays staged records while it owns them. Every method raises storage errors."""

    def __init__(self, database: Database, connection: Any) -> None:
        self._connection = connection
        self._guard = database.guard
        self._last_seq = 0
        self._gaps: dict[int, _Gap] = {}
        self._waiting: dict[int, StagedTransaction] = {}
        self._postponed: dict[int, tuple[float, float]] = {}
        """Maps a transaction's xid to the time until which it waits, and to the length of that wait."""
        self._deep_until: int | None = None
        self._deep_s = 0.0

    @classmethod
    async def open(cls, database: Database, notified: Callable[[], None]) -> StagedRecords:
        """Open the session. `notified` is called on the event loop when a transaction commits while no relay polls."""
        async with translated_errors():
            connection = await connect(
                database.url,
                {
                    **SESSION_SETTINGS,
                    "application_name": f"{APPLICATION_NAME} relay",
                    "lock_timeout": "5000",
                    "statement_timeout": str(TIMEOUT_S * 1000),
                    "idle_in_transaction_session_timeout": "60000",
                    "idle_session_timeout": "0",
                    "transaction_timeout": "0",
                },
                timeout=TIMEOUT_S,
                command_timeout=TIMEOUT_S + 2,
            )

        def heard(_connection: object, _pid: int, _channel: str, _payload: str) -> None:
            notified()

        try:
            async with translated_errors():
                await connection.add_listener(CHANNEL, heard)
        except BaseException:
            connection.terminate()
            raise
        return cls(database, connection)

    def close(self) -> None:
        """End the session, and with it the ownership."""
        self._connection.terminate()

    async def try_own(self) -> bool:
        """Become the owner if no other session is the owner. Return True if this session is the owner now."""
        async with translated_errors():
            if not await self._connection.fetchval(statement("try_own_staged")):
                return False
            horizon = await self._connection.fetchrow(statement("staged_horizon"))
        now_s = asyncio.get_running_loop().time()
        self._deep_until, self._deep_s = horizon["xmax"], now_s
        first = max(1, horizon["last_seq"] - RECENT_PLACES)
        for seq in range(first, horizon["last_seq"] + 1):
            self._gaps[seq] = _Gap(now_s, now_s, horizon["xmax"])
        return True

    async def foreign_owner(self) -> tuple[int, str] | None:
        """Return process id and role of a session that owns the records and is no node's, or None.

        Postgres lets every role take an advisory lock, so a role that may only connect can keep the relay from working.
        """
        async with translated_errors():
            row = await self._connection.fetchrow(statement("foreign_staged_owner"))
        return None if row is None else (row["pid"], row["role"])

    async def set_awake(self, awake: bool) -> None:
        """Tell committing transactions whether they must notify."""
        async with translated_errors():
            await self._connection.fetchval(statement("set_staged_awake"), _AWAKE if awake else _ASLEEP)

    # --- reading --------------------------------------------------------------------------------------------------

    async def look(self) -> Sequence[StagedTransaction]:
        """Return the next transactions to append, in the order of their commits, within the bounds of one append."""
        now_s = asyncio.get_running_loop().time()
        wanted = self._due_gaps(now_s)
        behind = self._last_seq
        if (self._deep_until is not None and now_s - self._deep_s >= DEEP_LOOK_INTERVAL_S) or behind == 0:
            behind, self._deep_s = 0, now_s
        async with translated_errors():
            rows = await self._connection.fetch(
                statement("staged_commits"), behind, wanted, TRANSACTIONS_AT_ONCE, RECORDS_AT_ONCE
            )
        self._note(rows, wanted, now_s, deep=behind == 0)
        return self._next()

    def _due_gaps(self, now_s: float) -> list[int]:
        due: list[int] = []
        for seq, gap in self._gaps.items():
            if now_s - gap.since_s < YOUNG_GAP_S or now_s - gap.looked_s >= OLD_GAP_INTERVAL_S:
                gap.looked_s = now_s
                due.append(seq)
        return due

    def _note(self, rows: Sequence[Row], wanted: Sequence[int], now_s: float, *, deep: bool) -> None:
        """Take over what a look has found. Each row shows the look's snapshot, also if it shows no transaction."""
        xmin, xmax = rows[0]["xmin"], rows[0]["xmax"]
        found: set[int] = set()
        for row in rows:
            seq = row["seq"]
            if seq is not None:
                found.add(seq)
                if seq not in self._waiting:
                    self._waiting[seq] = StagedTransaction(
                        seq, row["xid"], row["record_count"], row["size_bytes"], row["creates"]
                    )
                self._gaps.pop(seq, None)
        self._note_bounds(wanted, xmin, xmax)
        if deep and self._deep_until is not None and self._deep_until <= xmin:
            self._deep_until = None
        last = max(found, default=0)
        if last > self._last_seq:
            # A session that has just begun looks up the places below its first one by itself.
            if self._last_seq:
                for seq in range(max(self._last_seq + 1, last - MAX_GAPS), last):
                    if seq not in found:
                        self._gaps[seq] = _Gap(now_s, now_s)
            self._last_seq = last
        while len(self._gaps) > MAX_GAPS:
            # The oldest are most probably those of transactions that failed. A look at all places finds the others.
            del self._gaps[next(iter(self._gaps))]
            self._deep_until = 2**62

    def _note_bounds(self, wanted: Sequence[int], xmin: int, xmax: int) -> None:
        """Forget the wanted gaps whose transactions are over, as far as the snapshot shows."""
        for seq in wanted:
            gap = self._gaps.get(seq)
            if gap is None:
                continue
            if gap.bound is None:
                gap.bound = xmax
            elif gap.bound <= xmin:
                del self._gaps[seq]

    def _next(self) -> list[StagedTransaction]:
        chosen: list[StagedTransaction] = []
        record_count = size_bytes = 0
        now_s = asyncio.get_running_loop().time()
        for seq in sorted(self._waiting):
            transaction = self._waiting[seq]
            if self._postponed.get(transaction.xid, (now_s, 0.0))[0] > now_s:
                continue
            record_count += transaction.record_count
            size_bytes += transaction.size_bytes
            if chosen and (record_count > RECORDS_AT_ONCE or size_bytes > BYTES_AT_ONCE):
                break
            chosen.append(transaction)
            if len(chosen) == TRANSACTIONS_AT_ONCE:
                break
        return chosen

    def postpone(self, xid: int) -> None:
        """Leave a transaction out of what `look` returns for some time, longer each time."""
        _, waited_s = self._postponed.get(xid, (0.0, RETRY_S / 2))
        wait_s = min(2 * waited_s, LONGEST_RETRY_S)
        self._postponed[xid] = (asyncio.get_running_loop().time() + wait_s, wait_s)

    async def new_topics(self, transactions: Sequence[StagedTransaction]) -> dict[int, list[str]]:
        """Return, by xid, the names of topics that did not exist when the transactions staged records for them."""
        xids = [each.xid for each in transactions if each.creates]
        found: dict[int, list[str]] = {}
        if xids:
            async with translated_errors():
                rows = await self._connection.fetch(statement("staged_new_topics"), xids, RECORDS_AT_ONCE + 1)
            for row in rows:
                found.setdefault(row["xid"], []).append(row["topic"])
        return found

    # --- appending ------------------------------------------------------------------------------------------------

    async def append(
        self,
        transactions: Sequence[StagedTransaction],
        build: Callable[[list[StagedRecord]], Awaitable[list[NewBatch]]],
    ) -> list[tuple[NewBatch, Appended | Refusal]]:
        """Append what `build` makes of the records of small transactions, and delete them, in one durable transaction.
        Return each batch with its outcome. UNKNOWN_PARTITION: the topic was deleted, and its records with it."""
        asked = self._guard.history
        async with translated_errors():
            outcomes, decided = await self._append_small(transactions, build)
        self._settle(transactions, asked, decided)
        return outcomes

    async def append_large(
        self, large: StagedTransaction, build: Callable[[list[StagedRecord]], Awaitable[list[NewBatch]]]
    ) -> list[Grown]:
        """Append what `build` makes of each piece of a large transaction, and delete it, in one durable transaction.
        Return the new ends of the partitions. Readers see all records together."""
        asked = self._guard.history
        async with translated_errors(), self._connection.transaction():
            chunks = WrittenChunks(self._connection, await self._connection.fetchval(statement("inline_slot")))
            behind = -1
            while rows := await self._connection.fetch(
                statement("take_staged_piece"), large.xid, behind, RECORDS_AT_ONCE, BYTES_AT_ONCE
            ):
                batches = await build(await asyncio.to_thread(_staged_records, rows))
                if batches:
                    await chunks.write(batches)
                behind = rows[-1]["position"]
            if await self._connection.fetchval(statement("delete_staged_place"), large.seq) is None:
                raise StorageError(f"another relay has appended the records of transaction {large.xid}")
            decided, grown = await chunks.append()
        self._settle([large], asked, decided)
        return grown

    def _settle(self, transactions: Sequence[StagedTransaction], asked: int, decided: Row | None) -> None:
        if decided is not None and decided["transaction_id"] is not None:
            self._guard.acknowledged(asked, decided["transaction_id"], decided["written_lsn"])
        for transaction in transactions:
            self._waiting.pop(transaction.seq, None)
            self._postponed.pop(transaction.xid, None)

    async def _append_small(
        self,
        transactions: Sequence[StagedTransaction],
        build: Callable[[list[StagedRecord]], Awaitable[list[NewBatch]]],
    ) -> tuple[list[tuple[NewBatch, Appended | Refusal]], Row | None]:
        """Read, and append, by one statement each. A round trip costs each of the two processes some 70 µs, which adds
        up if appends carry few records."""
        xids = list(dict.fromkeys(each.xid for each in transactions))
        rows = await self._connection.fetch(statement("staged_records"), xids)
        by_xid: dict[int, list[StagedRecord]] = {}
        for row in rows:
            by_xid.setdefault(row["xid"], []).append(_staged_record(row))
        batches = await build([record for xid in xids for record in by_xid.get(xid, ())])
        taken = xids, [each.seq for each in transactions], len(rows)
        if not batches:
            await self._connection.execute(statement("take_staged"), *taken)
            return [], None
        group = AppendGroup(batches)
        decided = await self._connection.fetchrow(statement("append_staged"), *taken, *_arguments(group))
        assert decided is not None
        return list(zip(batches, group.settle(decided), strict=True)), decided


def _arguments(group: AppendGroup) -> tuple[object, ...]:
    records = [b"".join(group.buffers(candidate)) for candidate in range(len(group.candidates))]
    return group.arguments(wait=True, records=records)


def _staged_records(rows: Sequence[Row]) -> list[StagedRecord]:
    return [_staged_record(row) for row in rows]


def _staged_record(row: Row) -> StagedRecord:
    headers: tuple[tuple[str, bytes | None], ...] = ()
    if row["header_names"] is not None:
        named = zip(cast(list[str], row["header_names"]), cast(list[str | None], row["header_values"]), strict=True)
        headers = tuple((name, None if value is None else value.encode()) for name, value in named)
    return StagedRecord(
        row["xid"],
        row["position"],
        row["topic_id"],
        row["topic"],
        row["partition_index"],
        row["key"],
        row["value"],
        headers,
        row["timestamp_ms"],
    )
