"""Drop the functions of releases that no node runs any more.

The one idea: each release's functions are a schema of their own (`storage/schema.py`), so upgrades leave schemas
behind. Nodes report which schema they use. A schema that no live node has used for a long time is dropped, under the
lock that a starting node holds while it creates its own.
"""

from __future__ import annotations

import re

from storage import schema
from storage.pool import Connection, Database
from storage.queries import statement

GRACE_MS = 24 * 60 * 60 * 1000
"""Longer than the time between a process' start and its registration, and longer than an upgrade after which the
operator returns to the old release.
"""

_NAME = re.compile(rf"{schema.TABLE_SCHEMA}_[0-9a-f]{{12}}")


async def drop_unused_functions(database: Database, *, grace_ms: int = GRACE_MS) -> list[str]:
    """Drop function schemas that no node has used for `grace_ms`, and return their names. Raise StorageError."""

    async def drop(connection: Connection) -> list[str]:
        await connection.execute(statement("lock_migrations"))
        await connection.execute(statement("note_used_functions"), schema.FUNCTION_SCHEMA)
        rows = await connection.fetch(statement("unused_functions"), grace_ms)
        names = [row["name"] for row in rows if _NAME.fullmatch(row["name"])]
        for name in names:
            # The name has hexadecimal digits only, so it needs no quoting.
            await connection.execute(f"drop schema if exists {name} cascade")
            await connection.execute(statement("forget_functions"), name)
        return names

    return await database.control.transact(drop)
