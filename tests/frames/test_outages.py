"""Postgres is stopped, or its disk is full, and recovers: the answers of each API in between, in frames. After each of
these error codes stock clients try again. The log has the batch that they repeat once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from protocol.errors import ErrorCode
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, PartitionData
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from storage.embedded import EmbeddedPostgres
from tests.disks import mounted
from tests.frames.members import Member, create_topic, fresh, settle
from tests.gateway.data_plane import batch_of
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.postgres import cluster_directory
from tests.steps.waiting import until
from tests.wire import WireClient

PATIENCE_S = 60.0
PRODUCER = 7
LATEST = -1

Ask = Callable[[WireClient], Awaitable[int]]


@contextlib.asynccontextmanager
async def postgres(directory: Path) -> AsyncGenerator[EmbeddedPostgres]:
    server = EmbeddedPostgres(directory)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def produce(client: WireClient, topic: str, sequence: int, value: bytes = b"x") -> int:
    """Produce one batch of the idempotent producer. Return the error code."""
    records = batch_of(value, producer=(PRODUCER, 0, sequence))
    data = TopicProduceData(name=topic, partition_data=(PartitionProduceData(index=0, records=records),))
    answer = await client.send(ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=(data,)), 9)
    return int(answer.responses[0].partition_responses[0].error_code)


async def fetch(client: WireClient, topic: str, offset: int = 0) -> PartitionData:
    partition = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=2**20)
    request = FetchRequest(max_wait_ms=0, min_bytes=1, topics=(FetchTopic(topic=topic, partitions=(partition,)),))
    return (await client.send(request, 12)).responses[0].partitions[0]


async def metadata(client: WireClient, topic: str) -> int:
    asked = MetadataRequest(topics=(MetadataRequestTopic(name=topic),), allow_auto_topic_creation=False)
    return int((await client.send(asked, 12)).topics[0].error_code)


async def end_of(client: WireClient, topic: str) -> tuple[int, int]:
    partition = ListOffsetsPartition(partition_index=0, timestamp=LATEST)
    request = ListOffsetsRequest(replica_id=-1, topics=(ListOffsetsTopic(name=topic, partitions=(partition,)),))
    found = (await client.send(request, 7)).topics[0].partitions[0]
    return int(found.error_code), int(found.offset)


def asks(topic: str, member: Member) -> dict[str, Ask]:
    """Return one request of each kind that needs Postgres, and a Metadata request. Metadata for a topic that the node
    knows does not need Postgres.
    """

    async def fetched(client: WireClient) -> int:
        return int((await fetch(client, topic)).error_code)

    async def listed(client: WireClient) -> int:
        return (await end_of(client, topic))[0]

    async def committed(client: WireClient) -> int:
        return await Member.commit(_on(member, client), topic, 1)

    async def commits_fetched(client: WireClient) -> int:
        groups = (OffsetFetchRequestGroup(group_id=member.group_id, topics=None),)
        return int((await client.send(OffsetFetchRequest(groups=groups), 8)).groups[0].error_code)

    async def given_an_id(client: WireClient) -> int:
        request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=60_000)
        return int((await client.send(request, 4)).error_code)

    async def created(client: WireClient) -> int:
        made = CreatableTopic(name=fresh("created"), num_partitions=1, replication_factor=1)
        return int((await client.send(CreateTopicsRequest(topics=(made,), timeout_ms=30_000), 7)).topics[0].error_code)

    return {
        "Produce": lambda client: produce(client, topic, 1),
        "Fetch": fetched,
        "Metadata": lambda client: metadata(client, topic),
        "Metadata of an unknown topic": lambda client: metadata(client, "unknown"),
        "ListOffsets": listed,
        "OffsetCommit": committed,
        "OffsetFetch": commits_fetched,
        "InitProducerId": given_an_id,
        "CreateTopics": created,
    }


def _on(member: Member, client: WireClient) -> Member:
    """Return the same group member on another connection."""
    moved = Member(client, member.group_id)
    moved.member_id, moved.generation_id = member.member_id, member.generation_id
    return moved


async def answers(gateway: GatewayProcess, questions: dict[str, Ask]) -> dict[str, ErrorCode]:
    """Send all requests concurrently, each on a connection of its own."""

    async def one(ask: Ask) -> ErrorCode:
        async with await WireClient.connect(gateway.bootstrap) as client:
            return ErrorCode(await ask(client))

    return dict(zip(questions, await asyncio.gather(*map(one, questions.values())), strict=True))


AWAY = {
    "Produce": {ErrorCode.REQUEST_TIMED_OUT},
    "Fetch": {ErrorCode.NOT_LEADER_OR_FOLLOWER},
    "Metadata": {ErrorCode.NONE},
    "Metadata of an unknown topic": {ErrorCode.LEADER_NOT_AVAILABLE},
    "ListOffsets": {ErrorCode.NOT_LEADER_OR_FOLLOWER},
    # A node answers with the second code once its leases have expired.
    "OffsetCommit": {ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR},
    "OffsetFetch": {ErrorCode.NOT_COORDINATOR},
    "InitProducerId": {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS},
    "CreateTopics": {ErrorCode.REQUEST_TIMED_OUT},
}


async def test_requests_during_a_stop_of_postgres_are_answered_as_retriable(gateway_factory: GatewayFactory) -> None:
    with cluster_directory() as directory:
        async with postgres(directory) as server:
            gateway = gateway_factory(database_url=server.url)
            topic = fresh("t")
            async with await WireClient.connect(gateway.bootstrap) as client:
                await create_topic(client, topic)
                assert await produce(client, topic, 0) == ErrorCode.NONE
            gateway.restart()  # so that the gateway has no records in memory
            async with await WireClient.connect(gateway.bootstrap) as client:
                assert await metadata(client, topic) == ErrorCode.NONE
                member = Member(client, fresh("g"), session_timeout_ms=60_000)
                await settle(member)
                questions = asks(topic, member)

                await server.stop()
                for _ in range(2):
                    found = await answers(gateway, questions)
                    assert all(found[name] in AWAY[name] for name in AWAY), found
                await server.start()

                async def served() -> bool:
                    found = await answers(gateway, questions)
                    odd = found.pop("Metadata of an unknown topic")
                    codes = set(found.values()) - {ErrorCode.NONE}
                    assert all(code.retriable for code in codes), found
                    return not codes and odd == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

                await until(served, "it does not serve again")
                assert await member.heartbeat() == ErrorCode.NONE, "the group goes on without a rebalance"
                assert await end_of(client, topic) == (ErrorCode.NONE, 2), "what was repeated is there once"
            gateway.close()


async def test_requests_during_a_full_disk_of_postgres_are_answered_as_retriable(
    gateway_factory: GatewayFactory,
) -> None:
    value = bytes(30_000)
    with mounted() as disk:
        async with postgres(disk.directory) as server:
            gateway = gateway_factory({"message.max.bytes": "100000"}, database_url=server.url)
            topic = fresh("t")
            async with await WireClient.connect(gateway.bootstrap) as client:
                await create_topic(client, topic)
                assert await produce(client, topic, 0, value) == ErrorCode.NONE
                disk.fill()
                sequence, code = 1, ErrorCode.NONE
                while sequence < 2_000:
                    code = ErrorCode(await produce(client, topic, sequence, value))
                    if code != ErrorCode.NONE:
                        break
                    sequence += 1
                assert code == ErrorCode.REQUEST_TIMED_OUT
                assert await metadata(client, topic) == ErrorCode.NONE
                assert ErrorCode((await fetch(client, topic, sequence - 1)).error_code) == ErrorCode.NONE, "from memory"
                disk.empty()

                async def taken() -> bool:
                    answer = ErrorCode(await produce(client, topic, sequence, value))
                    assert answer in (ErrorCode.NONE, ErrorCode.REQUEST_TIMED_OUT), answer
                    return answer == ErrorCode.NONE

                await until(taken, "it takes nothing again")

                async def ended() -> bool:
                    code, end = await end_of(client, topic)
                    assert code in (ErrorCode.NONE, ErrorCode.NOT_LEADER_OR_FOLLOWER), ErrorCode(code)
                    return (code, end) == (ErrorCode.NONE, sequence + 1)

                await until(ended, "what was repeated is not there once")
            gateway.close()
