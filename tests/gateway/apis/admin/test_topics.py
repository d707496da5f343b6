"""CreateTopics, DeleteTopics, CreatePartitions and the internal topic, on a real Postgres."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from gateway.apis.admin.new_topics import MAX_PARTITIONS_PER_REQUEST, plan_internal
from gateway.config.definition import ConfigSource
from gateway.config.topic import REPLICATION_FACTOR
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.create_partitions import (
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from protocol.messages.create_topics import CreatableReplicaAssignment, CreatableTopic, CreateTopicsRequest
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from protocol.schema import ZERO_UUID
from tests.gateway.admin import SHOWN_CONFIGS, AdminNode, admin_node, config_entries
from tests.steps.waiting import until_blocked


def partitions_of(node: AdminNode, name: str) -> int:
    topic = node.catalog.get(name)
    assert topic is not None
    return len(topic.partitions)


async def create(node: AdminNode, *topics: CreatableTopic, version: int = 7, validate_only: bool = False):
    answer = await node.ask(
        ApiKey.CREATE_TOPICS, CreateTopicsRequest(topics=topics, validate_only=validate_only), version
    )
    return answer.topics


def new(name: str, partitions: int = -1, factor: int = -1, **fields) -> CreatableTopic:
    return CreatableTopic(name=name, num_partitions=partitions, replication_factor=factor, **fields)


def assigned(*broker_ids: tuple[int, ...], first: int = 0) -> tuple[CreatableReplicaAssignment, ...]:
    return tuple(
        CreatableReplicaAssignment(partition_index=index, broker_ids=ids) for index, ids in enumerate(broker_ids, first)
    )


async def cut_at(url: str, topic: str, change: Awaitable[Any]) -> Any:
    """Return the result of the change, whose connection to Postgres ends when it changes this topic."""
    watcher, locker = await asyncpg.connect(url), await asyncpg.connect(url)
    try:
        async with locker.transaction():
            await locker.execute("select from sluice.topic where name = $1 for update", topic)
            changing = asyncio.ensure_future(change)
            await until_blocked(watcher)
            await watcher.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and wait_event_type = 'Lock'"
            )
            return await changing
    finally:
        await locker.close()
        await watcher.close()


# --- CreateTopics ---------------------------------------------------------------------------------------------------


async def test_create_at_every_version(database_url: str) -> None:
    async with admin_node(database_url) as node:
        for version in range(2, 8):
            name = f"v{version}"
            (result,) = await create(node, new(name, 3, 1), version=version)
            assert result.error_code == ErrorCode.NONE
            topic = node.catalog.get(name)
            assert topic is not None, "the catalog must know at once"
            assert len(topic.partitions) == 3
            assert not topic.internal
            if version >= 5:
                assert (result.num_partitions, result.replication_factor) == (3, 1)
                assert {config.name for config in result.configs} == SHOWN_CONFIGS
            if version >= 7:
                assert result.topic_id == topic.topic_id != ZERO_UUID
            assert await node.topics.find(name) == topic


async def test_configs_are_echoed_with_their_sources(database_url: str) -> None:
    async with admin_node(database_url, broker={"log.retention.hours": "2"}) as node:
        (result,) = await create(node, new("orders", configs=config_entries({"segment.ms": "500"})))
        configs = {config.name: (config.value, config.config_source) for config in result.configs}
        assert configs["segment.ms"] == ("500", ConfigSource.TOPIC_CONFIG)
        assert configs["retention.ms"] == ("7200000", ConfigSource.STATIC_BROKER_CONFIG)
        assert configs["cleanup.policy"] == ("delete", ConfigSource.DEFAULT_CONFIG)
        assert configs["flush.ms"] == (str(2**63 - 1), ConfigSource.DEFAULT_CONFIG)
        assert REPLICATION_FACTOR not in configs


async def test_defaults_apply_without_values(database_url: str) -> None:
    async with admin_node(database_url, broker={"num.partitions": "4", "default.replication.factor": "2"}) as node:
        (result,) = await create(node, new("orders"))
        assert (result.num_partitions, result.replication_factor) == (4, 2)


async def test_any_replication_factor_is_remembered(database_url: str) -> None:
    async with admin_node(database_url) as node:
        (result,) = await create(node, new("orders", 1, 3))
        assert (result.error_code, result.replication_factor) == (ErrorCode.NONE, 3)


async def test_manual_assignment_counts_partitions(database_url: str) -> None:
    async with admin_node(database_url, name="node-2"), admin_node(database_url) as node:
        (result,) = await create(node, new("orders", assignments=assigned((1, 2), (2, 1), (1, 2))))
        assert (result.error_code, result.num_partitions, result.replication_factor) == (ErrorCode.NONE, 3, 2)
        for assignments, words in (
            (assigned((1, 7)), "broker 7, but no such broker is registered"),
            (assigned((1, 1)), "the broker 1 more than once"),
            (assigned((1, 2), (1,)), r"1 replica\(s\), but .* previous partitions, which have 2"),
            (assigned(()), "an empty replica list"),
            (assigned((1,), first=1), "consecutive 0-based"),
        ):
            (result,) = await create(node, new("wrong", assignments=assignments))
            assert result.error_code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
            assert re.search(words, result.error_message)


async def test_more_replicas_than_nodes_are_accepted_and_live_nodes_are_shown(database_url: str) -> None:
    """Deliberate: Postgres provides durability, and a client that always asks for three replicas must not fail on one
    node.
    """
    async with admin_node(database_url) as node:
        (result,) = await create(node, new("orders", 1, 3))
        assert (result.error_code, result.replication_factor) == (ErrorCode.NONE, 3)


async def test_internal_topics_are_internal_by_their_names(database_url: str) -> None:
    async with admin_node(database_url) as node:
        results = await create(node, new("__transaction_state"), new("__share_group_state"), new("__cluster_metadata"))
        none, invalid = ErrorCode.NONE, ErrorCode.INVALID_REQUEST
        assert [result.error_code for result in results] == [none, none, invalid]
        assert results[2].error_message == "Creation of internal topic __cluster_metadata is prohibited."
        assert {topic.name: topic.internal for topic in node.catalog.topics()} == {
            "__transaction_state": True,
            "__share_group_state": True,
        }


async def test_validate_only_creates_nothing(database_url: str) -> None:
    async with admin_node(database_url) as node:
        (result,) = await create(node, new("orders", 3, 2), validate_only=True)
        assert (result.error_code, result.num_partitions, result.replication_factor) == (ErrorCode.NONE, 3, 2)
        assert await node.topics.find("orders") is None
        await node.create("orders")
        (result,) = await create(node, new("orders"), validate_only=True)
        assert result.error_code == ErrorCode.TOPIC_ALREADY_EXISTS


CREATE_REFUSALS = [
    (new(""), ErrorCode.INVALID_TOPIC_EXCEPTION),
    (new("."), ErrorCode.INVALID_TOPIC_EXCEPTION),
    (new(".."), ErrorCode.INVALID_TOPIC_EXCEPTION),
    (new("a" * 250), ErrorCode.INVALID_TOPIC_EXCEPTION),
    (new("with space"), ErrorCode.INVALID_TOPIC_EXCEPTION),
    (new("ünï"), ErrorCode.INVALID_TOPIC_EXCEPTION),
    (new("newline\n"), ErrorCode.INVALID_TOPIC_EXCEPTION),
    (new("a", 0), ErrorCode.INVALID_PARTITIONS),
    (new("a", -2), ErrorCode.INVALID_PARTITIONS),
    (new("a", 1, 0), ErrorCode.INVALID_REPLICATION_FACTOR),
    (new("a", 1, -2), ErrorCode.INVALID_REPLICATION_FACTOR),
    (new("a", 1, assignments=assigned((1,))), ErrorCode.INVALID_REQUEST),
    (new("a", -1, 1, assignments=assigned((1,))), ErrorCode.INVALID_REQUEST),
    (new("a", assignments=assigned((1,), first=1)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    (new("a", assignments=assigned((1,)) * 2), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    (new("a", assignments=assigned((1, 1))), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    (new("a", assignments=assigned((1,), (1, 2))), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    (new("a", assignments=assigned(())), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    (new("a", assignments=assigned((-1,))), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    (new("a", configs=config_entries({"no.such": "1"})), ErrorCode.INVALID_CONFIG),
    (new("a", configs=config_entries({"retention.ms": "soon"})), ErrorCode.INVALID_CONFIG),
    (new("a", configs=config_entries({"retention.ms": None})), ErrorCode.INVALID_CONFIG),
    (new("a", configs=config_entries({"compression.type": "brotli"})), ErrorCode.INVALID_CONFIG),
    (new("a", configs=config_entries({"remote.storage.enable": "true"})), ErrorCode.INVALID_CONFIG),
    (new("a", configs=config_entries({REPLICATION_FACTOR: "3"})), ErrorCode.INVALID_CONFIG),
    (new("a", configs=config_entries({"segment.ms": "1"}) * 2), ErrorCode.INVALID_CONFIG),
]


async def test_refusals(database_url: str) -> None:
    async with admin_node(database_url) as node:
        for index, (topic, code) in enumerate(CREATE_REFUSALS):
            bad, good = await create(node, topic, new(f"good{index}"))
            assert bad.error_code == code, topic
            assert bad.error_message
            assert good.error_code == ErrorCode.NONE, "one topic's refusal is not another's"
            assert {each.name for each in node.catalog.topics()} == {f"good{each}" for each in range(index + 1)}


async def test_invalid_config_is_named(database_url: str) -> None:
    async with admin_node(database_url) as node:
        (result,) = await create(node, new("a", configs=config_entries({"segment.ms": "9", "retention.ms": "soon"})))
        assert "retention.ms" in result.error_message
        assert "soon" in result.error_message


async def test_existing_topic_is_refused(database_url: str) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        await node.create("orders")
        (result,) = await create(node, new("orders"))
        assert result.error_code == ErrorCode.TOPIC_ALREADY_EXISTS
        (result,) = await create(other, new("orders"))
        assert result.error_code == ErrorCode.TOPIC_ALREADY_EXISTS


async def test_name_used_twice_in_one_request_is_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        results = await create(node, new("a"), new("b"), new("a"))
        assert [(result.name, result.error_code) for result in results] == [
            ("a", ErrorCode.INVALID_REQUEST),
            ("b", ErrorCode.NONE),
        ]
        assert await node.topics.find("a") is None


@pytest.mark.parametrize(("first", "second"), [("a.b", "a_b"), ("a_b.c", "a.b_c")])
async def test_colliding_names_are_refused(database_url: str, first: str, second: str) -> None:
    async with admin_node(database_url) as node:
        one, other = await create(node, new(first), new(second))
        assert (one.error_code, other.error_code) == (ErrorCode.NONE, ErrorCode.INVALID_TOPIC_EXCEPTION)
        (later,) = await create(node, new(second))
        assert later.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
        assert first in later.error_message


async def test_refused_topic_collides_with_no_other_of_its_request(database_url: str) -> None:
    async with admin_node(database_url) as node:
        one, other = await create(node, new("a.b", configs=config_entries({"retention.ms": "soon"})), new("a_b"))
        assert (one.error_code, other.error_code) == (ErrorCode.INVALID_CONFIG, ErrorCode.NONE)


async def test_too_many_partitions_in_one_request_are_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        half = MAX_PARTITIONS_PER_REQUEST // 2
        with pytest.raises(KafkaError) as refused:
            await create(node, new("a", half), new("b", half + 1))
        assert refused.value.code is ErrorCode.POLICY_VIOLATION
        assert node.catalog.topics() == []
        with pytest.raises(KafkaError) as refused:
            await create(node, new("no/name", MAX_PARTITIONS_PER_REQUEST + 1))
        assert refused.value.code is ErrorCode.POLICY_VIOLATION, "counted as asked, before any topic is looked at"


# --- the internal topic ---------------------------------------------------------------------------------------------


async def test_consumer_offsets_is_internal_and_may_be_deleted(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.topics.create([plan_internal("__consumer_offsets", node.catalog.broker)])
        await node.topics.create([plan_internal("__consumer_offsets", node.catalog.broker)])
        await node.catalog.refresh_if_changed()
        topic = node.catalog.get("__consumer_offsets")
        assert topic is not None
        assert (topic.internal, len(topic.partitions), topic.configs["cleanup.policy"]) == (True, 50, "compact")
        grown = await node.ask(
            ApiKey.CREATE_PARTITIONS,
            CreatePartitionsRequest(topics=(CreatePartitionsTopic(name=topic.name, count=60, assignments=None),)),
            3,
        )
        assert grown.results[0].error_code == ErrorCode.INVALID_REQUEST
        assert await node.topics.find(topic.name) == topic
        deleted = await node.ask(ApiKey.DELETE_TOPICS, DeleteTopicsRequest(topic_names=(topic.name,)), 5)
        assert deleted.responses[0].error_code == ErrorCode.NONE
        assert node.catalog.get(topic.name) is None
        assert await node.topics.find(topic.name) is None


# --- DeleteTopics ---------------------------------------------------------------------------------------------------


async def test_delete_by_name_at_every_version(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("kept")
        for version in range(1, 7):
            await delete_by_name(node, version)


async def delete_by_name(node: AdminNode, version: int) -> None:
    topic = await node.create("orders")
    states = (DeleteTopicState(name="orders"), DeleteTopicState(name="missing"))
    request = (
        DeleteTopicsRequest(topics=states)
        if version >= 6
        else DeleteTopicsRequest(topic_names=tuple(state.name or "" for state in states))
    )
    deleted, missing = (await node.ask(ApiKey.DELETE_TOPICS, request, version)).responses
    assert (deleted.name, deleted.error_code) == ("orders", ErrorCode.NONE)
    assert (missing.name, missing.error_code) == ("missing", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if version >= 6:
        assert deleted.topic_id == topic.topic_id
    assert node.catalog.get("orders") is None, "the catalog must know at once"
    assert node.catalog.get_by_id(topic.topic_id) is None
    assert [each.name for each in (await node.topics.changes(0)).topics] == ["kept"]


async def test_recreated_topic_has_another_id(database_url: str) -> None:
    async with admin_node(database_url) as node:
        first = await node.create("orders")
        await node.ask(ApiKey.DELETE_TOPICS, DeleteTopicsRequest(topic_names=("orders",)), 5)
        second = await node.create("orders")
        assert second.topic_id != first.topic_id
        assert {part.partition_key for part in second.partitions}.isdisjoint(
            part.partition_key for part in first.partitions
        )


async def test_delete_by_id(database_url: str) -> None:
    async with admin_node(database_url) as node:
        topic = await node.create("orders")
        unknown = uuid4()
        answer = await node.ask(
            ApiKey.DELETE_TOPICS,
            DeleteTopicsRequest(topics=(DeleteTopicState(topic_id=topic.topic_id), DeleteTopicState(topic_id=unknown))),
            6,
        )
        deleted, missing = answer.responses
        assert (deleted.name, deleted.error_code) == ("orders", ErrorCode.NONE)
        assert (missing.name, missing.topic_id, missing.error_code) == (None, unknown, ErrorCode.UNKNOWN_TOPIC_ID)


async def test_delete_refusals(database_url: str) -> None:
    async with admin_node(database_url) as node:
        topic = await node.create("orders")
        twice = await node.create("twice")
        answer = await node.ask(
            ApiKey.DELETE_TOPICS,
            DeleteTopicsRequest(
                topics=(
                    DeleteTopicState(name="orders", topic_id=topic.topic_id),
                    DeleteTopicState(),
                    DeleteTopicState(name="twice"),
                    DeleteTopicState(name="twice"),
                )
            ),
            6,
        )
        assert [result.error_code for result in answer.responses] == [ErrorCode.INVALID_REQUEST] * 3
        assert await node.topics.find("orders") == topic
        assert await node.topics.find("twice") == twice


async def test_deletion_is_refused_if_disabled(database_url: str) -> None:
    async with admin_node(database_url, broker={"delete.topic.enable": "false"}) as node:
        for version, code in ((1, 42), (2, 42), (3, 73), (6, 73)):
            with pytest.raises(KafkaError) as refused:
                await node.ask(ApiKey.DELETE_TOPICS, DeleteTopicsRequest(), version)
            assert refused.value.code == code


async def test_another_nodes_topic_can_be_deleted(database_url: str) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        await node.create("orders")
        answer = await other.ask(ApiKey.DELETE_TOPICS, DeleteTopicsRequest(topic_names=("orders",)), 5)
        assert answer.responses[0].error_code == ErrorCode.NONE


async def test_topics_that_were_deleted_before_postgres_failed_are_not_refused(database_url: str) -> None:
    """A client that repeats the request would get UNKNOWN_TOPIC_OR_PARTITION for a topic that it has deleted."""
    async with admin_node(database_url) as node:
        names = ("first", "second", "third")
        for name in names:
            await node.create(name)
        request = DeleteTopicsRequest(topics=tuple(DeleteTopicState(name=name) for name in names))
        answer = await cut_at(database_url, "second", node.ask(ApiKey.DELETE_TOPICS, request, 6))
        codes = {response.name: response.error_code for response in answer.responses}
        failed = ErrorCode.REQUEST_TIMED_OUT
        assert codes == {"first": ErrorCode.NONE, "second": failed, "third": failed}
        assert node.catalog.get("first") is None
        assert await node.topics.find("third") is not None


# --- CreatePartitions -----------------------------------------------------------------------------------------------


def growth(name: str, count: int, *broker_ids: tuple[int, ...]) -> CreatePartitionsTopic:
    assignments = tuple(CreatePartitionsAssignment(broker_ids=ids) for ids in broker_ids) or None
    return CreatePartitionsTopic(name=name, count=count, assignments=assignments)


async def grow(node: AdminNode, *topics: CreatePartitionsTopic, version: int = 3, validate_only: bool = False):
    request = CreatePartitionsRequest(topics=topics, validate_only=validate_only)
    return (await node.ask(ApiKey.CREATE_PARTITIONS, request, version)).results


async def test_create_partitions_at_every_version(database_url: str) -> None:
    async with admin_node(database_url) as node:
        before = await node.create("orders", 2)
        for version in range(4):
            (result,) = await grow(node, growth("orders", 5 + version), version=version)
            assert (result.name, result.error_code, result.error_message) == ("orders", ErrorCode.NONE, None)
            after = node.catalog.get("orders")
            assert after is not None
            assert len(after.partitions) == 5 + version
            grown = tuple(replace(each, partition_count=len(after.partitions)) for each in before.partitions)
            assert after.partitions[:2] == grown
            assert await node.topics.find("orders") == after


async def test_create_partitions_with_assignments(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("orders", 1)
        (result,) = await grow(node, growth("orders", 3, (1,), (1,)))
        assert result.error_code == ErrorCode.NONE
        assert partitions_of(node, "orders") == 3
        for wrong, words in (
            (growth("orders", 4, (1, 1)), "the broker 1 more than once"),
            (growth("orders", 4, (9,)), "no such broker is registered"),
            (growth("orders", 5, (1,)), r"add 2 additional partition\(s\), but only 1 assignment"),
        ):
            (result,) = await grow(node, wrong)
            assert result.error_code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
            assert re.search(words, result.error_message)


async def test_added_partitions_have_as_many_replicas_as_the_others(database_url: str) -> None:
    async with admin_node(database_url, name="node-2"), admin_node(database_url) as node:
        await node.create("orders", 1, factor=2)
        (result,) = await grow(node, growth("orders", 2, (1,)))
        assert result.error_code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
        assert "previous partitions, which have 2 replica(s)" in result.error_message
        (result,) = await grow(node, growth("orders", 2, (2, 1)))
        assert result.error_code == ErrorCode.NONE


async def test_create_partitions_validate_only(database_url: str) -> None:
    async with admin_node(database_url) as node:
        topic = await node.create("orders", 1)
        (result,) = await grow(node, growth("orders", 3), validate_only=True)
        assert result.error_code == ErrorCode.NONE
        assert await node.topics.find("orders") == topic


GROWTH_REFUSALS = [
    (growth("missing", 3), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    (growth("orders", 2), ErrorCode.INVALID_PARTITIONS),
    (growth("orders", 1), ErrorCode.INVALID_PARTITIONS),
    (growth("orders", -1), ErrorCode.INVALID_PARTITIONS),
    (growth("orders", 4, (1,)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    (growth("orders", 3, (1, 1)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    (growth("orders", 3, ()), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
]


async def test_create_partitions_refusals(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("orders", 2)
        await node.create("other", 1)
        for total, (topic, code) in enumerate(GROWTH_REFUSALS, 2):
            bad, good = await grow(node, topic, growth("other", total))
            assert bad.error_code == code, topic
            assert bad.error_message
            assert good.error_code == ErrorCode.NONE
            assert partitions_of(node, "orders") == 2


async def test_create_partitions_twice_for_one_topic_is_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("orders", 1)
        (result,) = await grow(node, growth("orders", 2), growth("orders", 3))
        assert result.error_code == ErrorCode.INVALID_REQUEST
        assert partitions_of(node, "orders") == 1


async def test_topics_that_were_extended_before_postgres_failed_are_not_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        names = ("first", "second", "third")
        for name in names:
            await node.create(name)
        results = await cut_at(database_url, "second", grow(node, *(growth(name, 2) for name in names)))
        failed = ErrorCode.REQUEST_TIMED_OUT
        assert [result.error_code for result in results] == [ErrorCode.NONE, failed, failed]
        assert [partitions_of(node, name) for name in names] == [2, 1, 1]


async def test_too_many_new_partitions_are_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("orders", 1)
        with pytest.raises(KafkaError) as refused:
            await grow(node, growth("orders", MAX_PARTITIONS_PER_REQUEST + 2))
        assert refused.value.code is ErrorCode.POLICY_VIOLATION


async def test_growth_of_a_topic_that_was_created_after_the_check_is_bounded(database_url: str) -> None:
    """One statement could otherwise make two billion partitions."""
    watcher, locker = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    async with admin_node(database_url) as node:
        async with locker.transaction():
            # The node reads this table when it looks for live nodes, behind the check of the request's total.
            await locker.execute("lock table sluice.finalized_feature")
            growing = asyncio.ensure_future(grow(node, growth("late", MAX_PARTITIONS_PER_REQUEST + 2)))
            await until_blocked(watcher)
            await node.create("late", 1)
        (result,) = await growing
        assert result.error_code == ErrorCode.POLICY_VIOLATION
        assert partitions_of(node, "late") == 1
    await locker.close()
    await watcher.close()
