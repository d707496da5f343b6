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

    def accept(self, identity: str, flushed_lsn: int) -> None:
        self._identity, self._flushed_lsn = identity, flushed_lsn
        self.broken.clear()

    def seen(self, flushed_lsn: int) -> None:
        """The log is on disk up to here: no later state of this history has less."""
        self._flushed_lsn = max(self._flushed_lsn, flushed_lsn)

    def check(self, identity: str | None, flushed_lsn: int | None) -> None:
        """StorageUnavailable unless a new connection leads into the history that was accepted."""
        if self._identity is None:
            return
        if identity is None or flushed_lsn is None:
            raise StorageUnavailable("Postgres is a standby: waiting until it, or another, is not")
        if identity != self._identity or flushed_lsn < self._flushed_lsn:
            self.broken.set()
            raise StorageUnavailable(
                f"Postgres goes on from another history: {identity} at {flushed_lsn}, known is {self._identity} at"
                f" {self._flushed_lsn}"
            )
        self._flushed_lsn = flushed_lsn
