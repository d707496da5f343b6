"""Internal topics as clients see them.

No group has a coordinator before `__consumer_offsets` exists. A reader of it finds the groups of all nodes, through any
node.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.cluster.leases import partition_of
from protocol import coordinator_records as log
from protocol.errors import ErrorCode
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from protocol.messages.describe_groups import DescribeGroupsRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_commit import OffsetCommitRequest, OffsetCommitRequestPartition, OffsetCommitRequestTopic
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from protocol.records import iter_records, split_batches
from tests.frames.members import create_topic, fresh
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import WireClient

OFFSETS, STATE = "__consumer_offsets", "__transaction_state"
PARTITIONS = 3
NOT_COORDINATOR = ErrorCode.NOT_COORDINATOR
JOIN = JoinGroupRequest(
    group_id="g",
    session_timeout_ms=10_000,
    rebalance_timeout_ms=10_000,
    protocol_type="consumer",
    protocols=(JoinGroupRequestProtocol(name="range", metadata=b""),),
)
COORDINATED: list[tuple[Any, int, Any]] = [
    (JOIN, 3, lambda answer: answer.error_code),
    (HeartbeatRequest(group_id="g", member_id="m", generation_id=1), 4, lambda answer: answer.error_code),
    (DescribeGroupsRequest(groups=("g",)), 5, lambda answer: answer.groups[0].error_code),
    (DeleteGroupsRequest(groups_names=("g",)), 2, lambda answer: answer.results[0].error_code),
    (
        OffsetFetchRequest(groups=(OffsetFetchRequestGroup(group_id="g", topics=None),)),
        8,
        lambda answer: answer.groups[0].error_code,
    ),
    (
        ConsumerGroupHeartbeatRequest(
            group_id="c",
            member_id="AAAAAAAAAAAAAAAAAAAAAQ",
            member_epoch=0,
            rebalance_timeout_ms=1_000,
            subscribed_topic_names=("t",),
            topic_partitions=(),
        ),
        1,
        lambda answer: answer.error_code,
    ),
]


async def test_groups_have_no_coordinator_before_the_first_lookup(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(coordinated=False)
    async with await WireClient.connect(gateway.bootstrap) as client:
        for request, version, code in COORDINATED:
            assert code(await client.send(request, version)) == NOT_COORDINATOR, type(request).__name__
        listed = await client.send(ListGroupsRequest(), 4)
        assert (listed.error_code, listed.groups) == (ErrorCode.NONE, ())
        assert (await client.send(MetadataRequest(topics=None), 12)).topics == ()
        await client.send(FindCoordinatorRequest(coordinator_keys=("g",)), 4)
        for request, version, code in COORDINATED:
            assert code(await client.send(request, version)) != NOT_COORDINATOR, type(request).__name__


async def test_node_looks_for_the_offsets_topic_before_it_refuses(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    """Either node may have created the topic. From then on the other node, even if it holds the leases, refuses no
    client.
    """
    first = gateway_factory(coordinated=False, database_url=database_url)
    second = gateway_factory(coordinated=False, database_url=database_url)
    async with (
        await WireClient.connect(first.bootstrap) as client,
        await WireClient.connect(second.bootstrap) as other,
    ):
        (found,) = (await other.send(FindCoordinatorRequest(coordinator_keys=("g",)), 4)).coordinators
        coordinator = client if first.bootstrap.endswith(f":{found.port}") else other
        assert (await coordinator.send(JOIN, 3)).error_code == ErrorCode.NONE


async def test_a_database_that_has_groups_has_coordinators(gateway_factory: GatewayFactory, database_url: str) -> None:
    """A client has deleted `__consumer_offsets`, and the node has restarted. The groups still have a coordinator."""
    gateway = gateway_factory(database_url=database_url)
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic = fresh("orders")
        await create_topic(client, topic)
        await commit(client, "g", topic, 5)
        deleted = await client.send(DeleteTopicsRequest(topics=(DeleteTopicState(name=OFFSETS),)), 6)
        assert deleted.responses[0].error_code == ErrorCode.NONE
    gateway.restart()
    async with await WireClient.connect(gateway.bootstrap) as client:
        asked = OffsetFetchRequest(groups=(OffsetFetchRequestGroup(group_id="g", topics=None),))
        (group,) = (await client.send(asked, 8)).groups
        assert group.error_code == ErrorCode.NONE
        assert group.topics[0].partitions[0].committed_offset == 5


@pytest.mark.parametrize("earliest", [True, False])
async def test_reader_of_the_offsets_topic_finds_groups_of_all_nodes(
    gateway_factory: GatewayFactory, database_url: str, earliest: bool
) -> None:
    settings = {"offsets.topic.num.partitions": str(PARTITIONS)}
    nodes = [gateway_factory(settings, database_url=database_url) for _ in range(2)]
    groups = [f"g{number}" for number in range(12)]
    async with await WireClient.connect(nodes[0].bootstrap) as client:
        topic = fresh("orders")
        await create_topic(client, topic)
        coordinators = await committed_everywhere(client, nodes, groups, topic)
        assert len(coordinators) == 2, "both nodes have some"
        if earliest:
            # Ask for the start of the log, because the node that receives the request creates the log.
            await client.send(list_offsets(-2), 7)
        found: dict[str, int] = {}
        offsets = [0] * PARTITIONS
        async with asyncio.timeout(30):
            while found.keys() != set(groups):
                for index, records in enumerate(await read(client, offsets)):
                    for record in records:
                        offsets[index] = record.offset + 1
                        key = log.decode_key(log.OFFSET_COMMIT, record.key)
                        assert index == partition_of(key.group, PARTITIONS)
                        found[key.group] = log.decode_value(log.OFFSET_COMMIT, record.value)[1].offset
        assert found == {group_id: number for number, group_id in enumerate(groups)}


async def test_end_of_an_internal_topic_lies_behind_the_current_state(gateway_factory: GatewayFactory) -> None:
    """A client that reads from the end sees what is committed from then on, and no snapshot."""
    gateway = gateway_factory({"offsets.topic.num.partitions": "1"})
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic = fresh("orders")
        await create_topic(client, topic)
        await commit(client, "g", topic, 5)
        answer = await client.send(list_offsets(-1, 1), 7)
        end = answer.topics[0].partitions[0].offset
        assert end == 1
        await commit(client, "g", topic, 6)
        ((record,),) = await read(client, [end], wait_ms=10_000)
        assert log.decode_value(log.OFFSET_COMMIT, record.value)[1].offset == 6


async def test_leader_of_the_partition_coordinates_its_transactions(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    """Kafka does the same, and its tools compute the partition themselves. All nodes agree."""
    count = 8
    settings = {"transaction.state.log.num.partitions": str(count)}
    nodes = [gateway_factory(settings, database_url=database_url) for _ in range(2)]
    ids = [f"t{number}" for number in range(12)]
    said: list[tuple[dict[str, int], dict[int, int]]] = []
    async with asyncio.timeout(30):
        while len(said) < 2 or said[0] != said[1] or len(set(said[0][1].values())) < 2:
            said = [await coordinators_and_leaders(node.bootstrap, ids) for node in nodes]
    coordinators, leaders = said[0]
    assert coordinators == {each: leaders[partition_of(each, count)] for each in ids}


async def coordinators_and_leaders(bootstrap: str, ids: list[str]) -> tuple[dict[str, int], dict[int, int]]:
    async with await WireClient.connect(bootstrap) as client:
        asked = FindCoordinatorRequest(coordinator_keys=tuple(ids), key_type=1)
        found = (await client.send(asked, 4)).coordinators
        (topic,) = (await client.send(MetadataRequest(topics=(MetadataRequestTopic(name=STATE),)), 9)).topics
        return (
            {each.key: each.node_id for each in found},
            {each.partition_index: each.leader_id for each in topic.partitions},
        )


# --- steps ------------------------------------------------------------------------------------------------------------


async def committed_everywhere(
    client: WireClient, nodes: list[GatewayProcess], groups: list[str], topic: str
) -> set[int]:
    """Let each group commit its number at its coordinator, and return the coordinators' ports. A node that has just
    started receives shards, so a group's coordinator may change before its commit.
    """
    async with asyncio.timeout(30):
        while True:
            found = (await client.send(FindCoordinatorRequest(coordinator_keys=tuple(groups)), 4)).coordinators
            ports = {coordinator.port for coordinator in found}
            if len(ports) == len(nodes) and all(
                [
                    await commit_at(f"127.0.0.1:{coordinator.port}", coordinator.key, topic, number)
                    for number, coordinator in enumerate(found)
                ]
            ):
                return ports
            await asyncio.sleep(0.1)


async def commit_at(bootstrap: str, group_id: str, topic: str, offset: int) -> bool:
    """Commit the offset. Return False if another node has become the group's coordinator."""
    async with await WireClient.connect(bootstrap) as client:
        code = await ask_to_commit(client, group_id, topic, offset)
    assert code in (ErrorCode.NONE, ErrorCode.NOT_COORDINATOR)
    return code == ErrorCode.NONE


