"""Strict replicas: each node serves only what it leads or replicates, and clients find the right node."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from uuid import UUID

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from protocol.errors import ErrorCode
from protocol.messages.delete_records import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from protocol.messages.describe_producers import DescribeProducersRequest, TopicRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, PartitionData, ReplicaState
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from protocol.messages.produce import PartitionProduceResponse, ProduceRequest, ProduceResponse
from protocol.messages.write_txn_markers import WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest
from tests.cluster.test_replicas import PATIENCE_S, TTL_MS, alive, connected, create, placed, taken, until
from tests.cluster.test_wakeup import fetch, produce
from tests.frames.members import fresh
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import WireClient

NODES = 3
NONE, ELSEWHERE = ErrorCode.NONE, ErrorCode.NOT_LEADER_OR_FOLLOWER
PARTITIONS = 6
FIRST_VERSION_WITH_REPLICA_STATE = 15
Start = Callable[[int], GatewayProcess]
Codes = tuple[int, int, int]
"""Error codes of the leader, of a follower, and of a node that is neither."""


@pytest.fixture
def start(gateway_factory: GatewayFactory, database_url: str) -> Start:
    """Start the node of a number."""

    def start(number: int) -> GatewayProcess:
        return gateway_factory(
            {"node.id": str(number), "replicas.strict": "true"},
            database_url=database_url,
            environment={"SLUICE_NODE_TTL_MS": str(TTL_MS)},
        )

    return start


class Three:
    """A topic whose partition the first node leads and the second follows. The third is no replica."""

    def __init__(self, nodes: list[GatewayProcess], clients: list[WireClient], topic: str, topic_id: UUID) -> None:
        self.nodes, self.clients, self.topic, self.topic_id = nodes, clients, topic, topic_id

    async def codes(self, ask: Callable[[WireClient], Awaitable[int]]) -> Codes:
        one, two, three = [await ask(client) for client in self.clients]
        return one, two, three

    async def produced(self, client: WireClient, version: int = 9, acks: int = -1) -> ProduceResponse:
        request = produce(self.topic)
        return await client.send(ProduceRequest(acks=acks, timeout_ms=10_000, topic_data=request.topic_data), version)

    async def fetched(
        self, client: WireClient, version: int, *, epoch: int = -1, replica_id: int = -1
    ) -> tuple[PartitionData, dict[int, int]]:
        """Fetch, and return the partition and the ports of the nodes that the answer names."""
        part = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=2**20, current_leader_epoch=epoch)
        by_state = version >= FIRST_VERSION_WITH_REPLICA_STATE
        request = FetchRequest(
            replica_id=-1 if by_state else replica_id,
            replica_state=ReplicaState(replica_id=replica_id if by_state else -1),
            max_wait_ms=0,
            min_bytes=1,
            max_bytes=2**20,
            topics=(FetchTopic(topic=self.topic, topic_id=self.topic_id, partitions=(part,)),),
        )
        answer = await client.send(request, version)
        return answer.responses[0].partitions[0], {node.node_id: node.port for node in answer.node_endpoints}

    async def listed(self, client: WireClient, *, replica_id: int = -1, epoch: int = -1) -> int:
        part = ListOffsetsPartition(partition_index=0, current_leader_epoch=epoch, timestamp=-1)
        request = ListOffsetsRequest(
            replica_id=replica_id, isolation_level=0, topics=(ListOffsetsTopic(name=self.topic, partitions=(part,)),)
        )
        return (await client.send(request, 6)).topics[0].partitions[0].error_code

    @property
    def first_port(self) -> int:
        return int(self.nodes[0].bootstrap.rpartition(":")[2])


@pytest.fixture
async def three(start: Start) -> AsyncIterator[Three]:
    nodes = [start(number) for number in range(NODES)]
    topic = fresh("strict")
    async with connected(*nodes) as clients:
        for client in clients:
            await alive(client, *range(NODES))
        await create(clients[0], topic, 0, 1)
        for client in clients:
            await until(lambda client=client: placed(client, topic), (0, (0, 1), (0, 1), ()))
        request = MetadataRequest(topics=(MetadataRequestTopic(name=topic),), allow_auto_topic_creation=False)
        topic_id = (await clients[0].send(request, 10)).topics[0].topic_id
        yield Three(nodes, clients, topic, topic_id)


async def test_only_the_leader_accepts_records(three: Three) -> None:
    for acks in (-1, 1):

        async def code(client: WireClient, acks: int = acks) -> int:
            return only(await three.produced(client, acks=acks)).error_code

        assert await three.codes(code) == (NONE, ELSEWHERE, ELSEWHERE)
    for client in three.clients[1:]:
        answer = await three.produced(client, 10)
        leader = only(answer).current_leader
        assert (leader.leader_id, leader.leader_epoch) == (0, 0)
        assert [(node.node_id, node.port) for node in answer.node_endpoints] == [(0, three.first_port)]
        older = await three.produced(client, 9)
        assert (only(older).current_leader.leader_id, older.node_endpoints) == (-1, ())
    taken_in = await three.produced(three.clients[0], 10)
    assert (only(taken_in).base_offset, only(taken_in).current_leader.leader_id, taken_in.node_endpoints) == (2, -1, ())


async def test_a_partition_without_live_replicas_has_no_leader(three: Three) -> None:
    async def code(client: WireClient) -> int:
        return only(await three.produced(client)).error_code

    third = three.clients[2]
    three.nodes[0].kill()
    await until(lambda: placed(third, three.topic), (1, (0, 1), (1,), (0,)))
    three.nodes[1].kill()
    await until(lambda: placed(third, three.topic), (-1, (0, 1), (), (0, 1)))
    assert await code(third) == ELSEWHERE
    part, _ = await three.fetched(third, 12)
    assert part.error_code == ELSEWHERE
    assert await three.listed(third) == ELSEWHERE
    three.nodes[1].start()
    await until(lambda: placed(third, three.topic), (1, (0, 1), (1,), (0,)))
    async with await WireClient.connect(three.nodes[1].bootstrap) as second:
        assert await code(second) == NONE


async def test_a_refused_produce_without_acks_closes_the_connection(three: Three) -> None:
    request = ProduceRequest(acks=0, timeout_ms=10_000, topic_data=produce(three.topic).topic_data)
    for node, refuses in zip(three.nodes, (False, True, True), strict=True):
        async with await WireClient.connect(node.bootstrap) as client:
            client.send_only(request, 9)
            if refuses:
                await client.closed_by_peer()
            else:
                # The answer comes after the Produce, on a connection that is still open.
                await client.send(MetadataRequest(topics=()), 9)
    part, _ = await three.fetched(three.clients[0], 11)
    assert part.high_watermark == 1


async def test_followers_serve_consumers_that_support_fetching_from_them(three: Three) -> None:
    assert only(await three.produced(three.clients[0])).error_code == NONE
    expected: dict[tuple[int, int, int], Codes] = {
        # Keys: version, leader epoch, replica id.
        (10, -1, -1): (NONE, ELSEWHERE, ELSEWHERE),
        (11, -1, -1): (NONE, NONE, ELSEWHERE),
        (12, -1, 1): (NONE, ELSEWHERE, ELSEWHERE),
        (12, 0, -1): (NONE, NONE, ELSEWHERE),
        (12, 1, -1): (ErrorCode.UNKNOWN_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH, ELSEWHERE),
        (16, -1, -1): (NONE, NONE, ELSEWHERE),
        (16, -1, 1): (NONE, ELSEWHERE, ELSEWHERE),
    }
    for (version, epoch, replica_id), codes in expected.items():
        for client, code in zip(three.clients, codes, strict=True):
            part, endpoints = await three.fetched(client, version, epoch=epoch, replica_id=replica_id)
            assert part.error_code == code, (version, epoch, replica_id)
            assert bool(taken(part)) == (code == NONE)
            led = (part.current_leader.leader_id, part.current_leader.leader_epoch)
            if (version, code) == (16, ELSEWHERE):
                assert (led, endpoints) == ((0, 0), {0: three.first_port})
            else:
                assert (led, endpoints) == ((-1, -1), {})


async def test_only_the_leader_answers_list_offsets_and_leader_epochs(three: Three) -> None:
    unknown = ErrorCode.UNKNOWN_LEADER_EPOCH
    assert await three.codes(three.listed) == (NONE, ELSEWHERE, ELSEWHERE)
    assert await three.codes(lambda client: three.listed(client, replica_id=1)) == (NONE, ELSEWHERE, ELSEWHERE)
    assert await three.codes(lambda client: three.listed(client, replica_id=-2)) == (NONE, NONE, ELSEWHERE)
    assert await three.codes(lambda client: three.listed(client, epoch=1)) == (unknown, unknown, ELSEWHERE)
    for replica_id in (-1, -2, 1):

        async def ended(client: WireClient, replica_id: int = replica_id) -> int:
            topic = OffsetForLeaderTopic(
                topic=three.topic, partitions=(OffsetForLeaderPartition(partition=0, leader_epoch=0),)
            )
            answer = await client.send(OffsetForLeaderEpochRequest(replica_id=replica_id, topics=(topic,)), 3)
            return answer.topics[0].partitions[0].error_code

        assert await three.codes(ended) == (NONE, ELSEWHERE, ELSEWHERE)


async def test_admin_requests_for_a_leader_are_refused_elsewhere(three: Three) -> None:
    async def deleted(client: WireClient) -> int:
        topic = DeleteRecordsTopic(name=three.topic, partitions=(DeleteRecordsPartition(partition_index=0, offset=-1),))
        answer = await client.send(DeleteRecordsRequest(topics=(topic,), timeout_ms=1_000), 1)
        return answer.topics[0].partitions[0].error_code

    async def described(client: WireClient) -> int:
        request = DescribeProducersRequest(topics=(TopicRequest(name=three.topic, partition_indexes=(0,)),))
        return (await client.send(request, 0)).topics[0].partitions[0].error_code

    async def marked(client: WireClient) -> int:
        topic = WritableTxnMarkerTopic(name=three.topic, partition_indexes=(0,))
        marker = WritableTxnMarker(
            producer_id=1, producer_epoch=0, transaction_result=False, topics=(topic,), coordinator_epoch=0
        )
        answer = await client.send(WriteTxnMarkersRequest(markers=(marker,)), 1)
        return answer.markers[0].topics[0].partitions[0].error_code

    assert await three.codes(deleted) == (NONE, ELSEWHERE, ELSEWHERE)
    assert await three.codes(described) == (NONE, NONE, ELSEWHERE)
    ended, refused, unknown = await three.codes(marked)
    assert ended not in (ELSEWHERE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert (refused, unknown) == (ELSEWHERE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


async def test_a_parked_fetch_is_refused_when_the_leader_changes(start: Start) -> None:
    zero, one = start(0), start(1)
    topic = fresh("parked")
    async with connected(one) as (client,):
        await alive(client, 0, 1)
        await create(client, topic, 0, 1)
        zero.kill()
        await until(lambda: placed(client, topic), (1, (0, 1), (1,), (0,)))
        # Only the leader serves this version of Fetch.
        parked = client.send_nowait(replace(fetch(topic, 0), max_wait_ms=120_000), 10)
        zero.restart()
        async with connected(one, zero) as (other, on_zero):
            for each in (other, on_zero):
                await until(lambda each=each: placed(each, topic), (0, (0, 1), (0, 1), ()))
            assert only(await on_zero.send(produce(topic), 9)).error_code == NONE
        part = (await asyncio.wait_for(parked, PATIENCE_S)).responses[0].partitions[0]
        assert (part.error_code, taken(part)) == (ELSEWHERE, 0)


async def test_a_client_continues_when_a_leader_dies_and_when_it_returns(start: Start) -> None:
    """librdkafka needs no setting for this. Afterwards each acknowledged record is there once and in order. A race
    decides whether the client receives NOT_LEADER_OR_FOLLOWER or asks Metadata first."""
    nodes = [start(number) for number in range(NODES)]
    async with connected(*nodes) as clients:
        for client in clients:
            await alive(client, *range(NODES))
    bootstrap = ",".join(node.bootstrap for node in nodes)
    topic = fresh("moves")
    await asyncio.to_thread(Moves(nodes, bootstrap, topic).play)


class Moves:
    """Produce and consume while the first node dies and returns."""

    def __init__(self, nodes: list[GatewayProcess], bootstrap: str, topic: str) -> None:
        self._nodes, self._topic, self._bootstrap = nodes, topic, bootstrap
        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5})
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": topic,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 100,
            }
        )
        self._acknowledged: dict[int, list[bytes]] = defaultdict(list)
        self._received: dict[int, list[bytes]] = defaultdict(list)
        self._sent = 0

    def play(self) -> None:
        try:
            admin = AdminClient({"bootstrap.servers": self._bootstrap})
            admin.create_topics([NewTopic(self._topic, PARTITIONS, NODES)])[self._topic].result(PATIENCE_S)
            described = admin.list_topics(self._topic, timeout=PATIENCE_S).topics[self._topic].partitions
            assert Counter(part.leader for part in described.values()) == dict.fromkeys(range(NODES), 2)
            assert {frozenset(part.replicas) for part in described.values()} == {frozenset(range(NODES))}
            self._consumer.assign([TopicPartition(self._topic, number, 0) for number in range(PARTITIONS)])
            self._work_until(lambda: self._sent >= 2_000)
            self._nodes[0].kill()
            self._work_until(lambda: self._leaders(admin) == {1, 2})
            self._work_until(lambda: self._all_got(self._sent))
            self._nodes[0].start()
            self._work_until(lambda: self._leaders(admin) == {0, 1, 2})
            self._work_until(lambda: self._sent % 2_000 == 0)
            self._work_until(lambda: self._all_got(self._sent))
        finally:
            self._consumer.close()
        assert self._producer.flush(PATIENCE_S) == 0
        assert sum(map(len, self._acknowledged.values())) == self._sent
        assert self._received == self._acknowledged

    def _work_until(self, done: Callable[[], bool]) -> None:
        """Send a few records and receive what is available, again and again. At the end all sent records are
        acknowledged."""
        deadline = time.monotonic() + PATIENCE_S * 2
        while not done():
            assert time.monotonic() < deadline, (self._sent, {key: len(got) for key, got in self._received.items()})
            for _ in range(20):
                self._producer.produce(
                    self._topic,
                    str(self._sent).encode(),
                    partition=self._sent % PARTITIONS,
                    on_delivery=self._delivered,
                )
                self._sent += 1
            assert self._producer.flush(PATIENCE_S) == 0
            self._receive()
        while not self._all_got(self._sent):
            assert time.monotonic() < deadline, (self._sent, {key: len(got) for key, got in self._received.items()})
            self._receive()

    def _receive(self) -> None:
        for message in self._consumer.consume(1_000, 0.1):
            if message.error() is None:
                self._received[message.partition() or 0].append(message.value() or b"")

    def _all_got(self, count: int) -> bool:
        return sum(map(len, self._received.values())) >= count

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        self._acknowledged[message.partition() or 0].append(message.value() or b"")

    def _leaders(self, admin: AdminClient) -> set[int]:
        with contextlib.suppress(Exception):
            parts = admin.list_topics(self._topic, timeout=5).topics[self._topic].partitions
            return {part.leader for part in parts.values()}
        return set()


def only(answer: ProduceResponse) -> PartitionProduceResponse:
    return answer.responses[0].partition_responses[0]
