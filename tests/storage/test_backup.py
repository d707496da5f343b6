"""A backup holds the state of one moment while records flow, and a restored node has all of it. A check finds faults. A
node accepts only its own store."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import asyncpg
import pytest

import storage.backup
from storage import retention
from storage.backup import MANIFEST, back_up, for_server, read_manifest, restore
from storage.byte_store import FoundObject, Range, T
from storage.check import BYTES_PER_STATEMENT, check
from storage.compaction import CompactionPolicy, CompactionStore
from storage.database_url import parse_database_url
from storage.errors import StorageError
from storage.log import LogStore
from storage.migrate import migrate
from storage.pool import Database, Pool, Row
from storage.postgres_programs import bin_directory
from storage.queries import statement
from storage.roller import Roller
from storage.segments import SegmentDirectory
from storage.store import mark_history, open_store
from storage.text import stored
from storage.types import PartitionKey, StoredBatch
from storage.users import UserStore
from tests.postgres import EMPTY, Databases
from tests.steps.waiting import until
from tests.storage.batches import append, batch_bytes, new_batch, read
from tests.storage.conftest import MakeTopic
from tests.storage.transactions import Producer as TransactionalProducer
from tests.trust.powercut import Disk, Syncing, compiler


@pytest.fixture
async def directory(database: Database, tmp_path: Path) -> AsyncIterator[SegmentDirectory]:
    opened = await open_store(database, tmp_path / "log")
    assert isinstance(opened, SegmentDirectory)
    yield SegmentDirectory(opened.directory, segment_bytes=512 * 1024)
    await database.cold.fetch("delete from log_store")


@pytest.fixture
async def log(database: Database, directory: SegmentDirectory) -> AsyncIterator[LogStore]:
    store = LogStore(database, directory, inline_max_bytes=10_000)
    yield store
    await store.close()


async def test_a_backup_outlasts_the_timeouts_of_its_database(
    database_url: str,
    database: Database,
    log: LogStore,
    directory: SegmentDirectory,
    make_topic: MakeTopic,
    tmp_path: Path,
) -> None:
    """For as long as `pg_dump` runs and segments are copied, the backup's session is idle in its transaction."""
    (partition,) = (await make_topic()).partitions
    await append(log, new_batch(partition.partition_key, size_bytes=60_000))
    (name,) = await database.cold.fetch("select current_database() as name")
    wanted = ["idle_in_transaction_session_timeout", "idle_session_timeout", "transaction_timeout"]
    # Before 17 Postgres has no transaction_timeout.
    found = await database.cold.fetch("select name from pg_settings where name = any ($1)", wanted)
    settings = [setting["name"] for setting in found]
    assert set(wanted[:2]) <= set(settings)
    try:
        for setting in settings:
            await database.cold.fetch(f"alter database \"{name['name']}\" set {setting} = '20ms'")
        assert (await back_up(database_url, directory, tmp_path / "backup")).segments == 1
    finally:
        for setting in settings:
            await database.cold.fetch(f'alter database "{name["name"]}" reset {setting}')


async def test_a_backup_made_while_records_come_and_go_is_whole(
    database_url: str,
    database: Database,
    postgres: Databases,
    log: LogStore,
    directory: SegmentDirectory,
    make_topic: MakeTopic,
    tmp_path: Path,
) -> None:
    keys = [partition.partition_key for partition in (await make_topic(partition_count=3)).partitions]
    roller = Roller(database, log, directory)
    done, begun = asyncio.Event(), asyncio.Event()

    async def produce() -> None:
        number = 0
        while not done.is_set():
            if number == 20:
                begun.set()
            batches = [new_batch(key, size_bytes=(200, 60_000)[number % 2], fill=number % 251) for key in keys]
            await append(log, *batches)
            number += 1

    async def maintain() -> None:
        while not done.is_set():
            await roller.roll(max_bytes=0, max_age_ms=0)
            await log.delete_records(keys[0], -1)
            await retention.apply(database, [retention.RetentionPolicy(keys[0], -1)])
            await roller.sweep(grace_ms=0)

    tasks = [asyncio.create_task(produce()), asyncio.create_task(maintain())]
    await begun.wait()
    target = tmp_path / "backup"
    first = await back_up(database_url, directory, target)
    second = await back_up(database_url, directory, target)
    done.set()
    await asyncio.gather(*tasks)
    await roller.close()
    assert first.segments
    assert second.segments

    url = postgres.create(EMPTY)
    other = await Database.open(url, hot_connections=1, cold_connections=1)
    try:
        await restore(url, tmp_path / "restored", target)
        await migrate(other)
        restored = await open_store(other, tmp_path / "restored")
        assert restored is not None
        with pytest.raises(StorageError, match="another database"):
            await open_store(other, directory.directory)
        report = await check(other, restored)
        assert report.wrong == []
        assert report.batches
        store = LogStore(other, restored)
        for key in keys[1:]:
            end = (await store.states([key]))[key].high_watermark
            stored = (await read(store, key)).batches
            assert [batch.base_offset for batch in stored] == list(range(end))
            assert [batch.records[100] for batch in stored] == [offset % 251 for offset in range(end)]
        assert await append(LogStore(other, restored, inline_max_bytes=0), new_batch(keys[1])) == [end]
        with pytest.raises(StorageError, match="already"):
            await restore(url, tmp_path / "again", target)
    finally:
        await other.close()
        postgres.drop(url)


