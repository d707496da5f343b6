"""What a connection must show before it is used: that it leads into the history this process knows.

The one idea: checked where connections are opened, so nothing is read from or written to another history before
somebody has decided what to do about it. See `storage/history.py`.
"""

from __future__ import annotations

import asyncio

from storage.errors import StorageUnavailable


class HistoryGuard:
    """Lets everything in until it has been told of a history."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()
        """Set when another history was found, until one is accepted."""
        self._identity: str | None = None
        self._flushed_lsn = 0
        self._history = 0

    @property
    def accepted(self) -> bool:
        """Whether it knows of a history, so that the database has one to tell of."""
        return self._identity is not None

    @property
    def flushed_lsn(self) -> int:
        """How far the log of the accepted history has been seen on disk."""
        return self._flushed_lsn

    def accept(self, history: int, identity: str, flushed_lsn: int) -> None:
        self._history, self._identity, self._flushed_lsn = history, identity, flushed_lsn
        self.broken.clear()

    def seen(self, history: int, flushed_lsn: int) -> None:
        """The log is on disk up to here: no later state of this history has less. A number that is another has been
        given by another node, which found out first."""
        if self.accepted and history != self._history:
            self.broken.set()
        self._flushed_lsn = max(self._flushed_lsn, flushed_lsn)

    def check(self, identity: str | None, flushed_lsn: int | None, history: int | None, known_lsn: int) -> None:
        """StorageUnavailable unless a new connection leads into the history that was accepted. `known_lsn` is what was
        known before the server was asked. Once another node has begun the next history, the log may have grown beyond
        what this one had seen: then its number tells."""
        if self._identity is None:
            return
        if identity is None or flushed_lsn is None:
            raise StorageUnavailable("Postgres is a standby: waiting until it, or another, is not")
        if identity != self._identity or flushed_lsn < min(known_lsn, self._flushed_lsn) or history != self._history:
            self.broken.set()
            raise StorageUnavailable(
                f"Postgres goes on from another history: {history}, {identity} at {flushed_lsn}, known is"
                f" {self._history}, {self._identity} at {self._flushed_lsn}"
            )
        self._flushed_lsn = max(self._flushed_lsn, flushed_lsn)
