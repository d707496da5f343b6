"""SASL mechanisms seen from the server: PLAIN (RFC 4616) and SCRAM. One object for each exchange.

The one idea: an exchange is given the client's tokens one after the other and answers each, until it knows who the
client is. What is known of users it asks its source, which may be Postgres.

Mirrors upstream's PlainSaslServer and ScramSaslServer; the texts of `SaslAuthenticationError` are theirs, since
clients show them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from gateway.security.scram import MIN_ITERATIONS, ScramError, ScramMechanism, ScramServer, parse_client_first
from storage.types import ScramCredential

OTHER_USER = "Authentication failed: Client requested an authorization id that is different from username"
INVALID_PLAIN = "Authentication failed: Invalid username or password"

FindCredential = Callable[[str, ScramMechanism], Awaitable[ScramCredential]]
"""Of any name: of a user who is not there one that no password fits. Raises StorageError."""


class SaslError(Exception):
    """The client is not who it says. The text is for our log: the client is told no more than that."""


class SaslAuthenticationError(SaslError):
    """The same, with a text that the client is told."""


class Exchange(Protocol):
    user: str
    """Whom the client says it is; empty as long as it has not."""
    complete: bool
    """Whether it has shown it."""

    async def answer(self, token: bytes) -> bytes:
        """Raises SaslError."""
        ...


class PlainExchange:
    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self.user = ""
        self.complete = False

    async def answer(self, token: bytes) -> bytes:
        parts = token.decode("utf-8", "replace").split("\0", 3)
        if len(parts) != 3:
            raise SaslError(f"expected 3 tokens, got {len(parts)}")
        authorization_id, self.user, password = parts
        if not self.user:
            raise SaslError("username not specified")
        if not password:
            raise SaslError("password not specified")
        known = self._users.get(self.user)
        # Compared in any case, and as digests, so that the time tells neither who is known nor how long a password is.
        same = hmac.compare_digest(_digest(password), _digest(known or ""))
        if known is None or not same:
            raise SaslAuthenticationError(INVALID_PLAIN)
        if authorization_id and authorization_id != self.user:
            raise SaslAuthenticationError(OTHER_USER)
        self.complete = True
        return b""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class ScramExchange:
    def __init__(self, mechanism: ScramMechanism, find: FindCredential) -> None:
        self._mechanism = mechanism
        self._find = find
        self._server: ScramServer | None = None
        self.user = ""
        self.complete = False

    async def answer(self, token: bytes) -> bytes:
        try:
            if self._server is None:
                return await self._begin(token)
            last = self._server.finish(token)
        except ScramError as error:
            raise SaslError(str(error)) from None
        self.complete = True
        return last

    async def _begin(self, token: bytes) -> bytes:
        first = parse_client_first(token)
        self.user = first.name
        if first.authorization_id and first.authorization_id != first.name:
            raise SaslAuthenticationError(OTHER_USER)
        known = await self._find(first.name, self._mechanism)
        if known.iterations < MIN_ITERATIONS:
            raise SaslError(f"the credential has {known.iterations} iterations")
        self._server = ScramServer(first, known)
        return self._server.first
