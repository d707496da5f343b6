"""The check that each new connection leads into the history that this process knows.

The one idea: the check runs when a connection is opened. So nothing is read from or written to another history before
the process has decided what to do about it. See `storage/history.py`.

A history is known by two facts: how far its write-ahead log was on disk, and which transactions were committed last.
The length alone reveals a loss only until the log has grown again, and a server's own start is enough for that if
little was lost. An acknowledged transaction either exists or not. The catalog's revision reveals a lost change of the
catalog: a topic that is created in its place would get the ids of the lost one.

An answer is compared with what was known when its question was asked, and it adds knowledge only about the history that
the question went to. While the answer was on its way, another connection may have learned more, or another history may
have been accepted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from storage.errors import StorageUnavailable

REMEMBERED_TRANSACTIONS = 128
"""Number of transactions to remember. It exceeds the number of appending connections, because commits are reported in
another order than in the log.
"""


@dataclass(frozen=True, slots=True)
class Known:
    """The accepted history, as known when a question is sent to a server."""

    history: int
    flushed_lsn: int = 0
    """Position up to which its write-ahead log was known to be on disk."""
    transactions: Sequence[int] = ()
    """The last acknowledged transactions."""
    catalog_revision: int = 0
    """The newest revision of the catalog that was read."""


@dataclass(frozen=True, slots=True)
class Witness:
    """A new connection's answers about its server."""

    identity: str | None
    """Identity of the server; None on a standby."""
    flushed_lsn: int | None
    history: int | None
    has_all: bool
    """True if the server has all transactions and changes of the catalog that were known when it was asked."""


class HistoryGuard:
    """Admits every connection until a history is accepted."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()
        """Set when a connection shows another history than the accepted one. Accepting a history clears it."""
        self._identity: str | None = None
        self._flushed_lsn = 0
        self._history = 0
        self._transactions: deque[int] = deque(maxlen=REMEMBERED_TRANSACTIONS)
        self._catalog_revision = 0

    @property
    def accepted(self) -> bool:
        """True once a history has been accepted."""
        return self._identity is not None

    @property
    def identity(self) -> str | None:
        """Identity of the server of the accepted history. None before a history is accepted."""
        return self._identity

    @property
    def history(self) -> int:
        """Number of the accepted history. It rises when the database lost commits."""
        return self._history

    def known(self) -> Known:
        """Return what is known now. Call this before a new connection is asked for its witness."""
        return Known(self._history, self._flushed_lsn, tuple(self._transactions), self._catalog_revision)

    def require(self, asked: int) -> None:
        """Raise StorageUnavailable if an answer belongs to a history that has ended. `asked` is the history that was
        accepted when the question was asked."""
        if asked != self._history:
            raise StorageUnavailable("another history was accepted before Postgres had answered")

    def accept(self, history: int, identity: str, flushed_lsn: int) -> None:
        self._history, self._identity, self._flushed_lsn = history, identity, flushed_lsn
        self._transactions.clear()
        self._catalog_revision = 0
        self.broken.clear()

    def acknowledged(self, asked: int, transaction_id: int, flushed_lsn: int) -> None:
        """Note a committed transaction, and that the log is on disk up to `flushed_lsn`. `asked` is the history that
        was accepted when the transaction began."""
        if asked == self._history:
            self._transactions.append(transaction_id)
            self._flushed_lsn = max(self._flushed_lsn, flushed_lsn)

    def catalog_read(self, asked: int, revision: int) -> None:
        """Note a revision of the catalog. `asked` is the history that was accepted when the question was asked."""
        if asked == self._history:
            self._catalog_revision = max(self._catalog_revision, revision)

    def seen(self, asked: int, history: int, flushed_lsn: int) -> None:
        """Note that the log is on disk up to `flushed_lsn`; no later state of this history has less. A different
        number means that another node has found the loss first and begun a new history. `asked` is the history that
        was accepted when the question was asked."""
        if asked != self._history:
            return
        if self.accepted and history != self._history:
            self.broken.set()
            return
        self._flushed_lsn = max(self._flushed_lsn, flushed_lsn)

    def check(self, witness: Witness, known: Known) -> None:
        """Raise StorageUnavailable unless a new connection leads into the accepted history. Once another node has
        begun the next history, the log may have grown beyond what this node had seen; then the history's number
        shows the difference."""
        if self._identity is None:
            return
        if witness.identity is None or witness.flushed_lsn is None:
            raise StorageUnavailable("Postgres is a standby: waiting for a primary")
        if known.history != self._history:
            raise StorageUnavailable("another history was accepted while this connection was opened")
        if (
            witness.identity != self._identity
            or witness.history != self._history
            or witness.flushed_lsn < known.flushed_lsn
            or not witness.has_all
        ):
            self.broken.set()
            raise StorageUnavailable(
                f"Postgres continues from another history: {witness.history}, {witness.identity} at"
                f" {witness.flushed_lsn}{'' if witness.has_all else ', without acknowledged commits'}; known is"
                f" {self._history}, {self._identity} at {known.flushed_lsn}"
            )
        self._flushed_lsn = max(self._flushed_lsn, witness.flushed_lsn)