async def test_a_backup_refuses_the_directory_of_one_that_has_not_ended(
    database_url: str,
    postgres: Databases,
    log: LogStore,
    directory: SegmentDirectory,
    key: PartitionKey,
    tmp_path: Path,
) -> None:
    """The slow one of yesterday would name the dump of today's beside its own, shorter segments."""

    class Slow(SegmentDirectory):
        async def load(self, object_id: int, ranges: Sequence[Range], look: Callable[[list[bytearray]], T]) -> T:
            reached.set()
            await go_on.wait()
            return await super().load(object_id, ranges, look)

    reached, go_on = asyncio.Event(), asyncio.Event()
    await append(log, new_batch(key, size_bytes=300_000))
    slow = asyncio.create_task(back_up(database_url, Slow(directory.directory), tmp_path / "backup"))
    await reached.wait()
    await append(log, new_batch(key, size_bytes=100_000))
    with pytest.raises(StorageError, match="another backup"):
        await back_up(database_url, directory, tmp_path / "backup")
    go_on.set()
    await slow
    url = postgres.create(EMPTY)
    other = await Database.open(url, hot_connections=1, cold_connections=1)
    try:
        await restore(url, tmp_path / "restored", tmp_path / "backup")
        await migrate(other)
        assert (await check(other, await open_store(other, tmp_path / "restored"))).wrong == []
    finally:
        await other.close()
        postgres.drop(url)
    assert (await back_up(database_url, directory, tmp_path / "backup")).copied_bytes == 100_000


async def test_a_later_backup_copies_new_files_and_removes_deleted_ones(
    database_url: str, log: LogStore, directory: SegmentDirectory, key: PartitionKey, tmp_path: Path, database: Database
) -> None:
    target = tmp_path / "backup"
    for _ in range(2):
        await append(log, new_batch(key, size_bytes=300_000))
    assert (await back_up(database_url, directory, target)).copied_bytes == 600_000
    await mark_history(directory, 1)
    await append(log, new_batch(key, size_bytes=100_000))
    assert (await back_up(database_url, directory, target)).copied_bytes == 100_000
    await log.delete_records(key, -1)
    await retention.apply(database, [retention.RetentionPolicy(key, -1)])
    assert (await back_up(database_url, directory, target)).segments == 0
    assert not list((target / "log").glob("*.segment"))


BACK_UP = """
import asyncio, sys
from pathlib import Path
from storage.backup import back_up
from storage.segments import SegmentDirectory

asyncio.run(back_up(sys.argv[1], SegmentDirectory(Path(sys.argv[2])), Path(sys.argv[3])))
"""


@pytest.mark.skipif(compiler() is None, reason="no C compiler is installed (Debian: gcc)")
async def test_a_power_cut_during_a_later_backup_leaves_no_manifest_of_the_earlier_one(
    database_url: str, log: LogStore, directory: SegmentDirectory, key: PartitionKey, tmp_path: Path, database: Database
) -> None:
    disk = Disk(tmp_path)
    target = disk.watched / "backup"

    async def begin() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", BACK_UP, database_url, str(directory.directory), str(target)),
            env={**os.environ, **disk.environment},
        )

    await append(log, new_batch(key, size_bytes=300_000))
    assert await (await begin()).wait() == 0
    assert len(read_manifest(target)["segments"]) == 1
    await log.delete_records(key, -1)
    await retention.apply(database, [retention.RetentionPolicy(key, -1)])
    disk.slow_down(Syncing.NODES, 1.0)
    later = await begin()
    await until(lambda: later.returncode is not None or (target / f"{MANIFEST}.new").exists())
    later.kill()
    await later.wait()
    disk.take_back()
    assert not list((target / "log").glob("*.segment"))
    with pytest.raises(StorageError, match="holds no finished backup"):
        read_manifest(target)


