"""Nodes that share one address: a client reaches any of them, and every request is answered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, cast

import confluent_kafka
import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kafka import KafkaConsumer

from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.describe_cluster import DescribeClusterRequest
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from protocol.messages.describe_groups import DescribeGroupsRequest
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.metadata import MetadataRequest
from protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from tests.closing import close
from tests.cluster.conftest import balanced, metric
from tests.cluster.one_address import OneAddress, one_address, tried
from tests.frames.handoff import configure
from tests.frames.members import Member, create_topic, fresh, in_state
from tests.frames.share import ACCEPT, Reader, send
from tests.frames.transactions import Transactional
from tests.gateway_process import GatewayProcess
from tests.postgres import SERVED, Databases
from tests.steps.waiting import until, wait_for
from tests.wire import WireClient

NONE = ErrorCode.NONE
GROUPS = 8
"""Groups, or transactional ids, of one test. Each node coordinates some of them."""
PARTITIONS, RECORDS = 6, 120


@pytest.fixture(scope="module")
def shared(postgres: Databases) -> Iterator[OneAddress]:
    """Two nodes that the tests of this module share."""
    url = postgres.create(SERVED)
    with one_address(postgres, url, 2, {"group.connection.grace.ms": "1000"}) as running:
        balanced(running.nodes)
        yield running
    postgres.drop(url)


@contextlib.asynccontextmanager
async def connected(shared: OneAddress) -> AsyncIterator[list[WireClient]]:
    """Connect a client to each node."""
    clients = [await WireClient.connect(node.bootstrap) for node in shared.nodes]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


async def test_every_node_names_one_broker_for_everything(shared: OneAddress) -> None:
    async with connected(shared) as clients:
        topic = fresh("topic")
        await create_topic(clients[0], topic, 4)
        for client in clients:
            answer = await client.send(MetadataRequest(topics=None), 12)
            (broker,) = answer.brokers
            assert (broker.node_id, f"{broker.host}:{broker.port}") == (0, shared.address)
            assert answer.controller_id == 0
            parts = [part for each in answer.topics for part in each.partitions]
            assert {(part.leader_id, part.replica_nodes, part.isr_nodes) for part in parts} == {(0, (0,), (0,))}
            for key_type in (0, 1):
                found = await client.send(FindCoordinatorRequest(key_type=key_type, coordinator_keys=("a", "b")), 4)
                assert {(each.node_id, f"{each.host}:{each.port}") for each in found.coordinators} == {
                    (0, shared.address)
                }


async def test_client_that_knows_one_broker_is_at_the_right_one(shared: OneAddress) -> None:
    """A client of Kafka 4.4 names the broker that it believes to reach (KIP-1242)."""
    software = {"client_software_name": "test", "client_software_version": "1"}
    async with connected(shared) as clients:
        for client in clients:
            cluster = await client.send(DescribeClusterRequest(endpoint_type=1), 1)
            assert (cluster.controller_id, [each.broker_id for each in cluster.brokers]) == (0, [0])
            codes = [
                (
                    await client.send(ApiVersionsRequest(**software, cluster_id=cluster.cluster_id, node_id=node), 5)
                ).error_code
                for node in (0, 1)
            ]
            assert codes == [NONE, ErrorCode.REBOOTSTRAP_REQUIRED]
            broker = DescribeConfigsResource(resource_type=4, resource_name="0", configuration_keys=("node.id",))
            described = await client.send(DescribeConfigsRequest(resources=(broker,)), 4)
            assert [each.error_code for each in described.results] == [NONE]


async def test_inter_broker_listener_names_each_node(shared: OneAddress) -> None:
    async with await WireClient.connect(shared.inside[0]) as client:
        answer = await client.send(MetadataRequest(topics=()), 12)
    assert {f"{each.host}:{each.port}" for each in answer.brokers} == set(shared.inside)
    assert 0 not in {each.node_id for each in answer.brokers}


async def offsets_of(client: WireClient, topic: str, group_ids: list[str]) -> list[int]:
    """Return the committed offset of partition 0 for each group, by one request."""
    named = OffsetFetchRequestTopics(name=topic, partition_indexes=(0,))
    groups = tuple(OffsetFetchRequestGroup(group_id=group_id, topics=(named,)) for group_id in group_ids)
    found: dict[str, int] = {}

    async def fetch() -> list[int]:
        answer = await client.send(OffsetFetchRequest(groups=groups), 8)
        found.update({each.group_id: each.topics[0].partitions[0].committed_offset for each in answer.groups})
        return [each.error_code for each in answer.groups]

    assert await tried(fetch) == [NONE] * len(group_ids)
    return [found[group_id] for group_id in group_ids]


async def joined(one: Member) -> int:
    return (await one.join()).error_code


async def test_any_node_answers_for_any_group(shared: OneAddress) -> None:
    """Each node coordinates some of the groups, and each client speaks for all."""
    async with connected(shared) as clients:
        topic = fresh("topic")
        await create_topic(clients[0], topic)
        group_ids = [fresh("group") for _ in range(GROUPS)]
        for number, group_id in enumerate(group_ids):
            one = Member(clients[number % 2], group_id, version=3, session_timeout_ms=120_000)

            async def sync(of: Member = one) -> int:
                return (await of.sync({of.member_id: b"assignment"}, version=3)).error_code

            assert await tried(partial(joined, one)) == NONE
            assert await tried(sync) == NONE
            assert await tried(one.heartbeat) == NONE
            assert await tried(lambda of=one: of.commit(topic, 7)) == NONE
        for client in clients:
            await until(
                lambda of=client: of.send(ListGroupsRequest(), 4),
                "all groups are listed",
                holds=lambda listed: {each.group_id for each in listed.groups} >= set(group_ids),
            )

            async def describe(of: WireClient = client) -> list[int]:
                answer = await of.send(DescribeGroupsRequest(groups=tuple(group_ids)), 5)
                assert {each.group_id for each in answer.groups} == set(group_ids)
                assert {len(each.members) for each in answer.groups if not each.error_code} <= {1}
                return [each.error_code for each in answer.groups]

            assert await tried(describe) == [NONE] * GROUPS
            assert await offsets_of(client, topic, group_ids) == [7] * GROUPS

        async def delete() -> list[int]:
            answer = await clients[0].send(DeleteGroupsRequest(groups_names=tuple(group_ids)), 2)
            assert {each.group_id for each in answer.results} == set(group_ids)
            return [each.error_code for each in answer.results]

        assert await tried(delete) == [ErrorCode.NON_EMPTY_GROUP] * GROUPS


async def test_later_of_two_commits_wins_at_another_node(shared: OneAddress) -> None:
    async with connected(shared) as clients:
        topic = fresh("topic")
        await create_topic(clients[0], topic)
        group_ids = [fresh("group") for _ in range(GROUPS)]
        for client in clients:

            async def commit(of: WireClient = client) -> list[int]:
                groups = [Member(of, group_id) for group_id in group_ids]
                return await asyncio.gather(*(group.commit(topic, offset) for group in groups for offset in range(20)))

            assert set(cast("list[int]", await tried(commit))) == {NONE}
            assert await offsets_of(client, topic, group_ids) == [19] * GROUPS


async def test_coordinator_learns_that_a_client_of_another_node_has_died(shared: OneAddress) -> None:
    async def join_and_die(node: GatewayProcess) -> None:
        group_id = fresh("group")
        async with await WireClient.connect(node.bootstrap) as watching:
            dying = await WireClient.connect(node.bootstrap)
            one = Member(dying, group_id, version=3, session_timeout_ms=120_000, rebalance_timeout_ms=120_000)
            assert await tried(partial(joined, one)) == NONE
            await dying.abort()
            await in_state(watching, group_id, "Empty", seconds=60)

    await asyncio.gather(*(join_and_die(node) for node in shared.nodes for _ in range(3)))


async def test_transactions_end_through_any_node(shared: OneAddress) -> None:
    async with connected(shared) as clients:
        topic = fresh("topic")
        await create_topic(clients[0], topic)
        group_ids = [fresh("group") for _ in range(GROUPS)]
        for number, group_id in enumerate(group_ids):
            one, other = (Transactional(clients[(number + at) % 2], f"transaction-{group_id}") for at in range(2))
            assert await one.initialize() == NONE
            assert await one.add((topic, 0)) == [NONE]
            assert (await one.send((topic, 0), b"value")).error_code == NONE
            assert await one.add_offsets(group_id) == NONE
            assert await one.commit_offset(group_id, (topic, 0), 5) == NONE
            other.producer_id, other.producer_epoch = one.producer_id, one.producer_epoch
            assert await other.end(committed=True) == NONE
        for client in clients:
            assert await offsets_of(client, topic, group_ids) == [5] * GROUPS
        ended = 'sluice_forwarded_requests_total{api="end_txn"}'
        assert sum(metric(node, ended) for node in shared.nodes) > 0


async def test_share_group_reads_through_any_node(shared: OneAddress) -> None:
    """Two members of each group are connected to different nodes. Each record is delivered to one of them."""
    async with connected(shared) as clients:
        topic = fresh("topic")
        topic_id = await create_topic(clients[0], topic, 2)
        await send(clients[0], topic)
        for _ in range(4):
            group_id = fresh("share")
            await configure(clients[0], group_id, **{"share.auto.offset.reset": "earliest"})
            readers = [Reader(client, group_id, topic, topic_id) for client in clients]
            for reader in readers:
                await reader.join()
            assert await readers[0].fetch() == [(0, 0, 1)]
            assert await readers[1].fetch() == []
            assert await readers[0].acknowledge((0, 0, ACCEPT)) == NONE
            for reader in readers:
                await reader.leave()


# --- stock clients ----------------------------------------------------------------------------------------------------


def fill(shared: OneAddress) -> str:
    """Produce records to a new topic, and return its name."""
    topic = fresh("topic")
    admin = AdminClient({"bootstrap.servers": shared.address})
    admin.create_topics([NewTopic(topic, PARTITIONS)])[topic].result(60)
    producer = confluent_kafka.Producer({"bootstrap.servers": shared.address})
    for number in range(RECORDS):
        producer.produce(topic, str(number).encode(), partition=number % PARTITIONS)
    assert producer.flush(60) == 0
    return topic


def read_all(poll: Callable[[], set[int]]) -> None:
    got: set[int] = set()
    deadline = time.monotonic() + 90
    while got != set(range(RECORDS)):
        assert time.monotonic() < deadline, f"{len(got)} of {RECORDS} records"
        got |= poll()


def confluent(shared: OneAddress, group_id: str, **more: Any) -> confluent_kafka.Consumer:
    return confluent_kafka.Consumer(
        {"bootstrap.servers": shared.address, "group.id": group_id, "auto.offset.reset": "earliest", **more}
    )


@pytest.mark.parametrize(
    "more",
    [
        {"partition.assignment.strategy": "range"},
        {"partition.assignment.strategy": "cooperative-sticky"},
        {"group.protocol": "consumer"},
    ],
    ids=["eager", "cooperative", "kip-848"],
)
def test_librdkafka_reads_as_a_group(shared: OneAddress, more: dict[str, str]) -> None:
    topic, group_id = fill(shared), fresh("group")
    consumers = [confluent(shared, group_id, **more) for _ in range(2)]

    def poll() -> set[int]:
        messages = [consumer.poll(0.1) for consumer in consumers]
        return {int(each.value() or b"-1") for each in messages if each is not None and each.error() is None}

    try:
        for consumer in consumers:
            consumer.subscribe([topic])
        wait_for(lambda: [poll(), *map(confluent_kafka.Consumer.assignment, consumers)][1:], "shared", holds=all)
        admin = AdminClient({"bootstrap.servers": shared.address})
        listed = admin.list_consumer_groups(request_timeout=30).result(60)
        assert group_id in {each.group_id for each in listed.valid or ()}
        assert not listed.errors
        described = admin.describe_consumer_groups([group_id], request_timeout=30)[group_id].result(60)
        assert len(described.members) == 2
        for consumer in consumers:
            consumer.commit(asynchronous=False, offsets=[confluent_kafka.TopicPartition(topic, 0, 3)])
    finally:
        for consumer in consumers:
            close(consumer)
    committed = admin.list_consumer_group_offsets([confluent_kafka.ConsumerGroupTopicPartitions(group_id)])
    assert committed[group_id].result(60).topic_partitions


def test_kafka_python_reads_as_a_group(shared: OneAddress) -> None:
    topic = fill(shared)
    consumer = KafkaConsumer(
        topic, group_id=fresh("group"), auto_offset_reset="earliest", bootstrap_servers=shared.address
    )
    read_all(lambda: {int(each.value) for some in consumer.poll(timeout_ms=500).values() for each in some})
    consumer.commit()
    consumer.close()


async def test_aiokafka_reads_as_a_group(shared: OneAddress) -> None:
    topic = await asyncio.to_thread(fill, shared)
    consumer = AIOKafkaConsumer(
        topic, group_id=fresh("group"), auto_offset_reset="earliest", bootstrap_servers=shared.address
    )
    await consumer.start()
    try:
        async with asyncio.timeout(90):
            got: set[int] = set()
            while got != set(range(RECORDS)):
                got |= {
                    int(each.value or b"-1")
                    for some in (await consumer.getmany(timeout_ms=500)).values()
                    for each in some
                }
            await consumer.commit()
    finally:
        await consumer.stop()


def test_transaction_commits_offsets_with_its_records(shared: OneAddress) -> None:
    topic, target, group_id = fill(shared), fresh("topic"), fresh("group")
    producer = confluent_kafka.Producer({"bootstrap.servers": shared.address, "transactional.id": fresh("producer")})
    producer.init_transactions(60)
    consumer = confluent(shared, group_id, **{"enable.auto.commit": False})
    try:
        consumer.subscribe([topic])

        def copy() -> set[int]:
            messages = [each for each in consumer.consume(RECORDS, 0.5) if each.error() is None]
            if not messages:
                return set()
            producer.begin_transaction()
            for each in messages:
                producer.produce(target, each.value())
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 60
            )
            producer.commit_transaction(60)
            return {int(each.value() or b"-1") for each in messages}

        read_all(copy)
        whole = [confluent_kafka.TopicPartition(topic, index) for index in range(PARTITIONS)]
        assert [each.offset for each in consumer.committed(whole, 60)] == [RECORDS // PARTITIONS] * PARTITIONS
    finally:
        close(consumer)
