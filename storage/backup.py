"""Make a consistent copy of a database and its records while a node serves, and make a new node from such a copy.

The one idea: one snapshot determines every byte. `pg_dump` writes the index and the inline bytes as of that snapshot;
the segments it names only ever grow and objects never change, so copying them afterwards yields the state of the
snapshot. While a backup runs nothing is deleted: an advisory lock stops the sweep, and a reader's lock stops TRUNCATE.

A backup is a directory: `database.dump`, `log/` with a segment for each segment or object and the times of their
creation, and `manifest.json`, which is written last. Files of an earlier backup are kept, so that the next one copies
only new bytes. It may be restored into a directory or into a bucket, no matter which of the two it came from. Its files
are its owner's alone: they hold every credential.

Passwords reach `pg_dump`, `pg_restore` and `psql` by their environment, because every user of the machine can read a
process's arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from storage import schema
from storage.byte_store import MARKER, ByteStore
from storage.database_url import parse_database_url
from storage.errors import StorageError
from storage.pool import connect, translated_errors
from storage.postgres_programs import bin_directory
from storage.private_files import (
    FILE_MODE,
    create_file,
    make_directory,
    open_lock,
    restrict_directory,
    sync_directory,
    write_file,
)
from storage.queries import statement
from storage.segments import SegmentDirectory
from storage.store import Marker, parse_marker, reach_store, unusable

DUMP = "database.dump"
LOG = "log"
MANIFEST = "manifest.json"
TIMES = "segment-times.json"
"""The time at which each copied segment was created. It shows whether a segment of that id is still the same one."""
FORMAT = 1
_COPY_BYTES = 4 * 1024 * 1024
_SYNC_BYTES = 1024 * 1024
"""Bytes that a backup writes and syncs at once. A commit of a node on the same disk waits for such a sync."""
_REST = 2
"""A backup rests this many times as long as a sync of its copies took, so that the disk is free for the nodes' commits.
"""
_PIPE_BYTES = 1024 * 1024
_ERROR_LINES = 3
_ERROR_BYTES = 16 * 1024
LOCK = "backup.lock"
"""A file that exists, and is locked, while a backup is being written."""
_NAMES = frozenset({DUMP, f"{DUMP}.new", LOG, MANIFEST, f"{MANIFEST}.new", LOCK})
"""Names that a backup's directory may contain, whether the backup is complete or incomplete."""
_LOG_NAMES = frozenset({MARKER, f"{MARKER}.new", TIMES, f"{TIMES}.new"})
"""Names that `log/` may hold beside the segments."""
_NO_TIMEOUTS = dict.fromkeys(
    (
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "idle_session_timeout",
        "transaction_timeout",
    ),
    "0",
)
"""Settings of the backup's session. While programs and copies run, it is idle in its transaction, if need be for hours.
A default of the database would end it."""
_NOT_NULL = rb"(?:CONSTRAINT \S+ )?NOT NULL [^\s,]+"


@dataclass(frozen=True, slots=True)
class BackupReport:
    segments: int
    copied_segments: int
    copied_bytes: int
    dump_bytes: int


