"""Find the directory or bucket that holds this database's records, and verify that it is the right one.

The one idea: a store has an identity, in Postgres and in a marker beside the bytes. If a node is configured with
another store, or its store is not mounted, the marker is wrong or missing and the node does not start. Otherwise it
would report records as lost, or write where no other node reads.

The marker also names the newest history of the database (`history.py`). A former primary that still runs does not know
the objects of a later history, so nothing is removed on its word.

This module reads no record and creates no segment.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID, uuid4

from storage.byte_store import MARKER, ByteStore
from storage.errors import StorageError
from storage.pool import Connection, Database, Row
from storage.private_files import make_directory, open_lock, restrict_directory
from storage.queries import statement
from storage.segments import SegmentDirectory

LOCK = "sluice-store.lock"
LOCK_PATIENCE_S = 15.0
LOCK_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Marker:
    """The contents of a marker."""

    store_id: UUID
    claimed_by: str | None = None
    """The database that claimed the store, while it may have no row for the store yet."""
    history: int = 0
    """The newest history of the database that is known to have begun."""

    def content(self) -> bytes:
        value: dict[str, str | int] = {"store_id": str(self.store_id)}
        if self.claimed_by is not None:
            value["claimed_by"] = self.claimed_by
        if self.history:
            value["history"] = self.history
        return json.dumps(value).encode()


def reach_store(place: Path | str, *, page_cache_bytes: int | None = None) -> ByteStore:
    """Return the store at a directory, which is created, or at a bucket's URL. Raise StorageError if that is
    impossible.

    `page_cache_bytes` bounds how much of a directory's newest files stays in the page cache; None leaves that to the
    operating system.
    """
    try:
        if isinstance(place, Path):
            directory = place.absolute()
            if not make_directory(directory) and (directory / MARKER).exists():
                restrict_directory(directory)
            return SegmentDirectory(directory, page_cache_bytes=page_cache_bytes)
        # Imported only if needed: obstore is a large library.
        from storage.object_store import ObjectStore

        return ObjectStore.at(place)
    except OSError as error:
        raise unusable(str(place), error) from error


async def open_store(
    database: Database, place: Path | str | None, *, page_cache_bytes: int | None = None, claims: bool = True
) -> ByteStore | None:
    """Return the store at a directory or bucket (`reach_store`), claiming it the first time. Return None for None: all
    bytes are inline. If it `claims` nothing, return None for any place while all bytes are inline.

    Raise StorageError, in one line for the person who started the node, if the database's records lie elsewhere.
    """
    if place is None or not claims:
        row = await database.hot.fetch_row(statement("log_store"))
        if row is None:
            return None
        if place is None:
            raise StorageError(f"records of this database lie in {row['location']}: give it as --log-store")
    store = reach_store(place, page_cache_bytes=page_cache_bytes)
    try:
        async with _alone(store):
            row = await database.hot.fetch_row(statement("log_store"))
            marked = await read_marker(store)
            if row is None:
                row, marked = await _claim(database, store)
        if marked is not None and marked.store_id == row["store_id"]:
            await mark_history(store, row["history"])
    except OSError as error:
        store.close()
        raise unusable(store.location, error) from error
    except BaseException:
        store.close()
        raise
    if marked is None:
        problem = (
            f"{store.location} is not where the records of this database lie, or is not mounted: it has no {MARKER}, "
            f"and they were last known in {row['location']}"
        )
    elif marked.store_id != row["store_id"]:
        problem = f"{store.location} holds the records of another database; this one's lie in {row['location']}"
    else:
        return store
    store.close()
    raise StorageError(problem)


def unusable(location: str, error: OSError) -> StorageError:
    """Return the error for a store that cannot be used."""
    return StorageError(f"cannot use {location} for records: {error.strerror or error or 'it does not answer'}")


async def read_marker(store: ByteStore) -> Marker | None:
    """Return the store's marker, or None without one. Raise OSError if the store cannot be reached."""
    marker = await store.read_marker()
    return None if marker is None else parse_marker(marker, store.location)


