"""Bring the database to the schema that this program knows.

The one idea: the numbered files in migrations/ are applied in order, then this release's functions
(`storage/schema.py`) if they are missing. All of it is one transaction under an advisory lock, so one node at a time
migrates. Applied files are recorded, so running it again does nothing. A migration waits for table locks only as long
as lock_timeout, so it cannot stop a running node for long. There is no way back: a database newer than the program is
refused.
"""

from __future__ import annotations

from storage import schema
from storage.errors import StorageError, StorageUnavailable
from storage.pool import Connection, Database, lock_not_available
from storage.queries import statement

OLDEST_POSTGRES = 15

LOCK_PATIENCE_S = 30.0
"""Longer than the lock_timeout of `migration_limits`, so that Postgres reports which lock was not free."""
MIGRATION_PATIENCE_S = 3600.0
"""A migration may take long on large tables. A server that does not answer for this long is gone."""


async def migrate(database: Database) -> int:
    """Apply what is missing and return the schema's version.

    Raise StorageError if Postgres is older than 15, is not UTF8, or has a schema that is newer or older than the first
    release's. Raise StorageUnavailable if a lock is not acquired in time.
    """
    known = schema.migrations()

    async def apply(connection: Connection) -> int:
        server = await connection.fetchrow(statement("server_properties"))
        assert server is not None
        if server["version"] // 10000 < OLDEST_POSTGRES:
            raise StorageError(f"Postgres {OLDEST_POSTGRES} or later is needed, this is {server['version'] // 10000}")
        if server["encoding"] != "UTF8":
            raise StorageError(f"the database's encoding must be UTF8, it is {server['encoding']}")
        await connection.execute(statement("migration_limits"))
        await _lock(connection)
        await connection.execute(statement("create_schema"))
        await connection.execute(statement("create_migration_table"))
        rows = await connection.fetch(statement("applied_migrations"))
        applied = max((row["version"] for row in rows), default=0)
        if any(row["file_name"] != name for row, (_, name, _) in zip(rows, known, strict=False)):
            raise StorageError(
                "the database has the schema of a development version from before the first release, from which there "
                "is no upgrade: give an empty database"
            )
        if applied > len(known):
            raise StorageError(
                f"the database's schema is version {applied}, and this program knows {len(known)}: run a newer release"
            )
        for number, name, sql in known[applied:]:
            await connection.execute(sql, timeout=MIGRATION_PATIENCE_S)
            await connection.execute(statement("record_migration"), number, name)
        await _install_functions(connection)
        await connection.execute(statement("use_functions"), schema.FUNCTION_SCHEMA)
        return len(known)

    return await database.control.transact(apply)


async def has_tables(database: Database) -> bool:
    """Return whether the database has Sluice's tables, at any version."""

    async def look(connection: Connection) -> bool:
        return bool(await connection.fetchval(statement("schema_exists"), schema.TABLE_SCHEMA))

    return await database.control.transact(look)


async def _lock(connection: Connection) -> None:
    try:
        await connection.execute(statement("lock_migrations"), timeout=LOCK_PATIENCE_S)
    except Exception as error:
        if lock_not_available(error):
            raise StorageUnavailable("another node is migrating this database, and has been for 20 s") from error
        raise


async def _install_functions(connection: Connection) -> None:
    """Create the schema of this release's functions once. It is never changed.

    It is created anew if functions are missing: `drop schema sluice cascade` drops those that return rows of tables,
    and leaves the others."""
    functions = [sql for _, sql in schema.functions()]
    wanted = sum(sql.count("create function ") for sql in functions)
    if await connection.fetchval(statement("count_functions"), schema.FUNCTION_SCHEMA) >= wanted:
        return
    # The name has hexadecimal digits only, so it needs no quoting.
    await connection.execute(f"drop schema if exists {schema.FUNCTION_SCHEMA} cascade")
    await connection.execute(f"create schema {schema.FUNCTION_SCHEMA}")
    await connection.execute(statement("use_search_path"), f"{schema.FUNCTION_SCHEMA}, {schema.TABLE_SCHEMA}")
    for sql in functions:
        await connection.execute(sql)
    await connection.execute(statement("use_search_path"), schema.SEARCH_PATH)
