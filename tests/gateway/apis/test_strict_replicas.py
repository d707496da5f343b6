"""Replication factors under strict replicas: how many replicas a topic may have, and which nodes hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.create_partitions import (
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from protocol.messages.create_topics import CreatableReplicaAssignment, CreatableTopic, CreateTopicsRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from storage.types import NewTopic, Roles, Topic
from tests.gateway.admin import AdminNode, admin_node

RACKS = ("a", "b", "a")


@asynccontextmanager
async def three(url: str, settings: dict[str, str] | None = None) -> AsyncIterator[list[AdminNode]]:
    """Start nodes 1 to 3, the second in another rack, each of which knows of the others."""
    broker = {"replicas.strict": "true", **(settings or {})}
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(admin_node(url, name=f"node-{number}", rack=rack, broker=broker))
            for number, rack in enumerate(RACKS, 1)
        ]
        for node in nodes:
            await node.membership.renew()
        yield nodes


async def create(
    node: AdminNode, name: str, count: int, factor: int, *, validate_only: bool = False
) -> tuple[int, str | None]:
    """Create a topic; return code and message."""
    topic = CreatableTopic(name=name, num_partitions=count, replication_factor=factor)
    request = CreateTopicsRequest(topics=(topic,), validate_only=validate_only)
    (result,) = (await node.ask(ApiKey.CREATE_TOPICS, request, 7)).topics
    if not result.error_code:
        assert result.num_partitions == (2 if count == -1 else count)
        assert result.replication_factor == (2 if factor == -1 else factor)
    return result.error_code, result.error_message


async def shown(node: AdminNode, name: str, code: ErrorCode = ErrorCode.NONE) -> list[tuple[int, ...]]:
    """Return the replicas of each partition as Metadata shows them; the leader is the first of them."""
    await node.catalog.refresh_if_changed()
    request = MetadataRequest(topics=(MetadataRequestTopic(name=name),), allow_auto_topic_creation=True)
    (topic,) = (await node.ask(ApiKey.METADATA, request, 12)).topics
    assert topic.error_code == code
    assert all(part.leader_id == part.replica_nodes[0] for part in topic.partitions)
    return [part.replica_nodes for part in topic.partitions]


async def grow(node: AdminNode, name: str, count: int, *assignments: tuple[int, ...]) -> tuple[int, str | None]:
    named = tuple(CreatePartitionsAssignment(broker_ids=ids) for ids in assignments) or None
    topic = CreatePartitionsTopic(name=name, count=count, assignments=named)
    (result,) = (await node.ask(ApiKey.CREATE_PARTITIONS, CreatePartitionsRequest(topics=(topic,)), 3)).results
    return result.error_code, result.error_message


@pytest.mark.parametrize("validate_only", [True, False])
async def test_no_topic_has_more_replicas_than_there_are_nodes(database_url: str, validate_only: bool) -> None:
    async with three(database_url, {"default.replication.factor": "4"}) as (one, two, three_):
        reason = (
            "Unable to replicate the partition 4 time(s): The target replication factor of 4 cannot be reached "
            "because only 3 broker(s) are registered."
        )
        refused = (ErrorCode.INVALID_REPLICATION_FACTOR, reason)
        for factor in (4, -1):
            assert await create(one, "orders", 1, factor, validate_only=validate_only) == refused
        assert await create(one, "orders", 1, 3, validate_only=True) == (ErrorCode.NONE, None)
        # A node that is not alive counts, and leads nothing.
        await two.membership.withdraw()
        for node in (one, three_):
            await node.membership.renew()
        assert await create(one, "orders", 4, 3) == (ErrorCode.NONE, None)
        placed = await shown(one, "orders")
        assert {frozenset(replicas) for replicas in placed} == {frozenset((1, 2, 3))}
        assert {replicas[0] for replicas in placed} == {1, 3}
        await one.membership.unregister(two.membership.node_id)
        code, message = await create(one, "others", 1, 3, validate_only=validate_only)
        assert code == ErrorCode.INVALID_REPLICATION_FACTOR
        assert "only 2 broker(s) are registered" in (message or "")
        # An automatic creation has no field for the reason of its failure.
        assert await shown(one, "automatic", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) == []
        assert one.catalog.get("automatic") is None


async def test_topic_has_the_requested_number_of_replicas(database_url: str) -> None:
    settings = {"default.replication.factor": "2", "num.partitions": "2"}
    async with three(database_url, settings) as nodes:
        for name, count, factor in (("all", 6, 3), ("two", 12, 2), ("one", 3, 1), ("default", -1, -1)):
            assert await create(nodes[0], name, count, factor) == (ErrorCode.NONE, None)
            placed = await shown(nodes[0], name)
            for node in nodes:
                assert await shown(node, name) == placed
            assert {len(replicas) for replicas in placed} == {2 if factor == -1 else factor}
            assert len(placed) == (2 if count == -1 else count)
            if factor > 1:
                assert all(2 in replicas[:2] for replicas in placed), "both racks"
            led = Counter(replicas[0] for replicas in placed)
            assert max(led.values()) - min(led.get(node_id, 0) for node_id in (1, 2, 3)) <= 1
        await shown(nodes[1], "automatic", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        assert [len(replicas) for replicas in await shown(nodes[1], "automatic")] == [2, 2]


async def test_leaders_of_topics_of_one_partition_are_spread_too(database_url: str) -> None:
    async with three(database_url) as (one, *_):
        topics = tuple(CreatableTopic(name=f"t{at}", num_partitions=1, replication_factor=1) for at in range(60))
        await one.ask(ApiKey.CREATE_TOPICS, CreateTopicsRequest(topics=topics), 7)
        assert {(await shown(one, topic.name))[0] for topic in topics} == {(1,), (2,), (3,)}


async def test_added_partitions_continue_after_the_last_placement(database_url: str) -> None:
    async with three(database_url) as (one, *_):
        assert await create(one, "orders", 2, 2) == (ErrorCode.NONE, None)
        assert await grow(one, "orders", 6) == (ErrorCode.NONE, None)
        placed = await shown(one, "orders")
        assert Counter(replicas[0] for replicas in placed) == {1: 2, 2: 2, 3: 2}
        assert all(2 in replicas for replicas in placed)


async def test_partition_without_named_replicas_is_held_by_its_leader_alone(database_url: str) -> None:
    async with three(database_url, {"default.replication.factor": "3"}) as (one, *_):
        (topic,) = await one.topics.create([NewTopic("older", 12, {})])
        assert isinstance(topic, Topic)
        placed = await shown(one, "older")
        assert {len(replicas) for replicas in placed} == {1}
        assert len(set(placed)) == 3, "placed by weight"
        code, message = await grow(one, "older", 13, (1, 2))
        assert (code, message) == (
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "The manual partition assignment includes a partition with 2 replica(s), but this is not consistent with "
            "previous partitions, which have 1 replica(s).",
        )
        assert await grow(one, "older", 13, (2,)) == (ErrorCode.NONE, None)
        assert (await shown(one, "older"))[12] == (2,)


async def test_any_replication_factor_is_accepted_without_the_setting(database_url: str) -> None:
    async with three(database_url, {"replicas.strict": "false"}) as (one, *_):
        assert await create(one, "orders", 1, 9) == (ErrorCode.NONE, None)
        (replicas,) = await shown(one, "orders")
        assert len(replicas) == 3
        topic = one.catalog.get("orders")
        assert topic is not None
        assert topic.partitions[0].assignment is None


@pytest.mark.parametrize("strict", ["true", "false"])
async def test_a_controller_places_nothing_while_all_brokers_are_fenced(database_url: str, strict: str) -> None:
    settings = {"replicas.strict": strict}
    refused, reason = ErrorCode.INVALID_REPLICATION_FACTOR, "All brokers are currently fenced."
    unmade = (refused, f"Unable to replicate the partition 1 time(s): {reason}")
    async with (
        admin_node(database_url, broker=settings) as broker,
        admin_node(database_url, name="node-2", broker=settings, roles=Roles(is_broker=False)) as controller,
    ):
        named = (CreatableReplicaAssignment(partition_index=0, broker_ids=(1,)),)
        topic = CreatableTopic(name="named", num_partitions=-1, replication_factor=-1, assignments=named)
        answer = await broker.ask(ApiKey.CREATE_TOPICS, CreateTopicsRequest(topics=(topic,)), 7)
        assert answer.topics[0].error_code == ErrorCode.NONE
        await broker.membership.withdraw()
        await controller.membership.renew()
        for validate_only in (True, False):
            made = await create(controller, "orders", 1, 1, validate_only=validate_only)
            assert made == (unmade if strict == "true" else (ErrorCode.NONE, None))
        assert await grow(controller, "named", 2) == (refused, reason)
