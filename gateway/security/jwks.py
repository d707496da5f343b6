"""The keys that access tokens are signed by, from where an issuer publishes them, and tokens checked by them.

The one idea: keys are asked for because a token wants one, and never more often than an interval of ours allows: what
strangers send decides when, not how often. One question is under way at a time; whoever wants its answer waits for it.

Mirrors upstream's RefreshingHttpsJwks (KIP-768), and JwksFileVerificationKeyResolver for files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp
import structlog

from gateway.config.security import OAuthSettings
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
"""Between questions for keys that are in no set that we have."""


class KeysUnavailableError(Exception):
    """No key fits a token, and the issuer does not tell whether there are others."""


class Tokens:
    """Checks the access tokens of one listener. `clock` is monotonic, `wall_clock` tells seconds since 1970."""

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
        """When keys that are known are asked for again."""
        self._next_s = float("-inf")
        """Before it nobody is asked."""
        self._failures = 0
        """One after the other."""
        self._question: asyncio.Task[None] | None = None

    async def check(self, token: str) -> AccessToken:
        """Raises TokenError, KeysUnavailableError."""
        parsed = parse_token(token)
        try:
            key = find_key(parsed, self._keys)
        except UnknownKeyError:
            await self._ask()
            try:
                key = find_key(parsed, self._keys)
            except UnknownKeyError:
                if self._failures:
                    raise KeysUnavailableError("the keys of tokens cannot be read") from None
                raise
        else:
            now = self._clock()
            if now >= self._stale_s + self._settings.refresh_ms / 1000:
                # For long nobody has come: the key may have been withdrawn.
                await self._ask()
                key = find_key(parsed, self._keys)
            elif now >= self._stale_s:
                self._begin()
        verify(parsed, key)
        return check_claims(parsed, self._expected, self.now_s())

    async def close(self) -> None:
        if self._question is not None:
            self._question.cancel()
            await asyncio.gather(self._question, return_exceptions=True)

    async def _ask(self) -> None:
        """Returns once the answer is there, or where nobody is asked now."""
        question = self._begin()
        if question is not None:
            # Who leaves does not take it from the others.
            await asyncio.shield(question)

    def _begin(self) -> asyncio.Task[None] | None:
        if self._question is not None:
            return self._question
        if self._clock() < self._next_s:
            return None
        self._question = asyncio.create_task(self._refresh())
        return self._question

    async def _refresh(self) -> None:
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
                "the keys of tokens cannot be read", url=_without_secrets(settings.jwks_url), error=repr(error)[:200]
            )
        else:
            now = self._clock()
            self._keys, self._failures = keys, 0
            self._next_s, self._stale_s = now + UNKNOWN_KEY_INTERVAL_S, now + settings.refresh_ms / 1000
            logger.info("the keys of tokens were read", url=_without_secrets(settings.jwks_url), keys=len(keys))
        finally:
            self._question = None


async def _fetch(url: str) -> bytes:
    """At most MAX_SET_BYTES. Raises OSError, aiohttp.ClientError, ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return await asyncio.to_thread(_read, Path(unquote(parts.path)))
    # Who publishes keys says where, and sends nobody to another place by an answer.
    async with aiohttp.ClientSession() as session, session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise ValueError(f"answered by {response.status}")
        document = bytearray()
        async for chunk in response.content.iter_any():
            document += chunk
            _bounded(len(document))
    return bytes(document)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        document = file.read(MAX_SET_BYTES + 1)
    _bounded(len(document))
    return document


def _bounded(size_bytes: int) -> None:
    if size_bytes > MAX_SET_BYTES:
        raise ValueError(f"more than {MAX_SET_BYTES} bytes")


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
