"""SASL mechanisms seen from the server: PLAIN (RFC 4616), SCRAM, OAUTHBEARER (RFC 7628). One object per exchange.

The one idea: an exchange reads the client's tokens one after the other and answers each, until it knows who the client
is. It reads credentials from the source it was given, which may be Postgres.

Mirrors upstream's PlainSaslServer, ScramSaslServer and OAuthBearerSaslServer; the texts of `SaslAuthenticationError`
are theirs, since clients show them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from gateway.security.jwks import Tokens
from gateway.security.jwt import MAX_TOKEN_BYTES, TokenError
from gateway.security.scram import MIN_ITERATIONS, ScramError, ScramMechanism, ScramServer, parse_client_first
from storage.types import ScramCredential, TokenCredential

OTHER_USER = "Authentication failed: Client requested an authorization id that is different from username"
INVALID_PLAIN = "Authentication failed: Invalid username or password"

FindCredential = Callable[[str, ScramMechanism], Awaitable[ScramCredential]]
"""Returns a credential for every name; an unknown user gets a decoy that no password matches. Raises StorageError."""

FindToken = Callable[[str, ScramMechanism], Awaitable[TokenCredential]]
"""Returns a credential for every name; an unknown or expired token gets a decoy that no password matches. Raises
StorageError."""


class SaslError(Exception):
    """The client could not prove its identity. The text is for our log: the client learns only that it failed."""


class SaslAuthenticationError(SaslError):
    """A SaslError with a text for the client; `reason` is the text for our log, if that says more."""

    def __init__(self, told: str, reason: str | None = None) -> None:
        super().__init__(reason or told)
        self.told = told


class Exchange(Protocol):
    user: str
    """User that the client claims to be; empty until it names one."""
    complete: bool
    """True once the client has proved that it is the user."""
    lifetime_ms: int | None
    """How long the proof is valid once the exchange is complete; None: without limit."""
    by_token: bool
    """True if the client authenticated with a delegation token."""

    async def answer(self, token: bytes) -> bytes:
        """Return the server's answer to a token. Raise SaslError."""
        ...


class PlainExchange:
    lifetime_ms: int | None = None
    by_token = False

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
        # Always compared, and as digests, so that the time reveals neither which users exist nor a password's length.
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
    def __init__(
        self,
        mechanism: ScramMechanism,
        find: FindCredential,
        find_token: FindToken,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mechanism = mechanism
        self._find = find
        self._find_token = find_token
        self._clock = clock
        self._server: ScramServer | None = None
        self._owner = ""
        self._expires_s = 0.0
        self.user = ""
        """The user. Until the exchange is complete, it is the token's id if the client uses a delegation token."""
        self.by_token = False
        self.complete = False
        self.lifetime_ms: int | None = None

    async def answer(self, token: bytes) -> bytes:
        try:
            if self._server is None:
                return await self._begin(token)
            last = self._server.finish(token)
        except ScramError as error:
            raise SaslError(str(error)) from None
        if self.by_token:
            self.user = self._owner
            self.lifetime_ms = max(0, int((self._expires_s - self._clock()) * 1000))
        self.complete = True
        return last

    async def _begin(self, token: bytes) -> bytes:
        first = parse_client_first(token)
        self.user, self.by_token = first.name, first.by_token
        if first.authorization_id and first.authorization_id != first.name:
            raise SaslAuthenticationError(OTHER_USER)
        if first.by_token:
            found = await self._find_token(first.name, self._mechanism)
            self._owner, self._expires_s = found.owner, self._clock() + found.remaining_ms / 1000
            known = found.credential
        else:
            known = await self._find(first.name, self._mechanism)
        if known.iterations < MIN_ITERATIONS:
            raise SaslError(f"the credential has {known.iterations} iterations")
        self._server = ScramServer(first, known)
        return self._server.first


INVALID_TOKEN = '{"status":"invalid_token"}'
_SASL_NAME = r"(?:[\x01-\x2b\x2d-\x3c\x3e-\x7f]|=2C|=3D)+"
_VALUE = r"[\x21-\x7e \t\r\n]+"
_FIRST = re.compile(rf"n,(?:a=(?P<authorization_id>{_SASL_NAME}))?,\x01(?P<pairs>(?:[A-Za-z]+={_VALUE}\x01)*)\x01")
_AUTH = re.compile(r"(?P<scheme>[A-Za-z0-9_]+) +(?P<token>[-_~+/.a-zA-Z0-9]+=*)")
MAX_FIRST_BYTES = 2 * MAX_TOKEN_BYTES
"""Largest first message, with its extensions."""


class OAuthBearerExchange:
    by_token = False

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._refused: str | None = None
        """Why the token was refused. The client has received the refusal, and must confirm it with one more message."""
        self.user = ""
        self.complete = False
        self.lifetime_ms: int | None = None

    async def answer(self, token: bytes) -> bytes:
        """Return the server's answer to a token. Raise SaslError or KeysUnavailableError."""
        if self._refused is not None:
            # Upstream accepts another token in place of the confirmation. No client sends one, and here each guess has
            # to wait for the failure delay.
            raise (
                SaslAuthenticationError(INVALID_TOKEN, self._refused) if token == b"\x01" else SaslError(self._refused)
            )
        authorization_id, access_token = _parse_first(token)
        try:
            found = await self._tokens.check(access_token)
        except TokenError as error:
            self.user, self._refused = error.subject, f"the access token is not taken: {error}"
            return INVALID_TOKEN.encode()
        self.user = found.subject
        if authorization_id and authorization_id != self.user:
            raise SaslAuthenticationError(
                f"Authentication failed: Client requested an authorization id ({authorization_id}) that is different "
                f"from the token's principal name ({self.user})"
            )
        self.lifetime_ms = max(0, int((found.expires_s - self._tokens.now_s()) * 1000))
        self.complete = True
        return b""


def _parse_first(message: bytes) -> tuple[str, str]:
    """Return the authorization id, empty if the client asks for none, and the token. Of SASL extensions only the
    form is checked."""
    if len(message) > MAX_FIRST_BYTES:
        raise SaslError(f"a message of {len(message)} bytes")
    found = _FIRST.fullmatch(message.decode("utf-8", "replace"))
    if found is None:
        raise SaslError("Invalid OAUTHBEARER client first message")
    pairs = dict(pair.split("=", 1) for pair in found["pairs"].split("\x01")[:-1])
    if "auth" not in pairs:
        raise SaslError("Invalid OAUTHBEARER client first message: 'auth' not specified")
    auth = _AUTH.fullmatch(pairs["auth"])
    if auth is None or auth["scheme"].lower() != "bearer":
        raise SaslError("Invalid OAUTHBEARER client first message: invalid 'auth' format")
    return found["authorization_id"] or "", auth["token"]
