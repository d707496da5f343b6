"""Drop everything and start again when the database turns out to have another history.

The one idea: everything that a node remembers of the lost history may be untrue, and all of it can be read again. So
the node drops all of it at once, before any connection to the new history is admitted.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from storage.history import HistoryStore

logger = structlog.stdlib.get_logger(__name__)


class Histories:
    """`begin` before anything is read; `follow` is a pass of a supervisor that waits for its occasion."""

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self.forget: Callable[[], None] = lambda: None
        """Drops everything that was read or recorded; synchronous."""
        self.begun: Callable[[], None] = lambda: None
        """Another history has been begun or joined."""

    async def begin(self) -> None:
        """Joins the present history of the database, or begins the next. Raises StorageError."""
        history, identity, flushed_lsn = await self._store.adopt()
        self._store.accept(history, identity, flushed_lsn)

    async def remember(self, node_id: int) -> None:
        """Keeps what this node knows for its next run. Raises StorageError."""
        await self._store.remember(node_id)

    async def follow(self) -> None:
        """Waits until a connection has led into another history, and goes over to it. Raises StorageError."""
        await self._store.changed()
        logger.error("the database continues from another history: the last acknowledged writes may be lost")
        before = self._store.history
        history, identity, flushed_lsn = await self._store.adopt()
        self.forget()
        self._store.accept(history, identity, flushed_lsn)
        logger.warning(
            "another history has begun: leader epochs have risen, and clients find out where their history ends",
            before=before,
            history=history,
        )
        self.begun()
