"""Recognises a database that lacks commits it once acknowledged, and begins another history there.

The one idea: after a failover to a standby that was behind, or a restore, offsets are given a second time. What tells
is looked at whenever a connection is opened, and none survives such an event: the server's identity, its timeline, the
ids of the database and of a table, and whether the write-ahead log is as long as it has been seen to be. A connection
to another history is refused until this process has let go of what it remembers; the database then goes on under the
next history number, with every leader epoch raised where the log ends, so that clients find out where theirs differs.

What cannot be recognised: files put back to an earlier state while no node ran, where the server is told nothing of it
(a disk's snapshot). Then the operator says so: `adopt` with the number that ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs]

from storage.errors import StorageUnavailable
from storage.guard import HistoryGuard
from storage.pool import SESSION_SETTINGS, Database, translated_errors
from storage.queries import statement
from storage.types import PartitionKey

ADOPT_TIMEOUT_S = 300
"""Every partition's row is written."""

NEVER_SEEN = -1


class HistoryStore:
    """The history of one database, as this process knows it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._guard: HistoryGuard = database.guard
        self.history = NEVER_SEEN

    async def changed(self) -> None:
        """Waits until a connection has found another history."""
        await self._guard.broken.wait()

    async def adopt(self) -> tuple[int, str, int]:
        """Begins another history where one is needed: its number, and what to `accept` when everything that was
        remembered of the one before is gone. Raises StorageError."""
        async with translated_errors():
            connection = cast(
                Any,
                await asyncpg.connect(  # pyright: ignore[reportUnknownMemberType]
                    self._database.url,
                    timeout=5,
                    command_timeout=ADOPT_TIMEOUT_S,
                    server_settings={**SESSION_SETTINGS, "statement_timeout": "0"},
                ),
            )
            try:
                witness = await connection.fetchrow(statement("history_witness"))
                if witness["identity"] is None:
                    raise StorageUnavailable("Postgres is a standby")
                history = await connection.fetchval(statement("adopt_history"), witness["identity"], self.history)
                return history, witness["identity"], witness["flushed_lsn"]
            finally:
                await asyncio.shield(connection.close())

    def accept(self, history: int, identity: str, flushed_lsn: int) -> None:
        """From here on connections to this history are let in, and no others."""
        self.history = history
        self._guard.accept(history, identity, flushed_lsn)

    async def epochs(self, keys: Iterable[PartitionKey]) -> dict[PartitionKey, list[tuple[int, int]]]:
        """Each partition's leader epochs but its first, with the offsets at which they began, in order."""
        found: dict[PartitionKey, list[tuple[int, int]]] = {}
        for row in await self._database.hot.fetch(statement("partition_epochs"), list(keys)):
            found.setdefault(PartitionKey(row["partition_key"]), []).append((row["leader_epoch"], row["start_offset"]))
        return found
