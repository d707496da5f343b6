"""Which directory holds this database's records, and that it is the right one.

The one idea: a store has an identity, in Postgres and in a marker beside the files. A node that was given another
directory, or one that is not mounted, finds a marker that is wrong or missing, and does not start: it would answer that
records are lost, or write where nobody else reads.

It reads no record and makes no segment.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID, uuid4

from storage.errors import StorageError
from storage.pool import Database
from storage.queries import statement
from storage.segments import SegmentDirectory, sync_directory

MARKER = "sluice-store.json"
LOCK = "sluice-store.lock"
LOCK_PATIENCE_S = 15.0
LOCK_LOOK_S = 0.02


async def open_store(database: Database, directory: Path | None) -> SegmentDirectory | None:
    """The store at `directory`, made at the first time; None for None, where all bytes are inline.

    StorageError, in one line for the person who started the node, where the database's records lie elsewhere.
    """
    if directory is None:
        row = await database.hot.fetch_row(statement("log_store"))
        if row is not None:
            raise StorageError(f"records of this database lie in {row['location']}: give it as --log-store")
        return None
    try:
        directory = _prepare(directory)
        segments = SegmentDirectory(directory)
        async with _alone(directory):
            row = await database.hot.fetch_row(statement("log_store"))
            marked = _read_marker(directory)
            if row is None:
                if marked is not None and segments.found():
                    raise StorageError(f"{directory} holds the records of another database: give another --log-store")
                if marked is None:
                    marked = uuid4()
                    _write_marker(directory, marked)
                await database.hot.fetch(statement("claim_log_store"), marked, str(directory))
                row = await database.hot.fetch_row(statement("log_store"))
                assert row is not None
    except OSError as error:
        raise StorageError(f"cannot use {directory} for records: {error.strerror or error}") from error
    if marked is None:
        raise StorageError(
            f"{directory} is not where the records of this database lie, or is not mounted: it has no {MARKER}, and "
            f"they were last known in {row['location']}"
        )
    if marked != row["store_id"]:
        raise StorageError(f"{directory} holds the records of another database; this one's lie in {row['location']}")
    return segments


@asynccontextmanager
async def _alone(directory: Path) -> AsyncGenerator[None, None]:
    """While no other node looks at or makes the marker. StorageError if one does so for longer than a start takes."""
    with (directory / LOCK).open("a") as lock:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StorageError(f"another node holds {directory / LOCK}") from None
            await asyncio.sleep(LOCK_LOOK_S)
        yield


def _prepare(directory: Path) -> Path:
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _read_marker(directory: Path) -> UUID | None:
    try:
        return UUID(json.loads((directory / MARKER).read_text("utf-8"))["store_id"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{directory / MARKER} cannot be read: {error}") from error


def _write_marker(directory: Path, store_id: UUID) -> None:
    fresh = directory / f"{MARKER}.new"
    with fresh.open("w", encoding="utf-8") as file:
        json.dump({"store_id": str(store_id)}, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(directory / MARKER)
    sync_directory(directory)
