"""The journal's rows: written in batches, read back for people.

The one idea: a batch is one transaction. It takes its numbers first and so makes its rows visible in the order of the
numbers (docs/journal.md). A row is a value whose fields are the columns of its table.

It does not decide which rows to write; its callers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, cast
from uuid import UUID

from storage.pool import Connection, Database, Row
from storage.queries import statement
from storage.text import loaded, loaded_or_none, stored
from storage.turns import in_turns

DAYS_AHEAD = 2
RECORDS_PER_TURN = 250
"""Records encoded per turn: the driver encodes them as it consumes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """Columns that all five tables have, apart from the number."""

    at_ms: int
    node_id: int
    group_id: str
    generation_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEvent(JournalRow):
    group_type: str
    kind: str
    reason: str | None = None
    detail: str | None = None
    state_before: str | None = None
    state_after: str | None = None
    member_id: str | None = None
    group_instance_id: str | None = None
    client_id: str | None = None
    client_host: str | None = None
    protocol_name: str | None = None
    member_count: int | None = None
    wait_ms: int | None = None
    row_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalMember(JournalRow):
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    join_wait_ms: int | None
    leader: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOwnership(JournalRow):
    topic_id: UUID | None
    topic: str
    partition: int
    change: str
    member_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOffset(JournalRow):
    kind: str
    member_id: str | None
    topic_id: UUID | None
    topic: str
    partition: int
    offset: int
    log_start_offset: int | None
    log_end_offset: int | None
    error_code: int
    commit_count: int = 1
    """Number of commits for which the row stands. If there are several, the other fields describe the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHandoff(JournalRow):
    topic_id: UUID | None
    topic: str
    partition: int
    phase: str
    mode: str
    source_member_id: str
    target_member_id: str
    mark_offset: int | None = None
    deadline_ms: int | None = None
    reason: str | None = None
    wait_ms: int | None = None


_TABLES: dict[type[JournalRow], tuple[str, tuple[str, ...]]] = {
    kind: (table, tuple(field.name for field in fields(kind)))
    for kind, table in (
        (JournalEvent, "journal_event"),
        (JournalMember, "journal_member"),
        (JournalOwnership, "journal_ownership"),
        (JournalOffset, "journal_offset"),
        (JournalHandoff, "journal_handoff"),
    )
}
_VALUES = {kind: attrgetter(*columns) for kind, (_, columns) in _TABLES.items()}


@dataclass(frozen=True, slots=True)
class GroupHistory:
    """History of one group, newest first, up to the requested limits: rows as mappings of column to value."""

    events: Sequence[Row]
    ownership: Sequence[Row]
    refused_commits: Sequence[Row]
    handoffs: Sequence[Row]


class JournalStore:
    """Write and read the journal on the cold pool only, so that no client's request waits for the journal."""

    def __init__(self, database: Database) -> None:
        self._cold = database.cold

    async def write(self, rows: Sequence[JournalRow]) -> None:
        """Number the rows in their order and insert them, all or none.

        Raise StorageError if a table or a day is missing, StorageUnavailable also if the outcome is unknown.
        """
        numbered = await asyncio.to_thread(_numbered, rows)

        async def insert(connection: Connection) -> None:
            await connection.execute(statement("journal_writes_lazily"))
            first_seq = cast(int, await connection.fetchval(statement("journal_reserve"), len(rows)))
            for kind, records in numbered.items():
                table, columns = _TABLES[kind]
                await connection.copy_records_to_table(
                    table,
                    records=in_turns(
                        ((first_seq + position, *values) for position, *values in records), RECORDS_PER_TURN
                    ),
                    columns=("seq", *columns),
                )

        await self._cold.transact(insert)

    async def take_sql_commits(self, node_id: int, limit: int) -> int:
        """Move at most `limit` offsets that SQL transactions have committed to the journal, and return how many were
        moved."""
        return cast(int, await self._cold.fetch_value(statement("journal_sql_commits"), node_id, limit))

    async def take_sql_refusals(self, node_id: int) -> int:
        """Move the fenced commits of SQL transactions to the journal, and return how many there were."""
        return cast(int, await self._cold.fetch_value(statement("journal_sql_refusals"), node_id))

    async def make_partitions(self) -> int:
        """Create the missing partitions of days, up to two days ahead."""
        return cast(int, await self._cold.fetch_value(statement("journal_make_partitions"), DAYS_AHEAD))

    async def retain(self, retention_ms: int, retention_bytes: int) -> int:
        """Drop the days that are older than `retention_ms` as a whole, and the oldest days while all of them take more
        than `retention_bytes`; −1: no bound. Return the number of dropped days. The present day may be dropped, so
        call `make_partitions` afterwards.
        """
        return cast(int, await self._cold.fetch_value(statement("journal_retain"), retention_ms, retention_bytes))

    async def groups(self, max_events: int) -> list[str]:
        """List the groups of the newest events, in the order of their ids."""
        rows = await self._cold.fetch(statement("journal_recent_groups"), max_events)
        return [loaded(row["group_id"]) for row in rows]

    async def history(self, group_id: str, max_events: int, max_details: int) -> GroupHistory:
        """Return the newest events of a group, and the other rows written since the oldest of them."""
        key = stored(group_id)
        events = await self._cold.fetch(statement("journal_recent_events"), key, max_events)
        since = events[-1]["seq"] if len(events) == max_events else 0
        ownership = await self._cold.fetch(statement("journal_recent_ownership"), key, since, max_details)
        refused = await self._cold.fetch(statement("journal_recent_refusals"), key, since, max_details)
        handoffs = await self._cold.fetch(statement("journal_recent_handoffs"), key, since, max_details)
        return GroupHistory(_loaded(events), _loaded(ownership), _loaded(refused), _loaded(handoffs))


def _numbered(rows: Sequence[JournalRow]) -> dict[type[JournalRow], list[tuple[Any, ...]]]:
    """Return rows per table: (position among all rows, then its columns)."""
    numbered: dict[type[JournalRow], list[tuple[Any, ...]]] = {}
    for position, row in enumerate(rows):
        kind = type(row)
        values = (stored(value) if isinstance(value, str) else value for value in _VALUES[kind](row))
        numbered.setdefault(kind, []).append((position, *values))
    return numbered


def _loaded(rows: Sequence[Row]) -> list[Row]:
    return [
        {name: loaded_or_none(value) if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    ]
