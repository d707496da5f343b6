"""The fate of bytes after their commit: they are moved, rewritten or removed, and never lost."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import asyncpg
import pytest

from storage import retention
from storage.append_group import AppendGroup
from storage.errors import StorageUnavailable
from storage.log import LogStore
from storage.mover import Sizes
from storage.pool import Database, Pool, Row
from storage.queries import statement
from storage.roller import Roller
from storage.segment_writers import register_object
from storage.segments import SegmentDirectory
from storage.types import NewBatch, PartitionKey, ReadRequest, Refusal, unregistered
from tests.storage.batches import DEADLINE_S, EVERYTHING, append, append_each, new_batch, offsets, read
from tests.storage.conftest import MakeTopic
from tests.storage.pages import fill, pages_touched


@pytest.fixture
def directory(tmp_path: Path) -> SegmentDirectory:
    return SegmentDirectory(tmp_path, segment_bytes=256 * 1024)


@pytest.fixture
async def log(database: Database, directory: SegmentDirectory) -> AsyncIterator[LogStore]:
    store = LogStore(database, directory, inline_max_bytes=10_000)
    yield store
    await store.close()


@pytest.fixture
async def roller(database: Database, log: LogStore, directory: SegmentDirectory) -> AsyncIterator[Roller]:
    made = Roller(database, log, directory)
    yield made
    await made.close()


def small(key: PartitionKey, fill: int) -> NewBatch:
    return new_batch(key, size_bytes=200, fill=fill, max_timestamp_ms=1000 + fill)


async def places(sql: asyncpg.Connection) -> list[tuple[int, int, bool]]:
    """Return (base offset, last offset, whether inline) of every chunk."""
    rows = await sql.fetch("select base_offset, last_offset, object_id is null from chunk order by 1")
    return [tuple(row) for row in rows]


async def inline_rows(sql: asyncpg.Connection) -> int:
    return await sql.fetchval("select count(*) from inline_records") or 0


async def test_inline_chunks_are_joined_in_a_segment_and_their_rows_are_freed(
    log: LogStore, roller: Roller, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append_each(log, *(small(key, i) for i in range(20)))
    before = await read(log, key)
    assert await inline_rows(sql) == 20
    assert await roller.roll(**EVERYTHING) == 20 * 200
    assert await places(sql) == [(0, 19, False)]
    assert await inline_rows(sql) == 0
    assert await read(log, key) == before
    found = await log.batch_at_timestamp(key, 1007)
    assert found is not None
    assert found.base_offset == 7
    assert await append(log, small(key, 1)) == [20]
    assert (await read(log, key, 19)).batches[0].base_offset == 19


async def test_many_chunks_move_a_few_at_a_time(
    database: Database, log: LogStore, directory: SegmentDirectory, make_topic: MakeTopic, sql: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Producers of a partition wait while its chunks are renamed. All else waits while many rows become values."""
    roller = Roller(database, log, directory, sizes=Sizes(listed_chunks=5, moved_chunks=4))
    named: list[int] = []
    fetch_row = Pool.fetch_row

    async def counted(pool: Pool, query: str, *arguments: object) -> Row | None:
        if query == statement("move_chunks"):
            named.append(len(cast("list[int]", arguments[-1])))
        return await fetch_row(pool, query, *arguments)

    monkeypatch.setattr(Pool, "fetch_row", counted)
    first, second = [partition.partition_key for partition in (await make_topic("moved", 2)).partitions]
    await append_each(log, *(small(key, i) for i in range(11) for key in (first, second)))
    before = [await read(log, key) for key in (first, second)]
    assert await roller.roll(**EVERYTHING) == 22 * 200
    assert await places(sql) == [place for place in ((0, 3, False), (4, 7, False), (8, 10, False)) for _ in range(2)]
    assert sum(named) == 22
    assert max(named) == 4
    assert [await read(log, key) for key in (first, second)] == before
    await roller.close()


