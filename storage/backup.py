"""A consistent copy of a database and its records while a node serves, and a new node made of one.

The one idea: one snapshot names every byte. `pg_dump` writes the index and the inline bytes as of that snapshot; the
segments it names only ever grow and objects never change, so copying them afterwards gives what the snapshot meant.
While it runs nothing is deleted: the sweep sees an advisory lock, and TRUNCATE meets the lock of a reader.

A backup is a directory: `database.dump`, `log/` with a segment for each segment or object, and `manifest.json`, which
is written last. What an earlier backup left there is kept, so that the next one copies only what is new. It is restored
into a directory or into a bucket, wherever it came from.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from storage import schema
from storage.byte_store import MARKER, ByteStore
from storage.embedded import bin_directory
from storage.errors import StorageError
from storage.pool import connect, translated_errors
from storage.queries import statement
from storage.segments import SegmentDirectory, sync_directory
from storage.store import identity_marker, reach_store, unusable

DUMP = "database.dump"
LOG = "log"
MANIFEST = "manifest.json"
FORMAT = 1
_COPY_BYTES = 16 * 1024 * 1024
_ERROR_LINES = 3


@dataclass(frozen=True, slots=True)
class BackupReport:
    segments: int
    copied_segments: int
    copied_bytes: int
    dump_bytes: int


async def back_up(url: str, store: ByteStore | None, target: Path) -> BackupReport:
    """Writes a backup of the database at `url` and what it names in `store` to `target`, over an older one of the same.

    StorageError if there is no Sluice in the database, if `target` holds something else, or if a copy fails.
    """
    await asyncio.to_thread(_prepare, target, await _marker(store))
    async with translated_errors():
        connection = await _connect(url)
        try:
            await connection.execute(statement("lock_deletion_shared"))
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                # Before the snapshot, which the first query takes: from here on no slot is emptied.
                await connection.execute(statement("hold_inline"))
                snapshot: str = await connection.fetchval(statement("export_snapshot"))
                rows = await connection.fetch(statement("objects_in_use"))
                dump = [
                    "--snapshot",
                    snapshot,
                    "--format",
                    "custom",
                    "--compress",
                    "0",
                    "--schema",
                    schema.TABLE_SCHEMA,
                ]
                await _run("pg_dump", "--dbname", url, *dump, "--file", str(target / f"{DUMP}.new"))
                used = {row["object_id"]: int(row["end_position"]) for row in rows}
                copied_segments, copied_bytes = await _copy_segments(store, target, used)
        finally:
            await connection.close()
    dump_bytes = await asyncio.to_thread(_finish, target, used)
    return BackupReport(len(used), copied_segments, copied_bytes, dump_bytes)


async def restore(url: str, place: Path | str | None, source: Path) -> None:
    """Makes the database at `url`, in which there must be no Sluice, and the empty directory or prefix of a bucket at
    `place` what the backup in `source` was, with an identity of its own: the original goes on elsewhere. StorageError
    otherwise."""
    manifest = await asyncio.to_thread(read_manifest, source)
    if manifest["segments"] and place is None:
        raise StorageError("the backup has segments: give a directory or a bucket for them as --log-store")
    async with translated_errors():
        connection = await _connect(url)
        try:
            if await connection.fetchval(statement("schema_exists"), schema.TABLE_SCHEMA):
                raise StorageError("there is a Sluice in the database already: restore into an empty one")
        finally:
            await connection.close()
    store = None if place is None else reach_store(place)
    try:
        if store is not None:
            await _copy_back(source, store, manifest["segments"])
        await _run(
            "pg_restore", "--dbname", url, "--no-owner", "--exit-on-error", "--single-transaction", str(source / DUMP)
        )
        if store is not None:
            await _make_own(url, store)
    finally:
        if store is not None:
            store.close()


def read_manifest(source: Path) -> dict[str, Any]:
    """What a backup says of itself."""
    try:
        manifest: dict[str, Any] = json.loads((source / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{source} holds no finished backup: {error}") from error
    if manifest.get("format") != FORMAT:
        raise StorageError(f"{source} holds a backup of format {manifest.get('format')}, this program knows {FORMAT}")
    return manifest


async def _marker(store: ByteStore | None) -> bytes | None:
    try:
        return None if store is None else await store.read_marker()
    except OSError as error:
        assert store is not None
        raise unusable(store.location, error) from error


def _prepare(target: Path, marker: bytes | None) -> None:
    try:
        (target / LOG).mkdir(parents=True, exist_ok=True)
        there = target / LOG / MARKER
        if there.exists() and there.read_bytes() != marker:
            raise StorageError(f"{target} holds the backup of another database: give another directory")
        if marker is not None:
            there.write_bytes(marker)
        (target / MANIFEST).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write to {target}: {error.strerror or error}") from error


async def _copy_segments(store: ByteStore | None, target: Path, used: dict[int, int]) -> tuple[int, int]:
    """Copies what is new of each segment or object, up to the position that the snapshot needs; how many and how
    much."""
    if used and store is None:
        raise StorageError("records lie in a store: give it as --log-store")
    copies = SegmentDirectory(target / LOG)
    copied = copied_bytes = 0
    try:
        for object_id, end in used.items():
            path = copies.path(object_id)
            done = path.stat().st_size if path.exists() else 0
            if done >= end:
                continue
            assert store is not None
            copied += 1
            copied_bytes += end - done
            await _copy_object(store, object_id, path, done, end)
        for segment in copies.found():
            if segment.object_id not in used:
                copies.delete(segment.object_id)
        sync_directory(target / LOG)
    except OSError as error:
        raise StorageError(f"a segment could not be copied: {error}") from error
    finally:
        copies.close()
    return copied, copied_bytes


async def _copy_object(store: ByteStore, object_id: int, target: Path, start: int, end: int) -> None:
    def write(pieces: list[bytearray]) -> int:
        with target.open("ab") as writing:
            for piece in pieces:
                writing.write(piece)
            writing.flush()
            os.fsync(writing.fileno())
        return sum(map(len, pieces))

    while start < end:
        size_bytes = min(_COPY_BYTES, end - start)
        if await store.load(object_id, [(start, size_bytes)], write) < size_bytes:
            raise StorageError(f"{store.name(object_id)} is shorter than the index says ({end}): run sluice check")
        start += size_bytes


def _finish(target: Path, used: dict[int, int]) -> int:
    (target / f"{DUMP}.new").rename(target / DUMP)
    fresh = target / f"{MANIFEST}.new"
    with fresh.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "segments": {f"{object_id:016x}": end for object_id, end in used.items()}}, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(target / MANIFEST)
    sync_directory(target)
    return (target / DUMP).stat().st_size


async def _copy_back(source: Path, store: ByteStore, segments: dict[str, int]) -> None:
    copies = SegmentDirectory(source / LOG)
    try:
        if not await _is_empty(store):
            raise StorageError(f"{store.location} is not empty: give another --log-store or --data-dir")
        for name, end in segments.items():
            object_id = int(name, 16)
            # A segment is as large as memory allows: it was made so.
            (content,) = copies.read(object_id, [(0, end)])
            if len(content) < end:
                raise StorageError(f"{copies.path(object_id)} has {len(content)} bytes instead of {end}")
            await store.put(object_id, [content])
    except OSError as error:
        raise StorageError(f"a segment could not be restored: {error}") from error
    finally:
        copies.close()


async def _make_own(url: str, store: ByteStore) -> None:
    """The marker comes last: what was cut short is no store."""
    store_id = uuid4()
    async with translated_errors():
        connection = await _connect(url)
        try:
            changed = await connection.fetchval(statement("change_log_store"), store_id, store.location)
        finally:
            await connection.close()
    try:
        if changed is not None:
            await store.create_marker(identity_marker(store_id))
    except OSError as error:
        raise unusable(store.location, error) from error


async def _is_empty(store: ByteStore) -> bool:
    if isinstance(store, SegmentDirectory):
        return not any(store.directory.iterdir())
    return await store.read_marker() is None and not await store.listed()


async def _connect(url: str) -> Any:
    """Of its own, since the snapshot and the lock last as long as it."""
    return await connect(url, {"search_path": schema.TABLE_SCHEMA})


async def _run(program: str, *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        str(bin_directory() / program),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        said = " ".join(errors.decode("utf-8", "replace").splitlines()[-_ERROR_LINES:])
        raise StorageError(f"{program} failed: {said}")
