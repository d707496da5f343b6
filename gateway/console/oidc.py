"""Login by an OpenID Connect provider: the authorization code flow with PKCE (OpenID Connect Core 1.0, RFC 7636).

The one idea: the node remembers nothing about a login that is under way. The browser holds one random cookie. State,
nonce and code verifier are derived from the cookie by a key of this process. So logins that strangers begin and never
finish use no memory, and an answer counts only in the browser that asked for it.

The ID token is checked by the code that checks access tokens of OAUTHBEARER. It must also repeat the nonce.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import structlog

from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigError
from gateway.config.security import OAuthSettings
from gateway.console.decode import Json
from gateway.security.http_bodies import read_bounded
from gateway.security.jwks import KeysUnavailableError, Tokens
from gateway.security.jwt import AccessToken, TokenError

logger = structlog.get_logger(__name__)

COOKIE = "sluice_console_login"
PATH = "/api/oidc"
CALLBACK = f"{PATH}/callback"
LOGIN_S = 600
"""Time that a person has to log in at the provider."""
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 128 * 1024
MAX_CODE_CHARS = 4_096
METADATA_S = 3_600.0
AWAY_S = 5.0
"""If the provider failed, its metadata is not requested again for this time."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class LoginError(Exception):
    """A login failed. `code` names the reason to the page; the text is for our log."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class Provider:
    """The parts of a provider's metadata (OpenID Connect Discovery 1.0) that a login uses."""

    authorization_url: str
    token_url: str
    keys_url: str
    takes_basic: bool
    """True if the client may send its secret by HTTP Basic; otherwise it goes into the form."""
    names_itself: bool
    """True if each answer must name the issuer (RFC 9207)."""


