"""Drop everything and start again when the database turns out to have another history.

The one idea: everything that a node remembers of the lost history may be untrue, and all of it can be read again. So
the node drops all of it at once, before any connection to the new history is admitted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from storage.history import HistoryStore

logger = structlog.stdlib.get_logger(__name__)


class Remembers(Protocol):
    """A part that holds values read from Postgres."""

    def forget(self) -> None:
        """Drop everything that was read or recorded, without yielding to the event loop."""
        ...


async def begin_history(store: HistoryStore) -> None:
    """Join the present history of the database, or begin the next. Call it before anything is read. Raise
    StorageError."""
    history, identity, flushed_lsn = await store.adopt()
    store.accept(history, identity, flushed_lsn)


class Histories:
    """The history of the database, as this node follows it. `follow` is a pass of a supervisor that waits for another
    history."""

    def __init__(
        self,
        store: HistoryStore,
        parts: Sequence[Remembers],
        announce: Callable[[int], Awaitable[None]],
        begun: Callable[[], None],
    ) -> None:
        """Follow the history for `parts`, which forget their state when it ends. `announce` tells nodes at a former
        primary of another history, before this node writes anything in it. `begun` is called after the node has begun
        or joined another history.
        """
        self._store = store
        self._parts = parts
        self._announce = announce
        self._begun = begun

    async def follow(self) -> None:
        """Wait until a connection shows another history, and change over to that history. Raise StorageError."""
        await self._store.changed()
        logger.error("the database continues from another history: the last acknowledged writes may be lost")
        before = self._store.history
        history, identity, flushed_lsn = await self._store.adopt()
        await self._announce(history)
        for part in self._parts:
            part.forget()
        self._store.accept(history, identity, flushed_lsn)
        logger.warning(
            "another history has begun: leader epochs have risen, and clients find out where their history ends",
            before=before,
            history=history,
        )
        self._begun()
