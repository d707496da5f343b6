"""A Postgres of another version that is installed on this machine. The suite runs a server of its own from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from urllib.parse import quote

import asyncpg

from tests.postgres import short_directory

START_SECONDS = 60
STOP_SECONDS = 30
ACCOUNT = "nobody"
"""Account that runs the server if root runs the tests."""


@contextlib.contextmanager
def installed_postgres(programs: Path) -> Generator[str]:
    """Run a server from the directory's `initdb` and `postgres`, without syncing its files, and yield its URL."""
    account = pwd.getpwnam(ACCOUNT) if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    with short_directory() as directory, contextlib.ExitStack() as stack:
        cluster = directory / "cluster"
        cluster.mkdir(mode=0o700)
        os.chown(cluster, account.pw_uid, account.pw_gid)

        def start(program: str, *arguments: str) -> subprocess.Popen[bytes]:
            user = account.pw_uid if os.geteuid() == 0 else None
            with (directory / f"{program}.log").open("wb") as log:
                return subprocess.Popen(
                    [programs / program, "-D", cluster, *arguments],
                    cwd="/",
                    env={"PATH": os.defpath, "LC_ALL": "C"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    user=user,
                    group=account.pw_gid if user is not None else None,
                    extra_groups=[] if user is not None else None,
                )

        making = start("initdb", "-U", "sluice", "-E", "UTF8", "--locale=C", "-A", "trust", "--no-sync")
        assert making.wait(START_SECONDS) == 0, (directory / "initdb.log").read_text()
        settings = ("fsync=off", "listen_addresses=", f"unix_socket_directories={cluster}", "max_connections=400")
        server = start("postgres", *(word for setting in settings for word in ("-c", setting)))
        stack.callback(_stop, server)
        url = f"postgresql://sluice@/postgres?host={quote(str(cluster), safe='')}&sslmode=disable"
        asyncio.run(_answers(url, server, directory / "postgres.log"))
        yield url


async def _answers(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection = await asyncpg.connect(url)
        except (OSError, asyncpg.PostgresError):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            await asyncio.sleep(0.02)
        else:
            await connection.close()
            return


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGINT)
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
