"""Recognise a database that lacks commits it once acknowledged, and begin another history there.

The one idea: after a failover to a standby that was behind, or after a restore, offsets are assigned a second time.
Each new connection therefore checks facts that do not survive such an event: the server's identity, its timeline, the
ids of the database and of a table, and whether the write-ahead log is as long as it has been. Connections to another
history are refused until this process has dropped what it remembered. Then the database continues under the next
history number, and every leader epoch is raised where the log ends, so clients find out where their history differs.

What a node knew in its last run is kept beside the log's bytes (`storage/remembered.py`). So files that were put back
while no node ran are recognised too, unless the log's directory was put back with them, or does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import structlog

from storage.errors import StorageError, StorageUnavailable
from storage.guard import HistoryGuard, Known
from storage.pool import SESSION_SETTINGS, Connection, Database, connect, translated_errors
from storage.queries import statement
from storage.remembered import Remembered, read, write
from storage.store import reach_store, read_marker
from storage.types import PartitionKey

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

ADOPT_TIMEOUT_S = 300
"""Bounds a statement that writes every partition's row."""

NEVER_SEEN = -1

MARKER_PATIENCE_S = 3.0
"""How long a change of history waits for the marker of the store. Until it ends, the node serves no client."""


class HistoryStore:
    """The history of one database, as this process knows it."""

    def __init__(self, database: Database, place: Path | str | None = None) -> None:
        """`place` is the directory or the bucket that holds the log's bytes; None: Postgres holds them."""
        self._database = database
        self._place = place
        self._directory = place if isinstance(place, Path) else None
        self._remembered: Known | None = None
        self._guard: HistoryGuard = database.guard
        self.history = NEVER_SEEN
        self._put_back = NEVER_SEEN
        """Number of the history of which an earlier run of a node had seen more than the restored database now has."""

    async def changed(self) -> None:
        """Wait until a connection has found another history."""
        await self._guard.broken.wait()

    async def adopt(self) -> tuple[int, str, int]:
        """Begin another history if necessary. Return its number and the arguments for `accept`, to be called when
        everything remembered of the previous history is dropped. Raise StorageError."""
        async with translated_errors(), self._connected() as connection:
            witness = await connection.fetchrow(statement("history_witness"))
            assert witness is not None
            if witness["identity"] is None:
                raise StorageUnavailable("Postgres is a standby")
            ended = self._put_back if self.history == NEVER_SEEN else self.history
            begun = await self._marked_history(connection)
            history = await connection.fetchval(statement("adopt_history"), witness["identity"], ended, begun)
            return history, witness["identity"], witness["flushed_lsn"]

    async def _marked_history(self, connection: Connection) -> int:
        """Return the newest history that the log's store names. A copy that was restored before does not know the
        histories that began in it then, and clients know their epochs."""
        row = None if self._place is None else await connection.fetchrow(statement("log_store"))
        if self._place is None or row is None:
            return NEVER_SEEN
        try:
            async with asyncio.timeout(MARKER_PATIENCE_S):
                store = reach_store(self._place)
                try:
                    marked = await read_marker(store)
                finally:
                    store.close()
        except (OSError, StorageError) as error:
            logger.warning(
                "the log's store does not show whether another history has begun: check --log-store",
                place=str(self._place),
                reason=str(error) or "no answer",
            )
            return NEVER_SEEN
        return NEVER_SEEN if marked is None or marked.store_id != row["store_id"] else marked.history

    async def look_back(self) -> None:
        """Compare the database with what its nodes knew in their last run. Call this before anything is written,
        migrations included: one of our transactions may get the number of a lost one. Raise StorageError."""
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
                if present is None or remembered.identity != witness["identity"] or known.history < present["history"]:
                    continue
                # A copy that is restored again does not know the history that began after its first restore.
                if (
                    known.history > present["history"]
                    or witness["flushed_lsn"] < known.flushed_lsn
                    or present["catalog_revision"] < known.catalog_revision
                    or not present["has_all"]
                ):
                    logger.error(
                        "the database was restored to an earlier state: the last acknowledged writes are lost",
                        history=known.history,
                    )
                    self._put_back = max(self._put_back, known.history)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncGenerator[Connection]:
        """Open a connection that no guard checks."""
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
        """Store what this process knows about the history for the node's next run, if it is more than stored before.
        Raise StorageError.
        """
        known, identity = self._guard.known(), self._guard.identity
        if self._directory is None or identity is None or known == self._remembered:
            return
        await asyncio.to_thread(write, self._directory, node_id, Remembered(identity, known))
        self._remembered = known

    def accept(self, history: int, identity: str, flushed_lsn: int) -> None:
        """Admit connections to this history from now on, and no others."""
        self.history = history
        self._guard.accept(history, identity, flushed_lsn)

    async def epochs(self, keys: Iterable[PartitionKey]) -> dict[PartitionKey, list[tuple[int, int]]]:
        """Return each partition's leader epochs except the first, with the offsets at which they began, in order."""
        found: dict[PartitionKey, list[tuple[int, int]]] = {}
        for row in await self._database.hot.fetch(statement("partition_epochs"), list(keys)):
            found.setdefault(PartitionKey(row["partition_key"]), []).append((row["leader_epoch"], row["start_offset"]))
        return found