async def test_a_backup_copies_a_segment_again_whose_id_another_history_has_used(
    database_url: str,
    database: Database,
    directory: SegmentDirectory,
    make_topic: MakeTopic,
    tmp_path: Path,
) -> None:
    """The database is restored to a moment before the segment, whose file retention has removed since."""
    (partition,) = (await make_topic()).partitions
    target, copies = tmp_path / "backup", SegmentDirectory(tmp_path / "backup" / "log")
    for fill in (1, 2):
        log = LogStore(database, directory, inline_max_bytes=10_000)
        await append(log, new_batch(partition.partition_key, size_bytes=60_000, fill=fill))
        await log.close()
        (row,) = await database.cold.fetch("select object_id, position, size_bytes from chunk")
        assert (await back_up(database_url, directory, target)).segments == 1
        found = [(row["position"], row["size_bytes"])]
        assert copies.read(row["object_id"], found) == directory.read(row["object_id"], found)
        await database.cold.fetch("delete from chunk")
        await database.cold.fetch("delete from log_object")
        await database.cold.fetch(
            "select setval(pg_get_serial_sequence('log_object', 'object_id'), $1, false)", row["object_id"]
        )
        await database.cold.fetch("update cluster set history = history + 1")
        directory.delete(row["object_id"])
    copies.close()


async def test_no_file_is_deleted_during_a_backup(
    database: Database, log: LogStore, directory: SegmentDirectory, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append(log, new_batch(key, size_bytes=300_000))
    await log.close()
    await log.delete_records(key, -1)
    await retention.apply(database, [retention.RetentionPolicy(key, -1)])
    await sql.execute("select pg_advisory_lock_shared(5492300417)")
    roller = Roller(database, log, directory)
    assert await roller.sweep(grace_ms=0) == 0
    assert len(directory.found()) == 1
    await sql.execute("select pg_advisory_unlock_shared(5492300417)")
    assert await roller.sweep(grace_ms=0) == 1


async def test_a_backup_of_another_database_or_an_unfinished_one_is_refused(
    database_url: str, log: LogStore, directory: SegmentDirectory, key: PartitionKey, tmp_path: Path
) -> None:
    await append(log, new_batch(key, size_bytes=300_000))
    target = tmp_path / "backup"
    (target / "log").mkdir(parents=True)
    (target / "log" / "sluice-store.json").write_text('{"store_id": "another"}')
    with pytest.raises(StorageError, match="another database"):
        await back_up(database_url, directory, target)
    with pytest.raises(StorageError, match="no finished backup"):
        await restore(database_url, tmp_path / "restored", target)


@pytest.mark.parametrize(
    "segments",
    ["[]", '{"../outside": 1}', '{"0000000000000001": -1}', '{"0000000000000001": "1"}', '{"0000000000000001": 1e999}'],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, segments: str) -> None:
    (tmp_path / MANIFEST).write_text(f'{{"format": 1, "segments": {segments}}}')
    with pytest.raises(StorageError, match="is damaged"):
        read_manifest(tmp_path)


async def test_a_segment_that_is_shorter_than_the_manifest_says_ends_a_restore(
    postgres: Databases, tmp_path: Path
) -> None:
    source = tmp_path / "backup"
    (source / "log").mkdir(parents=True)
    (source / "log" / f"{1:016x}.segment").write_bytes(b"short")
    (source / MANIFEST).write_text(f'{{"format": 1, "segments": {{"{1:016x}": {2**62}}}}}')
    url = postgres.create(EMPTY)
    try:
        with pytest.raises(StorageError, match="has 5 bytes instead of"):
            await restore(url, tmp_path / "restored", source)
    finally:
        postgres.drop(url)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs that record their arguments and then run Postgres' own programs."""
    programs, real = tmp_path / "programs", bin_directory()
    programs.mkdir()
    for name in ("pg_dump", "pg_restore", "psql"):
        script = f"""#!/bin/sh
tr '\\0' '\\n' </proc/$$/cmdline >"$0.cmdline"
printf %s "$PGPASSWORD" >"$0.password"
exec {real / name} "$@"
"""
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    monkeypatch.setattr("storage.backup.bin_directory", lambda: programs)
    return programs


async def test_a_backup_of_another_cluster_without_a_store_is_refused(
    database_url: str, database: Database, postgres: Databases, tmp_path: Path
) -> None:
    """If all bytes are inline, a backup has no marker of a store."""
    target = tmp_path / "backup"
    await back_up(database_url, None, target)
    url = postgres.create(EMPTY)
    other = await Database.open(url, hot_connections=1, cold_connections=1)
    try:
        await migrate(other)
        with pytest.raises(StorageError, match="another database"):
            await back_up(url, None, target)
    finally:
        await other.close()
        postgres.drop(url)
    assert read_manifest(target)["cluster_id"] == await database.cold.fetch_value("select cluster_id from cluster")
    await back_up(database_url, None, target)


@pytest.mark.parametrize("failing", ["the dump", "a segment"])
async def test_a_backup_that_fails_leaves_the_earlier_one_whole(
    database_url: str,
    log: LogStore,
    directory: SegmentDirectory,
    key: PartitionKey,
    postgres: Databases,
    recorded: Path,
    tmp_path: Path,
    failing: str,
) -> None:
    target = tmp_path / "backup"
    await append(log, new_batch(key, size_bytes=300_000))
    await back_up(database_url, directory, target)
    await append(log, new_batch(key, size_bytes=300_000))
    if failing == "the dump":
        (recorded / "pg_dump").write_text("#!/bin/sh\necho 'no space left on device' >&2\nexit 1\n")
    else:
        newest = directory.path(max(found.object_id for found in directory.found()))
        os.truncate(newest, 0)
    with pytest.raises(StorageError, match=r"no space left|is shorter"):
        await back_up(database_url, directory, target)
    url = postgres.create(EMPTY)
    other = await Database.open(url, hot_connections=1, cold_connections=1)
    try:
        await restore(url, tmp_path / "restored", target)
        await migrate(other)
        report = await check(other, await open_store(other, tmp_path / "restored"))
        assert (report.size_bytes, report.wrong) == (300_000, [])
    finally:
        await other.close()
        postgres.drop(url)


async def test_no_argument_list_contains_the_password(
    database_url: str, database: Database, postgres: Databases, recorded: Path, tmp_path: Path
) -> None:
    def with_password(url: str) -> tuple[str, str]:
        shown, password = parse_database_url(url).without_password()
        password = password or "top secret"
        return f"{shown}{'&' if '?' in shown else '?'}password={quote(password)}", password

    url, password = with_password(database_url)
    await back_up(url, None, tmp_path / "backup")
    other = postgres.create(EMPTY)
    try:
        await restore(with_password(other)[0], None, tmp_path / "backup")
    finally:
        postgres.drop(other)
    for name in ("pg_dump", "pg_restore", "psql"):
        arguments = (recorded / f"{name}.cmdline").read_text()
        assert name in arguments
        assert password not in arguments
        assert quote(password) not in arguments
        assert (recorded / f"{name}.password").read_text() == ("" if name == "pg_restore" else password)


async def test_only_its_owner_can_read_a_backup(
    database_url: str, log: LogStore, directory: SegmentDirectory, key: PartitionKey, tmp_path: Path
) -> None:
    await append(log, new_batch(key, size_bytes=300_000))
    target = tmp_path / "backup"
    umask = os.umask(0o022)
    try:
        await back_up(database_url, directory, target)
        assert directory.directory.stat().st_mode & 0o777 == 0o700
        # An earlier release left files with these modes.
        target.chmod(0o755)
        (target / "log").chmod(0o755)
        await back_up(database_url, directory, target)
    finally:
        os.umask(umask)
    made = [path for path in (*target.rglob("*"), *directory.directory.iterdir()) if path.is_file()]
    assert {path.name for path in made} > {"database.dump", "manifest.json", "sluice-store.json", "sluice-store.lock"}
    assert any(path.suffix == ".segment" for path in made)
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}
    assert (target / "log").stat().st_mode & 0o077 == 0o011


