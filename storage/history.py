"""Recognises a database that lacks commits it once acknowledged, and begins another history there.

The one idea: after a failover to a standby that was behind, or a restore, offsets are given a second time. What tells
is looked at whenever a connection is opened, and none survives such an event: the server's identity, its timeline, the
ids of the database and of a table, and whether the write-ahead log is as long as it has been seen to be. A connection
to another history is refused until this process has let go of what it remembers; the database then goes on under the
next history number, with every leader epoch raised where the log ends, so that clients find out where theirs differs.

What a node knew when it ran last is kept beside the log's bytes (`storage/remembered.py`), so that files that were put
back while no node ran are recognised as well. Not where the log's directory was put back with them, or there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import structlog

from storage.errors import StorageUnavailable
from storage.guard import HistoryGuard, Known
from storage.pool import SESSION_SETTINGS, Connection, Database, connect, translated_errors
from storage.queries import statement
from storage.remembered import Remembered, read, write
from storage.types import PartitionKey

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

ADOPT_TIMEOUT_S = 300
"""Every partition's row is written."""

NEVER_SEEN = -1


class HistoryStore:
    """The history of one database, as this process knows it."""

    def __init__(self, database: Database, directory: Path | None = None) -> None:
        """`directory`: where the log's bytes lie, if they do."""
        self._database = database
        self._directory = directory
        self._remembered: Known | None = None
        self._guard: HistoryGuard = database.guard
        self.history = NEVER_SEEN
        self._put_back = NEVER_SEEN
        """The number of the history that another run of a node has seen go on, and that has not."""

    async def changed(self) -> None:
        """Waits until a connection has found another history."""
        await self._guard.broken.wait()

    async def adopt(self) -> tuple[int, str, int]:
        """Begins another history where one is needed: its number, and what to `accept` when everything that was
        remembered of the one before is gone. Raises StorageError."""
        async with translated_errors(), self._connected() as connection:
            witness = await connection.fetchrow(statement("history_witness"))
            assert witness is not None
            if witness["identity"] is None:
                raise StorageUnavailable("Postgres is a standby")
            ended = self._put_back if self.history == NEVER_SEEN else self.history
            history = await connection.fetchval(statement("adopt_history"), witness["identity"], ended)
            return history, witness["identity"], witness["flushed_lsn"]

    async def look_back(self) -> None:
        """Compares a database with what its nodes knew when they ran last. To be called before anything is written to
        it, migrations included: a transaction of ours may get the number of one that is gone. Raises StorageError."""
        if self._directory is None:
            return
        found = await asyncio.to_thread(read, self._directory)
        if not found:
            return
        async with translated_errors(), self._connected() as connection:
            if not await connection.fetchval(statement("history_is_kept")):
                return
            witness = await connection.fetchrow(statement("history_witness"))
            assert witness is not None
            for remembered in found:
                known = remembered.known
                present = await connection.fetchrow(statement("present_history"), known.transactions)
                if present is None or remembered.identity != witness["identity"] or known.history != present["history"]:
                    continue
                if witness["flushed_lsn"] < known.flushed_lsn or not present["has_all"]:
                    logger.error(
                        "the database has been put back: what it had acknowledged last is gone", history=known.history
                    )
                    self._put_back = max(self._put_back, known.history)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncGenerator[Connection]:
        """A connection that no guard keeps from any history."""
        connection = await connect(
            self._database.url,
            {**SESSION_SETTINGS, "statement_timeout": "0"},
            timeout=5,
            command_timeout=ADOPT_TIMEOUT_S,
        )
        try:
            yield connection
        finally:
            await asyncio.shield(connection.close())

    async def remember(self, node_id: int) -> None:
        """Keeps what is known for the next run of this node, if it is more than before. Raises StorageError."""
        known, identity = self._guard.known(), self._guard.identity
        if self._directory is None or identity is None or known == self._remembered:
            return
        await asyncio.to_thread(write, self._directory, node_id, Remembered(identity, known))
        self._remembered = known

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
