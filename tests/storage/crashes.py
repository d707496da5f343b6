"""Kill a writing process at each of its steps, and check the state that it left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from storage.byte_store import ByteStore
from storage.check import check
from storage.log import LogStore
from storage.pool import Database
from storage.roller import Roller
from tests.storage.batches import read
from tests.storage.conftest import MakeTopic
from tests.storage.crash_child import batch, open_place

KILLS = int(os.environ.get("SLUICE_TEST_KILLS", "12"))
"""Number of kills. A long run uses 500 and more."""
LAST_STEP = 160
ROOT = Path(__file__).parents[2]


async def kill_again_and_again(database: Database, database_url: str, make_topic: MakeTopic, place: str) -> None:
    """Kill a process at a step of its work on the store at `place`, verify the store, and start another process, KILLS
    times."""
    keys = [partition.partition_key for partition in (await make_topic(partition_count=4)).partitions]
    acknowledged: dict[int, int] = dict.fromkeys(keys, 0)
    seed = int(os.environ.get("SLUICE_TEST_SEED", "1"))
    generator = random.Random(seed)
    for kill in range(KILLS):
        step = generator.randint(1, LAST_STEP)
        arguments = [database_url, place, str(generator.random())[2:], str(step), json.dumps(acknowledged)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.storage.crash_child", *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(120):
            output = await process.stdout.read()
            assert await process.wait() == -9, f"kill {kill} of seed {seed} at step {step}"
        for line in output.decode().splitlines():
            if not line.startswith("ack "):
                continue
            _, key, sequence = map(int, line.replace("ack", "0").split())
            acknowledged[key] = max(acknowledged[key], sequence + 1)
        await _verify(database, place, acknowledged, f"kill {kill} of seed {seed} at step {step}")
    assert min(acknowledged.values()) > KILLS // 2, "it did not come far enough to prove anything"
    store = open_place(place)
    await collected(database, store)
    store.close()


async def collected(database: Database, store: ByteStore) -> None:
    """Assert that the removal of unreferenced objects removes no other objects. No process may work on the store in the
    meantime.
    """
    await database.cold.fetch("update log_object set sealed_at = clock_timestamp() where sealed_at is null")
    await Roller(database, LogStore(database, store), store).sweep(grace_ms=0)
    files = {each.object_id for each in await store.listed()}
    named = {row["object_id"] for row in await database.cold.fetch("select distinct object_id from chunk")} - {None}
    rewritten = {row["object_id"] for row in await database.cold.fetch("select object_id from log_object")}
    assert named <= files <= rewritten, "what nobody names has been collected"


async def _verify(database: Database, place: str, acknowledged: dict[int, int], which: str) -> None:
    store = open_place(place)
    await verify(database, store, acknowledged, which)
    store.close()


async def verify(database: Database, store: ByteStore, acknowledged: dict[int, int], which: str) -> dict[int, int]:
    """Assert that each partition contains exactly the records that were sent, from its start to its end, and that it
    contains every acknowledged record. Return the end offsets.
    """
    log = LogStore(database, store)
    states = await log.states([batch(key, 0).partition_key for key in acknowledged])
    for key, state in states.items():
        assert state.high_watermark >= acknowledged[key], f"{which}: acknowledged records of partition {key} are gone"
        offset = state.log_start_offset
        while offset < state.high_watermark:
            result = await read(log, key, offset)
            if offset < result.state.log_start_offset:
                # Postgres may execute the last statement of the killed process only now.
                offset = result.state.log_start_offset
                continue
            batches = result.batches
            assert batches, f"{which}: nothing at offset {offset} of partition {key}"
            for stored in batches:
                expected = batch(key, stored.base_offset)
                assert stored.base_offset <= offset
                assert stored.records[16:] == expected.records[16:], f"{which}: offset {offset} of partition {key}"
                offset = stored.last_offset + 1
        # The next process repeats records that were stored but not acknowledged. Postgres recognises them as
        # duplicates.
    await log.close()
    report = await check(database, store)
    assert [wrong for wrong in report.wrong if "does not know" not in wrong] == [], which
    return {key: state.high_watermark for key, state in states.items()}
