"""The Postgres that the suite runs on, and a fresh database for each test that needs one.

The server is the first of these that is available: SLUICE_TEST_DATABASE_URL (a user that may create databases); the
programs in the directory SLUICE_TEST_POSTGRES_BIN; a container, if an engine answers; `storage.embedded`, as `sluice
serve` runs it. Every database is a copy of a template: a migrated one, or for gateways one that also holds what a first
start adds. Parallel workers share the server and the templates of the process that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from storage.embedded import EmbeddedPostgres

T = TypeVar("T")

ENVIRONMENT_VARIABLE = "SLUICE_TEST_DATABASE_URL"
PROGRAMS_VARIABLE = "SLUICE_TEST_POSTGRES_BIN"
CONTAINER_IMAGE = "postgres:18"
CALL_SECONDS = 120
SETTINGS = {"fsync": "off", "full_page_writes": "off", "min_wal_size": "80MB", "max_wal_size": "256MB"}
"""Settings of the shared server. It never has to survive a crash, because tests of durability start a server of their
own. Without syncs, databases are created and dropped faster, and commits do not queue at the disk.
"""
MEMORY = Path("/dev/shm")
SERVER_BYTES = 4 * 1024 * 1024 * 1024
"""Space for the databases of all workers and for the server's log."""
CLUSTER_BYTES = 2 * 1024 * 1024 * 1024
"""Size of a cluster whose write-ahead log has reached its limit."""
LOGGED, COPIED = "WAL_LOG", "FILE_COPY"
"""Ways in which Postgres copies a template: page by page through its buffers and its log, or by copying files between
two checkpoints. Without syncs a checkpoint is cheap, and copying files takes half the CPU time.
"""
EMPTY, MIGRATED, SERVED = "empty", "migrated", "served"
"""Templates of databases. A served one has been migrated, and has what else a node creates at its first start: the
public schema of the SQL door and the journal's partitions of today. That is a fifth of the cost of such a start.
"""
NO_TEMPLATES: Mapping[str, str] = {EMPTY: "template1"}
CONNECTIONS = 400
"""Enough connections for several workers. Each runs gateways that hold some thirty connections."""


class LoopThread:
    """An event loop on its own thread, so that a session's server does not belong to a test's event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-postgres", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.submit(coroutine).result(CALL_SECONDS)

    def close(self) -> None:
        # A task that is still pending when its loop is closed prints an error in the middle of the next test.
        self.run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        self._loop.close()

    @staticmethod
    async def _end_tasks() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Databases:
    """Creates and drops databases on one server. `description` says which server that is."""

    def __init__(
        self,
        loop: LoopThread,
        url: str,
        description: str,
        *,
        templates: Mapping[str, str] = NO_TEMPLATES,
        strategy: str = LOGGED,
    ) -> None:
        """`templates` are those of another process. `strategy` is how Postgres copies a template: LOGGED or COPIED."""
        self.description = description
        self._strategy = strategy
        self._creation: Any = None
        """The connection that creates databases, after the first database was created."""
        self._creating = asyncio.Lock()
        self._loop = loop
        self._url = url
        self._prefix = f"sluice_test_{uuid.uuid4().hex[:8]}"
        self._count = 0
        self._templates = dict(templates)
        """Names of the template databases: EMPTY, and those that were made."""
        self._made: list[str] = []
        """URLs of the templates that this process has made."""
        self._drops: list[Future[None]] = []

    def shared(self) -> dict[str, Any]:
        """Return the arguments that `shared_databases` needs in another process."""
        assert MIGRATED in self._templates, "the template was not made"
        return {
            "url": self._url,
            "description": self.description,
            "templates": self._templates,
            "strategy": self._strategy,
        }

    def make_template(self, name: str, of: str, fill: Callable[[str], Coroutine[Any, Any, object]]) -> None:
        """Create the template database `name` as a copy of the template `of`. `fill` receives its URL, and must not
        leave a connection open.
        """
        url = self.create(of)
        self._loop.run(fill(url))
        self._templates[name] = _database_of(url)
        self._made.append(url)

    def create(self, template: str = MIGRATED) -> str:
        """Create a database and return its URL."""
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        source = self._templates[template]
        self._loop.run(self._create(f'CREATE DATABASE "{name}" TEMPLATE "{source}" STRATEGY {self._strategy}'))
        return _with_database(self._url, name)

    def drop(self, url: str) -> None:
        """Drop a database in the background, because a drop waits for a checkpoint. `close` raises its errors."""
        self._drops.append(self._loop.submit(self._execute(f'DROP DATABASE "{_database_of(url)}" WITH (FORCE)')))

    def close(self) -> None:
        for template in self._made:
            self.drop(template)
        for drop in self._drops:
            drop.result(CALL_SECONDS)
        self._loop.run(self._end_creation())

    async def _create(self, statement: str) -> None:
        async with self._creating:
            if self._creation is None:
                self._creation = await asyncpg.connect(self._url)
            await self._creation.execute(statement)

    async def _end_creation(self) -> None:
        if self._creation is not None:
            await self._creation.close()

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


@contextlib.contextmanager
def databases() -> Iterator[Databases]:
    """The session's server, for as long as the context lasts."""
    with contextlib.ExitStack() as stack:
        loop = LoopThread()
        stack.callback(loop.close)
        url, description, strategy = _server(loop, stack)
        made = Databases(loop, url, description, strategy=strategy)
        stack.callback(made.close)
        yield made


