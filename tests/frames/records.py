"""Topics and records in frames."""

from __future__ import annotations

import time
from typing import Any

from protocol.errors import ErrorCode
from protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, PartitionData
from protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    TopicProduceData,
)
from protocol.records import Record, build_batch
from tests.wire import WireClient


def batch(*records: Record, **head: Any) -> bytes:
    return build_batch(records or (Record(0, int(time.time() * 1000), b"k", b"v"),), **head)


async def produce(
    client: WireClient, topic: str, records: bytes, version: int = 9, *, of: str | None = None
) -> PartitionProduceResponse:
    """Produce a batch. `of` is the transactional id if the batch belongs to a transaction."""
    data = TopicProduceData(name=topic, partition_data=(PartitionProduceData(index=0, records=records),))
    asked = ProduceRequest(transactional_id=of, acks=-1, timeout_ms=10_000, topic_data=(data,))
    response = await client.send(asked, version)
    return response.responses[0].partition_responses[0]


async def fetch(client: WireClient, topic: str, offset: int, *, max_wait_ms: int = 0, **fields: Any) -> PartitionData:
    asked = FetchTopic(
        topic=topic, partitions=(FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20),)
    )
    response = await client.send(FetchRequest(max_wait_ms=max_wait_ms, min_bytes=1, topics=(asked,), **fields), 12)
    return response.responses[0].partitions[0]


async def create(client: WireClient, name: str, **configs: str) -> str:
    topic = CreatableTopic(
        name=name,
        num_partitions=1,
        replication_factor=1,
        configs=tuple(CreatableTopicConfig(name=key.replace("_", "."), value=value) for key, value in configs.items()),
    )
    response = await client.send(CreateTopicsRequest(topics=(topic,), timeout_ms=10_000), 7)
    assert response.topics[0].error_code == ErrorCode.NONE, response.topics[0].error_message
    return name
