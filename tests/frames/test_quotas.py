"""Quotas on a running gateway: a client above its quota is answered at once, and then muted for a while."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol.errors import ErrorCode
from protocol.messages.alter_client_quotas import AlterClientQuotasRequest, EntityData, EntryData, OpData
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.metadata import MetadataRequest
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.records import Record, build_batch
from tests.frames.members import create_topic, fresh
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient

BYTES = 60_000
WINDOW_S = 10
"""Seconds over which the gateway averages a client's rate."""


@pytest.fixture
async def admin(gateway: GatewayProcess) -> AsyncIterator[WireClient]:
    async with await WireClient.connect(gateway.bootstrap) as connected:
        yield connected


async def limit(admin: WireClient, client_id: str | None, **values: float) -> None:
    entry = EntryData(
        entity=(EntityData(entity_type="client-id", entity_name=client_id),),
        ops=tuple(OpData(key=key, value=value) for key, value in values.items()),
    )
    (result,) = (await admin.send(AlterClientQuotasRequest(entries=(entry,)), 1)).entries
    assert result.error_code == 0, result


async def produce(client: WireClient, topic: str) -> Any:
    """Produce a batch of about BYTES."""
    records = build_batch([Record(0, 1_000, None, os.urandom(BYTES))])
    data = TopicProduceData(name=topic, partition_data=(PartitionProduceData(index=0, records=records),))
    asked = ProduceRequest(transactional_id=None, acks=-1, timeout_ms=10_000, topic_data=(data,))
    answer = await client.send(asked, 9)
    assert answer.responses[0].partition_responses[0].error_code == 0
    return answer


async def fetch(client: WireClient, topic: str) -> Any:
    part = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    asked = FetchRequest(max_wait_ms=0, min_bytes=0, topics=(FetchTopic(topic=topic, partitions=(part,)),))
    answer = await client.send(asked, 12)
    assert answer.responses[0].partitions[0].records
    return answer


async def test_producer_above_its_quota_is_answered_and_muted(gateway: GatewayProcess, admin: WireClient) -> None:
    topic, name = fresh("quota"), fresh("client")
    await create_topic(admin, topic)
    await limit(admin, name, producer_byte_rate=BYTES / WINDOW_S * 0.9)
    async with await WireClient.connect(gateway.bootstrap, client_id=name) as client:
        throttled_ms = (await produce(client, topic)).throttle_time_ms
        assert 900 < throttled_ms < 1_500
        told_s = asyncio.get_running_loop().time()
        await client.send(ApiVersionsRequest(), 2)
        assert asyncio.get_running_loop().time() - told_s > throttled_ms / 1000 - 0.1
        assert (await fetch(client, topic)).throttle_time_ms == 0, "another quota's"
    async with await WireClient.connect(gateway.bootstrap, client_id=name) as again:
        assert (await produce(again, topic)).throttle_time_ms > 1_000, "the client's, not the connection's"


async def test_fetch_above_the_quota_reports_the_throttle_time(gateway: GatewayProcess, admin: WireClient) -> None:
    topic, name = fresh("quota"), fresh("client")
    await create_topic(admin, topic)
    await limit(admin, name, consumer_byte_rate=BYTES / WINDOW_S * 2.9)
    async with await WireClient.connect(gateway.bootstrap, client_id=name) as client:
        assert (await produce(client, topic)).throttle_time_ms == 0
        assert [(await fetch(client, topic)).throttle_time_ms for _ in range(2)] == [0, 0]
        assert (await fetch(client, topic)).throttle_time_ms > 100


async def test_fetch_answers_with_no_more_than_the_quota_allows_in_a_window(
    gateway: GatewayProcess, admin: WireClient
) -> None:
    """A client is muted for a minute at most, so many records in each answer would exceed a small quota."""
    topic, name = fresh("quota"), fresh("client")
    await create_topic(admin, topic)
    for _ in range(5):
        await produce(admin, topic)
    async with await WireClient.connect(gateway.bootstrap, client_id=name) as client:
        whole = await fetch(client, topic)
        await limit(admin, name, consumer_byte_rate=BYTES / WINDOW_S * 2)
        limited = await fetch(client, topic)
    size_bytes, limited_bytes = (len(each.responses[0].partitions[0].records) for each in (whole, limited))
    assert size_bytes > 5 * BYTES
    assert limited_bytes <= 2 * BYTES
    assert limited.throttle_time_ms == 0


