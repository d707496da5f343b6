"""Topics that are compacted at once."""

from __future__ import annotations

import time

from gateway.log.compactor import MAX_KEYS
from gateway.operate.maintenance import CHUNK_BYTES, Compaction
from protocol.compression import Compression
from protocol.errors import ErrorCode
from storage.types import Topic
from tests.gateway.data_plane import DataPlane, batch_of


def now_ms() -> int:
    return time.time_ns() // 1_000_000


EAGER = {"cleanup.policy": "compact", "segment.ms": "1", "min.cleanable.dirty.ratio": "0"}


async def compact(node: DataPlane, *, max_keys: int = MAX_KEYS, chunk_bytes: int = CHUNK_BYTES) -> None:
    await Compaction(node.database, node.log, node.catalog, max_keys=max_keys, chunk_bytes=chunk_bytes).run()


async def send_pairs(node: DataPlane, topic: Topic, *pairs: tuple[bytes, bytes | None], age_ms: int = 1000) -> None:
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    answer = await node.send(
        topic,
        batch_of(*values, keys=keys, timestamps=[now_ms() - age_ms] * len(pairs), compression=Compression.LZ4),
    )
    assert answer.error_code == ErrorCode.NONE, answer
