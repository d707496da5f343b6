"""The schemas of Sluice's tables and functions, and the SQL files that create them.

The one idea: tables are shared by every release that serves, functions belong to one release. Tables and views live in
the schema `sluice` and change by numbered migrations. Each migration must leave the previous release able to read and
write. Each release's set of function files lives in a schema named by its digest, which is created once and never
changed. So nodes of the previous and the new release call their own functions on the same tables, and a function may
change its parameters without a copy in the next migration. `storage/releases.py` drops functions that no node calls any
more.
"""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

from storage.errors import StorageError

TABLE_SCHEMA = "sluice"

_MIGRATION = re.compile(r"^(\d{4})_[a-z0-9_]+\.sql$")


def migrations() -> list[tuple[int, str, str]]:
    """Return (number, file name, SQL) in order; numbers run from 1 without gaps."""
    found = sorted(
        (int(match[1]), file.name, file.read_text(encoding="utf-8"))
        for file in files("storage").joinpath("migrations").iterdir()
        if (match := _MIGRATION.match(file.name))
    )
    if [number for number, _, _ in found] != list(range(1, len(found) + 1)):
        raise StorageError(f"migrations are not numbered without gaps: {[name for _, name, _ in found]}")
    return found


def functions() -> list[tuple[str, str]]:
    """Return (file name, SQL) in the order of the names, which is the order of application."""
    return sorted(
        (file.name, file.read_text(encoding="utf-8"))
        for file in files("storage").joinpath("functions").iterdir()
        if file.name.endswith(".sql")
    )


def function_schema_of(known: list[tuple[str, str]]) -> str:
    """Return the schema's name for these files: any change of a file yields another name."""
    digest = hashlib.sha256("\0".join(part for file in known for part in file).encode())
    return f"{TABLE_SCHEMA}_{digest.hexdigest()[:12]}"


FUNCTION_SCHEMA = function_schema_of(functions())

SEARCH_PATH = f"{TABLE_SCHEMA}, {FUNCTION_SCHEMA}"
"""Tables first, so that what a migration creates never lands among the functions."""
