"""Delegation tokens (KIP-48): their secrets, and who may do what with them.

The one idea: a token is an id, and its secret is that id signed by `delegation.token.secret.key` (HMAC-SHA-512). So the
secret is computed when needed and stored nowhere. A token made under another key is unknown here: no client can log in
with it, and it is not shown.

Mirrors upstream's DelegationTokenManager and DelegationTokenControlManager.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
from collections.abc import Collection, Sequence

from gateway.security.scram import DEFAULT_ITERATIONS, SALT_BYTES, ScramMechanism, credential, salted_password
from storage.tokens import TokenStore
from storage.types import DelegationToken, NewDelegationToken, ScramCredential, TokenCredential

MAX_TOKENS = 20_000
MAX_TOKENS_OF_ONE = 500
"""Maximal number of tokens that one user may have created: every authenticated user may create tokens."""
ID_BYTES = 16
MAX_DERIVING = 2
"""Tokens whose credentials a node derives at once: each takes some milliseconds of a thread."""


def hmac_of(secret_key: str, token_id: str) -> bytes:
    """Return a token's secret."""
    return hmac.digest(secret_key.encode(), token_id.encode(), "sha512")


def digest_of(token_hmac: bytes) -> bytes:
    """Return the digest of the secret that Postgres stores. The secret has 64 unguessable bytes, so it needs no
    salt."""
    return hashlib.sha256(token_hmac).digest()


def password_of(token_hmac: bytes) -> str:
    """Return the secret as the password that a client gives to SCRAM."""
    return base64.b64encode(token_hmac).decode()


def _new_id() -> str:
    """Return an id in the text form of upstream's Uuid. No id begins with a hyphen, because command lines would read
    that as an option."""
    while (made := base64.urlsafe_b64encode(secrets.token_bytes(ID_BYTES)).rstrip(b"=").decode()).startswith("-"):
        pass
    return made


def _credentials(token_id: str, token_hmac: bytes) -> tuple[ScramCredential, ...]:
    """Derive the SCRAM credentials. This takes milliseconds of processor time, by design."""
    password, made = password_of(token_hmac), list[ScramCredential]()
    for mechanism in ScramMechanism:
        salt = secrets.token_bytes(SALT_BYTES)
        salted = salted_password(mechanism, password, salt, DEFAULT_ITERATIONS)
        made.append(credential(token_id, mechanism, salted, salt, DEFAULT_ITERATIONS))
    return tuple(made)


def may_renew(token: DelegationToken, user: str) -> bool:
    """Return whether the user may renew or expire the token. A requester who created it for another owner may not."""
    return user == token.owner or user in token.renewers


def concerns(token: DelegationToken, user: str) -> bool:
    """Return whether the user may describe the token without a permission."""
    return user == token.requester or may_renew(token, user)


class DelegationTokens:
    """The tokens of one secret key."""

    def __init__(self, store: TokenStore, secret_key: str, *, max_lifetime_ms: int, expiry_ms: int) -> None:
        self._store = store
        self._secret_key = secret_key
        self._max_lifetime_ms = max_lifetime_ms
        self._expiry_ms = expiry_ms
        self._deriving = asyncio.Semaphore(MAX_DERIVING)
        self.describing = asyncio.Lock()
        """Held by the one request that describes tokens at a time: all tokens may take a hundred megabytes."""

    async def create(
        self, owner: str, requester: str, renewers: Sequence[str], lifetime_ms: int
    ) -> DelegationToken | None:
        """Create a token; return None if too many tokens exist. `lifetime_ms` includes all renewals; if it is not
        above 0, the token gets the longest lifetime."""
        token_id = _new_id()
        token_hmac = self.hmac(token_id)
        async with self._deriving:
            credentials = await asyncio.to_thread(_credentials, token_id, token_hmac)
        return await self._store.create(
            NewDelegationToken(token_id, digest_of(token_hmac), owner, requester, tuple(renewers), credentials),
            expiry_ms=self._expiry_ms,
            lifetime_ms=min(lifetime_ms, self._max_lifetime_ms) if lifetime_ms > 0 else self._max_lifetime_ms,
            most=MAX_TOKENS,
            most_of_one=MAX_TOKENS_OF_ONE,
        )

    def hmac(self, token_id: str) -> bytes:
        return hmac_of(self._secret_key, token_id)

    def is_ours(self, token_id: str, hmac_digest: bytes) -> bool:
        """Return whether the token was made under this key."""
        return hmac.compare_digest(digest_of(self.hmac(token_id)), hmac_digest)

    async def find(self, token_hmac: bytes) -> tuple[DelegationToken, bool] | None:
        """Return the token with this secret, and whether it has expired."""
        found = await self._store.by_digest(digest_of(token_hmac))
        return found if found is not None and self.is_ours(found[0].token_id, found[0].hmac_digest) else None

    async def described(self, users: Collection[str] | None) -> list[DelegationToken]:
        """Return the tokens that concern one of the users; all tokens if `users` is None. Some may be of another
        key."""
        return await self._store.described(users)

    async def renew(self, token: DelegationToken, period_ms: int) -> int | None:
        """Prolong the token from now on and return when it then expires; None if it has expired already. If
        `period_ms` is not above 0, use the longest renewal."""
        period_ms = min(period_ms, self._expiry_ms) if period_ms > 0 else self._expiry_ms
        return await self._store.prolong(token.token_id, period_ms)

    async def end(self, token: DelegationToken, period_ms: int) -> int | None:
        """Let the token expire `period_ms` from now and return that time; None if it has expired or is gone. If
        `period_ms` is negative, delete the token at once."""
        if period_ms < 0:
            return await self._store.delete(token.token_id)
        return await self._store.prolong(token.token_id, period_ms)

    async def credential(self, token_id: str, mechanism: ScramMechanism) -> TokenCredential | None:
        """Return the credential for the name, or None if no client can log in with the name."""
        found = await self._store.credential(token_id, int(mechanism))
        if found is None or found.remaining_ms <= 0 or not self.is_ours(token_id, found.hmac_digest):
            return None
        return found
