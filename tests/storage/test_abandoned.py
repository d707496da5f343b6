"""Segments that a killed process left open: their reserved disk space is freed, and no other space."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import asyncpg
import pytest

from storage import retention
from storage.check import check
from storage.log import LogStore
from storage.nodes import NodeStore
from storage.pool import Database
from storage.roller import KEPT_MS, Roller
from storage.segments import SEGMENT_BYTES, SegmentDirectory
from storage.types import PartitionKey
from tests.storage.batches import DEADLINE_S, EVERYTHING, append, new_batch, read
from tests.storage.conftest import MakeTopic
from tests.storage.reserving_child import LARGE_BYTES, LISTENERS, NAME, READY, SMALL_BYTES, TTL_MS

ROOT = Path(__file__).parents[2]
BLOCK_BYTES = 512
"""Unit of `st_blocks`."""
SECTOR_BYTES = 4_096


def room(directory: SegmentDirectory) -> dict[int, int]:
    """Return how many bytes of the disk each segment occupies."""
    return {each.object_id: directory.path(each.object_id).stat().st_blocks * BLOCK_BYTES for each in directory.found()}


async def killed_node(database_url: str, place: Path, key: PartitionKey) -> None:
    """Let a node open two segments, and kill it by SIGKILL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.storage.reserving_child", database_url, str(place), str(key)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert (await process.stdout.readline()).decode() == READY
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("end", ["its registration expires", "it starts again"])
async def test_a_killed_nodes_segments_give_their_room_back(
    database: Database, database_url: str, key: PartitionKey, sql: asyncpg.Connection, tmp_path: Path, end: str
) -> None:
    await killed_node(database_url, tmp_path, key)
    directory = SegmentDirectory(tmp_path)
    log = LogStore(database, directory)
    roller = Roller(database, log, directory)
    before = await read(log, key)
    reserved = room(directory)
    assert [size >= SEGMENT_BYTES for size in reserved.values()] == [True, True]

    assert await roller.sweep(grace_ms=0) == 0
    assert room(directory) == reserved, "the node may only be asleep"
    assert await sql.fetchval("select count(*) from log_object where sealed_at is null") == 2

    if end == "it starts again":
        await NodeStore(database).register(NAME, LISTENERS, None, TTL_MS)
    else:
        await sql.execute("update node set expires_at = clock_timestamp()")
    assert await roller.sweep(grace_ms=0) == 0
    assert room(directory).keys() == reserved.keys(), "nothing had to be rewritten"
    assert sum(room(directory).values()) <= SMALL_BYTES + LARGE_BYTES + 2 * SECTOR_BYTES
    assert sorted(each.size_bytes for each in directory.found()) == [SMALL_BYTES, LARGE_BYTES]
    assert (await read(log, key)) == before
    assert (await check(database, directory)).wrong == []


async def test_a_segment_keeps_the_room_of_chunks_that_a_reader_may_still_read(
    database: Database, make_topic: MakeTopic, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """A reader may have found the last chunk in the index just before the chunk was removed from the index."""
    kept, gone = (partition.partition_key for partition in (await make_topic(partition_count=2)).partitions)
    directory = SegmentDirectory(tmp_path, segment_bytes=256 * 1024)
    log = LogStore(database, directory, inline_max_bytes=0)
    now = 0.0
    roller = Roller(database, log, directory, monotonic=lambda: now)
    await append(log, new_batch(kept, size_bytes=30_000))
    await append(log, new_batch(gone, size_bytes=20_000))
    await sql.execute("update log_object set sealed_at = clock_timestamp() - interval '1 hour'")
    await roller.sweep()
    await log.delete_records(gone, -1)
    await retention.apply(database, [retention.RetentionPolicy(gone, -1)])
    now = KEPT_MS / 1000 - 1
    await roller.sweep()
    assert [each.size_bytes for each in directory.found()] == [256 * 1024]
    now = KEPT_MS / 1000
    await roller.sweep()
    assert [each.size_bytes for each in directory.found()] == [50_000]
    await log.close()


async def test_a_segment_is_not_trimmed_during_a_backup(
    database: Database, key: PartitionKey, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """The backup's copy of the index may contain chunks that were removed from the index since."""
    directory = SegmentDirectory(tmp_path, segment_bytes=256 * 1024)
    log = LogStore(database, directory, inline_max_bytes=0)
    roller = Roller(database, log, directory)
    await append(log, new_batch(key, size_bytes=30_000))
    await sql.execute("update log_object set sealed_at = clock_timestamp()")
    await sql.execute("select pg_advisory_lock_shared(5492300417)")
    await roller.sweep(grace_ms=0)
    assert [each.size_bytes for each in directory.found()] == [256 * 1024]
    await sql.execute("select pg_advisory_unlock_shared(5492300417)")
    await roller.sweep(grace_ms=0)
    assert [each.size_bytes for each in directory.found()] == [30_000]
    await log.close()


async def test_the_mover_leaves_a_segment_that_another_process_has_sealed(
    database: Database, key: PartitionKey, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    directory = SegmentDirectory(tmp_path, segment_bytes=256 * 1024)
    log = LogStore(database, directory, inline_max_bytes=10_000)
    roller = Roller(database, log, directory)
    await append(log, new_batch(key, size_bytes=200))
    assert await roller.roll(**EVERYTHING) == 200
    await sql.execute("update log_object set sealed_at = clock_timestamp()")
    await append(log, new_batch(key, size_bytes=300))
    assert await roller.roll(**EVERYTHING) == 0, "the segment takes no more"
    assert await roller.roll(**EVERYTHING) == 300
    await roller.close()
    await log.close()
