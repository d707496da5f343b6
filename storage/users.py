"""SCRAM credentials of users.

The one idea: a node reads them at every authentication and caches none, so a change holds on every node as soon as it
is committed. A stored credential proves a password and cannot be used in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

from storage.pool import Connection, Database
from storage.queries import statement
from storage.text import loaded, stored
from storage.turns import in_turns
from storage.types import ScramCredential, ScramInfo, ScramKey

T = TypeVar("T")

_ROWS_PER_STATEMENT = 1_000
"""Rows of one statement, built without yielding to the event loop: a few milliseconds."""


class UserStore:
    def __init__(self, database: Database) -> None:
        self._pool = database.hot

    async def credential(self, user: str, mechanism: int) -> ScramCredential | None:
        row = await self._pool.fetch_row(statement("scram_credential"), stored(user), mechanism)
        if row is None:
            return None
        return ScramCredential(user, mechanism, row["iterations"], row["salt"], row["stored_key"], row["server_key"])

    async def decoy_secret(self) -> bytes:
        """Return the secret of the decoys: the same on every node for the database's life, never to be revealed. The
        key by which nodes prove themselves to each other is derived from it, too (`gateway/net/node_proof.py`)."""
        return bytes(await self._pool.fetch_value(statement("scram_secret")))

    async def described(self, users: Collection[str] | None = None) -> list[ScramInfo]:
        """List credentials by user and mechanism; of all users if None."""
        names = None if users is None else [stored(user) for user in users]
        rows = await self._pool.fetch(statement("scram_credentials_of"), names)
        return [
            ScramInfo(loaded(row["user_name"]), row["mechanism"], row["iterations"]) async for row in in_turns(rows)
        ]

    async def count(self) -> int:
        """Count the users that have credentials."""
        return int(await self._pool.fetch_value(statement("count_scram_users")))

    async def change(self, upserted: Sequence[ScramCredential], deleted: Collection[ScramKey]) -> None:
        """Upsert and delete credentials in one transaction. Each key is given once; a deleted key may be gone
        already."""

        async def apply(connection: Connection) -> None:
            # Use one order, so that two changes of the same users do not wait for each other.
            for keys in _pieces(sorted(deleted)):
                await connection.fetch(
                    statement("delete_scram_credentials"),
                    [stored(key.user) for key in keys],
                    [key.mechanism for key in keys],
                )
            for rows in _pieces(sorted(upserted, key=lambda each: (each.user, each.mechanism))):
                await connection.execute(
                    statement("set_scram_credentials"),
                    [stored(each.user) for each in rows],
                    [each.mechanism for each in rows],
                    [each.iterations for each in rows],
                    [each.salt for each in rows],
                    [each.stored_key for each in rows],
                    [each.server_key for each in rows],
                )

        await self._pool.transact(apply)


def _pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _ROWS_PER_STATEMENT):
        yield items[start : start + _ROWS_PER_STATEMENT]
