"""A node that keeps two segments open until it is killed: one for appends and one for moved records."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from storage.log import LogStore
from storage.nodes import NodeStore
from storage.pool import Database
from storage.roller import Roller
from storage.segments import SegmentDirectory
from storage.types import PartitionKey
from tests.storage.batches import EVERYTHING, append, new_batch

NAME, LISTENERS = "localhost:9093", {"PLAINTEXT": ("localhost", 9093)}
TTL_MS = 3_600_000
"""Lifetime of the registration. It is long, so that only the test ends the registration."""
READY = "ready\n"
SMALL_BYTES, LARGE_BYTES = 200, 50_000


async def run(url: str, place: Path, key: PartitionKey) -> None:
    database = await Database.open(url, hot_connections=2, cold_connections=2)
    nodes, store = NodeStore(database), SegmentDirectory(place)
    await nodes.register(NAME, LISTENERS, None, TTL_MS)
    log = LogStore(database, store, nodes.registration, inline_max_bytes=10_000)
    roller = Roller(database, log, store, nodes.registration)
    await append(log, new_batch(key, size_bytes=SMALL_BYTES, fill=1))
    assert await roller.roll(**EVERYTHING) == SMALL_BYTES
    await append(log, new_batch(key, size_bytes=LARGE_BYTES, fill=2))
    os.write(1, READY.encode())
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], Path(sys.argv[2]), PartitionKey(int(sys.argv[3]))))
