"""Records that one node appends and another serves."""

from __future__ import annotations

import asyncio
import time

from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from tests.gateway.data_plane import batch_of
from tests.wire import WireClient

ROUNDS = 60


def produce(topic: str, value: bytes = b"x") -> ProduceRequest:
    partition = PartitionProduceData(index=0, records=bytes(batch_of(value)))
    return ProduceRequest(
        acks=-1, timeout_ms=10_000, topic_data=(TopicProduceData(name=topic, partition_data=(partition,)),)
    )


def fetch(topic: str, offset: int, *, max_wait_ms: int = 10_000) -> FetchRequest:
    partition = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=2**20)
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=2**20,
        topics=(FetchTopic(topic=topic, partitions=(partition,)),),
    )


async def delays(writer: WireClient, reader: WireClient, topic: str, first: int) -> list[float]:
    """For each of ROUNDS records, return the seconds from its acknowledgement until a waiting fetch is answered."""
    found: list[float] = []
    for offset in range(first, first + ROUNDS):
        waiting = reader.send_nowait(fetch(topic, offset), 11)
        await asyncio.sleep(0.02)
        answer = await writer.send(produce(topic), 9)
        acknowledged_s = time.monotonic()
        assert answer.responses[0].partition_responses[0].base_offset == offset
        received = await waiting
        found.append(max(time.monotonic() - acknowledged_s, 0.0))
        assert received.responses[0].partitions[0].high_watermark == offset + 1
    return found
