"""Delegation tokens: whose they are, until when they hold, and by what they are known.

The one idea: a token's secret is not here. What is stored of it is a digest, by which who shows the secret is found,
and SCRAM credentials, by which it is proven. They are read whenever somebody comes, as those of users are
(`storage/users.py`), and every time is Postgres' clock's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from storage.pool import Database
from storage.queries import statement
from storage.text import loaded, stored
from storage.turns import in_turns
from storage.types import DelegationToken, NewDelegationToken, ScramCredential, TokenCredential

ROWS_PER_TURN = 200
"""Each may have dozens of renewers: some milliseconds."""


class TokenStore:
    def __init__(self, database: Database) -> None:
        self._pool = database.hot

    async def create(
        self, token: NewDelegationToken, *, expiry_ms: int, lifetime_ms: int, most: int, most_of_one: int
    ) -> DelegationToken | None:
        """It holds for `expiry_ms`, and may be renewed up to `lifetime_ms`. None: `most` are there, or `most_of_one`
        that this requester has asked for."""
        keys = token.credentials
        row = await self._pool.fetch_row(
            statement("create_delegation_token"),
            token.token_id,
            token.hmac_digest,
            stored(token.owner),
            stored(token.requester),
            [stored(name) for name in token.renewers],
            [key.salt for key in keys],
            [key.stored_key for key in keys],
            [key.server_key for key in keys],
            expiry_ms,
            lifetime_ms,
            most,
            most_of_one,
            keys[0].iterations,
        )
        if row is None:
            return None
        return DelegationToken(
            token.token_id,
            token.owner,
            token.requester,
            token.renewers,
            row["issued_ms"],
            row["expires_ms"],
            row["max_ms"],
            token.hmac_digest,
        )

    async def by_digest(self, hmac_digest: bytes) -> tuple[DelegationToken, bool] | None:
        """The token, and whether it has expired."""
        row = await self._pool.fetch_row(statement("delegation_token_by_digest"), hmac_digest)
        return None if row is None else (_token(row), row["expired"])

    async def credential(self, token_id: str, mechanism: int) -> TokenCredential | None:
        """Of any name that a client gives."""
        row = await self._pool.fetch_row(statement("delegation_token_credential"), stored(token_id), mechanism)
        if row is None:
            return None
        keys = row["iterations"], row["salt"], row["stored_key"], row["server_key"]
        credential = ScramCredential(token_id, mechanism, *keys)
        return TokenCredential(credential, loaded(row["owner"]), row["hmac_digest"], row["remaining_ms"])

    async def described(self, users: Collection[str] | None = None) -> list[DelegationToken]:
        """By id: those that one of the users owns, has asked for or may renew; all if None."""
        names = None if users is None else [stored(user) for user in users]
        rows = await self._pool.fetch(statement("delegation_tokens_of"), names)
        return [_token(row) async for row in in_turns(rows, ROWS_PER_TURN)]

    async def prolong(self, token_id: str, period_ms: int) -> int | None:
        """When it expires from now on; None: it has expired, or is gone."""
        row = await self._pool.fetch_row(statement("prolong_delegation_token"), token_id, period_ms)
        return None if row is None else int(row["expires_ms"])

    async def delete(self, token_id: str) -> int | None:
        """When that was; None: it was gone."""
        row = await self._pool.fetch_row(statement("delete_delegation_token"), token_id)
        return None if row is None else int(row["ended_ms"])

    async def delete_expired(self, limit: int) -> Sequence[str]:
        """Their ids."""
        rows = await self._pool.fetch(statement("delete_expired_delegation_tokens"), limit)
        return [row["token_id"] for row in rows]


def _token(row: Any) -> DelegationToken:
    return DelegationToken(
        row["token_id"],
        loaded(row["owner"]),
        loaded(row["requester"]),
        tuple(loaded(name) for name in row["renewers"]),
        row["issued_ms"],
        row["expires_ms"],
        row["max_ms"],
        row["hmac_digest"],
    )
