"""Functions of releases that no node runs any more.

The one idea: each release's functions are a schema of their own (`storage/schema.py`), so upgrades leave schemas
behind. Nodes say which one they call; what no live node has called for a long time is dropped, under the lock that a
starting node holds while it makes its own. A node of which nobody knows what it calls keeps them all. With the last of
those that take a partition's row for the end of its log, appends stop writing it (`append_chunks`).
"""

from __future__ import annotations

import re

from storage import schema
from storage.pool import Connection, Database
from storage.queries import statement

GRACE_MS = 24 * 60 * 60 * 1000
"""Longer than a process may be between its start and its registration, and than an upgrade that is taken back."""

_NAME = re.compile(rf"{schema.TABLE_SCHEMA}_[0-9a-f]{{12}}")


async def drop_unused_functions(database: Database, *, grace_ms: int = GRACE_MS) -> list[str]:
    """Drops schemas of functions that nobody has called for `grace_ms`; their names. Raises StorageError."""

    async def drop(connection: Connection) -> list[str]:
        await connection.execute(statement("lock_migrations"))
        await connection.execute(statement("note_function_schemas"))
        await connection.execute(statement("note_used_functions"), schema.FUNCTION_SCHEMA)
        rows = await connection.fetch(statement("unused_functions"), grace_ms)
        names = [row["name"] for row in rows if _NAME.fullmatch(row["name"])]
        for name in names:
            await connection.execute(f"drop schema if exists {name} cascade")  # hexadecimal digits: nothing to quote
            await connection.execute(statement("forget_functions"), name)
        await connection.execute(statement("forget_former_releases"))
        await connection.execute(statement("forget_releases_without_transactions"))
        await connection.execute(statement("forget_former_transaction_versions"))
        return names

    return await database.control.transact(drop)
