"""Nodes that share one address: a client reaches any of them, and every request is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from protocol.errors import ErrorCode
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.describe_groups import DescribeGroupsRequest
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.metadata import MetadataRequest
from tests.cluster.conftest import balanced
from tests.cluster.one_address import OneAddress, one_address
from tests.frames.members import Member, create_topic, fresh
from tests.postgres import Databases
from tests.wire import WireClient

NONE = ErrorCode.NONE
GROUPS = 8


@pytest.fixture(scope="module")
def shared(postgres: Databases) -> Iterator[OneAddress]:
    """Two nodes that the tests of this module share."""
    url = postgres.create()
    with one_address(postgres, url, 2) as running:
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
            answer = await client.send(MetadataRequest(), 12)
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


async def test_inter_broker_listener_names_each_node(shared: OneAddress) -> None:
    async with await WireClient.connect(shared.inside[0]) as client:
        answer = await client.send(MetadataRequest(topics=()), 12)
    assert {f"{each.host}:{each.port}" for each in answer.brokers} == set(shared.inside)
    assert 0 not in {each.node_id for each in answer.brokers}


async def test_any_node_answers_for_any_group(shared: OneAddress) -> None:
    """Members of each group are connected to different nodes, one of which coordinates the group."""
    async with connected(shared) as clients:
        group_ids = [fresh("group") for _ in range(GROUPS)]
        for group_id in group_ids:
            members = [Member(client, group_id) for client in clients]
            for member in members:
                await member.knock()
            joined = await asyncio.gather(*(member.join() for member in members))
            assert {each.error_code for each in joined} == {NONE}
            assert {each.generation_id for each in joined} == {joined[0].generation_id}
        for client in clients:
            listed = await client.send(ListGroupsRequest(), 4)
            assert listed.error_code == NONE
            assert {each.group_id for each in listed.groups} >= set(group_ids)
            described = await client.send(DescribeGroupsRequest(groups=tuple(group_ids)), 5)
            assert {each.group_id: each.error_code for each in described.groups} == dict.fromkeys(group_ids, NONE)
            assert {len(each.members) for each in described.groups} == {2}
        refused = await clients[0].send(DeleteGroupsRequest(groups_names=tuple(group_ids)), 2)
        assert {each.group_id: each.error_code for each in refused.results} == dict.fromkeys(
            group_ids, ErrorCode.NON_EMPTY_GROUP
        )
