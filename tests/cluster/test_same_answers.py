"""Every node gives the same answer, or says which node can answer.

Kafka's rule is that every node answers for the cluster, with three exceptions. Only a group's coordinator answers for
the group; all other nodes answer NOT_COORDINATOR. A node's own settings are described by the node alone. ListGroups
lists the groups that the node coordinates; admin clients ask all nodes and merge the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from confluent_kafka import Consumer, IsolationLevel, Producer, TopicPartition
from confluent_kafka import ConsumerGroupTopicPartitions as OffsetsOf
from confluent_kafka.admin import (
    AdminClient,
    OffsetSpec,  # pyright: ignore[reportPrivateImportUsage]
)

from protocol.errors import ErrorCode
from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from protocol.messages.describe_cluster import DescribeClusterRequest
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from protocol.messages.describe_groups import DescribeGroupsRequest
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.metadata import MetadataRequest
from protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from tests.clients.topics import create_topic
from tests.closing import close
from tests.cluster.conftest import balanced
from tests.cluster.groups import commit, connected, group_coordinated_by
from tests.conftest import gateways
from tests.gateway_process import GatewayProcess
from tests.postgres import SERVED, Databases
from tests.steps.command import sluice
from tests.steps.waiting import wait_for

PARTITIONS = 4
RECORDS = 10
TIMEOUT_S = 30
FIRST_MS = 1_700_000_000_000
"""Timestamp of the first record of each partition. Each later record is one second later."""
TOPIC, BROKER, GROUP = 2, 4, 32
SET = 0


@dataclass(frozen=True)
class Scene:
    """Three nodes, and the topics and groups that clients of each node have created."""

    nodes: Sequence[GatewayProcess]
    topics: Sequence[str]
    classic: dict[str, GatewayProcess]
    """Groups that have a member, by id, each with the node that coordinates it."""
    consumer: dict[str, GatewayProcess]
    empty: dict[str, GatewayProcess]
    """Groups with committed offsets and without members."""

    @property
    def groups(self) -> dict[str, GatewayProcess]:
        return {**self.classic, **self.consumer, **self.empty}


@pytest.fixture(scope="module")
def scene(postgres: Databases) -> Iterator[Scene]:
    url = postgres.create(SERVED)
    with contextlib.ExitStack() as stack:
        stack.callback(postgres.drop, url)
        factory = stack.enter_context(gateways(postgres))
        nodes = [factory(environment={"SLUICE_RACK": f"rack-{number}"}, database_url=url) for number in range(3)]
        balanced(nodes)
        topics = [create_topic(node.bootstrap, PARTITIONS) for node in nodes]
        alter(nodes[0], TOPIC, topics[2], "retention.ms", "999999999999")
        alter(nodes[1], BROKER, "", "log.retention.ms", "-1")
        for node, topic in zip(nodes[1:] + nodes[:1], topics, strict=True):
            write(node, topic)
        found: dict[str, dict[str, GatewayProcess]] = {}
        for protocol in ("classic", "consumer", "empty"):
            found[protocol] = {group_coordinated_by(node, nodes): node for node in nodes}
            for number, group in enumerate(found[protocol]):
                # Change the group's setting through a node that is not the group's coordinator.
                node, places = nodes[number - 1], [TopicPartition(topics[number], 0, number + 1)]
                alter(node, GROUP, group, "group.handoff.mode", "drain")
                if protocol == "empty":
                    commit(node, group, places)
                else:
                    consumer = stack.enter_context(member(node, group, protocol, topics[number]))
                    consumer.commit(offsets=places, asynchronous=False)
        yield Scene(nodes, topics, **found)


def write(node: GatewayProcess, topic: str) -> None:
    producer = Producer({"bootstrap.servers": node.bootstrap})
    for number in range(RECORDS * PARTITIONS):
        at_ms = FIRST_MS + number // PARTITIONS * 1000
        producer.produce(topic, b"%d" % number, partition=number % PARTITIONS, timestamp=at_ms)
    assert producer.flush(TIMEOUT_S) == 0


def alter(node: GatewayProcess, kind: int, name: str, key: str, value: str) -> None:
    """Alter a setting by a frame, because librdkafka has no name for a setting of all brokers."""

    async def send() -> None:
        config = AlterableConfig(name=key, config_operation=SET, value=value)
        resource = AlterConfigsResource(resource_type=kind, resource_name=name, configs=(config,))
        async with connected([node]) as (client,):
            answer = await client.send(IncrementalAlterConfigsRequest(resources=(resource,)), 1)
        assert [each.error_code for each in answer.responses] == [ErrorCode.NONE], answer

    asyncio.run(send())


@contextlib.contextmanager
def member(node: GatewayProcess, group: str, protocol: str, topic: str) -> Iterator[Consumer]:
    """Run a consumer that owns the topic's partitions and commits only when a test says so."""
    consumer = Consumer(
        {
            "bootstrap.servers": node.bootstrap,
            "group.id": group,
            "group.protocol": protocol,
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.subscribe([topic])

        def assigned() -> bool:
            consumer.poll(0.1)
            return len(consumer.assignment()) == PARTITIONS

        wait_for(assigned, f"{group} has no partitions", seconds=TIMEOUT_S)
        yield consumer
    finally:
        close(consumer)


# --- frames -------------------------------------------------------------------------------------------------------


async def ask(scene: Scene, request: Any, version: int) -> list[Any]:
    """Send the request to every node and return all answers."""
    async with connected(scene.nodes) as clients:
        return await asyncio.gather(*(client.send(request, version) for client in clients))


async def same(scene: Scene, request: Any, version: int) -> Any:
    """Send the request to every node. Assert that all answers are equal, and return the answer."""
    first, *others = await ask(scene, request, version)
    for other in others:
        assert other == first
    return first


async def test_every_node_gives_the_same_metadata_and_cluster_description(scene: Scene) -> None:
    answers = await ask(scene, MetadataRequest(topics=None, include_topic_authorized_operations=True), 12)
    # Neither list has a defined order, so sort both.
    first, *others = [
        replace(
            answer,
            brokers=tuple(sorted(answer.brokers, key=lambda broker: broker.node_id)),
            topics=tuple(sorted(answer.topics, key=lambda topic: topic.name)),
        )
        for answer in answers
    ]
    for other in others:
        assert other == first
    assert [f"{broker.host}:{broker.port}" for broker in first.brokers] == [node.bootstrap for node in scene.nodes]
    assert [broker.rack for broker in first.brokers] == ["rack-0", "rack-1", "rack-2"]
    assert {topic.name for topic in first.topics} >= set(scene.topics)
    leaders = {partition.leader_id for topic in first.topics for partition in topic.partitions}
    assert leaders == {broker.node_id for broker in first.brokers}, "every node is to lead something"
    described = await same(scene, DescribeClusterRequest(include_cluster_authorized_operations=True), 1)
    assert [broker.broker_id for broker in described.brokers] == [broker.node_id for broker in first.brokers]
    assert (described.cluster_id, described.controller_id) == (first.cluster_id, first.controller_id)


def resource_of(kind: int, name: str) -> DescribeConfigsResource:
    return DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=None)


async def test_every_node_describes_the_same_settings_of_topics_groups_and_all_brokers(scene: Scene) -> None:
    resources = [(TOPIC, topic) for topic in scene.topics] + [(GROUP, group) for group in scene.groups] + [(BROKER, "")]
    request = DescribeConfigsRequest(
        resources=tuple(resource_of(kind, name) for kind, name in resources), include_synonyms=True
    )
    answer = await same(scene, request, 4)
    assert all(result.error_code == ErrorCode.NONE for result in answer.results)
    told = {(r.resource_type, r.resource_name, entry.name): entry.value for r in answer.results for entry in r.configs}
    assert told[TOPIC, scene.topics[2], "retention.ms"] == "999999999999"
    assert told[TOPIC, scene.topics[0], "retention.ms"] == "-1"
    assert told[BROKER, "", "log.retention.ms"] == "-1"
    assert all(told[GROUP, group, "group.handoff.mode"] == "drain" for group in scene.groups)


async def test_a_node_describes_itself_and_refuses_to_describe_another(scene: Scene) -> None:
    brokers = (await ask(scene, DescribeClusterRequest(), 1))[0].brokers
    for number, broker in enumerate(brokers):
        request = DescribeConfigsRequest(resources=(resource_of(BROKER, str(broker.broker_id)),))
        answers = await ask(scene, request, 4)
        codes = [answer.results[0].error_code for answer in answers]
        assert codes == [ErrorCode.NONE if i == number else ErrorCode.INVALID_REQUEST for i in range(3)]
        told = {entry.name: entry.value for entry in answers[number].results[0].configs}
        assert told["advertised.listeners"] == f"PLAINTEXT://{scene.nodes[number].bootstrap}"
        assert told["broker.rack"] == f"rack-{number}"


@pytest.mark.parametrize(
    ("timestamp", "offset"), [(-1, RECORDS), (-2, 0), (-3, RECORDS - 1), (FIRST_MS + 4500, 5), (FIRST_MS + 10**6, -1)]
)
async def test_every_node_lists_the_same_offsets_of_partitions(scene: Scene, timestamp: int, offset: int) -> None:
    parts = tuple(ListOffsetsPartition(partition_index=index, timestamp=timestamp) for index in range(PARTITIONS))
    topics = tuple(ListOffsetsTopic(name=topic, partitions=parts) for topic in scene.topics)
    answer = await same(scene, ListOffsetsRequest(replica_id=-1, topics=topics), 7)
    found = [(part.error_code, part.offset) for topic in answer.topics for part in topic.partitions]
    assert found == [(ErrorCode.NONE, offset)] * (PARTITIONS * len(scene.topics))


async def test_each_group_is_listed_by_its_coordinator_alone(scene: Scene) -> None:
    answers = await ask(scene, ListGroupsRequest(), 5)
    listed = {
        (group.group_id, group.group_type, group.group_state): scene.nodes[number]
        for number, answer in enumerate(answers)
        for group in answer.groups
    }
    assert len(listed) == sum(len(answer.groups) for answer in answers)
    assert listed == {
        **{(group, "classic", "Stable"): node for group, node in scene.classic.items()},
        **{(group, "consumer", "Stable"): node for group, node in scene.consumer.items()},
        **{(group, "classic", "Empty"): node for group, node in scene.empty.items()},
    }


async def test_groups_are_described_by_the_coordinator_that_every_node_names(scene: Scene) -> None:
    asked = tuple(scene.groups)
    answer = await same(scene, FindCoordinatorRequest(key_type=0, coordinator_keys=asked), 4)
    named = {each.key: f"{each.host}:{each.port}" for each in answer.coordinators}
    assert named == {group: node.bootstrap for group, node in scene.groups.items()}

    answers = await ask(scene, DescribeGroupsRequest(groups=tuple(scene.classic)), 5)
    for node, answer in zip(scene.nodes, answers, strict=True):
        for group in answer.groups:
            told = group.error_code, group.group_state, len(group.members)
            own = scene.classic[group.group_id] is node
            assert told == ((ErrorCode.NONE, "Stable", 1) if own else (ErrorCode.NOT_COORDINATOR, "", 0))
    answers = await ask(scene, ConsumerGroupDescribeRequest(group_ids=tuple(scene.consumer)), 1)
    for node, answer in zip(scene.nodes, answers, strict=True):
        for group in answer.groups:
            told = group.error_code, group.group_state, len(group.members)
            own = scene.consumer[group.group_id] is node
            assert told == ((ErrorCode.NONE, "Stable", 1) if own else (ErrorCode.NOT_COORDINATOR, "", 0))


async def test_committed_offsets_are_returned_by_the_coordinator_alone(scene: Scene) -> None:
    request = OffsetFetchRequest(
        groups=tuple(OffsetFetchRequestGroup(group_id=group, topics=None) for group in scene.groups)
    )
    for node, answer in zip(scene.nodes, await ask(scene, request, 8), strict=True):
        for group in answer.groups:
            told = (
                group.error_code,
                [
                    (topic.name, part.partition_index, part.committed_offset)
                    for topic in group.topics
                    for part in topic.partitions
                ],
            )
            number = scene.nodes.index(scene.groups[group.group_id])
            own = scene.groups[group.group_id] is node
            assert told == (
                (ErrorCode.NONE, [(scene.topics[number], 0, number + 1)]) if own else (ErrorCode.NOT_COORDINATOR, [])
            )


@pytest.mark.parametrize("version", [7, 8])
async def test_offset_fetch_at_another_node_names_the_partitions_of_a_consumer(scene: Scene, version: int) -> None:
    """If the answer does not name a partition whose OffsetFetch failed, librdkafka never reads this partition again."""
    group, owner = next(iter(scene.groups.items()))
    asked = (OffsetFetchRequestTopic(name="any", partition_indexes=(0, 3)),)
    several = (OffsetFetchRequestTopics(name="any", partition_indexes=(0, 3)),)
    for stable in (True, False):
        if version < 8:
            request = OffsetFetchRequest(group_id=group, topics=asked, require_stable=stable)
        else:
            groups = (OffsetFetchRequestGroup(group_id=group, topics=several),)
            request = OffsetFetchRequest(groups=groups, require_stable=stable)
        for node, answer in zip(scene.nodes, await ask(scene, request, version), strict=True):
            if node is owner:
                continue
            told = answer if version < 8 else answer.groups[0]
            codes = [
                (part.partition_index, part.committed_offset, part.error_code)
                for topic in told.topics
                for part in topic.partitions
            ]
            assert told.error_code == ErrorCode.NOT_COORDINATOR
            again = ErrorCode.UNSTABLE_OFFSET_COMMIT
            assert codes == [(0, -1, again), (3, -1, again)]


# --- a stock client, the metrics, the command line ----------------------------------------------------------------


def of_each(scene: Scene, look: Callable[[AdminClient], Any]) -> Any:
    """Call `look` for each node and return the result, which must be the same for all nodes."""
    first, *others = [look(AdminClient({"bootstrap.servers": node.bootstrap})) for node in scene.nodes]
    for other in others:
        assert other == first
    return first


def test_a_stock_admin_client_sees_the_same_cluster_through_every_node(scene: Scene) -> None:
    def cluster(admin: AdminClient) -> Any:
        told = admin.describe_cluster().result(TIMEOUT_S)
        return told.cluster_id, sorted((node.id, node.host, node.port, node.rack) for node in told.nodes)

    def groups(admin: AdminClient) -> Any:
        told = admin.list_consumer_groups().result(TIMEOUT_S)
        assert not told.errors
        return sorted((each.group_id, each.state.name, each.type.name) for each in told.valid)

    def described(admin: AdminClient) -> Any:
        told = {
            name: each.result(TIMEOUT_S) for name, each in admin.describe_consumer_groups(list(scene.groups)).items()
        }
        return {
            name: (
                each.state.name,
                each.coordinator.id,
                [(m.member_id, m.client_id, sorted(map(place, m.assignment.topic_partitions))) for m in each.members],
            )
            for name, each in told.items()
        }

    def committed(admin: AdminClient) -> Any:
        told = {group: admin.list_consumer_group_offsets([OffsetsOf(group)])[group] for group in scene.groups}
        return {group: sorted(map(place, answer.result(TIMEOUT_S).topic_partitions)) for group, answer in told.items()}

    def ends(admin: AdminClient) -> Any:
        places = [TopicPartition(topic, index) for topic in scene.topics for index in range(PARTITIONS)]
        asked: Any = {each: OffsetSpec.latest() for each in places}
        told = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
        return {place(each): answer.result(TIMEOUT_S).offset for each, answer in told.items()}

    assert len(of_each(scene, cluster)[1]) == 3
    assert {name for name, _, _ in of_each(scene, groups)} == set(scene.groups)
    told = of_each(scene, described)
    assert all(len(told[group][2][0][2]) == PARTITIONS for group in {**scene.classic, **scene.consumer})
    assert all(len(each) == 1 for each in of_each(scene, committed).values())
    assert set(of_each(scene, ends).values()) == {RECORDS}


def place(each: TopicPartition) -> tuple[str, int, int]:
    return each.topic, each.partition, each.offset


def test_one_node_exports_the_metrics_of_the_cluster(scene: Scene) -> None:
    def samples(node: GatewayProcess) -> set[str]:
        with urllib.request.urlopen(f"{node.metrics_url}/metrics", timeout=TIMEOUT_S) as answer:
            return set(re.findall(r"^kafka_.*$", answer.read().decode(), re.MULTILINE))

    (exported,) = [found for found in map(samples, scene.nodes) if found]
    assert "kafka_brokers 3.0" in exported
    for number, group in enumerate(scene.classic):
        labels = f'consumergroup="{group}",partition="0",topic="{scene.topics[number]}"'
        assert f"kafka_consumergroup_lag{{{labels}}} {RECORDS - number - 1:.1f}" in exported
        assert f'kafka_consumergroup_members{{consumergroup="{group}"}} 1.0' in exported


def test_the_command_line_shows_the_same_lag_through_every_node(scene: Scene) -> None:
    answers: list[Any] = []
    for node in scene.nodes:
        told = sluice("groups", "lag", "--json", "--by-partition", "--bootstrap", node.bootstrap)
        assert told.returncode == 0, told.stderr
        answers.append(json.loads(told.stdout))
    assert answers[1:] == answers[:1] * 2
    lag = {(row["group"], row["partition"]): row["lag"] for row in answers[0] if row["lag"] is not None}
    for number, group in enumerate(scene.consumer):
        assert lag[group, 0] == RECORDS - number - 1
