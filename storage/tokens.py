"""Delegation tokens: their owners, their expiry, and the digests and credentials that verify them.

The one idea: a token's secret is not stored. Postgres holds a digest, which finds the token of a client that presents
the secret, and SCRAM credentials, which prove it. They are read at every authentication, like those of users
(`storage/users.py`). Every time comes from Postgres' clock.
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
"""Rows built per turn. Each may have dozens of renewers: some milliseconds."""


class TokenStore:
    def __init__(self, database: Database) -> None:
        self._pool = database.hot

    async def create(
        self, token: NewDelegationToken, *, expiry_ms: int, lifetime_ms: int, most: int, most_of_one: int
    ) -> DelegationToken | None:
        """Create a token that is valid for `expiry_ms`, and may be renewed up to `lifetime_ms`.

        Return None if `most` tokens exist, or `most_of_one` of this requester.
        """
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
        """Return the token with this digest, and whether it has expired."""
        row = await self._pool.fetch_row(statement("delegation_token_by_digest"), hmac_digest)
        return None if row is None else (_token(row), row["expired"])

    async def credential(self, token_id: str, mechanism: int) -> TokenCredential | None:
        """Return the credential of a token; the id may be any name that a client sends."""
        row = await self._pool.fetch_row(statement("delegation_token_credential"), stored(token_id), mechanism)
        if row is None:
            return None
        keys = row["iterations"], row["salt"], row["stored_key"], row["server_key"]
        credential = ScramCredential(token_id, mechanism, *keys)
        return TokenCredential(credential, loaded(row["owner"]), row["hmac_digest"], row["remaining_ms"])

    async def described(self, users: Collection[str] | None = None) -> list[DelegationToken]:
        """List tokens by id: those that one of the users owns, requested or may renew; all if None."""
        names = None if users is None else [stored(user) for user in users]
        rows = await self._pool.fetch(statement("delegation_tokens_of"), names)
        return [_token(row) async for row in in_turns(rows, ROWS_PER_TURN)]

    async def prolong(self, token_id: str, period_ms: int) -> int | None:
        """Prolong the token and return its new expiry; None if it has expired or is gone."""
        row = await self._pool.fetch_row(statement("prolong_delegation_token"), token_id, period_ms)
        return None if row is None else int(row["expires_ms"])

    async def delete(self, token_id: str) -> int | None:
        """Delete the token and return the time of its deletion; None if it was gone."""
        row = await self._pool.fetch_row(statement("delete_delegation_token"), token_id)
        return None if row is None else int(row["ended_ms"])

    async def delete_expired(self, limit: int) -> Sequence[str]:
        """Delete expired tokens, at most `limit`; return their ids."""
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