def parse_marker(marker: bytes, location: str) -> Marker:
    """Return the value of a marker that was found at `location`. Raise StorageError."""
    try:
        found = json.loads(marker)
        return Marker(UUID(found["store_id"]), found.get("claimed_by"), int(found.get("history", 0)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{location}/{MARKER} cannot be read: {error}") from error


async def mark_history(store: ByteStore, history: int) -> None:
    """Name the history in the marker, unless the marker names it or a later one. Raise OSError or StorageError."""
    marked = await read_marker(store)
    if marked is None or marked.history >= history:
        return
    async with _alone(store):
        marked = await read_marker(store)
        if marked is not None and marked.history < history:
            await store.replace_marker(replace(marked, history=history).content())


async def why_nothing_may_go(store: ByteStore, row: Row | None) -> str | None:
    """Return why no object of the store may be removed on the word of a database, or None. Then the marker names the
    database's history. `row` is the database's row of `log_store`. Raise OSError or StorageError."""
    marked = await read_marker(store)
    if (None if marked is None else marked.store_id) != (None if row is None else row["store_id"]):
        return "the store holds the records of another database: check --log-store"
    if marked is not None and row is not None and marked.history > row["history"]:
        return (
            f"the database is in history {row['history']}, and the store in history {marked.history}: check that"
            f" --database-url does not lead to a former primary. If the database was restored on purpose, change"
            f' "history" in {MARKER} to {row["history"]}'
        )
    if marked is not None and row is not None and marked.history < row["history"]:
        await mark_history(store, row["history"])
    return None


async def _claim(database: Database, store: ByteStore) -> tuple[Row, Marker | None]:
    """Claim the store for the database and return the row and the previous marker. Concurrent nodes take turns at
    the row. A node that dies in between leaves a marker without a row, which the next node of that database adopts."""

    async def claim(connection: Connection) -> tuple[Row, Marker | None]:
        await connection.execute(statement("lock_log_store"))
        row = await connection.fetchrow(statement("log_store"))
        claimant: str = await connection.fetchval(statement("claimant"))
        try:
            marked = await (_mark(store, claimant) if row is None else read_marker(store))
        except OSError as error:
            # The caller would take this OSError for one of Postgres.
            raise unusable(store.location, error) from error
        if row is None:
            assert marked is not None
            await connection.execute(statement("claim_log_store"), marked.store_id, store.location)
            row = await connection.fetchrow(statement("log_store"))
            assert row is not None
        return row, marked

    return await database.hot.transact(claim)


async def _mark(store: ByteStore, claimant: str) -> Marker:
    """Mark a store that no database refers to, and return the marker. An empty store may have another owner, whose
    nodes have not written to it yet. If two databases had one store, each would delete the other's objects.
    """
    found = await read_marker(store)
    if found is None:
        marker = Marker(uuid4(), claimant)
        await store.create_marker(marker.content())
        return marker
    if await store.listed():
        raise StorageError(f"{store.location} holds the records of another database: give another --log-store")
    if found.claimed_by != claimant:
        raise StorageError(
            f"{store.location} belongs to another database: give another --log-store, or delete {MARKER} there if that "
            "database is gone"
        )
    return found


@asynccontextmanager
async def _alone(store: ByteStore) -> AsyncGenerator[None, None]:
    """Keep other nodes, also of other databases, from reading or creating a directory's marker. Raise StorageError
    if another node holds the lock for longer than a start takes. A bucket refuses a second marker by itself."""
    if not isinstance(store, SegmentDirectory):
        yield
        return
    directory = store.directory
    with os.fdopen(open_lock(directory / LOCK), "r+b") as lock:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"another process holds {directory / LOCK}: stop it, or wait until it ends"
                    ) from None
            await asyncio.sleep(LOCK_LOOK_S)
        yield
