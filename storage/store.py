"""Which directory or bucket holds this database's records, and that it is the right one.

The one idea: a store has an identity, in Postgres and in a marker beside the bytes. A node that was given another one,
or one that is not mounted, finds a marker that is wrong or missing, and does not start: it would answer that records
are lost, or write where nobody else reads.

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
    """The store at a directory, which is made, or at the URL of a bucket; StorageError where there can be none.

    Of a directory's newest files `page_cache_bytes` stay in the operating system's page cache; None: as it likes.
    """
    try:
        if isinstance(place, Path):
            directory = place.absolute()
            if not make_directory(directory) and (directory / MARKER).exists():
                restrict_directory(directory)
            return SegmentDirectory(directory, page_cache_bytes=page_cache_bytes)
        # Not before it is needed: it is a large library.
        from storage.object_store import ObjectStore

        return ObjectStore.at(place)
    except OSError as error:
        raise unusable(str(place), error) from error


async def open_store(
    database: Database, place: Path | str | None, *, page_cache_bytes: int | None = None
) -> ByteStore | None:
    """The store at a directory or the URL of a bucket (`reach_store`), made at the first time; None for None, where all
    bytes are inline.

    StorageError, in one line for the person who started the node, where the database's records lie elsewhere.
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
    """What to say of a store that cannot be used."""
    return StorageError(f"cannot use {location} for records: {error.strerror or error or 'it does not answer'}")


async def read_identity(store: ByteStore) -> UUID | None:
    """Whose store it is; None where it has no marker. OSError where it cannot be asked."""
    marker = await store.read_marker()
    if marker is None:
        return None
    try:
        return UUID(json.loads(marker)["store_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{store.location}/{MARKER} cannot be read: {error}") from error


def identity_marker(store_id: UUID) -> bytes:
    """What a marker holds."""
    return json.dumps({"store_id": str(store_id)}).encode()


async def _claim(database: Database, store: ByteStore) -> tuple[Row, UUID | None]:
    """Makes the store the database's; the row and the marker after that. Nodes that do so at once take turns at the
    row, and whoever ends in between leaves a marker without a row, which the next takes up."""

    async def claim(connection: Connection) -> tuple[Row, UUID | None]:
        await connection.execute(statement("lock_log_store"))
        row = await connection.fetchrow(statement("log_store"))
        try:
            marked = await read_identity(store)
            if row is None:
                marked = await _mark(store, marked)
        except OSError as error:
            # Here it would be taken for Postgres' own.
            raise unusable(store.location, error) from error
        if row is None:
            assert marked is not None
            await connection.execute(statement("claim_log_store"), marked, store.location)
            row = await connection.fetchrow(statement("log_store"))
            assert row is not None
        return row, marked

    return await database.hot.transact(claim)


async def _mark(store: ByteStore, marked: UUID | None) -> UUID:
    """The identity of a store that no database of ours refers to."""
    if marked is None:
        marked = uuid4()
        await store.create_marker(identity_marker(marked))
    elif await store.listed():
        raise StorageError(f"{store.location} holds the records of another database: give another --log-store")
    return marked


@asynccontextmanager
async def _alone(store: ByteStore) -> AsyncGenerator[None, None]:
    """While no other node looks at or makes the marker of a directory, also not for another database. StorageError if
    one does so for longer than a start takes. A bucket refuses to have its marker made twice."""
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
                    raise StorageError(f"another node holds {directory / LOCK}") from None
            await asyncio.sleep(LOCK_LOOK_S)
        yield
