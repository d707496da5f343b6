"""Names and help of the options that say where the database is, without the code that parses their values.

The one idea: a command that may use the database or a broker shows these options. If it uses a broker, it loads no
settings.
"""

from __future__ import annotations

from typing import NamedTuple


class DatabaseOption(NamedTuple):
    name: str
    default: str | None
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return f"--{self.name}"


DATABASE_URL = DatabaseOption(
    "database-url",
    None,
    "URL",
    "Postgres to keep everything in; default: an embedded one below the data directory",
)
DATA_DIR = DatabaseOption(
    "data-dir", ".sluice", "DIR", "directory of the embedded Postgres and, with --log-store auto, of the records"
)
POSTGRES_BIN = DatabaseOption(
    "postgres-bin",
    None,
    "DIR",
    "directory of Postgres' programs: postgres and initdb for the embedded Postgres, pg_dump, pg_restore and psql for "
    "backups; without it those of sluice-kafka[embedded], else the newest of the system",
)
LOG_STORE = DatabaseOption(
    "log-store",
    "auto",
    "DIR|URL|inline|auto",
    "where the bytes of the log go: to a directory or a bucket (s3://BUCKET/PREFIX, gs://..., az://...) that every "
    "node of the database reaches, or inline, into Postgres; auto: below the data directory with the embedded "
    "Postgres, else inline",
)
DATABASE_OPTIONS = (DATABASE_URL, DATA_DIR, POSTGRES_BIN, LOG_STORE)
"""Options that a command needs to find the database and the records beside it."""