class Oidc:
    """Logins by the provider of `console.oidc.issuer`. Raise ConfigError if the settings contradict each other."""

    def __init__(self, broker: BrokerConfig, listener: OAuthSettings | None, *, is_loopback: bool) -> None:
        self.issuer = broker.console_oidc_issuer
        self._client_id = broker.console_oidc_client_id
        self._secret = broker.console_oidc_client_secret
        self._redirect = broker.console_oidc_redirect_uri
        self._scopes = " ".join(dict.fromkeys(("openid", *broker.console_oidc_scopes)))
        self.session_s = broker.console_oidc_session_ms / 1000
        """Length of a session in seconds, from the login."""
        self._subject_claim = listener.subject_claim if listener is not None else broker.sasl_oauthbearer_sub_claim_name
        self._clock_skew_s = (
            listener.clock_skew_s if listener is not None else broker.sasl_oauthbearer_clock_skew_seconds
        )
        self._refresh_ms = broker.sasl_oauthbearer_jwks_endpoint_refresh_ms
        self._backoff_ms = broker.sasl_oauthbearer_jwks_endpoint_retry_backoff_ms
        self._backoff_max_ms = broker.sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms
        if not is_secure(self.issuer):
            raise ConfigError("console.oidc.issuer", self.issuer, "must be an https URL, or one of this machine")
        if not self._client_id:
            raise ConfigError(
                "console.oidc.client.id", "", "console.oidc.issuer is given: name the console's client id"
            )
        if not self._redirect and not is_loopback:
            raise ConfigError(
                "console.oidc.redirect.uri",
                "",
                f"the console is not on a loopback address: give its URL for browsers followed by {CALLBACK}",
            )
        self._key = secrets.token_bytes(32)
        self._provider: Provider | None = None
        self._read_s = float("-inf")
        self._asking: asyncio.Task[Provider] | None = None
        self._away: tuple[float, str] = (float("-inf"), "")
        self._tokens: tuple[str, Tokens] | None = None

    async def begin(self, origin: str) -> tuple[str, str]:
        """Return the provider's URL for the browser, and the cookie of this login. `origin` is the scheme and the
        host of the console as the browser names them, used on loopback alone. Raise LoginError."""
        provider = await self._metadata()
        cookie = f"{secrets.token_urlsafe(32)}.{int(time.monotonic())}"
        verifier = self._derived("verifier", cookie)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": self._redirect_uri(origin),
            "scope": self._scopes,
            "state": self._derived("state", cookie),
            "nonce": self._derived("nonce", cookie),
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        joint = "&" if urlsplit(provider.authorization_url).query else "?"
        return f"{provider.authorization_url}{joint}{urlencode(query)}", cookie

    def check_begun(self, answer: Mapping[str, str], cookie: str) -> None:
        """Raise LoginError unless the answer is to a recent login of this browser."""
        begun_s = cookie.rpartition(".")[2]
        if not (begun_s.isascii() and begun_s.isdigit() and len(begun_s) < 20):
            raise LoginError("state", "the browser has no cookie of a login")
        if not hmac.compare_digest(
            answer.get("state", "").encode(errors="replace"), self._derived("state", cookie).encode()
        ):
            raise LoginError("state", "the state is not that of this browser's login")
        if not 0 <= time.monotonic() - int(begun_s) <= LOGIN_S:
            raise LoginError("late", f"the login took longer than {LOGIN_S} s")

    async def finish(self, answer: Mapping[str, str], cookie: str, origin: str) -> AccessToken:
        """Return the ID token for the provider's answer in the callback's query, which `check_begun` has checked. Raise
        LoginError."""
        provider = await self._metadata()
        named = answer.get("iss")
        if named != self.issuer and (named is not None or provider.names_itself):
            raise LoginError("provider", "the answer names another issuer")
        if "error" in answer:
            code = "denied" if answer["error"] == "access_denied" else "provider"
            raise LoginError(code, f"the provider answered {answer['error'][:100]!r}")
        code = answer.get("code", "")
        if not 0 < len(code) <= MAX_CODE_CHARS:
            raise LoginError("provider", "the provider answered without a code")
        id_token = await self._exchange(provider, code, cookie, origin)
        try:
            return await self._checker(provider).check(id_token, nonce=self._derived("nonce", cookie))
        except TokenError as error:
            raise LoginError("token", f"the ID token is refused: {error}") from error
        except KeysUnavailableError as error:
            raise LoginError("away", str(error)) from error

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._tokens is not None:
            await self._tokens[1].close()

    def _derived(self, use: str, cookie: str) -> str:
        made = hmac.digest(self._key, f"{use} {cookie}".encode(errors="replace"), "sha256")
        return base64.urlsafe_b64encode(made).rstrip(b"=").decode()

    def _redirect_uri(self, origin: str) -> str:
        return self._redirect or f"{origin}{CALLBACK}"

    def _checker(self, provider: Provider) -> Tokens:
        """Return the check of ID tokens. Its keys stay until the provider publishes them elsewhere."""
        if self._tokens is None or self._tokens[0] != provider.keys_url:
            settings = OAuthSettings(
                jwks_url=provider.keys_url,
                refresh_ms=self._refresh_ms,
                retry_backoff_ms=self._backoff_ms,
                retry_backoff_max_ms=self._backoff_max_ms,
                audiences=(self._client_id,),
                issuer=self.issuer,
                clock_skew_s=self._clock_skew_s,
                scope_claim="scope",
                subject_claim=self._subject_claim,
            )
            self._tokens = provider.keys_url, Tokens(settings)
        return self._tokens[1]

    # --- the provider -------------------------------------------------------------------------------------------------

    async def _metadata(self) -> Provider:
        """Return the provider's metadata, at most METADATA_S old. Raise LoginError."""
        now = time.monotonic()
        if self._provider is not None and now < self._read_s + METADATA_S:
            return self._provider
        if now < self._away[0]:
            raise LoginError("away", self._away[1])
        if self._asking is None:
            self._asking = asyncio.create_task(self._discover())
            self._asking.add_done_callback(self._asked)
        # A browser that disconnects must not cancel the request that other browsers wait for.
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[Provider]) -> None:
        self._asking = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._away = time.monotonic() + AWAY_S, str(error)

    async def _discover(self) -> Provider:
        found = await self._ask("GET", f"{self.issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != self.issuer:
            raise LoginError("provider", f"the provider calls itself {str(found.get('issuer'))[:100]!r}")
        urls = [found.get(name) for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")]
        if not all(isinstance(url, str) and is_secure(url) for url in urls):
            raise LoginError("provider", "the provider's metadata lacks an https URL that a login needs")
        authorization_url, token_url, keys_url = (str(url) for url in urls)
        methods = found.get("token_endpoint_auth_methods_supported")
        takes_basic = not isinstance(methods, list) or "client_secret_basic" in methods
        names_itself = found.get("authorization_response_iss_parameter_supported") is True
        self._provider = Provider(authorization_url, token_url, keys_url, takes_basic, names_itself)
        self._read_s = time.monotonic()
        return self._provider

    async def _exchange(self, provider: Provider, code: str, cookie: str, origin: str) -> str:
        """Return the ID token that the provider gives for the code. Raise LoginError."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri(origin),
            "code_verifier": self._derived("verifier", cookie),
        }
        headers = {"Accept": "application/json"}
        if self._secret is not None and provider.takes_basic:
            # RFC 6749, 2.3.1: both parts are form-encoded before they are joined.
            pair = f"{quote(self._client_id, safe='')}:{quote(self._secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form["client_id"] = self._client_id
            if self._secret is not None:
                form["client_secret"] = self._secret
        answer = await self._ask("POST", provider.token_url, form, headers)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise LoginError("provider", "the provider answered the code without an ID token")
        return token

    async def _ask(
        self, method: str, url: str, form: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> Mapping[str, Json]:
        """Return the JSON object with which the provider answers. Raise LoginError."""
        try:
            async with asyncio.timeout(TIMEOUT_S), aiohttp.ClientSession() as session:
                # No redirects: the provider's metadata names every URL, and no other URL may receive a code.
                sent = session.request(method, url, data=form, headers=headers, allow_redirects=False)
                async with sent as response:
                    body, status = await read_bounded(response, MAX_ANSWER_BYTES), response.status
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a timeout is an OSError
            said = str(error) or type(error).__name__
            raise LoginError("away", f"the provider does not answer: {said}"[:200]) from error
        try:
            found: Json = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if status != 200:
            said = str(found.get("error"))[:100] if isinstance(found, dict) else "no reason"
            raise LoginError("away" if status >= 500 else "provider", f"the provider answered {status}: {said!r}")
        if not isinstance(found, dict):
            raise LoginError("provider", "the provider's answer is not a JSON object")
        return found


def is_secure(url: str) -> bool:
    """Return whether a URL is https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in LOOPBACK))
