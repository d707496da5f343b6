"""Fetch the keys that sign access tokens from where the issuer publishes them, and check tokens with them.

The one idea: a token that needs a key triggers a fetch, but never more often than our own interval allows. Unknown
clients decide when a node fetches, not how often. One fetch is under way at a time; every caller that needs its result
waits for it.

Mirrors upstream's RefreshingHttpsJwks (KIP-768), and JwksFileVerificationKeyResolver for files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

from gateway.config.security import OAuthSettings
from gateway.security.http_bodies import read_bounded
from gateway.security.jwt import (
    AccessToken,
    Expected,
    RsaKey,
    UnknownKeyError,
    check_claims,
    find_key,
    parse_keys,
    parse_token,
    verify,
)

logger = structlog.stdlib.get_logger(__name__)

MAX_SET_BYTES = 256 * 1024
FETCH_TIMEOUT_S = 10.0
UNKNOWN_KEY_INTERVAL_S = 10.0
"""Interval between fetches for keys that are in no set that we have."""


class KeysUnavailableError(Exception):
    """Error: no key fits the token, and the issuer cannot be asked now whether it has other keys."""


class Tokens:
    """Check the access tokens of one listener. `clock` is monotonic, `wall_clock` returns seconds since 1970."""

    def __init__(
        self,
        settings: OAuthSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._expected = Expected(
            frozenset(settings.audiences),
            settings.issuer,
            settings.clock_skew_s,
            settings.scope_claim,
            settings.subject_claim,
        )
        self._clock = clock
        self.now_s = wall_clock
        self._keys: Sequence[RsaKey] = ()
        self._stale_s = float("-inf")
        """When known keys become due for another fetch."""
        self._next_s = float("-inf")
        """Earliest time of the next fetch."""
        self._failures = 0
        """Consecutive failed fetches."""
        self._question: asyncio.Task[None] | None = None

    async def check(self, token: str, *, nonce: str | None = None) -> AccessToken:
        """Return the checked token. With `nonce` it must be the ID token of the login that has this nonce.

        Raise TokenError or KeysUnavailableError.
        """
        parsed = parse_token(token)
        try:
            key = find_key(parsed, self._keys)
        except UnknownKeyError:
            await self._ask()
            try:
                key = find_key(parsed, self._keys)
            except UnknownKeyError:
                if self._failures:
                    raise KeysUnavailableError("the keys for access tokens cannot be read") from None
                raise
        else:
            now = self._clock()
            if now >= self._stale_s + self._settings.refresh_ms / 1000:
                # No token arrived for a whole refresh interval: the issuer may have withdrawn the key.
                await self._ask()
                key = find_key(parsed, self._keys)
            elif now >= self._stale_s:
                self._begin()
        verify(parsed, key)
        return check_claims(parsed, self._expected, self.now_s(), nonce)

    async def close(self) -> None:
        if self._question is not None:
            self._question.cancel()
            await asyncio.gather(self._question, return_exceptions=True)

    async def _ask(self) -> None:
        """Fetch the keys and return when they have arrived; return at once if no fetch may begin yet."""
        question = self._begin()
        if question is not None:
            # A cancelled caller must not cancel the fetch that other callers wait for.
            await asyncio.shield(question)

    def _begin(self) -> asyncio.Task[None] | None:
        if self._question is not None:
            return self._question
        if self._clock() < self._next_s:
            return None
        self._question = asyncio.create_task(self._refresh())
        return self._question

    async def _refresh(self) -> None:
        import aiohttp  # imported late, because a node without tokens does not need it

        settings = self._settings
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                document = await _fetch(settings.jwks_url)
            keys = await asyncio.to_thread(parse_keys, document)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._failures += 1
            backoff_ms = settings.retry_backoff_ms * 2 ** min(self._failures - 1, 30)
            self._next_s = self._clock() + min(backoff_ms, settings.retry_backoff_max_ms) / 1000
            logger.warning(
                "the keys for access tokens cannot be read",
                url=_without_secrets(settings.jwks_url),
                error=repr(error)[:200],
            )
        else:
            now = self._clock()
            self._keys, self._failures = keys, 0
            self._next_s, self._stale_s = now + UNKNOWN_KEY_INTERVAL_S, now + settings.refresh_ms / 1000
            logger.info("the keys for access tokens were read", url=_without_secrets(settings.jwks_url), keys=len(keys))
        finally:
            self._question = None


async def _fetch(url: str) -> bytes:
    """Return at most MAX_SET_BYTES. Raise OSError, aiohttp.ClientError or ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return await asyncio.to_thread(_read, Path(unquote(parts.path)))
    import aiohttp

    # No redirects: the settings say where the issuer publishes its keys, and a response must not change that.
    async with aiohttp.ClientSession() as session, session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise ValueError(f"answered by {response.status}")
        return await read_bounded(response, MAX_SET_BYTES)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        document = file.read(MAX_SET_BYTES + 1)
    if len(document) > MAX_SET_BYTES:
        raise ValueError(f"it is longer than {MAX_SET_BYTES} bytes")
    return document


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