@pytest.mark.parametrize("name", ["holiday.jpg", "log/holiday.jpg", "log/sluice-store.lock"])
async def test_a_backup_into_a_directory_of_other_files_is_refused(
    database_url: str, database: Database, tmp_path: Path, name: str
) -> None:
    other = tmp_path / "backup" / name
    other.parent.mkdir(parents=True)
    other.touch()
    with pytest.raises(StorageError, match=rf"holds {other.name}, which is no part of a backup"):
        await back_up(database_url, None, tmp_path / "backup")
    assert [path for path in (tmp_path / "backup").rglob("*") if path.is_file()] == [other]


async def test_an_interrupted_backup_is_completed_by_the_next(
    database_url: str, database: Database, tmp_path: Path
) -> None:
    target = tmp_path / "backup"
    await back_up(database_url, None, target)
    (target / "manifest.json").unlink()
    (target / "database.dump.new").write_bytes(b"half")
    await back_up(database_url, None, target)
    assert sorted(path.name for path in target.iterdir()) == ["database.dump", "log", "manifest.json"]


DEFINITIONS = b"""SET lock_timeout = 0;
SET transaction_timeout = 0;
CREATE TABLE sluice.one (
    NOT NULL a,
    b bigint CONSTRAINT c NOT NULL,
    CONSTRAINT d NOT NULL "B"
)
INHERITS (sluice.parent);
COPY sluice.one (a) FROM stdin;
"""
OLDER = b"""SET lock_timeout = 0;
CREATE TABLE sluice.one (
    b bigint CONSTRAINT c NOT NULL
)
INHERITS (sluice.parent);
COPY sluice.one (a) FROM stdin;
"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (15, OLDER),
        (16, OLDER),
        (17, OLDER.replace(b"CREATE", b"SET transaction_timeout = 0;\nCREATE")),
        (18, DEFINITIONS),
    ],
)
def test_a_dump_contains_only_definitions_that_an_older_server_knows(version: int, expected: bytes) -> None:
    assert for_server(DEFINITIONS, version) == expected


@pytest.mark.parametrize("readable", ["nine tenths", "all but the end"])
async def test_a_dump_that_cannot_be_read_to_its_end_leaves_the_database_empty(
    database_url: str, database: Database, postgres: Databases, recorded: Path, tmp_path: Path, readable: str
) -> None:
    target = tmp_path / "backup"
    await back_up(database_url, None, target)
    dump = target / "database.dump"
    if readable == "nine tenths":
        os.truncate(dump, dump.stat().st_size * 9 // 10)
    else:
        program = recorded / "pg_restore"
        failing = f"{bin_directory() / 'pg_restore'} \"$@\"\necho 'end of file' >&2\nexit 1\n"
        program.write_text(f"#!/bin/sh\n{failing}")
    url = postgres.create(EMPTY)
    connection = await asyncpg.connect(url)
    try:
        with pytest.raises(StorageError, match=r"pg_restore failed: .*end of file"):
            await restore(url, None, target)
        assert not await connection.fetchval("select exists (select from pg_namespace where nspname = 'sluice')")
    finally:
        await connection.close()
        postgres.drop(url)


RESTORE = """
import asyncio, sys
from pathlib import Path
from storage.backup import restore

