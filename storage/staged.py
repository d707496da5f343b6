"""Read what user transactions have staged (storage/sql_door), and append it to the log exactly once.

The one idea: a staged transaction has a place, `staged_commit.seq`, which it drew while it committed. One session at a
time owns the staged records, by a lock that ends with the session. It appends transactions in the order of their places
and deletes them in the same Postgres transaction. So a crash at any point leaves a record either staged or appended.
The records of a large transaction are read and written in pieces, so that they need little memory. All of it is one
Postgres transaction, which locks the partitions only at its end (`written_chunks.py`).

A place is drawn before it becomes visible, so a later place may be visible first. A place that was skipped is a gap. It
is looked up by itself until it appears, or until every transaction that may have drawn it has ended. When one of these
transactions has ended, the gap is looked up before anything later is appended, because a later transaction may have
waited for that one. A scan of all places would walk over deleted rows, which Postgres cannot vacuum while some
transaction of a user is long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
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
RETRIED_AT_ONCE = 5
"""Maximal number of postponed transactions that one look returns. Others wait for the attempts to relay these."""

FIRST_AT_ONCE = 64
"""Maximal number of transactions that the first look counts, and one behind a look that has counted RECORDS_AT_ONCE
records. Each other look may count twice as many as the look before. After an outage, thousands of large transactions
may wait, and to count their records takes a microsecond each."""

FIRST_GAPS = 64
"""So many gaps, the newest, are looked up together with new places. The others need a statement of their own."""
MAX_GAPS = 10_000

_NO_PLACE = 2**63 - 1

TIMEOUT_S = 15

SILENT_PEER_SETTINGS = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
"""Postgres ends the session of a host that has vanished without closing its connection, and with the session the
ownership. By Linux' defaults that takes two hours."""

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
    """One place, or several, that may become visible although a later one is visible."""

    bound: int | None = None
    """Every transaction that may have drawn the place has a lower number. None: not known yet."""
    drawers: frozenset[int] | None = None
    """Those of these transactions that were running when the place was last looked up. None: it was not looked up since
    the bound is known."""

    def is_due(self, running: frozenset[int]) -> bool:
        """Return whether the place may have become visible, if these transactions still run."""
        return self.drawers is None or not self.drawers <= running

    def looked_up(self, running: frozenset[int]) -> bool:
        """Note that the place is not visible while these transactions run. Return whether it may still become so."""
        if self.bound is None:
            return True
        bound = self.bound
        self.drawers = frozenset(xid for xid in running if xid < bound)
        return bool(self.drawers)


