"""Differences that librdkafka's own tests found, as frames against a running gateway."""

from __future__ import annotations

import time

from protocol.records import Record, iter_records, split_batches
from tests.frames.members import fresh
from tests.frames.records import batch, create, fetch, produce
from tests.gateway_process import GatewayProcess
from tests.steps.waiting import until
from tests.wire import WireClient

CLEANED_SECONDS = 20.0
POLL_SECONDS = 0.1


async def test_reader_of_recent_records_sees_them_compacted(gateway: GatewayProcess) -> None:
    """librdkafka's test 0077: recent records are kept in memory, and must leave it once the log is compacted."""
    async with await WireClient.connect(gateway.bootstrap) as client:
        configs = {"cleanup_policy": "compact", "segment_ms": "500", "min_cleanable_dirty_ratio": "0.01"}
        topic = await create(client, fresh("compacted"), **configs)
        now_ms = int(time.time() * 1000)
        for value in (b"1", b"2", b"3"):
            await produce(client, topic, batch(Record(0, now_ms, b"k", value)))
        # The newest batch is never compacted, so the batches of "k" are only compacted if another batch follows.
        await produce(client, topic, batch(Record(0, now_ms, b"end", b"1")))
        cleaned = [(2, b"k", b"3"), (3, b"end", b"1")]
        await until(lambda: _content(client, topic), "older records are removed", holds=lambda found: found == cleaned)


async def _content(client: WireClient, topic: str) -> list[tuple[int, bytes | None, bytes | None]]:
    records = (await fetch(client, topic, 0)).records
    assert isinstance(records, memoryview)
    return [
        (record.offset, record.key, record.value) for part in split_batches(records) for record in iter_records(part)
    ]
