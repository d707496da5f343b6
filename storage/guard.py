"""What a connection must show before it is used: that it leads into the history this process knows.

The one idea: checked where connections are opened, so nothing is read from or written to another history before
somebody has decided what to do about it. See `storage/history.py`.

What is known of a history is how far its log was on disk, and which transactions were committed last. The length alone
tells of a loss only until the log has grown again, for which a server's own start is enough when little was lost; a
transaction that was acknowledged is there or is not.

An answer is compared with what was known when its question was asked, and teaches something only of the history that
the question went to: on its way, another connection may have learned more, or another history may have been accepted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from storage.errors import StorageUnavailable

REMEMBERED_TRANSACTIONS = 128
"""More than there are connections that append: the order in which commits are heard of is not that of the log."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was known of the accepted history when a question was asked."""

    history: int
    flushed_lsn: int = 0
    """How far its log had been seen on disk."""
    transactions: Sequence[int] = ()
    """The last that were acknowledged."""


@dataclass(frozen=True, slots=True)
class Witness:
    """What a new connection's server says of itself."""

    identity: str | None
    """None: a standby."""
    flushed_lsn: int | None
    history: int | None
    has_all: bool
    """Whether it has the transactions that were known when it was asked."""


class HistoryGuard:
    """Lets everything in until it has been told of a history."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()
        """Set when another history was found, until one is accepted."""
        self._identity: str | None = None
        self._flushed_lsn = 0
        self._history = 0
        self._transactions: deque[int] = deque(maxlen=REMEMBERED_TRANSACTIONS)

    @property
    def accepted(self) -> bool:
        """Whether it knows of a history, so that the database has one to tell of."""
        return self._identity is not None

    @property
    def identity(self) -> str | None:
        """What the server of the accepted history calls itself; None before any was accepted."""
        return self._identity

    @property
    def history(self) -> int:
        """The number of the accepted history."""
        return self._history

    def known(self) -> Known:
        """To be taken before a new connection is asked for its witness."""
        return Known(self._history, self._flushed_lsn, tuple(self._transactions))

    def accept(self, history: int, identity: str, flushed_lsn: int) -> None:
        self._history, self._identity, self._flushed_lsn = history, identity, flushed_lsn
        self._transactions.clear()
        self.broken.clear()

    def acknowledged(self, asked: int, transaction_id: int, flushed_lsn: int) -> None:
        """A transaction is committed, and with it the log is on disk up to `flushed_lsn`. `asked`: the history that was
        accepted when it began."""
        if asked == self._history:
            self._transactions.append(transaction_id)
            self._flushed_lsn = max(self._flushed_lsn, flushed_lsn)

    def seen(self, asked: int, history: int, flushed_lsn: int) -> None:
        """The log is on disk up to here: no later state of this history has less. A number that is another has been
        given by another node, which found out first. `asked`: the history that was accepted when the question began."""
        if asked != self._history:
            return
        if self.accepted and history != self._history:
            self.broken.set()
            return
        self._flushed_lsn = max(self._flushed_lsn, flushed_lsn)

    def check(self, witness: Witness, known: Known) -> None:
        """StorageUnavailable unless a new connection leads into the history that was accepted. Once another node has
        begun the next history, the log may have grown beyond what this one had seen: then its number tells."""
        if self._identity is None:
            return
        if witness.identity is None or witness.flushed_lsn is None:
            raise StorageUnavailable("Postgres is a standby: waiting until it, or another, is not")
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
                f"Postgres goes on from another history: {witness.history}, {witness.identity} at"
                f" {witness.flushed_lsn}{'' if witness.has_all else ', without what was acknowledged'}; known is"
                f" {self._history}, {self._identity} at {known.flushed_lsn}"
            )
        self._flushed_lsn = max(self._flushed_lsn, witness.flushed_lsn)