async def commit(client: WireClient, group_id: str, topic: str, offset: int) -> None:
    assert await ask_to_commit(client, group_id, topic, offset) == ErrorCode.NONE


async def ask_to_commit(client: WireClient, group_id: str, topic: str, offset: int) -> int:
    partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=offset, committed_metadata="")
    request = OffsetCommitRequest(
        group_id=group_id,
        generation_id_or_member_epoch=-1,
        topics=(OffsetCommitRequestTopic(name=topic, partitions=(partition,)),),
    )
    answer = await client.send(request, 8)
    return int(answer.topics[0].partitions[0].error_code)


def list_offsets(timestamp: int, partitions: int = PARTITIONS) -> ListOffsetsRequest:
    asked = tuple(ListOffsetsPartition(partition_index=index, timestamp=timestamp) for index in range(partitions))
    return ListOffsetsRequest(replica_id=-1, topics=(ListOffsetsTopic(name=OFFSETS, partitions=asked),))


async def read(client: WireClient, offsets: list[int], *, wait_ms: int = 500) -> list[list[Any]]:
    """Read each partition from its offset on."""
    asked = tuple(
        FetchPartition(partition=index, fetch_offset=offset, partition_max_bytes=1_000_000)
        for index, offset in enumerate(offsets)
    )
    request = FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=10_000_000,
        isolation_level=1,
        session_id=0,
        session_epoch=-1,
        topics=(FetchTopic(topic=OFFSETS, partitions=asked),),
    )
    answer = await client.send(request, 11)
    return [
        [
            record
            for batch in split_batches(partition.records or b"")
            for record in iter_records(batch)
            if record.offset >= offset
        ]
        for partition, offset in zip(answer.responses[0].partitions, offsets, strict=True)
    ]
