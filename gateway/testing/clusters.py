"""A Postgres cluster that is ready in a copy instead of an initdb.

The one idea: the first test server of a user and a release keeps its cluster, with all tables, in the user's cache. The
next ones copy it. Files that another process may see are only ever moved into place whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

from storage import schema
from storage.embedded import CLUSTER, EmbeddedPostgres, EmbeddedPostgresError
from storage.migrate import migrate
from storage.pool import Database
from storage.postgres_programs import Programs, find_programs

CACHE_VARIABLE = "XDG_CACHE_HOME"
DATA_PREFIX = "sluice-test-"
LOCK_NAME = "sluice.lock"
YOUNG_SECONDS = 120
"""A data directory without a lock may belong to a server that is just starting."""
KEPT_SECONDS = 7 * 24 * 3600
"""Age at which a cluster that no server has copied lately is removed."""
COPY_SECONDS = 60
SERVER_SETTINGS = {
    # Data of a test need not survive the machine. Other processes see what is written, so a restart finds it.
    "fsync": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_replication_slots": "0",
    "shared_buffers": "32MB",
    "wal_buffers": "1MB",
    "min_wal_size": "32MB",
    "max_wal_size": "256MB",
    "max_connections": "40",
    "autovacuum_max_workers": "1",
    "huge_pages": "off",
    "io_workers": "1",
}


class TestPostgres:
    """One server in a directory of its own below the system's temporary directory."""

    __test__ = False  # pytest takes classes of this name for tests

    def __init__(self, programs: Path | None = None) -> None:
        self._given = programs
        self.data_dir = Path(tempfile.gettempdir()) / f"{DATA_PREFIX}{os.geteuid()}-{uuid.uuid4().hex[:12]}"
        self._server: EmbeddedPostgres | None = None

    async def start(self) -> str:
        """Start the server with Sluice's tables and return its URL. Raise EmbeddedPostgresError or StorageError."""
        programs = await asyncio.to_thread(find_programs, self._given)
        # Root's server runs as another user, who must be able to pass.
        self.data_dir.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700)
        kept = _kept_cluster(programs)
        if kept is not None and kept.is_dir() and await _copy(kept, self.data_dir):
            try:
                return await self._serve(programs)
            except EmbeddedPostgresError:
                # The kept files are not synced, so they are damaged if the machine lost its power after it wrote them.
                await asyncio.to_thread(_remove, kept)
                await asyncio.to_thread(shutil.rmtree, self.data_dir / CLUSTER, True)
        url = await self._serve(programs)
        async with _opened(url) as database:
            await migrate(database)
        if kept is not None:
            await self._stop_server()
            await asyncio.to_thread(_keep, self.data_dir / CLUSTER, kept)
            url = await self._serve(programs)
        return url

    async def _serve(self, programs: Programs) -> str:
        self._server = EmbeddedPostgres(self.data_dir, programs=programs.directory, settings=SERVER_SETTINGS)
        return await self._server.start()

    async def _stop_server(self) -> None:
        if self._server is not None:
            await self._server.stop()

    async def stop(self) -> None:
        """Stop the server and remove its directory."""
        await self._stop_server()
        await asyncio.to_thread(shutil.rmtree, self.data_dir, True)


@contextlib.asynccontextmanager
async def _opened(url: str) -> AsyncGenerator[Database]:
    database = await Database.open(url, hot_connections=2, cold_connections=1)
    try:
        yield database
    finally:
        await database.close(1.0)


def remove_leftovers() -> None:
    """Remove the directories of servers of this user that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{DATA_PREFIX}{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
                continue
            if time.time() - directory.stat().st_mtime < YOUNG_SECONDS:
                continue
            lock = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _kept_cluster(programs: Programs) -> Path | None:
    """Return the place of the kept cluster for these programs and this release; None if the user has no cache."""
    given = os.environ.get(CACHE_VARIABLE)
    try:
        cache = (Path(given) if given else Path.home() / ".cache") / "sluice"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    if not os.access(cache, os.W_OK):
        return None
    found = (programs.directory / "postgres").stat()
    parts: Iterable[object] = (
        os.geteuid(),
        programs.directory,
        programs.major,
        found.st_size,
        found.st_mtime_ns,
        schema.migrations(),
        schema.FUNCTION_SCHEMA,
        sorted(SERVER_SETTINGS.items()),
    )
    return cache / f"cluster-{hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()[:20]}"


async def _copy(kept: Path, data_dir: Path) -> bool:
    """Copy the kept cluster; return False if it cannot be copied."""
    target = data_dir / CLUSTER
    with contextlib.suppress(OSError):
        os.utime(kept)  # before the copy, so that no other server removes it in the meantime for its age
    copying = await asyncio.create_subprocess_exec(
        *("cp", "-a", str(kept), str(target)), stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        failed = await asyncio.wait_for(copying.wait(), COPY_SECONDS) != 0
    except TimeoutError:
        copying.kill()
        failed = True
    if failed:
        await asyncio.to_thread(shutil.rmtree, target, True)
        return False
    return True


def _keep(cluster: Path, kept: Path) -> None:
    """Copy a stopped server's cluster into the cache, and remove old ones. Another server may do the same."""
    fresh = kept.with_name(f"{kept.name}.{uuid.uuid4().hex[:8]}.new")
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(cluster, fresh, symlinks=True)
        _own_alike(cluster, fresh)
        fresh.rename(kept)
    shutil.rmtree(fresh, ignore_errors=True)
    for other in kept.parent.glob("cluster-*"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > KEPT_SECONDS:
                _remove(other)


def _remove(kept: Path) -> None:
    """Remove a kept cluster. It is moved away first, so that a server that is copying it fails and does not get a part
    of it."""
    gone = kept.with_name(f"{kept.name}.{uuid.uuid4().hex[:8]}.old")
    with contextlib.suppress(OSError):
        kept.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _own_alike(source: Path, target: Path) -> None:
    """Give each file of a copy the owner of its original: root's server runs as another user."""
    if os.geteuid() != 0:
        return
    for directory, _, names in os.walk(source):
        place = target / Path(directory).relative_to(source)
        for original, copy in ((Path(directory), place), *((Path(directory) / n, place / n) for n in names)):
            status = original.lstat()
            os.lchown(copy, status.st_uid, status.st_gid)
