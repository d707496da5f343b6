"""A process that appends, rolls, rewrites and deletes until it is killed: by itself, at a step that the seed chose.

Its steps are the calls by which it reaches disk and Postgres. Each partition has one idempotent producer that sends one
record per batch, so the record at an offset is known: it is the one with that sequence. What was acknowledged is told
on standard output, a line each.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg.connection
import obstore

from storage import retention
from storage.byte_store import ByteStore
from storage.log import LogStore
from storage.object_store import ObjectStore
from storage.pool import Database
from storage.retention import RetentionPolicy
from storage.roller import Roller
from storage.segments import SegmentDirectory
from storage.types import Appended, NewBatch, PartitionKey
from tests.storage.batches import batch_bytes

SEGMENT_BYTES = 128 * 1024
INLINE_MAX_BYTES = 4_000
SLOWEST_DISK_S = 0.01
"""So that Postgres is often done before the disk is."""


def batch(key: int, sequence: int) -> NewBatch:
    """The batch that has this sequence, the same whenever it is sent."""
    generator = random.Random(key * 1_000_003 + sequence)
    size_bytes = generator.choice((100, 300, 2_000, 30_000))
    records = batch_bytes(size_bytes, fill=sequence % 251)
    return NewBatch(PartitionKey(key), records, 1, 1_000 + sequence, key, 0, sequence)


def kill_at(step: int) -> None:
    """SIGKILL before or after the call number `step`."""
    count = 0
    disk = random.Random(step)

    def stepping(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            _step()
            time.sleep(disk.random() * SLOWEST_DISK_S)
            _step()
            result = call(*arguments, **named)
            _step()
            return result

        return run

    def stepping_async(call: Callable[..., Any]) -> Callable[..., Any]:
        async def run(*arguments: Any, **named: Any) -> Any:
            _step()
            result = await call(*arguments, **named)
            _step()
            return result

        return run

    def _step() -> None:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("pwritev", "fdatasync", "fsync", "posix_fallocate", "ftruncate", "unlink"):
        setattr(os, name, stepping(getattr(os, name)))
    for name in ("put_async", "delete_async", "get_async"):
        setattr(obstore, name, stepping_async(getattr(obstore, name)))
    for name in ("fetch", "fetchrow", "fetchval", "execute"):
        setattr(asyncpg.connection.Connection, name, stepping_async(getattr(asyncpg.connection.Connection, name)))


def open_place(place: str) -> ByteStore:
    """A directory, or a bucket where there is a URL."""
    return ObjectStore.at(place) if "://" in place else SegmentDirectory(Path(place), segment_bytes=SEGMENT_BYTES)


async def run(url: str, place: str, seed: int, step: int, next_sequences: dict[int, int]) -> None:
    database = await Database.open(url, hot_connections=3, cold_connections=2)
    store = open_place(place)
    log = LogStore(database, store, inline_max_bytes=INLINE_MAX_BYTES)
    roller = Roller(database, log, store)
    # Whoever had these open has been killed.
    await database.cold.fetch("update log_object set sealed_at = clock_timestamp() where sealed_at is null")
    generator = random.Random(seed)
    keys = list(next_sequences)
    kill_at(step)

    async def append() -> None:
        while True:
            group = [
                batch(key, next_sequences[key] + i)
                for key in generator.sample(keys, generator.randint(1, len(keys)))
                for i in range(generator.randint(1, 4))
            ]
            for sent, outcome in zip(group, await log.append(group), strict=True):
                assert isinstance(outcome, Appended), outcome
                assert outcome.base_offset == sent.base_sequence, (sent.partition_key, sent.base_sequence, outcome)
                next_sequences[sent.partition_key] = sent.base_sequence + 1
                os.write(1, f"ack {sent.partition_key} {sent.base_sequence}\n".encode())

    async def maintain() -> None:
        while True:
            await roller.roll(max_bytes=0, max_age_ms=0)
            key = PartitionKey(generator.choice(keys))
            await log.delete_records(key, max(0, next_sequences[key] - generator.randint(5, 40)))
            await retention.apply(database, [RetentionPolicy(PartitionKey(each), -1, -1) for each in keys])
            await roller.sweep(grace_ms=0)

    await asyncio.gather(append(), maintain())


if __name__ == "__main__":
    url, place, seed, step, sequences = sys.argv[1:]
    asyncio.run(run(url, place, int(seed), int(step), {int(k): n for k, n in json.loads(sequences).items()}))
