"""Read the settings of a Postgres server that decide how safely and how fast a node works."""

from __future__ import annotations

from dataclasses import dataclass

from storage.pool import Database
from storage.queries import statement


@dataclass(frozen=True, slots=True)
class ServerReport:
    major_version: int
    clock_ms: int
    """Time of the server's clock, in milliseconds since 1970."""
    fsync: bool
    full_page_writes: bool
    max_wal_bytes: int
    usable_connections: int
    """`max_connections` minus the reserved connections."""


async def read_server(database: Database) -> ServerReport:
    """Return the state of the server. This needs no tables in the database. Raise StorageError."""
    row = await database.control.fetch_row(statement("server_report"))
    assert row is not None
    return ServerReport(**row)
