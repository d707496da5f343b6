"""A Postgres with a synchronous standby, and the failover between them.

The one idea: the primary acknowledges a commit only after the standby has it on disk, so a failover loses nothing that
was acknowledged. Each failover makes a new standby, so that another failover can follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import asyncpg
import psutil

from storage.embedded import CLUSTER, EmbeddedPostgres
from storage.embedded_socket import USER
from storage.postgres_programs import find_programs
from tests.postgres import LoopThread

DEADLINE_S = 120.0
POLL_S = 0.05
SETTINGS = {"max_wal_senders": "4", "hot_standby": "on", "wal_retrieve_retry_interval": "100ms"}


class ReplicatedPostgres:
    """A primary and its standby below `directory`, started by the constructor."""

    def __init__(
        self, loop: LoopThread, directory: Path, connections: int = 0, settings: Mapping[str, str] | None = None
    ) -> None:
        self._loop = loop
        self._directory = directory
        self._connections = connections
        self._count = 0
        access = directory / "pg_hba.conf"  # by default the embedded server accepts only its own process
        access.write_text("local all all trust\nlocal replication all trust\n")
        access.chmod(0o644)
        self._settings = {**SETTINGS, **(settings or {}), "hba_file": str(access)}
        self.primary = self._server()
        loop.run(self.primary.start())
        self.standby = self._new_standby()

    def _server(self) -> EmbeddedPostgres:
        self._count += 1
        return EmbeddedPostgres(self._directory / f"server-{self._count}", self._connections, settings=self._settings)

    def _new_standby(self) -> EmbeddedPostgres:
        """Copy the primary and start the copy as its standby. From then on commits wait for it."""
        standby = self._server()
        standby.data_dir.mkdir(mode=0o711)
        words = [
            *(find_programs(None).directory / "pg_basebackup", "-h", _socket_directory(self.primary), "-U", USER),
            *("-D", standby.data_dir / CLUSTER, "-R", "-c", "fast"),
        ]
        subprocess.run(words, check=True, timeout=DEADLINE_S)
        self._loop.run(standby.start())
        self._loop.run(self._wait_for(standby))
        return standby

    async def _wait_for(self, standby: EmbeddedPostgres) -> None:
        connection = await asyncpg.connect(self.primary.url)
        try:
            await connection.execute("alter system set synchronous_standby_names = '*'")
            await connection.execute("select pg_reload_conf()")
            async with asyncio.timeout(DEADLINE_S):
                while await connection.fetchval("select sync_state from pg_stat_replication") != "sync":  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        finally:
            await connection.close()

    def sleeping_standby(self) -> contextlib.AbstractContextManager[None]:
        """Stop the standby by SIGSTOP for as long as the context lasts. No commit ends in that time."""
        return sleeping(self.standby)

    def fail_over(self) -> str:
        """Freeze the primary, promote the standby, and return its URL. `retire` ends the previous primary."""
        self._former, self._frozen = self.primary, suspend(self.primary)
        self._loop.run(_promoted(self.standby.url))
        self.primary = self.standby
        return self.primary.url

    def retire(self) -> None:
        """Kill the previous primary, which no client may use any more, and make a new standby."""
        for process in self._frozen:
            process.kill()
        self._loop.run(self._former.stop())
        shutil.rmtree(self._former.data_dir)
        self.standby = self._new_standby()

    def stop(self) -> None:
        for server in (self.standby, self.primary):
            self._loop.run(server.stop())


def running(server: EmbeddedPostgres) -> psutil.Process:
    """Return the postmaster of a server. If the server was killed, wait until it was started again."""
    deadline_s = time.monotonic() + DEADLINE_S
    while (pid := server.pid) is None:
        assert time.monotonic() < deadline_s, "Postgres does not run"
        time.sleep(POLL_S)
    return psutil.Process(pid)


def suspend(server: EmbeddedPostgres) -> list[psutil.Process]:
    """Stop every process of a server by SIGSTOP, and return them."""
    postmaster = running(server)
    postmaster.suspend()  # stop the postmaster first, because children that it forks in the meantime would answer
    stopped = [postmaster, *postmaster.children(recursive=True)]
    for process in stopped[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    return stopped


@contextlib.contextmanager
def sleeping(server: EmbeddedPostgres) -> Iterator[None]:
    """Stop every process of a server by SIGSTOP for as long as the context lasts."""
    stopped = suspend(server)
    try:
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _socket_directory(server: EmbeddedPostgres) -> str:
    return str(server.data_dir / "socket")


async def _promoted(url: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            connection = await asyncpg.connect(url)
        except (OSError, asyncpg.PostgresError):
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(POLL_S)
        else:
            break
    try:
        assert await connection.fetchval("select pg_promote(true, 60)"), "the standby is not promoted"
    finally:
        await connection.close()
