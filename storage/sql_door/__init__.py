"""Install the public schema of the SQL door from the `.sql` files beside this module.

The one idea: users call the functions for longer than a release lives, so `install` replaces them in place, in one
transaction. Each release carries VERSION. A release that finds a later version keeps it, because each release must work
with the functions of the next one, as with its tables.

The files write `kafka.` for the public schema, and `install` puts its real name there. An ordinary role can run them:
they need neither a superuser nor an extension.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from storage.errors import StorageError
from storage.pool import Connection, Database
from storage.queries import statement
from storage.types import SHARD_COUNTS, LeaseKind

VERSION = 23
"""Raise it with every change of the files."""

_PUBLIC = re.compile(r"\bkafka(?=\.[a-z_]+\b)|(?<=schema )kafka\b")
_VIEW = re.compile(r"^(create or replace view \w+\.(\w+) .*?;\n)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """The brokers' settings that the public functions apply."""

    max_message_bytes: int
    compacts: bool
    """True if topics are compacted by default."""
    auto_create: bool
    authorizer: bool
    allow_if_no_acl: bool
    super_users: Sequence[str]
    log_append_time: bool
    """True if records of SQL get the relay's time by default."""
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int


def door_files(schema_name: str) -> list[tuple[str, str]]:
    """Return (file name, SQL) with the public schema's name in place, a plain lower-case identifier."""
    shards = str(SHARD_COUNTS[LeaseKind.GROUPS])

    def rendered(sql: str) -> str:
        return _PUBLIC.sub(schema_name, sql.replace(":shards", shards).replace(":schema", schema_name))

    return sorted(
        (file.name, rendered(file.read_text(encoding="utf-8")))
        for file in files(__name__).iterdir()
        if file.name.endswith(".sql")
    )


async def install(database: Database, schema_name: str, settings: DoorSettings) -> DoorSettings | None:
    """Create or replace the public schema and store the settings that its functions apply. Return the former settings,
    or None if there were none: the functions apply the settings of the node that started last.

    Raise StorageError if the database has a schema of this name that is not the SQL door's.
    """
    known = door_files(schema_name)
    digest = hashlib.sha256("\0".join(part for file in known for part in file).encode()).hexdigest()

    async def apply(connection: Connection) -> DoorSettings | None:
        await connection.execute(statement("lock_migrations"))
        row = await connection.fetchrow(statement("sql_door"))
        # A backup holds the private schema only, so the public one may be missing after a restore.
        is_there = await connection.fetchval(statement("schema_exists"), schema_name)
        is_installed = is_there and row is not None and row["schema_name"] == schema_name
        if not is_there:
            await connection.execute(f"create schema {schema_name}")  # a plain identifier: nothing to quote
        elif not is_installed and not await connection.fetchval(statement("is_sql_door"), schema_name):
            raise StorageError(
                f"the database already has a schema {schema_name}: choose another name for the SQL door with "
                "--set sql.schema=NAME, or turn it off with --set sql.schema="
            )
        if row is None or not is_installed or (row["version"] <= VERSION and row["digest"] != digest):
            for _, sql in known:
                await _apply(connection, schema_name, sql)
            await connection.execute(statement("save_sql_door"), schema_name, VERSION, digest)
        elif await connection.fetchval(statement("sql_door_roles_lack_rights"), schema_name):
            await connection.execute(known[-1][1])  # the file of the grants
        await connection.execute(statement("renumber_restored"))
        former = await connection.fetchrow(statement("sql_door_settings"))
        await connection.execute(
            statement("save_sql_door_settings"),
            settings.max_message_bytes,
            settings.compacts,
            settings.auto_create,
            settings.authorizer,
            settings.allow_if_no_acl,
            list(settings.super_users),
            settings.log_append_time,
            settings.timestamp_before_max_ms,
            settings.timestamp_after_max_ms,
        )
        return None if row is None or former is None else DoorSettings(**former)

    return await database.control.transact(apply)


async def _apply(connection: Connection, schema_name: str, sql: str) -> None:
    """Run a file. Replace a view only if its definition changes, because that waits for each open transaction that has
    read the view, and other readers wait behind it."""
    before, *views = _VIEW.split(sql)
    await connection.execute(before)
    for view, name, behind in zip(views[::3], views[1::3], views[2::3], strict=True):
        kept, candidate = f"{schema_name}.{name}", f"{schema_name}.new_{name}"
        await connection.execute(view.replace(kept, candidate, 1))
        if not await connection.fetchval(statement("same_views"), kept, candidate):
            await connection.execute(view)
        await connection.execute(f"drop view {candidate};\n{behind}")