async def test_few_and_young_bytes_stay_inline(
    log: LogStore, roller: Roller, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await append_each(log, *(small(key, i) for i in range(3)))
    assert await roller.roll() == 0
    assert [inline for *_, inline in await places(sql)] == [True] * 3


async def test_the_greatest_age_moves_nothing(log: LogStore, roller: Roller, key: PartitionKey) -> None:
    """`log.store.roll.ms` may be the greatest long integer, so that only the size counts."""
    await append(log, small(key, 1))
    assert await roller.roll(max_bytes=2**40, max_age_ms=2**63 - 1) == 0


async def test_chunks_are_not_joined_across_a_gap_or_across_partitions(
    log: LogStore, roller: Roller, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    one, two = (partition.partition_key for partition in (await make_topic(partition_count=2)).partitions)
    for i in range(6):
        await append(log, small(one, i), small(two, i))
    await sql.execute("delete from chunk where partition_key = $1 and base_offset = 2", one)
    await roller.roll(**EVERYTHING)
    rows = await sql.fetch("select partition_key, base_offset, last_offset from chunk order by 1, 2")
    assert [tuple(row) for row in rows] == [(one, 0, 1), (one, 3, 5), (two, 0, 5)]
    assert offsets((await read(log, one)).batches) == [(0, 0), (1, 1), (3, 3), (4, 4), (5, 5)]


async def test_appends_and_reads_go_on_while_bytes_move(
    log: LogStore, roller: Roller, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    done = asyncio.Event()

    async def produce() -> None:
        for i in range(150):
            await append(log, small(key, i % 250))
        done.set()

    async def consume() -> None:
        offset = 0
        while offset < 150:
            for batch in (await read(log, key, offset)).batches:
                assert batch.base_offset == offset
                assert batch.records[100] == offset % 250
                offset += 1

    async def roll() -> None:
        while not done.is_set():
            await roller.roll(**EVERYTHING)

    await asyncio.wait_for(asyncio.gather(produce(), consume(), roll()), 60)
    await roller.roll(**EVERYTHING)
    await roller.roll(**EVERYTHING)
    assert await inline_rows(sql) == 0
    assert len((await read(log, key)).batches) == 150
    assert (await read(log, key)).state.size_bytes == 150 * 200


async def test_without_a_directory_live_rows_move_to_another_slot_if_most_are_dead(
    database: Database, key: PartitionKey, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    log = LogStore(database)
    roller = Roller(database, log, None)
    other = (await make_topic("other")).partitions[0].partition_key
    await append_each(log, *(new_batch(key, size_bytes=50_000) for _ in range(4)))
    await append(log, small(other, 7))
    assert await roller.roll(max_bytes=0, max_age_ms=-1) == 0, "all of it is alive"
    await log.delete_records(key, -1)
    await retention.apply(database, [retention.RetentionPolicy(key, -1)])
    assert await roller.roll(max_bytes=2**40, max_age_ms=-1) == 200
    assert await sql.fetchval("select count(*) from inline_records") == 1
    assert (await read(log, other)).batches[0].records[100] == 7


async def test_a_slot_of_many_dead_rows_is_emptied_by_statements_that_end_in_time(
    database_url: str, directory: SegmentDirectory, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    """A statement that looks all of these rows up takes longer than this limit."""
    await sql.execute(
        "insert into inline_records select 0, nextval('inline_position'), $1, i, '' from generate_series(1, 300000) i",
        key,
    )
    database = await Database.open(database_url, hot_connections=1, cold_connections=2, statement_timeout_ms=250)
    log = LogStore(database, directory)
    roller = Roller(database, log, directory)
    try:
        assert await roller.roll(**EVERYTHING) == 0
        assert await inline_rows(sql) == 0
    finally:
        await roller.close()
        await log.close()
        await database.close()


async def test_the_search_for_live_inline_chunks_ends_at_its_limit_if_all_rows_are_dead(
    key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await fill(sql, key, 5_000)
    await sql.execute("delete from chunk")
    assert await pages_touched(sql, statement("live_inline_chunks"), 0, 0, 100) < 1_000


async def test_a_slot_into_which_an_append_writes_is_not_emptied(
    log: LogStore, roller: Roller, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    """The append has read the number of the slot before the rotation. Its rows lie between others, and are not seen."""
    await sql.execute("insert into inline_records select 0, nextval('inline_position'), 1, 1, ''")
    async with sql.transaction():
        await fill(sql, key, 3)
        assert await roller.roll(**EVERYTHING) == 0
    await sql.execute("insert into inline_records select 0, nextval('inline_position'), 1, 1, ''")
    assert len((await read(log, key)).batches) == 3
    assert await roller.roll(**EVERYTHING) == 300
    assert await inline_rows(sql) == 0
    assert len((await read(log, key)).batches) == 3


async def test_the_slot_that_has_become_the_current_one_is_not_emptied(
    key: PartitionKey, sql: asyncpg.Connection
) -> None:
    """A node that was frozen after it had listed the slots may come to a slot that another node has emptied since."""
    await fill(sql, key, 3)
    assert not await sql.fetchval(statement("lock_inline"), 0)
    await sql.execute("update inline_rotation set current_slot = 1")
    assert await sql.fetchval(statement("lock_inline"), 0)


async def test_no_statement_that_empties_a_slot_reads_all_of_its_rows(
    key: PartitionKey, sql: asyncpg.Connection
) -> None:
    """A slot may have more pages than Postgres reads from the disk in the time of a statement."""
    await fill(sql, key, 50_000)
    await sql.execute("delete from chunk; update inline_rotation set current_slot = 1")
    assert await pages_touched(sql, statement("truncate_inline"), 0) < 500


async def test_an_unreferenced_segment_is_removed_after_its_grace(
    database: Database, log: LogStore, roller: Roller, key: PartitionKey, directory: SegmentDirectory
) -> None:
    for _ in range(3):
        await append(log, new_batch(key, size_bytes=200_000))
    await log.close()
    assert len(directory.found()) == 3
    await log.delete_records(key, 2)
    await retention.apply(database, [retention.RetentionPolicy(key, -1)])
    assert await roller.sweep() == 0, "an append or a read that began before may still need them"
    assert await roller.sweep(grace_ms=0) == 2
    assert len(directory.found()) == 1
    assert len((await read(LogStore(database, directory), key, 2)).batches) == 1


async def test_a_segment_that_is_open_is_never_removed(
    log: LogStore, roller: Roller, key: PartitionKey, directory: SegmentDirectory
) -> None:
    assert await log.append([new_batch(PartitionKey(10**9), size_bytes=50_000)]) == [Refusal.UNKNOWN_PARTITION]
    assert len(directory.found()) == 1, "made, and nothing in it counts"
    assert await roller.sweep(grace_ms=0) == 0
    assert await append(log, new_batch(key, size_bytes=50_000)) == [0]
    assert len((await read(log, key)).batches) == 1


@pytest.mark.parametrize("function", ["append_plain", "append_chunks"])
async def test_a_segment_stays_open_while_an_append_hangs_in_its_commit(
    database: Database,
    log: LogStore,
    roller: Roller,
    key: PartitionKey,
    sql: asyncpg.Connection,
    directory: SegmentDirectory,
    function: str,
) -> None:
    """The connection of the append may be lost, and a commit that waits for a standby may take minutes."""
    batch = new_batch(key, size_bytes=50_000)
    object_id = await register_object(database.hot, unregistered)
    await directory.put(object_id, [batch.records])
    await sql.execute("update log_object set created_at = created_at - interval '1 hour'")
    group = AppendGroup([batch])
    arguments = group.plain_arguments(object_id=object_id, position=0)
    if function == "append_chunks":
        arguments = group.arguments(wait=True, object_id=object_id, position=0)
    assert arguments is not None
    async with sql.transaction():
        await sql.fetchrow(statement(function), *arguments)
        assert await roller.sweep(grace_ms=0) == 0
    assert len((await read(log, key)).batches) == 1
    assert await roller.sweep(grace_ms=0) == 0
    assert await sql.fetchval("select count(*) from log_object where sealed_at is not null") == 1


async def test_a_sparse_segment_is_rewritten(
    database: Database, log: LogStore, roller: Roller, make_topic: MakeTopic, directory: SegmentDirectory
) -> None:
    topic = await make_topic(partition_count=2)
    kept, gone = (partition.partition_key for partition in topic.partitions)
    await append(log, new_batch(kept, size_bytes=20_000, fill=3), new_batch(gone, size_bytes=200_000))
    await log.close()
    await log.delete_records(gone, -1)
    await retention.apply(database, [retention.RetentionPolicy(gone, -1)])
    (before,) = directory.found()
    reader = LogStore(database, directory)
    expected = (await read(reader, kept)).batches
    await roller.sweep(grace_ms=0)
    await roller.sweep(grace_ms=0)
    assert before.object_id not in {segment.object_id for segment in directory.found()}
    assert (await read(LogStore(database, directory), kept)).batches == expected


async def test_unregistered_files_are_removed_and_others_stay(
    roller: Roller, directory: SegmentDirectory, tmp_path: Path
) -> None:
    directory.create(2**40).close()
    (tmp_path / "notes.txt").write_text("of a person")
    assert await roller.sweep() == 0, "it may be older than it looks"
    assert await roller.sweep(grace_ms=0) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


async def test_a_writer_leaves_a_segment_that_another_process_has_sealed(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection, directory: SegmentDirectory
) -> None:
    await append(log, new_batch(key, size_bytes=50_000, fill=1))
    await sql.execute("update log_object set sealed_at = clock_timestamp()")
    assert await append(log, new_batch(key, size_bytes=50_000, fill=2)) == [1]
    assert await sql.fetchval("select count(distinct object_id) from chunk") == 2
    assert [batch.records[100] for batch in (await read(log, key)).batches] == [1, 2]


async def test_a_dead_slot_is_freed_although_the_directory_accepts_no_write(
    database: Database,
    log: LogStore,
    roller: Roller,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If both lie on one disk, freeing the dead slot makes room."""
    kept, gone = (partition.partition_key for partition in (await make_topic(partition_count=2)).partitions)
    for key in (kept, gone):
        await append(log, small(key, 1))
        assert await sql.fetchval("select rotate_inline(0, 0)")
    await log.delete_records(gone, -1)
    await retention.apply(database, [retention.RetentionPolicy(gone, -1)])
    assert await inline_rows(sql) == 2

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        await roller.roll(**EVERYTHING)
    assert await inline_rows(sql) == 1
    assert len((await read(log, kept)).batches) == 1


@pytest.mark.parametrize("step", ["posix_fallocate", "fdatasync"])
async def test_a_move_cancelled_during_a_write_leaves_no_file_open(
    log: LogStore,
    roller: Roller,
    key: PartitionKey,
    sql: asyncpg.Connection,
    directory: SegmentDirectory,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """A move is cancelled if the lease goes to another node. The thread continues, and owns the file until the thread
    has ended."""
    await append_each(log, *(small(key, i) for i in range(3)))
    begun, go_on = threading.Event(), threading.Event()
    real: Callable[..., None] = getattr(os, step)

    def slow(*arguments: object) -> None:
        begun.set()
        assert go_on.wait(20)
        real(*arguments)

    monkeypatch.setattr(os, step, slow)
    rolling = asyncio.create_task(roller.roll(**EVERYTHING))
    assert await asyncio.to_thread(begun.wait, 20)
    rolling.cancel()
    await asyncio.sleep(0.05)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await rolling
    assert [inline for *_, inline in await places(sql)] == [True] * 3
    await roller.close()
    assert await sql.fetchval("select count(*) from log_object where sealed_at is null") == 0
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(directory.directory) in os.path.realpath(fd)]
    assert await roller.sweep(grace_ms=0) == 1


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
async def test_a_damaged_chunk_is_refused_and_all_others_are_served(
    database: Database, log: LogStore, make_topic: MakeTopic, directory: SegmentDirectory, damage: str
) -> None:
    topic = await make_topic(partition_count=2)
    hurt, whole = (partition.partition_key for partition in topic.partitions)
    await append(log, new_batch(hurt, size_bytes=200_000))
    await append(log, new_batch(hurt, size_bytes=200_000))
    await append(log, new_batch(whole, size_bytes=200_000))
    await log.close()
    path = directory.path(sorted(segment.object_id for segment in directory.found())[1])
    if damage == "remove":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[150_000] ^= 1
        else:
            del content[150_000:]
        path.write_bytes(content)
    reader = LogStore(database, directory)
    assert offsets((await read(reader, hurt)).batches) == [(0, 0)], "up to the damage"
    requests = [ReadRequest(hurt, 1, 10**6), ReadRequest(whole, 0, 10**6)]
    refused, served = await reader.read(requests, max_bytes=10**7)
    assert refused is Refusal.DAMAGED
    assert not isinstance(served, Refusal)
    assert offsets(served.batches) == [(0, 0)]
    assert reader.damaged_chunks == 2


async def test_a_write_that_fails_fails_its_append_and_not_the_next(
    log: LogStore, key: PartitionKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        await log.append([new_batch(key, size_bytes=50_000)])
    monkeypatch.setattr(os, "pwritev", real)
    assert await append(log, new_batch(key, size_bytes=50_000)) == [0]
    assert (await read(log, key)).state.high_watermark == 1


async def test_an_append_asks_postgres_only_after_its_bytes_are_synced(
    log: LogStore, key: PartitionKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await append(log, new_batch(key, size_bytes=50_000)) == [0]
    real, syncing, may_end = os.fdatasync, threading.Event(), threading.Event()

    def held(descriptor: int) -> None:
        syncing.set()
        assert may_end.wait(DEADLINE_S)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", held)
    try:
        appending = asyncio.create_task(append(log, new_batch(key, size_bytes=50_000)))
        assert await asyncio.to_thread(syncing.wait, DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S / 2):
            assert await append(log, small(key, 1)) == [1], "a slow disk holds no lock on the partition"
    finally:
        may_end.set()
    assert await appending == [2]


async def test_a_segment_that_cannot_be_made_leaves_no_row(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Producers repeat failed appends for as long as the disk is full."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        for _ in range(3):
            with pytest.raises(StorageUnavailable, match="No space left"):
                await log.append([new_batch(key, size_bytes=50_000)])
    assert await sql.fetchval("select count(*) from log_object") == 0
    assert await append(log, new_batch(key, size_bytes=50_000)) == [0]