async def back_up(url: str, store: ByteStore | None, target: Path, *, programs: Path | None = None) -> BackupReport:
    """Back up the database at `url`, and the objects in `store` that it refers to, to `target`. An older backup of the
    same database there is updated. `programs` is the directory of Postgres' programs; None: see `bin_directory`.

    Raise StorageError if the database has no Sluice, if `target` holds something else, if another backup is being
    written there, if a copy fails, or if a captured table of a user lies among Sluice's, because such a backup could
    not be restored.
    """
    marker = await _marker(store)
    with _alone(target):
        async with translated_errors():
            connection = await _connect(url)
            try:
                captured = await connection.fetch(statement("captured_tables"), schema.TABLE_SCHEMA)
                if captured:
                    names = ", ".join(f"{schema.TABLE_SCHEMA}.{row['relname']}" for row in captured)
                    raise StorageError(
                        f"{names}: a captured table among Sluice's own tables cannot be restored. "
                        f'Move it: "alter table … set schema public"'
                    )
                cluster_id: str = await connection.fetchval(statement("cluster_id"))
                await asyncio.to_thread(_prepare, target, marker, cluster_id)
                await connection.execute(statement("lock_deletion_shared"))
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    # Take this lock before the first query takes the snapshot. From then on no slot is emptied.
                    await connection.execute(statement("hold_inline"))
                    snapshot: str = await connection.fetchval(statement("export_snapshot"))
                    rows = await connection.fetch(statement("objects_in_use"))
                    await _dump(url, snapshot, target / f"{DUMP}.new", programs)
                    used = {row["object_id"]: int(row["end_position"]) for row in rows}
                    await asyncio.to_thread(
                        _remove_reused, target, {row["object_id"]: row["created_us"] for row in rows}
                    )
                    copied_segments, copied_bytes = await _copy_segments(store, target, used)
            finally:
                await connection.close()
        dump_bytes = await asyncio.to_thread(_finish, target, used, cluster_id)
    return BackupReport(len(used), copied_segments, copied_bytes, dump_bytes)


async def restore(url: str, place: Path | str | None, source: Path, *, programs: Path | None = None) -> None:
    """Restore the backup in `source` into the database at `url`, which must hold no Sluice, and into `place`: an empty
    directory or prefix of a bucket.

    The copy gets an identity and a secret of its own, because the original may go on elsewhere. Delegation tokens end
    with the old identity. A restore that is killed leaves no database that would accept the original's store. Raise
    StorageError if the restore is refused or fails.
    """
    manifest = await asyncio.to_thread(read_manifest, source)
    if manifest["segments"] and place is None:
        raise StorageError("the backup has segments: give a directory or a bucket for them as --log-store")
    async with translated_errors():
        connection = await _connect(url)
        try:
            if await connection.fetchval(statement("schema_exists"), schema.TABLE_SCHEMA):
                raise StorageError("the database already has Sluice's tables: restore into an empty one")
            version: int = connection.get_server_version().major
        finally:
            await connection.close()
    store = None if place is None else reach_store(place)
    try:
        if store is not None:
            await _copy_back(source, store, manifest["segments"])
        store_change = statement("forget_log_store" if store is None else "leave_log_store")
        changes = [statement("end_delegation_tokens"), statement("change_scram_secret"), store_change]
        await _load(url, source / DUMP, version, changes, programs)
        if store is not None:
            await _make_own(url, store)
    finally:
        if store is not None:
            store.close()


