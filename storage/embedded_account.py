"""The system account that the embedded Postgres runs as if root starts it."""

from __future__ import annotations

import asyncio
import contextlib
import pwd
from dataclasses import dataclass

import structlog

from storage.postgres_programs import EmbeddedPostgresError, last_line

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

ACCOUNT = "sluice"
"""System user that runs the server if root starts it."""
USERADD = (
    *("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"),
    *("--shell", "/usr/sbin/nologin", ACCOUNT),
)
USERADD_ATTEMPTS = 20
"""Attempts to run useradd, because another process may be changing the list of users."""
USERADD_RETRY_SECONDS = 0.25
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Account:
    """Account that runs the server; None for this process's own account."""

    uid: int
    gid: int

    @property
    def owner(self) -> tuple[int, int]:
        return self.uid, self.gid


async def own_account() -> Account:
    """Return the system user of the embedded Postgres. Create it if it does not exist."""
    output = b""
    for attempt in range(USERADD_ATTEMPTS):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(ACCOUNT)
            if entry.pw_uid == 0:
                raise EmbeddedPostgresError(f"the user {ACCOUNT} is root, as which Postgres refuses to run: rename it")
            return Account(entry.pw_uid, entry.pw_gid)
        if attempt:
            await asyncio.sleep(USERADD_RETRY_SECONDS)
        try:
            process = await asyncio.create_subprocess_exec(
                *USERADD,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={"PATH": SYSTEM_PATH, "LC_ALL": "C"},
            )
        except FileNotFoundError:
            output = b"there is no useradd"
            break
        output, _ = await process.communicate()
        if process.returncode == 0:
            logger.info("system user created for the embedded Postgres", user=ACCOUNT)
    raise EmbeddedPostgresError(
        f"Postgres refuses to run as root, and the user {ACCOUNT} cannot be created ({last_line(output)}): create a "
        f"system user of that name, run as another user, or give --database-url"
    )