asyncio.run(restore(sys.argv[1], None, Path(sys.argv[2]), programs=Path(sys.argv[3])))
"""


async def test_a_restore_that_is_killed_during_the_load_leaves_the_database_empty(
    database_url: str, database: Database, postgres: Databases, recorded: Path, tmp_path: Path
) -> None:
    """psql outlives the restore, and sees the end of its input."""
    await back_up(database_url, None, tmp_path / "backup")
    (recorded / "pg_restore").write_text(
        f"""#!/bin/sh
{bin_directory() / "pg_restore"} "$@" | sed '/^\\\\\\.$/q'
until grep -q '^\\\\\\.$' "${{0%/*}}/psql.input"; do sleep 0.01; done
kill -9 $PPID
"""
    )
    (recorded / "psql").write_text(
        f"""#!/bin/sh
tee "$0.input" | {bin_directory() / "psql"} "$@"
touch "$0.ended"
"""
    )
    url = postgres.create(EMPTY)
    connection = await asyncpg.connect(url)
    try:
        killed = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RESTORE, url, str(tmp_path / "backup"), str(recorded)
        )
        assert await killed.wait() == -signal.SIGKILL
        await until((recorded / "psql.ended").exists)
        assert not await connection.fetchval("select exists (select from pg_namespace where nspname = 'sluice')")
    finally:
        await connection.close()
        postgres.drop(url)


async def test_a_restore_into_a_database_that_refuses_the_dump_gives_its_reason(
    database_url: str, database: Database, postgres: Databases, tmp_path: Path
) -> None:
    target = tmp_path / "backup"
    await back_up(database_url, None, target)
    url = postgres.create(EMPTY)
    name = url.rpartition("/")[2].partition("?")[0]
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f'alter database "{name}" set default_transaction_read_only = on')
        with pytest.raises(StorageError, match=r"psql failed: .*read-only transaction"):
            await restore(url, None, target)
    finally:
        await connection.close()
        postgres.drop(url)


async def test_a_restore_ends_delegation_tokens(
    database_url: str, database: Database, sql: asyncpg.Connection, postgres: Databases, tmp_path: Path
) -> None:
    await sql.execute("insert into delegation_token values ('t', 'd', 'o', 'o', '{}', 1, 2, 3, 4096, '{}', '{}', '{}')")
    await sql.execute("insert into scram_credential values ('bob', 1, 4096, 's', 'k', 'k')")
    await back_up(database_url, None, tmp_path / "backup")
    url = postgres.create(EMPTY)
    try:
        await restore(url, None, tmp_path / "backup")
        connection = await asyncpg.connect(url)
        try:
            assert await connection.fetchval("select count(*) from sluice.scram_credential") == 1
            assert await connection.fetchval("select count(*) from sluice.delegation_token") == 0
        finally:
            await connection.close()
    finally:
        postgres.drop(url)


async def test_restored_database_has_a_secret_of_its_own(
    database_url: str, database: Database, postgres: Databases, tmp_path: Path
) -> None:
    """The nodes of a copy must not be taken for nodes of the original, for example because both have one
    configuration."""
    await back_up(database_url, None, tmp_path / "backup")
    url = postgres.create(EMPTY)
    other = await Database.open(url, hot_connections=1, cold_connections=1)
    try:
        await restore(url, None, tmp_path / "backup")
        assert await UserStore(other).decoy_secret() != await UserStore(database).decoy_secret()
    finally:
        await other.close()
        postgres.drop(url)


async def test_a_restore_without_a_store_leaves_the_store_to_the_original(
    database_url: str,
    postgres: Databases,
    log: LogStore,
    directory: SegmentDirectory,
    make_topic: MakeTopic,
    tmp_path: Path,
) -> None:
    (partition,) = (await make_topic()).partitions
    await append(log, new_batch(partition.partition_key, size_bytes=200))
    assert (await back_up(database_url, directory, tmp_path / "backup")).segments == 0
    await append(log, new_batch(partition.partition_key, size_bytes=60_000))
    url = postgres.create(EMPTY)
    other = await Database.open(url, hot_connections=1, cold_connections=1)
    try:
        await restore(url, None, tmp_path / "backup")
        await migrate(other)
        # `sluice check --repair` of the copy would delete the original's segments there.
        with pytest.raises(StorageError, match="another database"):
            await open_store(other, directory.directory)
        assert await open_store(other, None) is None
    finally:
        await other.close()
        postgres.drop(url)


async def test_a_restore_that_ends_behind_the_load_leaves_the_store_to_the_original(
    database_url: str,
    postgres: Databases,
    log: LogStore,
    directory: SegmentDirectory,
    make_topic: MakeTopic,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (partition,) = (await make_topic()).partitions
    await append(log, new_batch(partition.partition_key, size_bytes=60_000))
    await back_up(database_url, directory, tmp_path / "backup")
    url = postgres.create(EMPTY)
    other = await Database.open(url, hot_connections=1, cold_connections=1)
    connections = iter([storage.backup.connect])

    async def connect_once(*given: Any, **more: Any) -> Any:
        for connect in connections:
            return await connect(*given, **more)
        raise ConnectionRefusedError

    try:
        with monkeypatch.context() as patched:
            patched.setattr("storage.backup.connect", connect_once)
            with pytest.raises(StorageError):
                await restore(url, tmp_path / "restored", tmp_path / "backup")
        await migrate(other)
        with pytest.raises(StorageError, match="another database"):
            await open_store(other, directory.directory)
    finally:
        await other.close()
        postgres.drop(url)


# --- check ------------------------------------------------------------------------------------------------------------


async def test_a_check_names_faults_and_repairs_only_unknown_files(
    database: Database, log: LogStore, directory: SegmentDirectory, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    one, two = (partition.partition_key for partition in (await make_topic(partition_count=2)).partitions)
    await append(log, new_batch(one, size_bytes=300_000))
    await append(log, new_batch(two))
    await log.close()
    assert (await check(database, directory)).wrong == []
    (segment,) = directory.found()
    content = bytearray(directory.path(segment.object_id).read_bytes())
    content[1_000] ^= 1
    directory.path(segment.object_id).write_bytes(content)
    directory.create(2**40).close()
    await sql.execute("update inline_records set records = substring(records from 2)")
    await sql.execute("update partition set size_bytes = size_bytes + 1 where partition_key = $1", two)
    report = await check(database, directory, repair=True)
    assert [wrong.partition(":")[0] for wrong in report.wrong] == [
        f"partition {one}, offsets 0 to 0, object {segment.object_id:016x} at 0",
        f"partition {two}, offsets 0 to 0, inline",
        f"partition {two}",
    ]
    assert report.removed_files == 1
    assert len(directory.found()) == 1, "what is damaged is left to people"


@pytest.mark.parametrize("repair", [False, True])
async def test_a_check_blames_no_file_that_a_node_removes_in_the_meantime(
    database: Database, log: LogStore, directory: SegmentDirectory, make_topic: MakeTopic, *, repair: bool
) -> None:
    """A check of a large log takes long, and a node removes segments every half minute."""

    class Swept(SegmentDirectory):
        async def listed(self) -> list[FoundObject]:
            found = await super().listed()
            await roller.sweep(grace_ms=0)
            return found

    (partition,) = (await make_topic()).partitions
    for _ in range(3):
        await append(log, new_batch(partition.partition_key, size_bytes=400_000))
    await log.close()
    await log.delete_records(partition.partition_key, 2)
    await retention.apply(database, [retention.RetentionPolicy(partition.partition_key, -1)])
    roller = Roller(database, log, directory)
    assert len(directory.found()) == 3
    report = await check(database, Swept(directory.directory), repair=repair)
    assert (report.wrong, report.removed_files) == ([], 0)
    assert len(directory.found()) == 1
    await roller.close()


async def test_a_check_reads_few_inline_bytes_at_a_time(
    database: Database, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand chunks of 1 MiB are more than the memory of many a machine."""
    log = LogStore(database)
    (partition,) = (await make_topic()).partitions
    await append(log, *(new_batch(partition.partition_key, size_bytes=2**20) for _ in range(24)))
    await log.close()
    fetched: list[int] = []
    fetch = Pool.fetch

    async def measured(pool: Pool, query: str, *arguments: object) -> Sequence[Row]:
        rows = await fetch(pool, query, *arguments)
        if query == statement("chunks_to_check"):
            fetched.append(sum(len(row["records"] or b"") for row in rows))
        return rows

    monkeypatch.setattr(Pool, "fetch", measured)
    report = await check(database, None)
    assert (report.wrong, report.chunks) == ([], 24)
    assert max(fetched) <= BYTES_PER_STATEMENT + 2**20