def read_manifest(source: Path) -> dict[str, Any]:
    """Read the manifest of a finished backup."""
    try:
        found: object = json.loads((source / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{source} holds no finished backup: {error}") from error
    manifest = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if manifest and manifest.get("format") != FORMAT:
        raise StorageError(f"{source} holds a backup of format {manifest.get('format')}, this program knows {FORMAT}")
    if not _are_segments(manifest.get("segments")):
        raise StorageError(f"{source} holds no finished backup: {MANIFEST} is damaged")
    return manifest


def _are_segments(found: object) -> bool:
    """Return whether the value maps segments' ids to their sizes."""
    return isinstance(found, dict) and all(
        re.fullmatch("[0-9a-f]{16}", str(name)) and isinstance(end, int) and 0 <= end < 2**63
        for name, end in cast("dict[object, object]", found).items()
    )


async def _marker(store: ByteStore | None) -> bytes | None:
    try:
        return None if store is None else await store.read_marker()
    except OSError as error:
        assert store is not None
        raise unusable(store.location, error) from error


@contextlib.contextmanager
def _alone(target: Path) -> Generator[None]:
    """Keep other backups from the directory, which is created if necessary. Two at once would mix their files, and the
    first to end would call the mixture finished."""
    lock_path = target / LOCK
    try:
        if not make_directory(target):
            _refuse_others(target, lambda name: name in _NAMES)
        lock_fd = open_lock(lock_path)
    except OSError as error:
        raise StorageError(f"cannot write to {target}: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A backup that has just ended may have removed this file, and a third one may have made another.
            is_ours = os.path.samestat(os.fstat(lock_fd), lock_path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        except OSError as error:
            raise StorageError(f"cannot lock {lock_path}: {error.strerror or error}") from error
        if not is_ours:
            raise StorageError(f"another backup is being written to {target}: wait until it ends")
        try:
            yield
        finally:
            lock_path.unlink(missing_ok=True)
    finally:
        os.close(lock_fd)


def _prepare(target: Path, marker: bytes | None, cluster_id: str) -> None:
    _refuse_another_cluster(target, cluster_id)
    try:
        if not make_directory(target / LOG):
            _refuse_others(target / LOG, lambda name: name.endswith(".segment") or name in _LOG_NAMES)
            restrict_directory(target / LOG)
        there = target / LOG / MARKER
        if there.exists() and not _of_one_store(there.read_bytes(), marker, target):
            raise StorageError(f"{target} holds the backup of another database: give another directory")
        if marker is not None:
            write_file(there, marker)
    except OSError as error:
        raise StorageError(f"cannot write to {target}: {error.strerror or error}") from error


def _refuse_another_cluster(target: Path, cluster_id: str) -> None:
    """Refuse a target with a finished backup of another cluster. If all bytes are inline, no marker names the
    database."""
    try:
        earlier = read_manifest(target)
    except StorageError:
        return  # no finished backup can be lost
    if earlier.get("cluster_id", cluster_id) != cluster_id:
        raise StorageError(f"{target} holds the backup of another database: give another directory")


def _end_earlier(target: Path) -> None:
    """Remove the manifest of an earlier backup, durably, before its files change. A backup that fails before leaves
    the earlier one whole."""
    (target / MANIFEST).unlink(missing_ok=True)
    sync_directory(target)


def _of_one_store(earlier: bytes, marker: bytes | None, target: Path) -> bool:
    """Return whether two markers name the same store. Its history may have changed since."""
    if marker is None:
        return False
    where = str(target / LOG)
    try:
        return parse_marker(earlier, where).store_id == parse_marker(marker, where).store_id
    except StorageError:
        return False


def _refuse_others(directory: Path, is_ours: Callable[[str], bool]) -> None:
    """Refuse a target directory with files that belong to no backup, complete or incomplete."""
    other = next((entry.name for entry in directory.iterdir() if not is_ours(entry.name)), None)
    if other is not None:
        raise StorageError(
            f"{directory} holds {other}, which is no part of a backup: give an empty directory or an earlier backup"
        )


def _remove_reused(target: Path, created_us: Mapping[int, int]) -> None:
    """Remove each copy of a segment that was created at another time, and note the present times.

    A database that was restored to an earlier moment gives ids out again. So an earlier backup may hold other bytes
    under the same id.
    """
    copies, times = SegmentDirectory(target / LOG), target / LOG / TIMES
    present = {f"{object_id:016x}": time_us for object_id, time_us in created_us.items()}
    try:
        reused = [copies.path(each) for each in created_us.keys() - _of_same_time(times, present)]
        if any(path.exists() for path in reused):
            _end_earlier(target)
        for path in reused:
            path.unlink(missing_ok=True)
        sync_directory(target / LOG)
        write_file(times, json.dumps(present).encode())
    except OSError as error:
        raise StorageError(f"cannot write to {target}: {error.strerror or error}") from error
    finally:
        copies.close()


def _of_same_time(times: Path, present: Mapping[str, int]) -> set[int]:
    """Return the ids of segments whose copies were created when the present segments were."""
    try:
        found: object = json.loads(times.read_text("utf-8"))
    except FileNotFoundError:
        return set()
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{times} cannot be read: {error}") from error
    known = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    return {int(name, 16) for name, time_us in present.items() if known.get(name) == time_us}


async def _copy_segments(store: ByteStore | None, target: Path, used: dict[int, int]) -> tuple[int, int]:
    """Copy the new bytes of each segment or object, up to the position that the snapshot needs. Return how many objects
    and how many bytes were copied.
    """
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
        _end_earlier(target)
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(target, flags, FILE_MODE), "ab") as writing:
            for piece in pieces:
                for first in range(0, len(piece), _SYNC_BYTES):
                    began_s = time.monotonic()
                    writing.write(memoryview(piece)[first : first + _SYNC_BYTES])
                    writing.flush()
                    os.fsync(writing.fileno())
                    time.sleep((time.monotonic() - began_s) * _REST)
        return sum(map(len, pieces))

    while start < end:
        size_bytes = min(_COPY_BYTES, end - start)
        if await store.load(object_id, [(start, size_bytes)], write) < size_bytes:
            raise StorageError(f"{store.name(object_id)} is shorter than the index says ({end}): run sluice check")
        start += size_bytes


def _finish(target: Path, used: dict[int, int], cluster_id: str) -> int:
    segments = {f"{object_id:016x}": end for object_id, end in used.items()}
    manifest = {"format": FORMAT, "cluster_id": cluster_id, "segments": segments}
    try:
        (target / f"{DUMP}.new").rename(target / DUMP)
        write_file(target / MANIFEST, json.dumps(manifest).encode())
        sync_directory(target)
        return (target / DUMP).stat().st_size
    except OSError as error:
        raise StorageError(f"cannot write to {target}: {error.strerror or error}") from error


async def _copy_back(source: Path, store: ByteStore, segments: dict[str, int]) -> None:
    copies = SegmentDirectory(source / LOG)
    try:
        if not await _is_empty(store):
            raise StorageError(f"{store.location} is not empty: give another --log-store or --data-dir")
        for name, end in segments.items():
            object_id = int(name, 16)
            # A segment always fits into memory: the node that wrote it was limited to such a size.
            size_bytes = copies.path(object_id).stat().st_size
            (content,) = copies.read(object_id, [(0, min(end, size_bytes))])
            if len(content) < end:
                raise StorageError(f"{copies.path(object_id)} has {len(content)} bytes instead of {end}")
            await store.put(object_id, [content])
    except OSError as error:
        raise StorageError(f"a segment could not be restored: {error}") from error
    finally:
        copies.close()


async def _make_own(url: str, store: ByteStore) -> None:
    """Give the copied store its own identity. Write the marker last, because without a marker an incomplete copy is not
    a store.
    """
    store_id = uuid4()
    async with translated_errors():
        connection = await _connect(url)
        try:
            changed = await connection.fetchval(statement("change_log_store"), store_id, store.location)
        finally:
            await connection.close()
    try:
        if changed is not None:
            await store.create_marker(Marker(store_id).content())
    except OSError as error:
        raise unusable(store.location, error) from error


async def _is_empty(store: ByteStore) -> bool:
    if isinstance(store, SegmentDirectory):
        return not any(store.directory.iterdir())
    return await store.read_marker() is None and not await store.listed()


async def _connect(url: str) -> Any:
    """Open a connection of the backup's own, because the snapshot and the lock last as long as the connection."""
    return await connect(url, {"search_path": schema.TABLE_SCHEMA, **_NO_TIMEOUTS})


async def _dump(url: str, snapshot: str, target: Path, programs: Path | None) -> None:
    try:
        dump_fd = create_file(target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    try:
        dump = await _start(
            "pg_dump",
            *("--snapshot", snapshot, "--format", "custom", "--compress", "0", "--schema", schema.TABLE_SCHEMA),
            # Open the table of contents anew, by a name that no other file can have: standard output already has the
            # first one.
            *("--file", f"/dev/fd/{dump_fd}"),
            programs=programs,
            url=url,
            inherited=(dump_fd,),
        )
        await _finished(dump)
        await asyncio.to_thread(os.fsync, dump_fd)
    finally:
        os.close(dump_fd)


def for_server(definitions: bytes, version: int) -> bytes:
    """Adapt what `pg_restore` writes before the first row to a Postgres of the major `version`.

    Before 17 no transaction_timeout exists, which `pg_restore` sets to its default. Before 18 columns inherit NOT NULL
    by themselves, and a table cannot declare it for an inherited column.
    """
    if version < 17:
        definitions = definitions.replace(b"SET transaction_timeout = 0;\n", b"", 1)
    if version < 18:
        definitions = re.sub(rb"(?m)^    " + _NOT_NULL + rb",\n", b"", definitions)
        definitions = re.sub(rb",\n    " + _NOT_NULL + rb"\n\)", b"\n)", definitions)
    return definitions


async def _load(url: str, dump: Path, version: int, changes: Sequence[str], programs: Path | None) -> None:
    """Load the dump and make the changes in one transaction, by way of `psql`, because definitions may have to change
    (`for_server`)."""
    words = ("--no-owner", "--file", "-", str(dump))
    reading = await _start("pg_restore", *words, programs=programs, output=asyncio.subprocess.PIPE)
    loading: _Program | None = None
    try:
        loading = await _start(
            "psql",
            *("--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", "--file", "-"),
            programs=programs,
            url=url,
            given=asyncio.subprocess.PIPE,
        )
        await _pass_on(reading, loading, version, changes)
        # If this process is killed, psql sees the end of its input. So psql commits only by a command of its own, which
        # follows when the dump was read to its end.
        await _finished(reading)
        assert loading.process.stdin is not None
        loading.process.stdin.write(b"commit;\n")
        loading.process.stdin.close()
        await _finished(loading)
    finally:
        for program in (reading, loading):
            if program is not None:
                _kill(program)
                await program.process.wait()


async def _pass_on(reading: _Program, loading: _Program, version: int, changes: Sequence[str]) -> None:
    script, target = reading.process.stdout, loading.process.stdin
    assert script is not None
    assert target is not None
    try:
        definitions = bytearray()
        while line := await script.readline():
            definitions += line
            if line.startswith(b"COPY "):
                break
        target.write(b"begin;\n" + for_server(bytes(definitions), version))
        while piece := await script.read(_PIPE_BYTES):
            target.write(piece)
            await target.drain()
        target.writelines(change.encode() + b";\n" for change in changes)
        await target.drain()
    except (BrokenPipeError, ConnectionResetError):
        # psql has ended and says why.
        _kill(reading)
        await _finished(loading)


@dataclass(frozen=True, slots=True)
class _Program:
    name: str
    process: asyncio.subprocess.Process
    errors: asyncio.Task[bytes]


async def _start(
    program: str,
    *arguments: str,
    programs: Path | None,
    url: str | None = None,
    given: int = asyncio.subprocess.DEVNULL,
    output: int = asyncio.subprocess.DEVNULL,
    inherited: tuple[int, ...] = (),
) -> _Program:
    executable = (programs or bin_directory()) / program
    if not executable.is_file():
        raise StorageError(
            f"{executable.parent} has no {program}: give --postgres-bin the directory with all programs of Postgres"
        )
    environment = dict(os.environ)
    target: tuple[str, ...] = ()
    if url is not None:
        try:
            shown, password = parse_database_url(url).without_password()
        except ValueError as error:
            raise StorageError(str(error)) from error
        target = ("--dbname", shown)
        if password is not None:
            environment["PGPASSWORD"] = password
    process = await asyncio.create_subprocess_exec(
        str(executable),
        *target,
        *arguments,
        stdin=given,
        stdout=output,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        pass_fds=inherited,
        limit=_PIPE_BYTES,
    )
    assert process.stderr is not None
    return _Program(program, process, asyncio.create_task(_last_lines(process.stderr)))


def _kill(program: _Program) -> None:
    with contextlib.suppress(ProcessLookupError):
        program.process.kill()


async def _last_lines(stream: asyncio.StreamReader) -> bytes:
    """Return the end of a program's output, which may have any length."""
    end = b""
    while piece := await stream.read(_ERROR_BYTES):
        end = (end + piece)[-_ERROR_BYTES:]
    return end


async def _finished(program: _Program) -> None:
    """Wait for the program's end. Raise StorageError, with its last lines, if it failed."""
    try:
        errors = await asyncio.shield(program.errors)
        returncode = await program.process.wait()
    except BaseException:
        _kill(program)
        raise
    if returncode:
        said = " ".join(errors.decode("utf-8", "replace").splitlines()[-_ERROR_LINES:])
        raise StorageError(f"{program.name} failed: {said}")