async def test_default_quota_applies_per_client_unless_it_has_its_own(
    gateway: GatewayProcess, admin: WireClient
) -> None:
    topic, named = fresh("quota"), fresh("client")
    await create_topic(admin, topic)
    await limit(admin, None, producer_byte_rate=BYTES / WINDOW_S * 1.5)
    await limit(admin, named, producer_byte_rate=BYTES * 100)
    try:
        for name, throttled in (
            (fresh("client"), [False, True]),
            (fresh("client"), [False, True]),
            (named, [False] * 3),
        ):
            async with await WireClient.connect(gateway.bootstrap, client_id=name) as client:
                assert [(await produce(client, topic)).throttle_time_ms > 0 for _ in throttled] == throttled
    finally:
        await limit(admin, None, producer_byte_rate=2.0**62)


async def test_client_above_its_request_quota_is_throttled(gateway: GatewayProcess, admin: WireClient) -> None:
    name = fresh("client")
    await limit(admin, name, request_percentage=0.000_1)
    async with await WireClient.connect(gateway.bootstrap, client_id=name) as client:
        answer = await client.send(MetadataRequest(topics=None), 9)
        assert answer.throttle_time_ms == 1_000, "no longer than a window, however little is allowed"
        await limit(admin, name, request_percentage=100_000.0)
        assert (await client.send(MetadataRequest(topics=None), 9)).throttle_time_ms == 0


async def test_creation_above_the_partition_quota_is_refused_until_the_debt_is_paid(
    gateway: GatewayProcess, admin: WireClient
) -> None:
    name = fresh("client")
    rate = 10.0
    await limit(admin, name, controller_mutation_rate=rate)
    burst = int(rate) * (WINDOW_S + 1)
    one, two, three = (fresh("mutation") for _ in range(3))

    def making(*topics: tuple[str, int]) -> CreateTopicsRequest:
        asked = (CreatableTopic(name=topic, num_partitions=count, replication_factor=1) for topic, count in topics)
        return CreateTopicsRequest(topics=tuple(asked))

    async with await WireClient.connect(gateway.bootstrap, client_id=name) as client:
        answer = await client.send(making((one, burst + 5), (two, 1)), 6)
        assert {each.name: each.error_code for each in answer.topics} == {
            one: ErrorCode.NONE,
            two: ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        }
        assert 300 < answer.throttle_time_ms <= 500
        told_s = asyncio.get_running_loop().time()
        await client.send(ApiVersionsRequest(), 2)
        assert asyncio.get_running_loop().time() - told_s > 0.2
    async with await WireClient.connect(gateway.bootstrap, client_id=name) as client:
        answer = await client.send(making((two, 20)), 6)
        while answer.topics[0].error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED:
            answer = await client.send(making((two, 20)), 6)
        assert answer.topics[0].error_code == ErrorCode.NONE
        grown = CreatePartitionsRequest(topics=(CreatePartitionsTopic(name=two, count=30, assignments=None),))
        refused = await client.send(grown, 3)
        assert refused.results[0].error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
        assert refused.throttle_time_ms > 0
    async with await WireClient.connect(gateway.bootstrap, client_id=name) as client:
        older = await client.send(making((three, 40)), 4)
        assert older.topics[0].error_code == ErrorCode.NONE, "it would not know the code"
        assert older.throttle_time_ms > 3_000
    async with await WireClient.connect(gateway.bootstrap, client_id=name) as client:
        answer = await client.send(DeleteTopicsRequest(topics=(DeleteTopicState(name=one),)), 6)
        assert answer.responses[0].error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    deleted = await admin.send(DeleteTopicsRequest(topics=(DeleteTopicState(name=one),)), 6)
    assert deleted.responses[0].error_code == ErrorCode.NONE


async def test_connections_above_the_rate_are_delayed_and_closed(gateway: GatewayProcess, admin: WireClient) -> None:
    async def set_rate(**ops: Any) -> None:
        entry = EntryData(
            entity=(EntityData(entity_type="ip", entity_name="127.0.0.1"),),
            ops=(OpData(key="connection_creation_rate", **ops),),
        )
        (result,) = (await admin.send(AlterClientQuotasRequest(entries=(entry,)), 1)).entries
        assert result.error_code == 0, result

    host, port = gateway.bootstrap.rsplit(":", 1)
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    await set_rate(value=1.0)
    try:
        began_s = asyncio.get_running_loop().time()
        while len(opened) <= WINDOW_S:
            opened += [await asyncio.open_connection(host, int(port))]
        welcome, (refused, _) = opened[:WINDOW_S], opened[-1]
        assert await asyncio.wait_for(refused.read(1), 20) == b""
        assert asyncio.get_running_loop().time() - began_s > 0.5
        assert not any(reader.at_eof() for reader, _ in welcome)
    finally:
        await set_rate(value=0.0, remove=True)
        for _, writer in opened:
            writer.close()
    async with await WireClient.connect(gateway.bootstrap) as client:
        await client.send(ApiVersionsRequest(), 2)
