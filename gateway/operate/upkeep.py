"""`sluice check`, `sluice backup` and `sluice restore`: the operator's commands for the data, with or without a node.

The one idea: each finds the database as `serve` does. If a node runs the embedded Postgres, the command uses that same
server; if none does, the command runs one for as long as it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.config.settings import Settings
from storage.backup import back_up, read_manifest, restore
from storage.check import CheckReport, check
from storage.embedded import EmbeddedPostgres, EmbeddedPostgresError, holds_cluster
from storage.errors import StorageError
from storage.migrate import has_tables, migrate
from storage.pool import Database
from storage.store import open_store

EXIT_FAILED = 1
_LEAST_PRIORITY = 19
MEBIBYTE = 1024 * 1024

Configure = Callable[[argparse.Namespace], Settings]


def add_check(parser: argparse.ArgumentParser, settings: Configure) -> None:
    def run(given: argparse.Namespace) -> int:
        return _run(_check(settings(given), repair=bool(given.repair)))

    parser.add_argument(
        "--repair",
        action="store_true",
        help="delete files that the index does not know; it mends nothing else",
    )
    parser.set_defaults(run=run)


def add_backup(parser: argparse.ArgumentParser, settings: Configure) -> None:
    def run(given: argparse.Namespace) -> int:
        return _run(_back_up(settings(given), Path(given.directory)))

    parser.add_argument("directory", metavar="DIR", help="where to; a backup that is there is brought up to date")
    parser.set_defaults(run=run)


def add_restore(parser: argparse.ArgumentParser, settings: Configure) -> None:
    def run(given: argparse.Namespace) -> int:
        return _run(_restore(settings(given), Path(given.directory)))

    parser.add_argument("directory", metavar="DIR", help="where the backup is")
    parser.set_defaults(run=run)


def _run(command: Coroutine[object, None, int]) -> int:
    try:
        return asyncio.run(command)
    except (StorageError, EmbeddedPostgresError) as error:
        print(f"sluice: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED


@asynccontextmanager
async def database_of(settings: Settings) -> AsyncGenerator[str]:
    if settings.database_url is not None:
        yield settings.database_url
        return
    embedded = EmbeddedPostgres(settings.data_dir, programs=settings.postgres_bin)
    url = embedded.running_url()
    if url is not None:
        yield url
        return
    try:
        yield await embedded.start()
    finally:
        await embedded.stop()


@asynccontextmanager
async def existing_database(settings: Settings) -> AsyncGenerator[str]:
    """Yield the URL of an existing database. Raise StorageError if the data directory holds none: a command that
    created one would answer from an empty database while the gateway uses another."""
    if settings.database_url is None and not holds_cluster(settings.data_dir):
        place = settings.data_dir.absolute()
        raise StorageError(f"no gateway and no database in {place}: give --config, --database-url or --data-dir")
    async with database_of(settings) as url:
        yield url


async def require_tables(database: Database) -> None:
    """Raise StorageError if no gateway has served from this database yet."""
    if not await has_tables(database):
        raise StorageError("no gateway has served from this database: give --config, --database-url or --data-dir")


async def _check(settings: Settings, *, repair: bool) -> int:
    async with existing_database(settings) as url:
        database = await Database.open(url, hot_connections=1, cold_connections=2, statement_timeout_ms=60_000)
        try:
            await require_tables(database)
            await migrate(database)
            store = await open_store(database, settings.log_place, claims=False)
            report = await check(database, store, repair=repair)
        finally:
            await database.close()
    print(_summary(report))
    for wrong in report.wrong:
        print(f"wrong: {wrong}")
    return EXIT_FAILED if report.wrong else 0


def _summary(report: CheckReport) -> str:
    said = f"{report.chunks} chunks of {report.batches} batches are right ({report.size_bytes / MEBIBYTE:.1f} MiB)"
    if report.removed_files:
        said += f", {report.removed_files} unknown files deleted"
    return said


async def _back_up(settings: Settings, target: Path) -> int:
    async with existing_database(settings) as url:
        database = await Database.open(url, hot_connections=1, cold_connections=1)
        try:
            store = await open_store(database, settings.log_place, claims=False)
        finally:
            await database.close()
        # Leave the processors to the nodes, if they need them. Programs that this one starts inherit the priority.
        os.nice(_LEAST_PRIORITY)
        report = await back_up(url, store, target, programs=settings.postgres_bin)
    copied = f"{report.copied_segments} of them copied ({report.copied_bytes / MEBIBYTE:.1f} MiB)"
    print(f"{report.segments} segments, {copied}, database {report.dump_bytes / MEBIBYTE:.1f} MiB in {target}")
    return 0


async def _restore(settings: Settings, source: Path) -> int:
    read_manifest(source)  # check this before a Postgres is created for the database
    async with database_of(settings) as url:
        await restore(url, settings.log_place, source, programs=settings.postgres_bin)
    print(f"restored {source}: `sluice serve` with the same options goes on from there")
    print("Users, ACLs and settings are those of the backup; its delegation tokens have ended.")
    return 0
