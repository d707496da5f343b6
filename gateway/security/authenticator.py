"""SASL before Kafka's requests: which requests a node accepts before a client has authenticated, and its responses.

The one idea: an `Authenticator` stands before one connection's requests as a handler of its own. Until the exchange is
complete it accepts one request at a time. So no later request, not even one in the same segment, is started or read.
From then on it passes requests on, until the session ends or the client authenticates again (KIP-368).

Mirrors upstream's SaslServerAuthenticator and what Selector and SocketServer do around it: a client that fails gets its
response and is disconnected, after a delay. The end of a session is noticed at the client's next request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Protocol

from gateway.config.mechanisms import OAUTHBEARER, PLAIN
from gateway.config.security import SaslSettings
from gateway.net.context import ConnectionInfo, Principal
from gateway.net.requests import Admission, LastAnswerError, Requests, UnanswerableError
from gateway.security.delegation import DelegationTokens
from gateway.security.failures import Failures
from gateway.security.jwks import KeysUnavailableError, Tokens
from gateway.security.mechanisms import (
    Exchange,
    OAuthBearerExchange,
    PlainExchange,
    SaslAuthenticationError,
    SaslError,
    ScramExchange,
)
from gateway.security.scram import MECHANISMS, TOKEN_AUTH, ScramMechanism, decoy
from gateway.security.turns import Turns
from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.codec import decode_request, encode_response
from protocol.errors import ErrorCode, ProtocolError
from protocol.framing import Frame
from protocol.headers import RequestHeader, decode_request_header, encode_response_header
from protocol.messages.sasl_authenticate import SaslAuthenticateRequest, SaslAuthenticateResponse
from protocol.messages.sasl_handshake import SaslHandshakeRequest, SaslHandshakeResponse
from storage.errors import StorageError
from storage.types import ScramCredential, TokenCredential
from storage.users import UserStore

HANDSHAKE_VERSIONS, AUTHENTICATE_VERSIONS = range(2), range(3)
FIRST_HANDSHAKE_WITH_REQUESTS = 1
"""First handshake version after which tokens arrive as requests. Before it, tokens have no headers."""
MIN_REAUTH_INTERVAL_S = 1.0
"""Upstream's interval. A client that authenticates again sooner gets ILLEGAL_SASL_STATE, as it does if
re-authentication is not enabled."""
MAX_REQUEST_BYTES = 64 * 1024
"""Largest request before authentication, even if the settings allow more. No mechanism accepts a token of more than
half of that. A request that has arrived only in part counts against the same bound as the requests of authenticated
clients."""
MAX_LOOKUPS = 2
"""Credentials that a node reads at once: clients that are not authenticated must not keep the others from Postgres."""
ABSENT_S = 1.0
"""How long an absent user name is not looked up while other look-ups wait. If no look-up waits, a new user is found at
once.
"""
MAX_ABSENT = 1_000
MAX_TOOK_S = 0.1
MAX_SHOWN_NAME = 100

_ALONE = Admission()
_ERROR_CODE = slice(8, 10)
"""Place of the error code in a response to ApiVersions, in every version: behind the size and the correlation id."""


class Counts(Protocol):
    """Counters of authentications, by mechanism."""

    def authenticated(self, listener: str, mechanism: str, *, again: bool, ok: bool) -> None: ...

    def session_expired(self, listener: str) -> None: ...


class Users:
    """SCRAM credentials of users and of delegation tokens, from Postgres. `tokens` is None if the node has no
    tokens."""

    def __init__(
        self,
        store: UserStore,
        tokens: DelegationTokens | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._clock = clock
        self._lookups = Turns(MAX_LOOKUPS)
        self._secret: bytes | None = None
        self._absent: dict[tuple[str, ScramMechanism], float] = {}
        """When each name was last found absent, the oldest first."""
        self._took_s = 0.0

    async def find(self, user: str, mechanism: ScramMechanism, address: str) -> ScramCredential:
        key = user, mechanism
        absent = self._clock() < self._absent.get(key, float("-inf")) + ABSENT_S
        if absent and self._secret is not None and self._lookups.busy:
            # A faster response would reveal that no such user exists.
            await asyncio.sleep(self._took_s)
            return decoy(user, mechanism, self._secret)
        async with self._lookups.turn(address):
            began_s = self._clock()
            secret = await self._decoy_secret()
            found = await self._store.credential(user, int(mechanism))
            self._took_s = min(self._clock() - began_s, MAX_TOOK_S)
        self._absent.pop(key, None)
        if found is None:
            while len(self._absent) >= MAX_ABSENT:
                del self._absent[next(iter(self._absent))]
            self._absent[key] = self._clock()
        # Computed for existing users too, so that both cases take equally long.
        substitute = decoy(user, mechanism, secret)
        return substitute if found is None else found

    async def find_token(self, token_id: str, mechanism: ScramMechanism, address: str) -> TokenCredential:
        async with self._lookups.turn(address):
            secret = await self._decoy_secret()
            found = None if self._tokens is None else await self._tokens.credential(token_id, mechanism)
        # The prefix makes this decoy differ from the decoy of a user with the same name.
        substitute = decoy(f"{TOKEN_AUTH} {token_id}", mechanism, secret)
        return TokenCredential(substitute, "", b"", 0) if found is None else found

    async def _decoy_secret(self) -> bytes:
        if self._secret is None:
            self._secret = await self._store.decoy_secret()
        return self._secret


class ListenerSasl:
    """State that all connections of one listener share."""

    def __init__(
        self,
        listener: str,
        settings: SaslSettings,
        users: Users,
        requests: Requests,
        counts: Counts,
        *,
        failure_delay_ms: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listener = listener
        self.settings = settings
        self.users = users
        self.requests = requests
        self.counts = counts
        self.failure_delay_s = failure_delay_ms / 1000
        self.clock = clock
        self.tokens = None if settings.oauthbearer is None else Tokens(settings.oauthbearer)
        self.failures = Failures("a client failed to authenticate", listener=listener, clock=clock)

    def exchange(self, mechanism: str, address: str) -> Exchange:
        return EXCHANGES[mechanism](self, address)

    def renew_users(self, users: Mapping[str, str]) -> None:
        """Replace the users of PLAIN and their passwords for later logins."""
        self.settings = replace(self.settings, plain_users=users)

    async def close(self) -> None:
        if self.tokens is not None:
            await self.tokens.close()

    def guard(self) -> Authenticator:
        return Authenticator(self)


def _plain(sasl: ListenerSasl, _address: str) -> Exchange:
    return PlainExchange(sasl.settings.plain_users)


def _oauthbearer(sasl: ListenerSasl, _address: str) -> Exchange:
    assert sasl.tokens is not None
    return OAuthBearerExchange(sasl.tokens)


def _scram(mechanism: ScramMechanism, sasl: ListenerSasl, address: str) -> Exchange:
    find = partial(sasl.users.find, address=address)
    find_token = partial(sasl.users.find_token, address=address)
    return ScramExchange(mechanism, find, find_token, sasl.clock)


EXCHANGES: Mapping[str, Callable[[ListenerSasl, str], Exchange]] = {
    PLAIN: _plain,
    **{name: partial(_scram, mechanism) for name, mechanism in MECHANISMS.items()},
    OAUTHBEARER: _oauthbearer,
}
"""The exchange of each mechanism that `LOGIN_MODULES` names, for a client of this address."""


class State(Enum):
    INITIAL = auto()
    """ApiVersions or SaslHandshake may follow."""
    HANDSHAKE = auto()
    """ApiVersions has been answered: only SaslHandshake may follow."""
    TOKENS = auto()
    COMPLETE = auto()
    OTHER_MECHANISM = auto()
    """The client asked for another mechanism when it re-authenticated: its next request ends the connection."""
    FAILED = auto()


class Authenticator:
    """The guard of one connection (`gateway.net.requests.Guard`)."""

    def __init__(self, shared: ListenerSasl) -> None:
        self._shared = shared
        self._state = State.INITIAL
        self._mechanism = ""
        self._principal: Principal | None = None
        """Principal of the completed exchange; re-authentication must end with the same principal."""
        self._exchange: Exchange | None = None
        self._with_requests = False
        """True if tokens arrive in SaslAuthenticate requests rather than bare."""
        self._expires_s: float | None = None
        self._again_s = float("-inf")
        """Time at which the client last began to re-authenticate."""
        self.max_request_bytes = min(shared.settings.max_receive_bytes, MAX_REQUEST_BYTES)
        self.passed: Callable[[], None] = lambda: None

    @property
    def _again(self) -> bool:
        return self._principal is not None

    def admission(self, frame: Frame) -> Admission:
        if self._state is State.COMPLETE:
            return self._shared.requests.admission(frame)
        return _ALONE

    def handle(self, frame: Frame, connection: ConnectionInfo) -> Coroutine[object, None, Sequence[Buffer]]:
        if self._state is not State.COMPLETE:
            return self._take(frame, connection)
        if self._expires_s is not None:
            now = self._shared.clock()
            if _api_key(frame) == ApiKey.SASL_HANDSHAKE and now >= self._again_s + MIN_REAUTH_INTERVAL_S:
                self._again_s = now
                self._state = State.HANDSHAKE
                return self._take(frame, connection)
            if now > self._expires_s:
                return self._expired(connection)
        return self._shared.requests.handle(frame, connection)

    async def _expired(self, connection: ConnectionInfo) -> Sequence[Buffer]:
        self._shared.counts.session_expired(self._shared.listener)
        raise UnanswerableError("session_expired", f"{connection.principal} has not authenticated again")

    async def _take(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        if len(frame) > self.max_request_bytes:  # other requests on a re-authenticating connection may be larger
            self._state = State.FAILED
            raise UnanswerableError("request_size", f"{len(frame)} bytes to authenticate")
        try:
            match self._state:
                case State.INITIAL | State.HANDSHAKE:
                    return await self._take_handshake(frame, connection)
                case State.TOKENS if self._with_requests:
                    return await self._take_request(frame, connection)
                case State.TOKENS:
                    return await self._take_token(frame, connection)
                case State.OTHER_MECHANISM:
                    raise await self._failure(connection, "another mechanism than before", None)
                case _:
                    raise UnanswerableError("sasl_state", "a request behind a failed authentication")
        except StorageError as error:
            self._state = State.FAILED
            # Close without refusing: the client may be genuine, and will reconnect.
            raise UnanswerableError("storage", f"credentials cannot be read: {error}") from error
        except KeysUnavailableError as error:
            self._state = State.FAILED
            raise UnanswerableError("token_keys", str(error)) from error
        except ProtocolError:
            self._state = State.FAILED
            raise

    # --- handshake ------------------------------------------------------------------------------------------------

    async def _take_handshake(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        header, position = decode_request_header(frame)
        if header.api_key == ApiKey.API_VERSIONS and self._state is State.INITIAL:
            chunks = await self._shared.requests.handle(frame, connection)
            if bytes(chunks[0][_ERROR_CODE]) == b"\0\0":
                self._state = State.HANDSHAKE
            return chunks
        if header.api_key != ApiKey.SASL_HANDSHAKE:
            raise UnanswerableError("sasl_state", f"API key {header.api_key} before authentication")
        if header.api_version not in HANDSHAKE_VERSIONS:
            raise UnanswerableError("unsupported_version", f"sasl_handshake version {header.api_version}")
        request: SaslHandshakeRequest = decode_request(ApiKey.SASL_HANDSHAKE, header.api_version, frame, position)
        enabled = self._shared.settings.mechanisms
        answer = SaslHandshakeResponse(mechanisms=enabled)
        if request.mechanism not in enabled:
            refused = SaslHandshakeResponse(error_code=ErrorCode.UNSUPPORTED_SASL_MECHANISM, mechanisms=enabled)
            raise await self._failure(connection, "a mechanism that is not enabled", _encode(header, refused))
        if self._again and request.mechanism != self._mechanism:
            self._state = State.OTHER_MECHANISM
            return _encode(header, answer)
        self._with_requests = header.api_version >= FIRST_HANDSHAKE_WITH_REQUESTS
        self._mechanism = request.mechanism
        self._exchange = self._shared.exchange(request.mechanism, connection.client_host)
        self._state = State.TOKENS
        return _encode(header, answer)

    # --- tokens ---------------------------------------------------------------------------------------------------

    async def _take_request(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        header, position = decode_request_header(frame)
        if header.api_key != ApiKey.SASL_AUTHENTICATE:
            name = ApiKey(header.api_key).name if header.api_key in frozenset(ApiKey) else str(header.api_key)
            message = f"Unexpected Kafka request of type {name} during SASL authentication."
            refused = await self._shared.requests.refuse(frame, ErrorCode.ILLEGAL_SASL_STATE, message)
            raise await self._failure(connection, message, refused)
        if header.api_version not in AUTHENTICATE_VERSIONS:
            raise UnanswerableError("unsupported_version", f"sasl_authenticate version {header.api_version}")
        request: SaslAuthenticateRequest = decode_request(ApiKey.SASL_AUTHENTICATE, header.api_version, frame, position)
        try:
            token, lifetime_ms = await self._answer(request.auth_bytes, connection)
        except SaslError as error:
            told = error.told if isinstance(error, SaslAuthenticationError) else self._generic()
            refused = SaslAuthenticateResponse(error_code=ErrorCode.SASL_AUTHENTICATION_FAILED, error_message=told)
            raise await self._failure(connection, str(error), _encode(header, refused)) from None
        return _encode(
            header, SaslAuthenticateResponse(error_message=None, auth_bytes=token, session_lifetime_ms=lifetime_ms)
        )

    async def _take_token(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        try:
            token, _ = await self._answer(bytes(frame), connection)
        except SaslError as error:
            raise await self._failure(connection, str(error), None) from None
        return (len(token).to_bytes(4, "big") + token,)

    async def _answer(self, token: bytes, connection: ConnectionInfo) -> tuple[bytes, int]:
        """Return the response token and the session's lifetime in ms (0: unlimited, or the session has not begun)."""
        assert self._exchange is not None
        exchange = self._exchange
        answer = await exchange.answer(token)
        if not exchange.complete:
            return answer, 0
        principal = Principal(exchange.user, by_token=exchange.by_token)
        if self._principal is not None and principal != self._principal:
            before, now = self._principal, principal
            raise SaslAuthenticationError(
                "Cannot change principals during re-authentication from "
                f"{before.type}.{before.name}: {now.type}.{now.name}"
            )
        shared = self._shared
        shared.counts.authenticated(shared.listener, self._mechanism, again=self._again, ok=True)
        # The earlier limit counts. A credential that has expired, and passes only by the allowed clock skew, leaves 0
        # ms.
        limits_ms = [shared.settings.max_reauth_ms.get(self._mechanism), exchange.lifetime_ms]
        lifetime_ms = min((limit_ms for limit_ms in limits_ms if limit_ms is not None), default=None)
        self._expires_s = None if lifetime_ms is None else shared.clock() + lifetime_ms / 1000
        self._principal = connection.principal = principal
        self._exchange, self._state = None, State.COMPLETE
        self.passed()
        return answer, lifetime_ms or 0

    def _generic(self) -> str:
        what = "re-authentication" if self._again else "authentication"
        return f"Authentication failed during {what} due to invalid credentials with SASL mechanism {self._mechanism}"

    async def _failure(
        self, connection: ConnectionInfo, reason: str, refused: Sequence[Buffer] | None
    ) -> ProtocolError:
        """Count and log the failure, wait for the delay, and return the error that ends the connection. The error
        carries the response, if there is one."""
        self._state = State.FAILED
        shared, exchange = self._shared, self._exchange
        shared.counts.authenticated(shared.listener, self._mechanism or "unknown", again=self._again, ok=False)
        shared.failures.log(
            mechanism=self._mechanism or None,
            user=None if exchange is None else exchange.user[:MAX_SHOWN_NAME],
            reason=reason,
            client_host=connection.client_host,
            connection=connection.connection_id,
        )
        await asyncio.sleep(shared.failure_delay_s)
        if refused is None:
            return UnanswerableError("authentication_failed", reason)
        return LastAnswerError("authentication_failed", reason, refused)


def _api_key(frame: Frame) -> int:
    return frame[0] << 8 | frame[1] if len(frame) >= 2 else -1


def _encode(header: RequestHeader, response: object) -> Sequence[Buffer]:
    api_key, version = ApiKey(header.api_key), header.api_version
    body = encode_response_header(api_key, version, header.correlation_id)
    body += b"".join(bytes(chunk) for chunk in encode_response(response, version))
    return (len(body).to_bytes(4, "big") + body,)


def guards(sasl: Mapping[str, ListenerSasl]) -> Mapping[str, Callable[[], Authenticator]]:
    """Return the guard factories by listener, in the form that the server expects."""
    return {name: shared.guard for name, shared in sasl.items()}
