"""Find the directory or bucket that holds this database's records, and verify that it is the right one.

The one idea: a store has an identity, in Postgres and in a marker beside the bytes. If a node is configured with
another store, or its store is not mounted, the marker is wrong or missing and the node does not start. Otherwise it
would report records as lost, or write where no other node reads.

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
    database: Database, place: Path | str | None, *, page_cache_bytes: int | None = None
) -> ByteStore | None:
    """Return the store at a directory or bucket (`reach_store`), claiming it the first time. Return None for None: all
    bytes are inline.

    Raise StorageError, in one line for the person who started the node, if the database's records lie elsewhere.
    """
    if place is None:
        row = await database.hot.fetch_row(statement("log_store"))
        if row is not None:
            raise StorageError(f"records of this database lie in {row['location']}: give it as --log-store")
        return None
    store = reach_store(place, page_cache_bytes=page_cache_bytes)
    try:
        async with _alone(store):
            row = await database.hot.fetch_row(statement("log_store"))
            marked = await read_identity(store)
            if row is None:
                row, marked = await _claim(database, store)
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
    elif marked != row["store_id"]:
        problem = f"{store.location} holds the records of another database; this one's lie in {row['location']}"
    else:
        return store
    store.close()
    raise StorageError(problem)


def unusable(location: str, error: OSError) -> StorageError:
    """Return the error for a store that cannot be used."""
    return StorageError(f"cannot use {location} for records: {error.strerror or error or 'it does not answer'}")


async def read_identity(store: ByteStore) -> UUID | None:
    """Return the id of the store's owner, or None without a marker. Raise OSError if the store cannot be reached."""
    found = await _read(store)
    return None if found is None else found[0]


async def _read(store: ByteStore) -> tuple[UUID, object] | None:
    """Return the id of the store's owner, and the database that claimed the store if the marker names one."""
    marker = await store.read_marker()
    if marker is None:
        return None
    try:
        found = json.loads(marker)
        return UUID(found["store_id"]), found.get("claimed_by")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{store.location}/{MARKER} cannot be read: {error}") from error


def identity_marker(store_id: UUID, claimant: str | None = None) -> bytes:
    """Return the contents of a marker. `claimant` is the database that has no row for the store yet."""
    claimed = {} if claimant is None else {"claimed_by": claimant}
    return json.dumps({"store_id": str(store_id), **claimed}).encode()


async def _claim(database: Database, store: ByteStore) -> tuple[Row, UUID | None]:
    """Claim the store for the database and return the row and the previous marker. Concurrent nodes take turns at
    the row. A node that dies in between leaves a marker without a row, which the next node of that database adopts."""

    async def claim(connection: Connection) -> tuple[Row, UUID | None]:
        await connection.execute(statement("lock_log_store"))
        row = await connection.fetchrow(statement("log_store"))
        claimant: str = await connection.fetchval(statement("claimant"))
        try:
            marked = await (_mark(store, claimant) if row is None else read_identity(store))
        except OSError as error:
            # The caller would take this OSError for one of Postgres.
            raise unusable(store.location, error) from error
        if row is None:
            assert marked is not None
            await connection.execute(statement("claim_log_store"), marked, store.location)
            row = await connection.fetchrow(statement("log_store"))
            assert row is not None
        return row, marked

    return await database.hot.transact(claim)


async def _mark(store: ByteStore, claimant: str) -> UUID:
    """Mark a store that no database refers to, and return its identity. An empty store may have another owner, whose
    nodes have not written to it yet. If two databases had one store, each would delete the other's objects.
    """
    found = await _read(store)
    if found is None:
        store_id = uuid4()
        await store.create_marker(identity_marker(store_id, claimant))
        return store_id
    if await store.listed():
        raise StorageError(f"{store.location} holds the records of another database: give another --log-store")
    store_id, claimed_by = found
    if claimed_by != claimant:
        raise StorageError(
            f"{store.location} belongs to another database: give another --log-store, or delete {MARKER} there if that "
            "database is gone"
        )
    return store_id


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