@contextlib.contextmanager
def shared_databases(url: str, description: str, templates: Mapping[str, str], strategy: str) -> Iterator[Databases]:
    """Databases on the server of another process, which has made the templates."""
    with contextlib.ExitStack() as stack:
        loop = LoopThread()
        stack.callback(loop.close)
        made = Databases(loop, url, description, templates=templates, strategy=strategy)
        stack.callback(made.close)
        yield made


def _server(loop: LoopThread, stack: contextlib.ExitStack) -> tuple[str, str, str]:
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    if given:
        return given, f"given by {ENVIRONMENT_VARIABLE}", LOGGED
    programs = os.environ.get(PROGRAMS_VARIABLE)
    if programs:
        from tests.installed_postgres import installed_postgres

        return stack.enter_context(installed_postgres(Path(programs))), f"that of {programs}", COPIED
    contained = _container(stack)
    if contained is not None:
        return contained, f"a container of {CONTAINER_IMAGE}", LOGGED
    directory = stack.enter_context(short_directory(in_memory(SERVER_BYTES)))
    server = EmbeddedPostgres(directory, CONNECTIONS, settings=SETTINGS)
    url = loop.run(server.start())
    stack.callback(lambda: loop.run(server.stop()))
    return url, "embedded", COPIED


def _container(stack: contextlib.ExitStack) -> str | None:
    if not os.environ.get("DOCKER_HOST") and not Path("/var/run/docker.sock").exists():
        return None
    import docker
    from docker.errors import DockerException
    from testcontainers.community.postgres import PostgresContainer

    try:
        docker.from_env().ping()
        container = PostgresContainer(CONTAINER_IMAGE, driver=None)
        stack.callback(container.stop)
        container.start()
    except DockerException as error:
        warnings.warn(f"no container of {CONTAINER_IMAGE} ({error}): the embedded Postgres is used", stacklevel=2)
        return None
    return container.get_connection_url()


@contextlib.contextmanager
def short_directory(parent: Path | None = None) -> Iterator[Path]:
    """A directory with a path so short that a socket fits into it, and which an unprivileged user may enter. It is in
    `parent`, or in the directory for temporary files.
    """
    directory = Path(tempfile.mkdtemp(prefix="sluice-", dir=parent))
    directory.chmod(0o711)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, onerror=_unless_gone)


def cluster_directory() -> contextlib.AbstractContextManager[Path]:
    """A short directory for a node and its Postgres. It is in memory if there is room, because syncs are most of the
    time for which starts and recoveries wait.
    """
    return short_directory(in_memory(CLUSTER_BYTES))


def in_memory(needed_bytes: int) -> Path | None:
    """Return a directory in memory if it has this much free space.

    A database has three hundred files. If thousands of files are created and deleted, ext4 checks every recently
    deleted inode before it reuses one. That was a third of the cost of a gateway's start. A recovery syncs every file
    of a cluster, which takes most of its time on a shared disk. A killed process loses nothing that it has written to
    memory.
    """
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY).free >= needed_bytes and os.access(MEMORY, os.W_OK | os.X_OK):
            return MEMORY
    return None


def _unless_gone(_call: object, _path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
    """Ignore files that a process removed first while it ended."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _with_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


def _database_of(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")
