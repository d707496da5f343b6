"""Connections through a pooler: served if a client's connection keeps its server, refused at once if not."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from storage.errors import StorageError, StorageUnavailable
from storage.history import HistoryStore
from storage.log import LogStore
from storage.pool import Database
from storage.types import PartitionKey
from tests.gateway_process import free_ports
from tests.storage.batches import append, new_batch

PGBOUNCER = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")
START_S = 10

pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed")


@contextlib.contextmanager
def _pooler(database_url: str, directory: Path, *, mode: str, ignored: str) -> Iterator[str]:
    """Run a pgbouncer before the test's database, and yield the database's URL through it."""
    parts = urlsplit(database_url)
    query = parse_qs(parts.query)
    host = query.get("host", [parts.hostname or ""])[0]
    port = parts.port or int(query.get("port", ["5432"])[0])
    user = parts.username or query.get("user", [""])[0]
    (listen_port,) = free_ports(1)
    ini = directory / "pgbouncer.ini"
    ini.write_text(
        f"""
[databases]
* = host={host} port={port} user={user} {f"password={parts.password}" if parts.password else ""}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
ignore_startup_parameters = {ignored}
"""
    )
    directory.chmod(0o755)
    assert PGBOUNCER is not None
    with (directory / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [PGBOUNCER, "-u", _account(Path(host)) if host.startswith("/") else "nobody", str(ini)],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"postgresql://{user}@127.0.0.1:{listen_port}{parts.path}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
async def pooler_may_connect(sql: asyncpg.Connection) -> None:
    """Admit the server's own account. As root's child the embedded server admits only root, and a pooler refuses to run
    as root."""
    ident = Path(str(await sql.fetchval("select current_setting('ident_file')")))
    if os.getuid() == 0 and ident.exists() and "gateway root" in ident.read_text():
        admitted = f"gateway {_account(ident)} sluice\n"
        if admitted not in ident.read_text():
            with ident.open("a") as file:
                file.write(admitted)
        await sql.execute("select pg_reload_conf()")


def _account(path: Path) -> str:
    return pwd.getpwuid(path.stat().st_uid).pw_name


async def _open(url: str) -> Database:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return await Database.open(url)
        except StorageUnavailable as error:
            if not isinstance(error.__cause__, ConnectionRefusedError) or time.monotonic() > deadline:
                raise


@pytest.mark.parametrize("mode", ["transaction", "statement"])
async def test_a_pooler_that_moves_a_session_is_refused(database_url: str, tmp_path: Path, mode: str) -> None:
    with (
        _pooler(database_url, tmp_path, mode=mode, ignored="") as url,
        pytest.raises(StorageError, match="session mode"),
    ):
        await (await _open(url)).close()


async def test_a_session_pooler_serves_with_the_settings_that_we_rely_on(
    database_url: str, tmp_path: Path, key: PartitionKey
) -> None:
    with _pooler(database_url, tmp_path, mode="session", ignored="extra_float_digits") as url:
        database = await _open(url)
        try:
            assert await database.hot.fetch_value("select current_setting('statement_timeout')") == "10s"
            assert await append(LogStore(database), new_batch(key)) == [0]
            history = HistoryStore(database)  # This uses a connection of its own.
            history.accept(*await history.adopt())
        finally:
            await database.close()