class StagedRecords:
    """One session that relays staged records while it owns them. Every method raises storage errors. If the database
    gets another history, every method raises StorageUnavailable."""

    def __init__(self, database: Database, connection: Any, history: int) -> None:
        self._connection = connection
        self._guard = database.guard
        self._history = history
        """The history to which the connection leads. The server of a former history may still run."""
        self._at_once = FIRST_AT_ONCE
        """Maximal number of transactions that the next look counts."""
        self._last_seq = 0
        self._horizon = 0
        """The last place that was drawn when this session became the owner. Up to it, no place becomes a gap."""
        self._gaps: dict[int, _Gap] = {}
        """Maps each gap's place to the gap. The newest gap is the last."""
        self._rest: _Gap | None = None
        """Stands for all other places before the last one, while one of them may become visible."""
        self._waiting: dict[int, StagedTransaction] = {}
        self._postponed: dict[int, StagedTransaction] = {}
        """Maps the places of postponed transactions to them. They are not in `_waiting`."""
        self._due: list[tuple[float, int]] = []
        """Heap of the times until which these wait, with their places."""
        self._refused: dict[int, tuple[float, str]] = {}
        """Maps the place of a postponed transaction to the length of its last wait, and to a topic that it lacks."""

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
                    **SILENT_PEER_SETTINGS,
                },
                timeout=TIMEOUT_S,
                command_timeout=TIMEOUT_S + 2,
            )

        def heard(_connection: object, _pid: int, _channel: str, _payload: str) -> None:
            notified()

        try:
            async with translated_errors():
                history = await database.admit(connection)
                await connection.add_listener(CHANNEL, heard)
        except BaseException:
            connection.terminate()
            raise
        return cls(database, connection, history)

    def close(self) -> None:
        """End the session, and with it the ownership."""
        self._connection.terminate()

    async def try_own(self) -> bool:
        """Become the owner if no other session is the owner. Return True if this session is the owner now."""
        self._guard.require(self._history)
        async with translated_errors():
            if not await self._connection.fetchval(statement("try_own_staged")):
                return False
            self._horizon = await self._connection.fetchval(statement("last_staged_place"))
            self._rest = _Gap(await self._connection.fetchval(statement("next_xid")))
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
        asked = set(islice(reversed(self._gaps), FIRST_GAPS))
        rows = await self._look_up(self._last_seq, asked)
        running = _running(rows)
        self._note(rows, asked)
        due = [seq for seq, gap in self._gaps.items() if seq not in asked and gap.is_due(running)]
        self._note_new_gaps(rows)
        # A transaction that the first statement shows may have waited for one that only the following statements show.
        if due:
            self._note(await self._look_up(_NO_PLACE, due), due)
        if self._rest is not None and self._rest.is_due(running):
            await self._look_at_all(self._rest)
        counted = sum(row["record_count"] or 0 for row in rows)
        self._at_once = FIRST_AT_ONCE if counted > RECORDS_AT_ONCE else min(2 * self._at_once, TRANSACTIONS_AT_ONCE)
        return self._next()

    async def _look_up(self, behind: int, gaps: Collection[int]) -> Sequence[Row]:
        self._guard.require(self._history)
        async with translated_errors():
            return await self._connection.fetch(
                statement("staged_commits"), behind, gaps, self._at_once, RECORDS_AT_ONCE
            )

    async def _look_at_all(self, rest: _Gap) -> None:
        """Look at all places up to the last one."""
        behind = 0
        while True:
            rows = await self._look_up(behind, [])
            if behind == 0 and not rest.looked_up(_running(rows)):
                self._rest = None
            found = [row for row in rows if row["seq"] is not None and row["seq"] <= self._last_seq]
            self._note(found, [])
            if len(found) < self._at_once:
                return
            behind = found[-1]["seq"]

    def _note(self, rows: Sequence[Row], asked: Collection[int]) -> None:
        """Take over the transactions that a statement has found, and forget those of the asked gaps that stay empty."""
        for row in rows:
            seq = row["seq"]
            if seq is None:
                continue
            self._gaps.pop(seq, None)
            if seq not in self._waiting and seq not in self._postponed:
                self._waiting[seq] = StagedTransaction(
                    seq, row["xid"], row["record_count"], row["size_bytes"], row["creates"]
                )
        if not asked:
            return
        running = _running(rows)
        for seq in asked:
            gap = self._gaps.get(seq)
            if gap is not None and not gap.looked_up(running):
                del self._gaps[seq]

    def _note_new_gaps(self, rows: Sequence[Row]) -> None:
        found = {row["seq"] for row in rows if row["seq"] is not None}
        last = max(found, default=0)
        behind = max(self._last_seq, self._horizon)
        first = max(behind + 1, last - MAX_GAPS)
        overflows = first > behind + 1
        for seq in range(first, last):
            if seq not in found:
                self._gaps[seq] = _Gap()
        self._last_seq = max(self._last_seq, last)
        while len(self._gaps) > MAX_GAPS:
            # The oldest are most probably those of transactions that failed.
            del self._gaps[next(iter(self._gaps))]
            overflows = True
        if overflows:
            self._rest = _Gap()

    def _next(self) -> list[StagedTransaction]:
        chosen: list[StagedTransaction] = []
        record_count = size_bytes = 0
        for _ in range(RETRIED_AT_ONCE):
            if not self._due or self._due[0][0] > asyncio.get_running_loop().time():
                break
            _, seq = heappop(self._due)
            self._waiting[seq] = self._postponed.pop(seq)
        for seq in sorted(self._waiting):
            transaction = self._waiting[seq]
            record_count += transaction.record_count
            size_bytes += transaction.size_bytes
            if chosen and (record_count > RECORDS_AT_ONCE or size_bytes > BYTES_AT_ONCE):
                break
            chosen.append(transaction)
            if len(chosen) == TRANSACTIONS_AT_ONCE:
                break
        return chosen

    def postpone(self, transaction: StagedTransaction, topic: str) -> None:
        """Leave a transaction out of what `look` returns for some time, longer each time. It lacks the topic, which
        `new_topics` returns from now on."""
        seq = transaction.seq
        waited_s, _ = self._refused.get(seq, (RETRY_S / 2, ""))
        wait_s = min(2 * waited_s, LONGEST_RETRY_S)
        self._refused[seq] = wait_s, topic
        self._postponed[seq] = self._waiting.pop(seq)
        heappush(self._due, (asyncio.get_running_loop().time() + wait_s, seq))

    async def new_topics(self, transactions: Sequence[StagedTransaction]) -> dict[int, list[str]]:
        """Return, by xid, the names of topics that did not exist when the transactions staged records for them."""
        xids = [each.xid for each in transactions if each.creates]
        found: dict[int, list[str]] = {}
        for each in transactions:
            if each.seq in self._refused:
                # A large transaction may name the topic behind the records that are looked at. To find it there again
                # would take a minute, in which all other records wait.
                found.setdefault(each.xid, []).append(self._refused[each.seq][1])
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
        async with translated_errors():
            outcomes, decided = await self._append_small(transactions, build)
        self._settle(transactions, decided)
        return outcomes

    async def append_large(
        self, large: StagedTransaction, build: Callable[[list[StagedRecord]], Awaitable[list[NewBatch]]]
    ) -> list[Grown]:
        """Append what `build` makes of each piece of a large transaction, and delete it, in one durable transaction.
        Return the new ends of the partitions. Readers see all records together."""
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
        self._settle([large], decided)
        return grown

    def _settle(self, transactions: Sequence[StagedTransaction], decided: Row | None) -> None:
        self._guard.require(self._history)
        if decided is not None and decided["transaction_id"] is not None:
            self._guard.acknowledged(self._history, decided["transaction_id"], decided["written_lsn"])
            self._bound_gaps(decided["transaction_id"])
        for transaction in transactions:
            self._waiting.pop(transaction.seq, None)
            self._refused.pop(transaction.seq, None)

    def _bound_gaps(self, xid: int) -> None:
        """Note a transaction that began after the newest gaps were found, and so after their places were drawn."""
        for gap in reversed(self._gaps.values()):
            if gap.bound is not None:
                break
            gap.bound = xid
        if self._rest is not None and self._rest.bound is None:
            self._rest.bound = xid

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


def _running(rows: Sequence[Row]) -> frozenset[int]:
    """Return the transactions that had begun and not ended when these rows were read."""
    snapshot: str = rows[0]["snapshot"]
    return frozenset(int(xid) for xid in snapshot.split(":")[2].split(",") if xid)


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
