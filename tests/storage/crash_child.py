"""A process that appends, rolls, rewrites and deletes, and kills itself at a step that the seed chose.

Its steps are its calls to disk and Postgres. Each partition has one idempotent producer that sends one record per
batch. So the record at an offset is known: its sequence number equals the offset. The process prints each
acknowledgement as a line on standard output.
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
"""Maximal delay of a disk call, in seconds. It is so long that Postgres often finishes before the disk."""


def batch(key: int, sequence: int) -> NewBatch:
    """Return the batch of this sequence. It is the same each time."""
    generator = random.Random(key * 1_000_003 + sequence)
    size_bytes = generator.choice((100, 300, 2_000, 30_000))
    records = batch_bytes(size_bytes, fill=sequence % 251)
    return NewBatch(PartitionKey(key), records, 1, 1_000 + sequence, key, 0, sequence)


DISK_CALLS = ("pwritev", "fdatasync", "fsync", "posix_fallocate", "ftruncate", "unlink")


def at_every_step(
    step: Callable[[str], None], *, disk: random.Random, patch: Callable[[Any, str, Any], None] = setattr
) -> None:
    """Call `step` with the name of each call to disk, store and Postgres, once before the call and once after it.

    `step` may be called in any thread. If `step` raises an exception, this replaces the call's result. `disk` chooses
    random delays of the disk.
    """

    def stepping(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            step(name)
            time.sleep(disk.random() * SLOWEST_DISK_S)
            step(name)
            result = call(*arguments, **named)
            step(name)
            return result

        return run

    def stepping_async(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def run(*arguments: Any, **named: Any) -> Any:
            step(name)
            result = await call(*arguments, **named)
            step(name)
            return result

        return run

    for name in DISK_CALLS:
        patch(os, name, stepping(name, getattr(os, name)))
    for name in ("put_async", "delete_async", "get_async"):
        patch(obstore, name, stepping_async(name, getattr(obstore, name)))
    for name in ("fetch", "fetchrow", "fetchval", "execute"):
        method = getattr(asyncpg.connection.Connection, name)
        patch(asyncpg.connection.Connection, name, stepping_async(name, method))


def kill_at(step: int) -> None:
    """Kill this process by SIGKILL before or after call number `step`."""
    count = 0

    def counted(_: str) -> None:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    at_every_step(counted, disk=random.Random(step))


def open_place(place: str) -> ByteStore:
    """Open a directory, or a bucket if `place` is a URL."""
    return ObjectStore.at(place) if "://" in place else SegmentDirectory(Path(place), segment_bytes=SEGMENT_BYTES)


class Work:
    """Appends to the partitions of `next_sequences`, updates that mapping, and runs maintenance. If an append fails,
    the next append repeats its batches, as a producer does.
    """

    def __init__(self, database: Database, store: ByteStore, seed: int, next_sequences: dict[int, int]) -> None:
        self.log = LogStore(database, store, inline_max_bytes=INLINE_MAX_BYTES)
        self.roller = Roller(database, self.log, store)
        self.next_sequences = next_sequences
        self._database = database
        self._generator = random.Random(seed)
        self._group: list[tuple[int, int]] = []

    async def append(self) -> list[tuple[int, int]]:
        """Append one group of batches. Return the keys and sequences that were acknowledged. Raise StorageError."""
        generator, keys = self._generator, list(self.next_sequences)
        if not self._group:
            self._group = [
                (key, self.next_sequences[key] + i)
                for key in generator.sample(keys, generator.randint(1, len(keys)))
                for i in range(generator.randint(1, 4))
            ]
        group = self._group
        for (key, sequence), outcome in zip(
            group, await self.log.append([batch(key, sequence) for key, sequence in group]), strict=True
        ):
            assert isinstance(outcome, Appended), (key, sequence, outcome)
            assert outcome.base_offset == sequence, (key, sequence, outcome)
            self.next_sequences[key] = sequence + 1
        self._group = []
        return group

    async def maintain(self) -> None:
        """Run once each job that moves or removes records. Raise StorageError."""
        keys = list(self.next_sequences)
        await self.roller.roll(max_bytes=0, max_age_ms=0)
        key = PartitionKey(self._generator.choice(keys))
        await self.log.delete_records(key, max(0, self.next_sequences[key] - self._generator.randint(5, 40)))
        await retention.apply(self._database, [RetentionPolicy(PartitionKey(each), -1, -1) for each in keys])
        await self.roller.sweep(grace_ms=0)


async def run(url: str, place: str, seed: int, step: int, next_sequences: dict[int, int]) -> None:
    database = await Database.open(url, hot_connections=3, cold_connections=2)
    work = Work(database, open_place(place), seed, next_sequences)
    # The process that had these objects open was killed.
    await database.cold.fetch("update log_object set sealed_at = clock_timestamp() where sealed_at is null")
    kill_at(step)

    async def append() -> None:
        while True:
            for key, sequence in await work.append():
                os.write(1, f"ack {key} {sequence}\n".encode())

    async def maintain() -> None:
        while True:
            await work.maintain()

    await asyncio.gather(append(), maintain())


if __name__ == "__main__":
    url, place, seed, step, sequences = sys.argv[1:]
    asyncio.run(run(url, place, int(seed), int(step), {int(k): n for k, n in json.loads(sequences).items()}))
