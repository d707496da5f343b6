"""Sessions of the console: who looks, and the token that a form must repeat.

The one idea: the cookie is a random name for an entry in this process, so nothing about a person is in the browser. A
node forgets its sessions when it ends. Passwords are compared with the SCRAM credentials in Postgres and kept nowhere.
A session that began with an access token ends with the token, and one that began with a password when the user's
credentials change.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from gateway.net.context import ANONYMOUS, Principal
from gateway.net.networks import network_of
from gateway.security.authenticator import Users
from gateway.security.scram import ScramMechanism, credential, salted_password
from storage.errors import StorageError
from storage.types import ScramCredential

MAX_SESSIONS = 1_000
IDLE_S = 8 * 3600.0
RECHECK_S = 10.0
"""Interval at which a session in use compares its user's credentials with those in Postgres."""
MAX_NAME_CHARS = 1_024
MAX_ATTEMPTS = 5
"""Maximal number of failed logins of one address, and of one user, within WINDOW_S."""
MAX_ATTEMPTS_OF_ALL = 60
WINDOW_S = 60.0
MAX_ADDRESSES = 1_000

Credentials = tuple[ScramCredential, ScramCredential]
"""A user's credentials for SCRAM-SHA-256 and SCRAM-SHA-512."""


@dataclass(slots=True)
class Session:
    key: str
    csrf: str
    principal: Principal
    is_logged_in: bool
    used_s: float
    until_s: float = math.inf
    """Time at which the session ends even if it is in use, by the monotonic clock."""
    credentials: Credentials | None = None
    """The user's credentials at the login. None if the session did not begin with a password."""
    checked_s: float = -math.inf


class Sessions:
    """The sessions of one node, the least recently used first."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def find(self, key: str | None) -> Session | None:
        session = None if key is None else self._sessions.get(key)
        if session is None:
            return None
        now = time.monotonic()
        if now > min(session.used_s + IDLE_S, session.until_s):
            del self._sessions[session.key]
            return None
        session.used_s = now
        self._sessions.move_to_end(session.key)
        return session

    def begin(
        self, principal: Principal = ANONYMOUS, *, is_logged_in: bool = False, lifetime_s: float = math.inf
    ) -> Session:
        """Begin a session with a new key. The least recently used one ends if there are too many."""
        now = time.monotonic()
        key, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        session = Session(key, csrf, principal, is_logged_in, now, now + lifetime_s)
        self._sessions[session.key] = session
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    async def checked(self, key: str | None, address: str) -> Session | None:
        """Return the session, or None if its user's credentials are no longer those of the login. While Postgres does
        not answer, the session goes on."""
        session, now = self.find(key), time.monotonic()
        if session is None or session.credentials is None or now < session.checked_s + RECHECK_S:
            return session
        try:
            found = await credentials_of(self._users, session.principal.name, address)
        except StorageError:
            return session
        if found != session.credentials:
            self.end(session.key)
            return None
        session.checked_s = now
        return session

    def end(self, key: str) -> None:
        self._sessions.pop(key, None)


class Attempts:
    """Failed logins of the last minute, by address and by user. A person who guesses must wait."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()
        self._all: deque[float] = deque(maxlen=MAX_ATTEMPTS_OF_ALL)

    def wait_s(self, *keys: str) -> float:
        """Return for how long these keys must wait before the next attempt; 0 for none."""
        now = time.monotonic()
        waits = [self._wait_s(self._failed[key], MAX_ATTEMPTS, now) for key in keys if key in self._failed]
        return max((*waits, self._wait_s(self._all, MAX_ATTEMPTS_OF_ALL, now)))

    def _wait_s(self, failed: deque[float], most: int, now: float) -> float:
        while failed and failed[0] < now - WINDOW_S:
            failed.popleft()
        return 0.0 if len(failed) < most else failed[0] + WINDOW_S - now

    def failed(self, *keys: str) -> None:
        now = time.monotonic()
        self._all.append(now)
        for key in keys:
            self._failed.setdefault(key, deque(maxlen=MAX_ATTEMPTS)).append(now)
            self._failed.move_to_end(key)
        while len(self._failed) > MAX_ADDRESSES:
            self._failed.popitem(last=False)

    def forget(self, *keys: str) -> None:
        """Forget the failures for these keys, because the last attempt succeeded."""
        if self._all:
            self._all.pop()
        for key in keys:
            self._failed.pop(key, None)

    def withdraw(self, *keys: str) -> None:
        """Remove the last failure for these keys, because nothing could be compared."""
        for failed in (self._all, *(self._failed.get(key) for key in keys)):
            if failed:
                failed.pop()


def address_key(address: str) -> str:
    """Return the key under which the failed logins of an address count. A machine has all addresses of its network of
    IPv6."""
    return f"address {network_of(address)}"


async def credentials_of(users: Users, user: str, address: str) -> Credentials:
    """Return the SCRAM credentials of a user. An unknown user has credentials that no password matches. Raise
    StorageError."""
    return (
        await users.find(user, ScramMechanism.SHA_256, address),
        await users.find(user, ScramMechanism.SHA_512, address),
    )


async def password_matches(known: Credentials, password: str) -> bool:
    """Return whether the password is that of one of the credentials. An unknown user takes as long as a known one."""
    matches = False
    for each in known:
        mechanism = ScramMechanism(each.mechanism)
        salted = await asyncio.to_thread(salted_password, mechanism, password, each.salt, each.iterations)
        shown = credential(each.user, mechanism, salted, each.salt, each.iterations)
        matches = hmac.compare_digest(shown.stored_key, each.stored_key) or matches
    return matches