async def test_a_check_takes_no_chunk_of_a_compaction_beside_it_for_an_overlap(
    database: Database, make_topic: MakeTopic, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogStore(database)
    key = (await make_topic()).partitions[0].partition_key
    for _ in range(17):
        await append(log, new_batch(key, size_bytes=2**20, records=10))
    compaction = CompactionStore(database, log)
    (dirty,) = await compaction.dirty_ranges([CompactionPolicy(key)])
    fetch = Pool.fetch
    last_bases: list[int] = []

    async def overtaken(pool: Pool, query: str, *arguments: object) -> Sequence[Row]:
        rows = await fetch(pool, query, *arguments)
        if query == statement("chunks_to_check") and not last_bases:
            last_bases.append(rows[-1]["base_offset"])
            # The last chunk of the first answer becomes two.
            first, middle = rows[-1]["base_offset"], rows[-1]["base_offset"] + 5
            halves = [
                StoredBatch(base, base + 4, 1000, bytes(batch_bytes(600_000, 5, 1000, base_offset=base)))
                for base in (first, middle)
            ]
            await compaction.replace(await compaction.begin(dirty), [first], halves)
        return rows

    monkeypatch.setattr(Pool, "fetch", overtaken)
    assert (await check(database, None)).wrong == []
    assert last_bases == [150]
    await sql.execute("update chunk set last_offset = 10 where base_offset = 0")
    assert f"partition {key}: chunks overlap at offset 10" in (await check(database, None)).wrong
    await log.close()


async def test_a_check_reads_a_chunk_at_its_new_place_if_it_has_moved(
    database: Database, log: LogStore, directory: SegmentDirectory, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    class Moving(SegmentDirectory):
        """A store in which a node moves a chunk before it is read. The new place is damaged."""

        async def load(self, object_id: int, ranges: Sequence[Range], look: Callable[[list[bytearray]], T]) -> T:
            if object_id == segment.object_id:
                self.path(object_id).rename(self.path(2**40))
                await sql.execute("update chunk set object_id = $1", 2**40)
            return await super().load(object_id, ranges, look)

    (partition,) = (await make_topic()).partitions
    await append(log, new_batch(partition.partition_key, size_bytes=300_000))
    await log.close()
    (segment,) = directory.found()
    with directory.path(segment.object_id).open("r+b") as file:
        file.seek(1_000)
        file.write(b"damaged")
    report = await check(database, Moving(directory.directory))
    assert report.chunks == 0
    assert [wrong.partition(":")[0] for wrong in report.wrong] == [
        f"partition {partition.partition_key}, offsets 0 to 0, object {2**40:016x} at 0"
    ]


async def test_a_check_names_leftovers_of_transactions(
    database: Database, log: LogStore, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    one, two = (partition.partition_key for partition in (await make_topic(partition_count=2)).partitions)
    done, open_one = TransactionalProducer(database, log, 4_000), TransactionalProducer(database, log, 4_001)
    await done.append(one, (b"k", b"v"))
    await done.end(committed=False)
    await open_one.append(one, (b"k", b"v"))
    await open_one.take_in(two)
    await sql.execute("insert into transaction_group values (4001, 'g')")
    await sql.execute("insert into pending_offset values ('g', gen_random_uuid(), 0, 4001, 7, -1, '', 1)")
    assert (await check(database, None)).wrong == []

    await sql.execute("insert into open_transaction values ($1, 4000, 0, null)", two)
    await sql.execute("insert into open_transaction values ($1, 4002, 0, 1)", one)
    await sql.execute(
        "update open_transaction set first_offset = 0 where partition_key = $1 and producer_id = 4001", two
    )
    await sql.execute("insert into aborted_transaction values ($1, 3, 4000, 2, 4), ($1, 2, 4000, 2, 3)", one)
    await sql.execute("insert into transaction_group values (4000, $1)", stored("h\0"))
    await sql.execute("insert into pending_offset values ('i', gen_random_uuid(), 0, 4001, 7, -1, '', 1)")
    await sql.execute("insert into pending_offset values ('i', gen_random_uuid(), 0, 4001, 7, -1, '', 1)")
    assert (await check(database, None)).wrong == [
        f"partition {two}: producer 4001 is in a transaction since offset 0, past the log's end",
        "group 'h\\x00': producer 4000 is in a transaction that is not under way",
        f"partition {one}: producer 4000 has aborted a transaction by a marker at offset 2, where it had not begun",
        f"partition {one}: producer 4000 has aborted a transaction by a marker at offset 3, past the log's end",
        f"partition {one}: producer 4002 is in a transaction that is not under way",
        f"partition {two}: producer 4000 is in a transaction that is not under way",
        "group 'i': offsets of producer 4001 are pending in no transaction",
    ]


# --- the store --------------------------------------------------------------------------------------------------------


async def test_nodes_that_start_together_make_one_store(
    database: Database, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes in threads of their own. All of them see that no store exists before the first of them creates it."""
    seen = threading.Barrier(3)

    def uuid_after_all() -> UUID:
        with suppress(threading.BrokenBarrierError):
            seen.wait(0.5)
        return uuid4()

    monkeypatch.setattr("storage.store.uuid4", uuid_after_all)

    async def start() -> bool:
        own = await Database.open(database_url)
        try:
            return await open_store(own, tmp_path / "log") is not None
        finally:
            await own.close()

    try:
        assert await asyncio.gather(*(asyncio.to_thread(asyncio.run, start()) for _ in range(3))) == [True] * 3
    finally:
        await database.cold.fetch("delete from log_store")


async def test_a_directory_of_another_database_is_refused(
    database: Database, directory: SegmentDirectory, tmp_path: Path
) -> None:
    assert await open_store(database, directory.directory) is not None
    with pytest.raises(StorageError, match="give it as --log-store"):
        await open_store(database, None)
    with pytest.raises(StorageError, match="not mounted"):
        await open_store(database, tmp_path / "empty")
    other = tmp_path / "other"
    other.mkdir()
    (other / "sluice-store.json").write_text('{"store_id": "00000000-0000-0000-0000-000000000000"}')
    with pytest.raises(StorageError, match="another database"):
        await open_store(database, other)


async def test_a_directory_that_another_database_has_claimed_is_refused_though_it_is_empty(
    database: Database, directory: SegmentDirectory, postgres: Databases
) -> None:
    url = postgres.create()
    other = await Database.open(url, hot_connections=1, cold_connections=1)
    try:
        # A sweep of the other database would delete the segments that this one writes.
        with pytest.raises(StorageError, match="another database"):
            await open_store(other, directory.directory)
    finally:
        await other.close()
        postgres.drop(url)


async def test_a_directory_whose_first_node_died_before_its_row_was_written_is_claimed_by_the_next(
    database: Database, directory: SegmentDirectory
) -> None:
    await database.cold.fetch("delete from log_store")
    assert await open_store(database, directory.directory) is not None


IN_TRANSACTION = """select count(*) from pg_stat_activity where datname = current_database()
    and backend_type = 'client backend' and xact_start is not null and pid <> pg_backend_pid()"""


async def test_a_commit_waits_for_the_disk_and_holds_no_lock_until_then(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import threading

    written, synced, real = threading.Event(), threading.Event(), os.fdatasync

    def slow(fd: int) -> None:
        written.set()
        synced.wait(20)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    appending = asyncio.create_task(log.append([new_batch(key, size_bytes=50_000)]))
    assert await asyncio.to_thread(written.wait, 20)
    assert await sql.fetchval("select count(*) from chunk") == 0, "not to be seen before it is on disk"
    assert await sql.fetchval(IN_TRANSACTION) == 0, "no lock is held while the disk works"
    assert not appending.done()
    synced.set()
    await appending
    assert await sql.fetchval("select count(*) from chunk") == 1
