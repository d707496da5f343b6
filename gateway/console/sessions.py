"""Sessions of the console: who looks, and the token that a form must repeat.

The one idea: the cookie is a random name for an entry in this process, so nothing about a person is in the browser. A
node forgets its sessions when it ends. Passwords are compared with the SCRAM credentials in Postgres and kept nowhere.
A session that began with an access token ends with the token.
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
from gateway.security.authenticator import Users
from gateway.security.scram import ScramMechanism, credential, salted_password

COOKIE = "sluice_console"
MAX_SESSIONS = 1_000
IDLE_S = 8 * 3600.0
MAX_NAME_CHARS = 1_024
MAX_ATTEMPTS = 5
"""Maximal number of failed logins of one address, and of one user, within WINDOW_S."""
MAX_ATTEMPTS_OF_ALL = 60
WINDOW_S = 60.0
MAX_ADDRESSES = 1_000


@dataclass(slots=True)
class Session:
    key: str
    csrf: str
    principal: Principal
    is_logged_in: bool
    used_s: float
    until_s: float = math.inf
    """Time at which the session ends even if it is in use, by the monotonic clock."""


class Sessions:
    """The sessions of one node, the least recently used first."""

    def __init__(self) -> None:
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


async def password_matches(users: Users, user: str, password: str, address: str) -> bool:
    """Return whether the password is that of a SCRAM user. An unknown user takes as long as a known one.

    Raise StorageError.
    """
    matches = False
    for mechanism in (ScramMechanism.SHA_256, ScramMechanism.SHA_512):
        known = await users.find(user, mechanism, address)
        salted = await asyncio.to_thread(salted_password, mechanism, password, known.salt, known.iterations)
        shown = credential(user, mechanism, salted, known.salt, known.iterations)
        matches = hmac.compare_digest(shown.stored_key, known.stored_key) or matches
    return matches
