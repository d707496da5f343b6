"""Read what the console shows: groups, the journal between two times, topics, transactions.

The one idea: every statement runs on the cold pool and returns a bounded number of rows, so that the console cannot
delay a client. Nothing here writes, except the rows of the journal that say what an administrator did.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.pool import Database, Row
from storage.queries import statement
from storage.text import loaded, stored

Loaded = dict[str, Any]
"""One row, which maps each column to its value. Kafka's strings are restored."""

MAX_ROWS = 20_000
"""Maximal number of rows of one kind that a timeline reads."""
MAX_ROWS_BEFORE = 5_000
"""Maximal number of rows before a timeline that are read to find who owned what at its beginning."""
LAG_ROWS = 100_000
"""Number of the journal's newest rows in which the history of lag is read."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The journal of one group between two times, oldest first. `before` holds the changes of ownership that precede
    it."""

    events: Sequence[Loaded]
    ownership: Sequence[Loaded]
    before: Sequence[Loaded]
    handoffs: Sequence[Loaded]
    refusals: Sequence[Loaded]
    members: Mapping[str, Loaded]
    """Name and host of the members, by member id."""
    is_cut: bool
    """True if the interval has more rows than were read. Then the oldest rows are missing."""


class ConsoleStore:
    """Reads for the console. Each call raises StorageError if Postgres does not respond."""

    def __init__(self, database: Database) -> None:
        self._pool = database.cold

    async def position(self) -> int:
        return await self._pool.fetch_value(statement("console_position"))

    async def group_position(self, group_id: str) -> tuple[int | None, ...]:
        """Return values that identify the state of a group's timeline: at least one changes whenever the timeline
        changes.
        """
        row = await self._pool.fetch_row(statement("console_group_position"), stored(group_id))
        assert row is not None
        return tuple(row.values())

    async def groups(self, search: str, limit: int) -> list[Loaded]:
        rows = _loaded(await self._pool.fetch(statement("console_groups"), stored(search), limit))
        for row in rows:
            row["lags"] = json.loads(row["lags"])
        return rows

    async def group_offsets(self, group_id: str, limit: int) -> list[Loaded]:
        return _loaded(await self._pool.fetch(statement("console_group_offsets"), stored(group_id), limit))

    async def recent_events(self, since_ms: int, limit: int) -> list[Loaded]:
        return _loaded(await self._pool.fetch(statement("console_recent_events"), since_ms, limit))

    async def forced_handoffs(self, since_ms: int, limit: int) -> dict[str, int]:
        rows = await self._pool.fetch(statement("console_forced_handoffs"), since_ms, limit)
        return {loaded(row["group_id"]): row["forced"] for row in rows}

    async def refusals(self, since_ms: int, limit: int) -> dict[str, int]:
        rows = await self._pool.fetch(statement("console_refusals"), since_ms, limit)
        return {loaded(row["group_id"]): row["refused"] for row in rows}

    async def stretch(self, group_id: str, from_ms: int, to_ms: int) -> Stretch:
        """Read the journal of a group between two times (Unix ms), at most MAX_ROWS rows of each kind."""
        key = stored(group_id)
        names = ("console_events", "console_ownership", "console_handoffs", "console_group_refusals")
        rows = [await self._pool.fetch(statement(name), key, from_ms, to_ms, MAX_ROWS) for name in names]
        before = await self._pool.fetch(statement("console_ownership_before"), key, from_ms, MAX_ROWS_BEFORE)
        member_ids = {row["member_id"] for row in (*rows[0], *rows[1], *before) if row["member_id"]}
        for row in rows[2]:
            member_ids |= {row["source_member_id"], row["target_member_id"]}
        named: Sequence[Row] = (
            await self._pool.fetch(statement("console_members"), key, sorted(member_ids)) if member_ids else ()
        )
        events, ownership, handoffs, refusals, earlier = [
            await asyncio.to_thread(_loaded, each[::-1]) for each in (*rows, before)
        ]
        members = {str(row["member_id"]): row for row in _loaded(named)}
        is_cut = any(len(each) == MAX_ROWS for each in rows)
        return Stretch(events, ownership, earlier, handoffs, refusals, members, is_cut)

    async def lag_history(self, group_id: str, from_ms: int, to_ms: int, limit: int) -> list[Loaded]:
        since = await self.position() - LAG_ROWS
        rows = await self._pool.fetch(statement("console_lag_history"), stored(group_id), since, from_ms, to_ms, limit)
        return _loaded(rows)

    async def topics(self, search: str, limit: int) -> list[Loaded]:
        return _loaded(await self._pool.fetch(statement("console_topics"), search, limit))

    async def partitions(self, topic: str, limit: int) -> list[Loaded]:
        return _loaded(await self._pool.fetch(statement("console_partitions"), topic, limit))

    async def consumers(self, topic: str, limit: int) -> list[Loaded]:
        return _loaded(await self._pool.fetch(statement("console_consumers"), topic, limit))

    async def transactions(self, limit: int) -> list[Loaded]:
        rows = _loaded(await self._pool.fetch(statement("console_transactions"), limit))
        for row in rows:
            row["partitions"] = json.loads(row["partitions"])
            row["groups"] = json.loads(row["groups"])
        return rows

    async def share_groups(self, limit: int) -> list[Loaded]:
        return _loaded(await self._pool.fetch(statement("console_share_groups"), limit))

    async def totals(self) -> Loaded:
        row = await self._pool.fetch_row(statement("console_totals"))
        assert row is not None
        return dict(row)

    async def jobs(self) -> dict[int, int]:
        """Return the node that holds each job's lease, by the job's shard."""
        rows = await self._pool.fetch(statement("console_jobs"))
        return {row["shard"]: row["node_id"] for row in rows}


def _loaded(rows: Sequence[Row]) -> list[Loaded]:
    return [{name: loaded(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows]
