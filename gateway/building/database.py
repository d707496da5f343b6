"""The database of a node: connected, migrated, and in a known history."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from gateway.building.undo import STEP_TIMEOUT_S, StartError, Undo
from gateway.cluster.histories import begin_history
from gateway.config.settings import Settings, hide_password, read_database_url
from storage.embedded import EmbeddedPostgres, holds_cluster
from storage.errors import StorageError, StorageUnavailable
from storage.history import HistoryStore
from storage.migrate import has_tables, migrate
from storage.pool import Database, Url, is_refused_login, lock_not_available

logger = structlog.get_logger(__name__)

T = TypeVar("T")

DATABASE_PATIENCE_S = 30.0
"""How long a start waits for a database that does not respond yet."""
LOCK_PATIENCE_S = 60.0
"""How long a start waits for a lock that another session of the database holds."""
DATABASE_RETRY_S = 0.5
DATABASE_REMINDER_S = 10.0
"""Interval between log lines that the start is still waiting for the database."""
POSTGRES_STOP_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class DatabasePart:
    """The database, and the history that this node follows."""

    database: Database
    history: HistoryStore


async def open_database(settings: Settings, undo: Undo) -> DatabasePart:
    """Start the embedded Postgres if no database is named, and open the database. Raise StartError."""
    url = settings.database_url
    if url is None:
        embedded = EmbeddedPostgres(settings.data_dir, programs=settings.postgres_bin)
        undo.push("embedded postgres", POSTGRES_STOP_TIMEOUT_S, embedded.stop)
        url = await embedded.start()
    try:
        file = settings.database_url_file
        database = await _connect(url if file is None else UrlFile(file, url).current, settings)
        undo.push("database", 2 * STEP_TIMEOUT_S, lambda: database.close(STEP_TIMEOUT_S))
        if settings.database_url is not None:
            await _require_moved(database, url, settings.data_dir)
        history = HistoryStore(database, settings.log_place)
        await history.look_back()
        await migrate(database)
        await begin_history(history)
    except StorageError as error:
        raise StartError(f"cannot use {hide_password(url)}: {error}") from error
    return DatabasePart(database, history)


async def _require_moved(database: Database, url: str, data_dir: Path) -> None:
    """Refuse to start with an empty database if an embedded Postgres in the same directory holds earlier data."""
    if not holds_cluster(data_dir) or EmbeddedPostgres(data_dir).running_url() == url or await has_tables(database):
        return
    shown = await asyncio.to_thread(data_dir.absolute)
    raise StartError(
        f"the database is empty, and {shown} holds the embedded Postgres of an earlier run: move it "
        "by `sluice backup` and `sluice restore` (docs/operate.md), or begin anew with another "
        "--data-dir"
    )


class UrlFile:
    """The database's URL in a file, read for each new connection, because the password in the URL may change."""

    def __init__(self, path: Path, url: str) -> None:
        self._path, self._url, self._told = path, url, ""

    async def current(self) -> str:
        """Return the URL in the file, or the last usable URL if the file has none."""
        url, error = self._url, ""
        try:
            url = await asyncio.to_thread(read_database_url, self._path)
        except ValueError as refused:
            error = str(refused)
        if url != self._url:
            logger.info("the URL of the database changed", file=str(self._path), database=hide_password(url))
        if error and error != self._told:
            logger.error(
                "the file with the database's URL cannot be used: the last URL stays in use; correct the file",
                file=str(self._path),
                error=error,
            )
        self._url = url
        self._told = error
        return url


async def _connect(url: Url, settings: Settings) -> Database:
    deadline = time.monotonic() + DATABASE_PATIENCE_S
    last_told, remind_s = "", 0.0
    shown = hide_password(settings.database_url or str(url))
    while True:
        try:
            return await Database.open(
                url, hot_connections=settings.hot_connections, cold_connections=settings.cold_connections
            )
        except StorageUnavailable as error:
            now, text = time.monotonic(), str(error)
            if now > deadline or is_refused_login(error):
                raise
            if text != last_told or now >= remind_s:
                logger.warning("waiting for the database", database=shown, error=text)
                last_told, remind_s = text, now + DATABASE_REMINDER_S
            await asyncio.sleep(DATABASE_RETRY_S)


async def wait_for_locks(step: Callable[[], Awaitable[T]]) -> T:
    """Run a step of the start, and repeat it while another session holds a lock that the step needs.

    The step must be safe to repeat. Raise StorageError, after LOCK_PATIENCE_S also for the lock.
    """
    deadline, remind_s = time.monotonic() + LOCK_PATIENCE_S, 0.0
    while True:
        try:
            return await step()
        except StorageUnavailable as error:
            now = time.monotonic()
            if error.__cause__ is None or not lock_not_available(error.__cause__) or now > deadline:
                raise
            if now >= remind_s:
                logger.warning("waiting for a lock that another session of the database holds", error=str(error))
                remind_s = now + DATABASE_REMINDER_S
            await asyncio.sleep(DATABASE_RETRY_S)
