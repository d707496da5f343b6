"""A PgBouncer of a test's own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg

from tests.gateway_process import free_ports

PGBOUNCER = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")
START_S = 10


@contextlib.contextmanager
def pooler(database_url: str, directory: Path, *, mode: str, ignored: str, servers: int = 20) -> Iterator[str]:
    """Run a pgbouncer in front of the database, and yield the database's URL through it. `servers` is the maximal
    number of connections to Postgres.
    """
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
default_pool_size = {servers}
"""
    )
    directory.chmod(0o755)
    assert PGBOUNCER is not None, "pgbouncer is not installed; install the Debian package pgbouncer"
    with (directory / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [PGBOUNCER, "-u", _account(Path(host)) if host.startswith("/") else "nobody", str(ini)],
            stdout=log,
            stderr=log,
        )
    try:
        _wait(listen_port)
        yield f"postgresql://{user}@127.0.0.1:{listen_port}{parts.path}"
    finally:
        process.kill()
        process.wait()


async def admit_pooler(sql: asyncpg.Connection) -> None:
    """Let the server's own account connect. As root's child the embedded server admits only root, and a pooler refuses
    to run as root.
    """
    ident = Path(str(await sql.fetchval("select current_setting('ident_file')")))
    if os.getuid() == 0 and ident.exists() and "gateway root" in ident.read_text():
        admitted = f"gateway {_account(ident)} sluice\n"
        if admitted not in ident.read_text():
            with ident.open("a") as file:
                file.write(admitted)
        await sql.execute("select pg_reload_conf()")


def _account(path: Path) -> str:
    return pwd.getpwuid(path.stat().st_uid).pw_name


def _wait(port: int) -> None:
    """Wait until the pooler listens. Raise OSError if it does not in time."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
        else:
            return
