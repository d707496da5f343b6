"""Nodes with ids and racks: the replicas that a client assigned lead, and consumers read from the nearest replica."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from protocol.errors import ErrorCode
from protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from protocol.messages.create_topics import CreatableReplicaAssignment, CreatableTopic, CreateTopicsRequest
from protocol.messages.elect_leaders import ElectLeadersRequest
from protocol.messages.fetch import PartitionData
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.cluster.records import fetch, produce
from tests.frames.members import fresh
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.waiting import until
from tests.wire import WireClient

RACKS = ("a", "b", "c")
TTL_MS = 1_000
PATIENCE_S = 30.0
SELECTOR = {"replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector"}
FETCH_VERSION = 11


Start = Callable[[int], GatewayProcess]


@pytest.fixture
def start(gateway_factory: GatewayFactory, database_url: str) -> Start:
    """Start the node with this id, in the rack of the same number."""

    def start(number: int) -> GatewayProcess:
        return gateway_factory(
            {"node.id": str(number), "broker.rack": RACKS[number], **SELECTOR},
            database_url=database_url,
            environment={"SLUICE_NODE_TTL_MS": str(TTL_MS)},
        )

    return start


@contextlib.asynccontextmanager
async def connected(*nodes: GatewayProcess) -> AsyncIterator[list[WireClient]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await WireClient.connect(node.bootstrap)) for node in nodes]


async def create(client: WireClient, topic: str, *replicas: int) -> None:
    """Create a topic with one partition, whose replicas are these nodes."""
    await alive(client, *replicas)
    named = (CreatableReplicaAssignment(partition_index=0, broker_ids=replicas),)
    request = CreateTopicsRequest(
        topics=(CreatableTopic(name=topic, num_partitions=-1, replication_factor=-1, assignments=named),)
    )
    answer = await client.send(request, 5)
    assert answer.topics[0].error_code == ErrorCode.NONE, answer


async def until_equal(found: Callable[[], Any], expected: object) -> None:
    await until(found, f"{expected} is there", holds=lambda seen: seen == expected)


async def alive(client: WireClient, *node_ids: int) -> None:
    async def found() -> list[int]:
        answer = await client.send(MetadataRequest(topics=()), 9)
        return [broker.node_id for broker in answer.brokers if broker.node_id in node_ids]

    await until_equal(found, sorted(node_ids))


async def placed(client: WireClient, topic: str) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the leader, replicas, in-sync replicas and offline replicas of the topic's first partition."""
    request = MetadataRequest(topics=(MetadataRequestTopic(name=topic),), allow_auto_topic_creation=False)
    (part,) = (await client.send(request, 9)).topics[0].partitions
    return part.leader_id, part.replica_nodes, part.isr_nodes, part.offline_replicas


async def read(
    client: WireClient, topic: str, offset: int, rack: str, version: int = FETCH_VERSION, *, max_wait_ms: int = 0
) -> PartitionData:
    request = replace(fetch(topic, offset, max_wait_ms=max_wait_ms), rack_id=rack)
    answer = await client.send(request, version)
    (part,) = answer.responses[0].partitions
    return part


def taken(part: PartitionData) -> int:
    """Return the number of bytes of records in the answer."""
    records = part.records or b""
    return sum(map(len, records)) if isinstance(records, tuple) else len(records)


async def test_a_node_has_its_configured_number(start: Start, gateway_factory: GatewayFactory) -> None:
    zero, two = start(0), start(2)
    async with connected(zero) as (client,):
        await alive(client, 0, 2)
        answer = await client.send(MetadataRequest(topics=()), 9)
        assert [(broker.node_id, broker.rack) for broker in answer.brokers] == [(0, "a"), (2, "c")]
        assert answer.controller_id == 0
    with pytest.raises(AssertionError, match=f"node.id 2 is that of the live node at PLAINTEXT://{two.bootstrap}"):
        start(2)
    two.kill()
    # The node was killed and is still registered, but a new process can use its id at once.
    successor = start(2)
    async with connected(zero) as (client,):

        async def addresses() -> list[int]:
            return [broker.port for broker in (await client.send(MetadataRequest(topics=()), 9)).brokers]

        await until_equal(addresses, [int(node.bootstrap.rpartition(":")[2]) for node in (zero, successor)])


async def test_the_next_replica_leads_until_the_first_returns(start: Start) -> None:
    zero, one, two = (start(number) for number in range(3))
    topic = fresh("named")
    async with connected(zero, one) as (on_zero, on_one):
        await create(on_zero, topic, 2, 0)
        await until_equal(lambda: placed(on_one, topic), (2, (2, 0), (2, 0), ()))
        two.kill()
        for client in (on_zero, on_one):
            await until_equal(lambda client=client: placed(client, topic), (0, (2, 0), (0,), (2,)))
        assert (await on_zero.send(produce(topic), 9)).responses[0].partition_responses[0].error_code == 0
        two.restart()
        for client in (on_zero, on_one):
            await until_equal(lambda client=client: placed(client, topic), (2, (2, 0), (2, 0), ()))
        assert one.running


