"""A share group over two nodes: a partition's leader serves it, and the other node takes over when the leader is
killed."""

from __future__ import annotations

import asyncio

from gateway.share.sessions import SILENT_S
from protocol.errors import ErrorCode
from protocol.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
)
from protocol.messages.share_fetch import FetchPartition, FetchTopic
from tests.cluster.conftest import QUICK_TTL, Cluster
from tests.frames.members import create_topic, fresh
from tests.frames.share import ACCEPT, NONE, Reader, part_of, send
from tests.wire import WireClient

TAKEN_OVER_S = 30.0


async def begin(clients: list[WireClient], group_id: str, topic: str) -> int:
    """Reset partition 0 to its beginning through the group's coordinator, and return the coordinator."""
    part = AlterShareGroupOffsetsRequestPartition(partition_index=0, start_offset=0)
    asked = AlterShareGroupOffsetsRequestTopic(topic_name=topic, partitions=(part,))
    request = AlterShareGroupOffsetsRequest(group_id=group_id, topics=(asked,))
    codes = [(await client.send(request, 0)).error_code for client in clients]
    assert sorted(codes) == [NONE, ErrorCode.NOT_COORDINATOR]
    return codes.index(NONE)


async def test_a_reset_through_one_node_is_seen_by_the_leader(cluster: Cluster) -> None:
    """The groups are coordinated by both nodes, and one node leads the partition. So some resets go through a node that
    does not lead it.
    """
    nodes = cluster(2)
    clients = [await WireClient.connect(node.bootstrap) for node in nodes]
    try:
        topic = fresh("topic")
        topic_id = await create_topic(clients[0], topic, 1)
        await send(clients[0], topic)
        coordinated: set[bool] = set()
        while len(coordinated) < 2:
            group_id = fresh("share")
            coordinator = await begin(clients, group_id, topic)
            for _ in range(2):
                readers = [Reader(client, group_id, topic, topic_id) for client in clients]
                parts = [part_of(await reader.ask()) for reader in readers]
                (leader,) = [at for at, part in enumerate(parts) if part is not None and not part.error_code]
                led = parts[leader]
                assert led is not None
                assert [(each.first_offset, each.last_offset) for each in led.acquired_records] == [(0, 0)]
                assert await readers[leader].acknowledge((0, 0, ACCEPT)) == NONE
                await begin(clients, group_id, topic)
            coordinated.add(coordinator == leader)
    finally:
        for client in clients:
            await client.close()


async def test_a_silent_session_sees_a_reset_through_another_node(cluster: Cluster) -> None:
    """A member that stands still expires. Its share session lasts as long as its connection, and continues later."""
    nodes = cluster(2)
    clients = [await WireClient.connect(node.bootstrap) for node in nodes]
    try:
        topic = fresh("topic")
        topic_id = await create_topic(clients[0], topic, 1)
        await send(clients[0], topic)
        while True:
            group_id = fresh("share")
            coordinator = await begin(clients, group_id, topic)
            reader = Reader(clients[1 - coordinator], group_id, topic, topic_id)
            part = part_of(await reader.ask())
            assert part is not None
            if not part.error_code:
                break
        assert await reader.acknowledge((0, 0, ACCEPT)) == NONE
        await begin(clients, group_id, topic)
        await asyncio.sleep(SILENT_S + 0.1)
        assert await reader.fetch() == [(0, 0, 1)]
    finally:
        for client in clients:
            await client.close()


async def test_another_node_continues_where_the_killed_leader_stopped(cluster: Cluster) -> None:
    nodes = cluster(2, environment=QUICK_TTL)
    clients = [await WireClient.connect(node.bootstrap) for node in nodes]
    try:
        group_id, topic = fresh("share"), fresh("topic")
        topic_id = await create_topic(clients[0], topic, 1)
        for _ in range(3):
            await send(clients[0], topic)
        await begin(clients, group_id, topic)
        readers = [Reader(client, group_id, topic, topic_id) for client in clients]
        parts = [part_of(await reader.ask()) for reader in readers]
        (leader,) = [at for at, part in enumerate(parts) if part is not None and not part.error_code]
        other = 1 - leader
        led, elsewhere = parts[leader], parts[other]
        assert led is not None
        assert elsewhere is not None
        assert [(each.first_offset, each.last_offset) for each in led.acquired_records] == [(0, 2)]
        assert elsewhere.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        named = FetchTopic(topic_id=topic_id, partitions=(FetchPartition(partition_index=0),))
        answer = await readers[other].ask(topics=(named,))
        endpoints = {node.node_id: f"{node.host}:{node.port}" for node in answer.node_endpoints}
        assert endpoints[elsewhere.current_leader.leader_id] == nodes[leader].bootstrap
        assert await readers[leader].acknowledge((1, 1, ACCEPT)) == NONE
        nodes[leader].kill()
        async with asyncio.timeout(TAKEN_OVER_S):
            while True:
                part = part_of(await readers[other].ask(max_wait_ms=100))
                if part is not None and part.acquired_records:
                    break
                await asyncio.sleep(0.05)
        acquired = [(each.first_offset, each.last_offset, each.delivery_count) for each in part.acquired_records]
        assert acquired == [(0, 0, 2), (2, 2, 2)]
        assert await readers[other].acknowledge((0, 0, ACCEPT), (2, 2, ACCEPT)) == NONE
    finally:
        for client in clients:
            await client.close()
