"""Migrations: from an empty database, repeated, concurrent, and refused for a newer schema."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from storage import schema
from storage.errors import StorageError, StorageUnavailable
from storage.migrate import migrate
from storage.nodes import NodeStore
from storage.pool import Database
from storage.queries import statement
from storage.topics import TopicStore


@pytest.fixture
async def empty(empty_database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(empty_database_url)
    yield opened
    await opened.close()


def test_migrations_are_numbered_without_gaps() -> None:
    assert [number for number, _, _ in schema.migrations()] == list(range(1, len(schema.migrations()) + 1))


async def test_a_repeated_migration_does_nothing(empty: Database) -> None:
    version = await migrate(empty)
    assert version == len(schema.migrations())
    cluster_id = await TopicStore(empty).cluster_id()
    applied = await empty.hot.fetch("select * from schema_migration order by version")
    assert await migrate(empty) == version
    assert await empty.hot.fetch("select * from schema_migration order by version") == applied
    assert await TopicStore(empty).cluster_id() == cluster_id


async def test_functions_that_were_dropped_with_the_tables_are_created_again(
    empty: Database, empty_database_url: str
) -> None:
    """To begin anew, an administrator drops the schema `sluice`. Functions that return rows of tables go with it, and
    the others stay."""
    await migrate(empty)
    connection = await asyncpg.connect(empty_database_url)
    try:
        await connection.execute("drop schema sluice cascade")
    finally:
        await connection.close()
    await migrate(empty)
    assert await NodeStore(empty).register("localhost:9092", {"PLAINTEXT": ("localhost", 9092)}, None, 60_000) == 1


async def test_nodes_that_start_together_migrate_once(empty_database_url: str) -> None:
    databases = [await Database.open(empty_database_url, hot_connections=1) for _ in range(4)]
    try:
        assert await asyncio.gather(*(migrate(database) for database in databases)) == [len(schema.migrations())] * 4
    finally:
        for database in databases:
            await database.close()


async def test_a_failing_migration_leaves_no_change(
    empty: Database, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = schema.migrations()
    broken = [*known, (len(known) + 1, "9999_broken.sql", "create table half (); select 1 / 0")]
    monkeypatch.setattr("storage.schema.migrations", lambda: broken)
    with pytest.raises(StorageError, match="division"):
        await migrate(empty)
    connection = await asyncpg.connect(empty_database_url)
    try:
        assert await connection.fetchval("select count(*) from pg_namespace where nspname like 'sluice%'") == 0
    finally:
        await connection.close()
    monkeypatch.setattr("storage.schema.migrations", lambda: known)
    assert await migrate(empty) == len(known)


async def test_a_node_waits_for_a_migration_longer_than_for_a_request(
    empty: Database, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres' lock timeout ends the wait, with its reason. The time limit of a request does not apply."""
    holder = await asyncpg.connect(empty_database_url)
    limits = "select set_config('statement_timeout', '0', true), set_config('lock_timeout', '2500', true)"
    real = statement
    monkeypatch.setattr("storage.migrate.statement", lambda name: limits if name == "migration_limits" else real(name))
    # A request may take 100 ms and the client waits two seconds more. Both are shorter than the wait for the lock.
    hasty = await Database.open(empty_database_url, statement_timeout_ms=100)
    try:
        async with holder.transaction():
            await holder.execute(real("lock_migrations"))
            with pytest.raises(StorageUnavailable, match="another node is migrating"):
                await migrate(hasty)
        await migrate(hasty)
    finally:
        await hasty.close()
        await holder.close()


async def test_a_newer_schema_is_refused(empty: Database) -> None:
    version = await migrate(empty)
    await empty.hot.fetch("insert into schema_migration values ($1, 'from_the_future.sql')", version + 1)
    with pytest.raises(StorageError, match="version"):
        await migrate(empty)


@pytest.mark.parametrize("version_count", [1, 25], ids=["older", "newer"])
async def test_a_schema_of_a_development_version_is_refused(empty: Database, version_count: int) -> None:
    await empty.hot.fetch("create schema sluice")
    await empty.hot.fetch("create table sluice.schema_migration (version integer, file_name text)")
    await empty.hot.fetch(
        "insert into sluice.schema_migration select n, case n when 1 then '0001_schema.sql' else 'later.sql' end "
        "from generate_series(1, $1::integer) n",
        version_count,
    )
    with pytest.raises(StorageError, match="before the first release, from which there is no upgrade"):
        await migrate(empty)


async def test_a_release_with_other_functions_leaves_those_of_the_previous_one(
    empty: Database, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function may change its parameters. A node of the previous release continues to call its own version."""
    releases = {
        "old": [("probe.sql", "create function probe(a integer) returns text language sql as $$ select 'old' $$")],
        "new": [("probe.sql", "create function probe(a integer, out text) language sql as $$ select 'new' $$")],
    }
    paths: dict[str, str] = {}
    for release, functions in releases.items():
        own = schema.function_schema_of(functions)
        paths[release] = f"{schema.TABLE_SCHEMA}, {own}"
        monkeypatch.setattr("storage.schema.functions", lambda functions=functions: functions)
        monkeypatch.setattr("storage.schema.FUNCTION_SCHEMA", own)
        monkeypatch.setattr("storage.schema.SEARCH_PATH", paths[release])
        await migrate(empty)
    for release, path in paths.items():
        connection = await asyncpg.connect(empty_database_url, server_settings={"search_path": path})
        try:
            assert await connection.fetchval("select probe(1)") == release
        finally:
            await connection.close()


async def test_an_older_postgres_is_refused(empty: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.migrate.OLDEST_POSTGRES", 1_000)
    with pytest.raises(StorageError, match="Postgres 1000 or later is needed"):
        await migrate(empty)


async def test_a_database_that_is_not_utf8_is_refused(empty: Database, empty_database_url: str) -> None:
    parts = urlsplit(empty_database_url)
    name = f"{parts.path.removeprefix('/')}_ascii"
    await empty.hot.fetch(f"create database {name} template template0 encoding 'SQL_ASCII' locale 'C'")
    try:
        database = await Database.open(urlunsplit(parts._replace(path=f"/{name}")))
        try:
            with pytest.raises(StorageError, match="UTF8, it is SQL_ASCII"):
                await migrate(database)
        finally:
            await database.close()
    finally:
        await empty.hot.fetch(f"drop database {name} with (force)")


async def test_postgres_does_not_compress_the_stored_bytes(empty: Database) -> None:
    await migrate(empty)
    storage = await empty.hot.fetch_value(
        "select attstorage::text from pg_attribute "
        "where attrelid = 'inline_records_3'::regclass and attname = 'records'"
    )
    assert storage == "e"