async def test_a_reassignment_and_an_election_are_seen_by_every_node(start: Start) -> None:
    nodes = [start(number) for number in range(3)]
    topic = fresh("moved")
    async with connected(*nodes) as clients:
        await create(clients[0], topic, 0, 1)
        moved = AlterPartitionReassignmentsRequest(
            topics=(
                ReassignableTopic(name=topic, partitions=(ReassignablePartition(partition_index=0, replicas=(2, 0)),)),
            )
        )

        async def moving() -> int:
            return (await clients[1].send(moved, 0)).responses[0].partitions[0].error_code

        # Node 1 learns of the other node when it next reads the registrations.
        await until_equal(moving, ErrorCode.NONE)
        for client in clients:
            await until_equal(lambda client=client: placed(client, topic), (0, (2, 0), (2, 0), ()))
        elected = await clients[1].send(ElectLeadersRequest(topic_partitions=None), 2)
        assert [result.topic for result in elected.replica_election_results] == [topic]
        for client in clients:
            await until_equal(lambda client=client: placed(client, topic), (2, (2, 0), (2, 0), ()))


async def test_the_leader_redirects_a_consumer_to_a_replica_in_its_rack(start: Start) -> None:
    nodes = [start(number) for number in range(3)]
    topic = fresh("near")
    async with connected(*nodes) as (zero, one, two):
        await create(zero, topic, 0, 1)
        assert (await zero.send(produce(topic), 9)).responses[0].partition_responses[0].error_code == 0
        sent = await read(zero, topic, 0, "b")
        assert (sent.error_code, sent.preferred_read_replica, taken(sent)) == (ErrorCode.NONE, 1, 0)
        assert (sent.high_watermark, sent.log_start_offset) == (1, 0)
        # A node serves the consumer itself in three cases: it is the preferred replica, it is in the consumer's rack,
        # or no replica is in that rack.
        for client, rack in ((one, "b"), (zero, "a"), (zero, "elsewhere"), (zero, "c"), (zero, ""), (two, "b")):
            here = await read(client, topic, 0, rack)
            assert (here.error_code, here.preferred_read_replica) == (ErrorCode.NONE, -1), rack
            assert taken(here) > 61, rack
        assert taken(await read(zero, topic, 0, "", 10)) > 61
        # The leader refuses an offset that is out of range, as every node does.
        for client in (zero, one):
            beyond = await read(client, topic, 2, "b")
            assert (beyond.error_code, beyond.preferred_read_replica) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
        # A consumer at the end of the log is redirected too, and waits at the replica for the leader's next record.
        asked_s = time.monotonic()
        assert (await read(zero, topic, 1, "b", max_wait_ms=20_000)).preferred_read_replica == 1
        assert time.monotonic() - asked_s < 10, "who is sent away does not wait for records first"
        waiting = one.send_nowait(fetch(topic, 1), FETCH_VERSION)
        assert (await zero.send(produce(topic), 9)).responses[0].partition_responses[0].base_offset == 1
        (part,) = (await waiting).responses[0].partitions
        assert (part.error_code, part.high_watermark) == (ErrorCode.NONE, 2)
        # A record that one node has acknowledged can be read from another node, even before that node learns of the
        # append.
        for offset in range(2, 22):
            assert (await zero.send(produce(topic), 9)).responses[0].partition_responses[0].base_offset == offset
            told = await read(one, topic, offset + 1, "b")
            assert (told.error_code, told.high_watermark) == (ErrorCode.NONE, offset + 1)
        nodes[1].kill()

        async def sent_to() -> int:
            return (await read(zero, topic, 0, "b")).preferred_read_replica

        await until_equal(sent_to, -1)


async def test_a_consumer_reads_from_the_near_node_and_continues_when_it_dies(start: Start) -> None:
    """With librdkafka no record is lost or repeated, on the way to the near node and back."""
    nodes = [start(number) for number in range(2)]
    topic = fresh("rack")
    async with connected(nodes[0]) as (client,):
        await create(client, topic, 0, 1)
    producer = Producer({"bootstrap.servers": nodes[0].bootstrap})
    consumer = Consumer(
        {
            "bootstrap.servers": ",".join(node.bootstrap for node in nodes),
            "group.id": topic,
            "client.rack": "b",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 100,
            "topic.metadata.refresh.interval.ms": 1_000,
        }
    )
    consumer.subscribe([topic])
    received: list[tuple[int, bytes]] = []

    def send(first: int, count: int) -> None:
        for number in range(first, first + count):
            producer.produce(topic, str(number).encode(), partition=0)
        assert producer.flush(PATIENCE_S) == 0

    def receive(count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(received) < count:
            assert time.monotonic() < deadline, (len(received), count)
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                received.append((message.offset() or 0, message.value() or b""))

    def work() -> None:
        send(0, 1_000)
        receive(1_000)
        before = fetches(nodes[1])
        for first in range(1_000, 2_000, 100):
            send(first, 100)
            receive(first + 100)
        assert fetches(nodes[1]) - before >= 10, "it read from the node in its rack"
        nodes[1].kill()
        send(2_000, 1_000)
        receive(3_000)
        nodes[1].start()
        send(3_000, 1_000)
        receive(4_000)

    try:
        await asyncio.to_thread(work)
    finally:
        consumer.close()
    assert received == [(number, str(number).encode()) for number in range(4_000)]


def fetches(node: GatewayProcess) -> int:
    """Return the number of Fetch requests that the node has answered."""
    with urllib.request.urlopen(f"{node.metrics_url}/metrics", timeout=10) as answer:
        counts = re.findall(r'^sluice_requests_total{api="fetch",.*} (\S+)$', answer.read().decode(), re.MULTILINE)
    return sum(int(float(count)) for count in counts)
