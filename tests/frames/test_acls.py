"""ACLs on a running cluster: every API checks them, refuses clients without permission, and serves clients with
permission.

Two nodes serve one cluster, and all clients are `User:ANONYMOUS`. On one node this user is a super user; on the other
node ACLs decide what it may do.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import aiohttp
import pytest

from bench.worst_requests import MEMBER, addressed, filled
from gateway.apis import SERVED
from gateway.apis.permissions import DEMANDS, FREE, of_topology
from gateway.coordinator.streams.topology import StatusCode
from gateway.security.kinds import AclOperation as Op
from gateway.security.kinds import PatternType, Permission, ResourceType
from protocol.api_keys import ApiKey
from protocol.codec import request_class
from protocol.errors import ErrorCode
from protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from protocol.messages.alter_share_group_offsets import AlterShareGroupOffsetsRequest
from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.create_acls import AclCreation, CreateAclsRequest
from protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.delete_acls import DeleteAclsFilter, DeleteAclsRequest
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from protocol.messages.describe_acls import DescribeAclsRequest
from protocol.messages.describe_cluster import DescribeClusterRequest
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from protocol.messages.describe_groups import DescribeGroupsRequest
from protocol.messages.describe_share_group_offsets import DescribeShareGroupOffsetsRequest
from protocol.messages.describe_topic_partitions import DescribeTopicPartitionsRequest, TopicRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.list_transactions import ListTransactionsRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_delete import OffsetDeleteRequest
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchRequestTopics
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.messages.share_acknowledge import ShareAcknowledgeRequest
from protocol.messages.share_fetch import FetchPartition as SharePartition
from protocol.messages.share_fetch import FetchTopic as ShareTopic
from protocol.messages.share_fetch import ShareFetchRequest
from protocol.messages.streams_group_describe import StreamsGroupDescribeRequest
from protocol.messages.streams_group_heartbeat import StreamsGroupHeartbeatRequest
from protocol.messages.txn_offset_commit import TxnOffsetCommitRequest
from protocol.records import Record, build_batch
from protocol.schema import ZERO_UUID
from tests.conftest import gateways
from tests.frames.members import create_topic, fresh
from tests.frames.streams import Instance, counting
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.postgres import Databases
from tests.secured import AUTHORIZER
from tests.wire import WireClient

ME = "User:ANONYMOUS"
OK = ErrorCode.NONE
TOPIC, GROUP, CLUSTER, TRANSACTION = (
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
REFUSED = frozenset({TOPIC, GROUP, CLUSTER, TRANSACTION})
SHOWING = frozenset({ApiKey.LIST_GROUPS, ApiKey.LIST_TRANSACTIONS, ApiKey.DESCRIBE_CLUSTER})
"""APIs that omit what the client may not see, without an error. A broker shows every client the live brokers."""
OF_THE_KNOWN = frozenset({ApiKey.CREATE_DELEGATION_TOKEN, ApiKey.DESCRIBE_DELEGATION_TOKEN})
"""APIs that refuse every client that has not authenticated (`test_delegation_tokens.py`)."""


@dataclass
class Cluster:
    admin: WireClient
    """Connect a super user, to the node that checks no ACLs."""
    client: WireClient
    """Connect a client to the node that checks ACLs."""
    guarded: GatewayProcess

    async def create(self, *acls: AclCreation) -> None:
        answer = await self.admin.send(CreateAclsRequest(creations=acls), 3)
        assert [each.error_code for each in answer.results] == [OK] * len(acls), answer
        await self.follow()

    async def delete(self, *acls: AclCreation) -> None:
        answer = await self.admin.send(DeleteAclsRequest(filters=tuple(map(exactly, acls))), 3)
        assert [len(each.matching_acls) for each in answer.filter_results] == [1] * len(acls)
        await self.follow()

    async def follow(self) -> None:
        """Wait until the node that checks ACLs has the newest catalog. It refreshes the catalog when a client asks for
        settings.
        """
        await self.client.send(DescribeConfigsRequest(), 4)

    @asynccontextmanager
    async def allowing(self, *acls: AclCreation) -> AsyncIterator[None]:
        await self.create(*acls)
        try:
            yield
        finally:
            await self.delete(*acls)


def acl(
    operation: Op,
    kind: ResourceType,
    name: str = "kafka-cluster",
    *,
    pattern: PatternType = PatternType.LITERAL,
    permission: Permission = Permission.ALLOW,
    principal: str = ME,
) -> AclCreation:
    return AclCreation(
        resource_type=kind,
        resource_name=name,
        resource_pattern_type=pattern,
        principal=principal,
        host="*",
        operation=operation,
        permission_type=permission,
    )


def on_topic(operation: Op, name: str, **given: Any) -> AclCreation:
    return acl(operation, ResourceType.TOPIC, name, **given)


def on_group(operation: Op, name: str) -> AclCreation:
    return acl(operation, ResourceType.GROUP, name)


def on_cluster(operation: Op) -> AclCreation:
    return acl(operation, ResourceType.CLUSTER)


def exactly(made: AclCreation) -> DeleteAclsFilter:
    return DeleteAclsFilter(
        resource_type_filter=made.resource_type,
        resource_name_filter=made.resource_name,
        pattern_type_filter=made.resource_pattern_type,
        principal_filter=made.principal,
        host_filter=made.host,
        operation=made.operation,
        permission_type=made.permission_type,
    )


@pytest.fixture(scope="module")
def processes(postgres: Databases) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    with gateways(postgres) as start:
        admin = start({**AUTHORIZER, "super.users": f"User:root;{ME}"})
        yield admin, start(AUTHORIZER, database_url=admin.database_url)


@pytest.fixture
async def cluster(processes: tuple[GatewayProcess, GatewayProcess]) -> AsyncIterator[Cluster]:
    admin, guarded = processes
    async with (
        await WireClient.connect(admin.bootstrap) as as_admin,
        await WireClient.connect(guarded.bootstrap) as as_client,
    ):
        yield Cluster(as_admin, as_client, guarded)


def codes_in(answer: Any) -> Iterator[int]:
    """Yield every error code of an answer, at every level of nesting."""
    for field in dataclasses.fields(answer):
        value = getattr(answer, field.name)
        if field.name.endswith("error_code"):
            yield value
        for each in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(each):
                yield from codes_in(each)


def about(request: Any, topic_id: UUID) -> Any:
    """Return the request with this topic id in each field that holds a topic id."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        if field.name == "topic_id":
            changed[field.name] = topic_id
        elif isinstance(value, tuple):
            inner = (about(each, topic_id) if dataclasses.is_dataclass(each) else each for each in value)
            changed[field.name] = tuple(inner)
    return dataclasses.replace(request, **changed)


# --- every API ----------------------------------------------------------------------------------------------------


def test_every_served_api_is_in_the_table_or_free() -> None:
    served = {line.api_key for line in SERVED}
    assert served <= DEMANDS.keys() | FREE
    assert not DEMANDS.keys() & FREE
    assert all(demand.whole or demand.each for demand in DEMANDS.values())


@pytest.mark.parametrize(
    "line",
    [line for line in SERVED if line.api_key not in FREE | SHOWING | OF_THE_KNOWN],
    ids=lambda line: line.api_key.name,
)
async def test_client_without_acl_is_refused_and_super_user_is_not(cluster: Cluster, line: Any) -> None:
    topic_id = await create_topic(cluster.admin, fresh("identified"))
    for version in range(line.min_version, line.max_version + 1):
        request = addressed(filled(request_class(line.api_key), version, (), 1), line.api_key)
        # DeleteTopics takes a topic's name or id. Metadata does too, and takes ids from version 12 on.
        if line.api_key is not ApiKey.DELETE_TOPICS and (line.api_key is not ApiKey.METADATA or version >= 12):
            request = about(request, topic_id)
        answer = await cluster.client.send(request, version)
        assert REFUSED.intersection(codes_in(answer)), (version, answer)
        answer = await cluster.admin.send(request, version)
        assert not REFUSED.intersection(codes_in(answer)), (version, answer)


async def test_refused_requests_are_counted(cluster: Cluster) -> None:
    async def count() -> float:
        return await metric(cluster.guarded, 'sluice_authorizer_denials_total{operation="DESCRIBE",resource="TOPIC"}')

    before = await count()
    await topics_of(cluster.client, fresh("counted"))
    await cluster.client.send(MetadataRequest(topics=None), 12)
    assert await count() == before + 1, "what is left out of a listing was not asked for"


async def metric(process: GatewayProcess, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{process.metrics_url}/metrics") as answer:
        text = await answer.text()
    return next((float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)), 0.0)


# --- topics -------------------------------------------------------------------------------------------------------


async def topics_of(client: WireClient, *names: str, create: bool = False) -> dict[str | None, int]:
    asked = MetadataRequest(
        topics=tuple(MetadataRequestTopic(name=name) for name in names), allow_auto_topic_creation=create
    )
    return {each.name: each.error_code for each in (await client.send(asked, 12)).topics}


async def test_metadata(cluster: Cluster) -> None:
    seen, hidden, missing = fresh("seen"), fresh("hidden"), fresh("missing")
    seen_id, hidden_id = await create_topic(cluster.admin, seen), await create_topic(cluster.admin, hidden)
    async with cluster.allowing(on_topic(Op.READ, seen), on_topic(Op.DESCRIBE, missing)):
        assert await topics_of(cluster.client, seen, hidden, missing, create=True) == {
            seen: OK,
            hidden: TOPIC,
            missing: TOPIC,
        }, "to create one takes another permission"
        for version in (0, 12):
            listed = await cluster.client.send(MetadataRequest(topics=None if version else ()), version)
            assert {each.name for each in listed.topics} == {seen}
        by_id = MetadataRequest(
            topics=tuple(MetadataRequestTopic(name=None, topic_id=each) for each in (seen_id, hidden_id))
        )
        answer = await cluster.client.send(by_id, 12)
        assert [(each.name, each.topic_id, each.error_code) for each in answer.topics] == [
            (seen, seen_id, OK),
            (None, hidden_id, TOPIC),
        ]
    assert missing not in await topics_of(cluster.admin)
    async with cluster.allowing(on_topic(Op.DESCRIBE, missing), on_topic(Op.CREATE, missing)):
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert await topics_of(cluster.client, missing, create=True) == {missing: unknown}, "it is in the next answer"
        assert await topics_of(cluster.client, missing) == {missing: OK}


async def test_topics_page_by_page(cluster: Cluster) -> None:
    seen, hidden = fresh("seen"), fresh("hidden")
    for name in (seen, hidden):
        await create_topic(cluster.admin, name)
    async with cluster.allowing(on_topic(Op.DESCRIBE, seen)):
        named = DescribeTopicPartitionsRequest(topics=(TopicRequest(name=seen), TopicRequest(name=hidden)))
        answer = await cluster.client.send(named, 0)
        assert {each.name: (each.error_code, each.topic_id == ZERO_UUID) for each in answer.topics} == {
            seen: (OK, False),
            hidden: (TOPIC, True),
        }
        answer = await cluster.client.send(DescribeTopicPartitionsRequest(), 0)
        assert [each.name for each in answer.topics] == [seen]


async def test_authorized_operations_are_those_that_acls_allow(cluster: Cluster) -> None:
    name = fresh("operations")
    await create_topic(cluster.admin, name)
    asked = MetadataRequest(topics=(MetadataRequestTopic(name=name),), include_topic_authorized_operations=True)
    async with cluster.allowing(on_topic(Op.WRITE, name)):
        (topic,) = (await cluster.client.send(asked, 12)).topics
        assert topic.topic_authorized_operations == (1 << Op.WRITE) + (1 << Op.DESCRIBE)
    of_cluster = DescribeClusterRequest(include_cluster_authorized_operations=True)
    assert (await cluster.client.send(of_cluster, 2)).cluster_authorized_operations == 0
    async with cluster.allowing(on_cluster(Op.ALTER)):
        allowed = (await cluster.client.send(of_cluster, 2)).cluster_authorized_operations
        assert allowed == (1 << Op.ALTER) + (1 << Op.DESCRIBE)


async def test_topic_creation_needs_the_create_operation(cluster: Cluster) -> None:
    mine, other = fresh("mine"), fresh("other")
    asked = CreateTopicsRequest(
        topics=tuple(
            CreatableTopic(name=name, num_partitions=1, replication_factor=1)
            for name in (mine, other, "__cluster_metadata")
        )
    )

    async def created() -> dict[str, tuple[int, str | None, int]]:
        answer = await cluster.client.send(asked, 7)
        return {
            each.name: (each.error_code, each.error_message, each.topic_config_error_code) for each in answer.topics
        }

    prohibited = "Creation of internal topic __cluster_metadata is prohibited."
    async with cluster.allowing(on_topic(Op.CREATE, mine)):
        assert await created() == {
            mine: (OK, None, TOPIC),
            other: (TOPIC, "Authorization failed.", OK),
            "__cluster_metadata": (ErrorCode.INVALID_REQUEST, prohibited, OK),
        }
    async with cluster.allowing(on_cluster(Op.CREATE), on_topic(Op.DESCRIBE_CONFIGS, other)):
        assert (await created())[other] == (OK, None, OK)


async def test_refusal_does_not_reveal_the_number_of_partitions(cluster: Cluster) -> None:
    name = fresh("secret")
    await create_topic(cluster.admin, name)
    grow = CreatePartitionsRequest(topics=(CreatePartitionsTopic(name=name, count=1_000_000, assignments=None),))
    for topic in (name, fresh("missing")):
        asked = dataclasses.replace(grow, topics=(dataclasses.replace(grow.topics[0], name=topic),))
        (answer,) = (await cluster.client.send(asked, 3)).results
        assert answer.error_code == TOPIC
    async with cluster.allowing(on_topic(Op.ALTER, name)):
        (answer,) = (await cluster.client.send(grow, 3)).results
        assert answer.error_code == ErrorCode.POLICY_VIOLATION


async def test_topic_deletion_needs_the_delete_operation(cluster: Cluster) -> None:
    names = mine, seen, hidden, missing = fresh("mine"), fresh("seen"), fresh("hidden"), fresh("missing")
    ids = {name: await create_topic(cluster.admin, name) for name in (mine, seen, hidden)}

    async def deleted(*states: DeleteTopicState) -> list[tuple[str | None, int]]:
        answer = await cluster.client.send(DeleteTopicsRequest(topics=states), 6)
        return [(each.name, each.error_code) for each in answer.responses]

    async with cluster.allowing(on_topic(Op.DELETE, mine), on_topic(Op.DESCRIBE, seen), on_topic(Op.DESCRIBE, missing)):
        by_id = (DeleteTopicState(name=None, topic_id=ids[name]) for name in (seen, hidden))
        assert await deleted(*by_id) == [(seen, TOPIC), (None, TOPIC)]
        assert await deleted(*(DeleteTopicState(name=name) for name in names)) == [
            (mine, OK),
            (seen, TOPIC),
            (hidden, TOPIC),
            (missing, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ]
    async with cluster.allowing(on_cluster(Op.DELETE)):
        assert await deleted(DeleteTopicState(name=hidden)) == [(hidden, OK)]


async def test_settings(cluster: Cluster) -> None:
    mine, other = fresh("mine"), fresh("other")
    for name in (mine, other):
        await create_topic(cluster.admin, name)
    resources = ((2, mine), (2, other), (32, "g"), (4, ""))
    describing = DescribeConfigsRequest(
        resources=tuple(DescribeConfigsResource(resource_type=kind, resource_name=name) for kind, name in resources)
    )
    changed = (AlterableConfig(name="retention.ms", value="1000"),)
    altering = IncrementalAlterConfigsRequest(
        resources=tuple(
            AlterConfigsResource(resource_type=kind, resource_name=name, configs=changed) for kind, name in resources
        ),
        validate_only=True,
    )
    async with cluster.allowing(on_topic(Op.ALTER_CONFIGS, mine)):
        answer = await cluster.client.send(describing, 4)
        assert [(each.error_code, bool(each.configs)) for each in answer.results] == [
            (OK, True),
            (TOPIC, False),
            (GROUP, False),
            (CLUSTER, False),
        ]
        answer = await cluster.client.send(altering, 1)
        assert [each.error_code for each in answer.responses] == [OK, TOPIC, GROUP, CLUSTER]
    async with cluster.allowing(on_cluster(Op.DESCRIBE_CONFIGS), on_group(Op.DESCRIBE_CONFIGS, "g")):
        answer = await cluster.client.send(describing, 4)
        assert [each.error_code for each in answer.results] == [TOPIC, TOPIC, OK, OK]


# --- records ------------------------------------------------------------------------------------------------------


def producing(*topics: TopicProduceData, transactional_id: str | None = None, acks: int = -1) -> ProduceRequest:
    return ProduceRequest(transactional_id=transactional_id, acks=acks, timeout_ms=10_000, topic_data=topics)


def to(**named: Any) -> TopicProduceData:
    batch = build_batch([Record(0, 1_000, None, b"value")])
    return TopicProduceData(**named, partition_data=(PartitionProduceData(index=0, records=batch),))


async def test_produce_needs_the_write_operation(cluster: Cluster) -> None:
    mine, other, missing = fresh("mine"), fresh("other"), fresh("missing")
    ids = [await create_topic(cluster.admin, name) for name in (mine, other)]

    async def codes(request: ProduceRequest, version: int) -> list[int]:
        return [
            part.error_code
            for topic in (await cluster.client.send(request, version)).responses
            for part in topic.partition_responses
        ]

    assert await codes(producing(to(name=mine)), 9) == [TOPIC]
    async with cluster.allowing(on_topic(Op.WRITE, mine)):
        assert await codes(producing(to(name=mine)), 9) == [OK]
        assert await codes(producing(to(name=mine), to(name=other), to(name=missing)), 9) == [OK, TOPIC, TOPIC]
        assert await codes(producing(*(to(topic_id=each) for each in ids)), 13) == [OK, TOPIC]
        assert await codes(producing(to(name=mine), transactional_id="other's"), 9) == [TRANSACTION]
        async with await WireClient.connect(cluster.guarded.bootstrap) as unheard:
            unheard.send_only(producing(to(name=mine), to(name=other), acks=0), 9)
            await unheard.closed_by_peer()


async def test_fetch_needs_the_read_operation(cluster: Cluster) -> None:
    mine, other = fresh("mine"), fresh("other")
    ids = [await create_topic(cluster.admin, name) for name in (mine, other)]
    await cluster.admin.send(producing(to(name=mine), to(name=other)), 9)
    part = FetchPartition(partition=0, partition_max_bytes=1 << 20)
    by_name = tuple(FetchTopic(topic=name, partitions=(part,)) for name in (mine, other))
    by_id = tuple(FetchTopic(topic_id=each, partitions=(part,)) for each in ids)

    async def read(topics: tuple[FetchTopic, ...], version: int) -> list[tuple[int, bool]]:
        answer = await cluster.client.send(FetchRequest(max_wait_ms=0, topics=topics), version)
        return [(part.error_code, bool(part.records)) for each in answer.responses for part in each.partitions]

    for topics, version in ((by_name, 12), (by_id, 18)):
        async with cluster.allowing(on_topic(Op.READ, mine)):
            assert await read(topics, version) == [(OK, True), (TOPIC, False)]
        assert await read(topics, version) == [(TOPIC, False), (TOPIC, False)]


@pytest.mark.parametrize("deny_all", [False, True])
async def test_idempotent_producer_needs_write_on_any_topic(cluster: Cluster, deny_all: bool) -> None:
    async def begun() -> int:
        return (await cluster.client.send(InitProducerIdRequest(transactional_id=None), 5)).error_code

    assert await begun() == CLUSTER
    denied = (on_topic(Op.WRITE, "*", permission=Permission.DENY),) if deny_all else ()
    async with cluster.allowing(on_topic(Op.WRITE, fresh("one"), pattern=PatternType.PREFIXED), *denied):
        assert await begun() == (CLUSTER if deny_all else OK)
    async with cluster.allowing(on_cluster(Op.IDEMPOTENT_WRITE)):
        assert await begun() == OK


async def test_share_coordinators_are_for_brokers(cluster: Cluster) -> None:
    find = FindCoordinatorRequest(key_type=2, coordinator_keys=("group", "another"))

    async def codes() -> list[int]:
        return [each.error_code for each in (await cluster.client.send(find, 6)).coordinators]

    assert await codes() == [CLUSTER] * 2
    async with cluster.allowing(on_cluster(Op.CLUSTER_ACTION)):
        assert await codes() == [ErrorCode.INVALID_REQUEST] * 2


async def test_transactions(cluster: Cluster) -> None:
    mine, other, producer = fresh("mine"), fresh("other"), fresh("producer")
    for name in (mine, other):
        await create_topic(cluster.admin, name)
    begin = InitProducerIdRequest(transactional_id=producer, transaction_timeout_ms=60_000)
    assert (await cluster.client.send(begin, 4)).error_code == TRANSACTION
    granted = acl(Op.WRITE, ResourceType.TRANSACTIONAL_ID, producer)
    async with cluster.allowing(granted, on_topic(Op.WRITE, mine)):
        began = await cluster.client.send(begin, 4)
        assert began.error_code == OK
        add = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=producer,
            v3_and_below_producer_id=began.producer_id,
            v3_and_below_producer_epoch=began.producer_epoch,
            v3_and_below_topics=tuple(AddPartitionsToTxnTopic(name=name, partitions=(0,)) for name in (mine, other)),
        )
        answer = await cluster.client.send(add, 3)
        assert [
            part.partition_error_code
            for topic in answer.results_by_topic_v3_and_below
            for part in topic.results_by_partition
        ] == [ErrorCode.OPERATION_NOT_ATTEMPTED, TOPIC]
    listing = ListTransactionsRequest()
    shown = [
        {each.transactional_id for each in (await client.send(listing, 2)).transaction_states}
        for client in (cluster.client, cluster.admin)
    ]
    async with cluster.allowing(acl(Op.DESCRIBE, ResourceType.TRANSACTIONAL_ID, producer)):
        allowed = {each.transactional_id for each in (await cluster.client.send(listing, 2)).transaction_states}
    assert shown[0] == set()
    assert producer in shown[1] | allowed, "each node lists those that it coordinates"


# --- groups -------------------------------------------------------------------------------------------------------


async def test_groups(cluster: Cluster) -> None:
    mine, other = await coordinated_by_the_guarded(cluster), fresh("other")
    topic, hidden = fresh("topic"), fresh("hidden")
    for name in (topic, hidden):
        await create_topic(cluster.admin, name)
    assert await coordinators(cluster.client, mine, other) == [GROUP, GROUP]
    granted = (on_group(Op.READ, mine), on_topic(Op.READ, topic))
    async with cluster.allowing(*granted):
        assert await coordinators(cluster.client, mine, other) == [OK, GROUP]
        described = await cluster.client.send(DescribeGroupsRequest(groups=(other, mine)), 6)
        assert {each.group_id: each.error_code == GROUP for each in described.groups} == {mine: False, other: True}
        commit = OffsetCommitRequest(
            group_id=mine,
            generation_id_or_member_epoch=-1,
            topics=tuple(
                OffsetCommitRequestTopic(
                    name=name, partitions=(OffsetCommitRequestPartition(partition_index=0, committed_offset=5),)
                )
                for name in (topic, hidden)
            ),
        )
        answer = await cluster.client.send(commit, 9)
        assert [part.error_code for each in answer.topics for part in each.partitions] == [OK, TOPIC]
        named = tuple(OffsetFetchRequestTopics(name=name, partition_indexes=(0,)) for name in (topic, hidden))
        for asked in (named, None):
            fetch = OffsetFetchRequest(
                groups=tuple(OffsetFetchRequestGroup(group_id=group, topics=asked) for group in (mine, other))
            )
            first, second = (await cluster.client.send(fetch, 9)).groups
            assert (first.error_code, second.error_code) == (OK, GROUP)
            told_of = {each.name: each.partitions[0].error_code for each in first.topics}
            assert told_of == ({topic: OK} if asked is None else {topic: OK, hidden: TOPIC})
        answer = await cluster.client.send(DeleteGroupsRequest(groups_names=(mine,)), 2)
        assert [each.error_code for each in answer.results] == [GROUP]


async def coordinated_by_the_guarded(cluster: Cluster) -> str:
    """Return a group whose coordinator is the node with ACLs."""
    port = int(cluster.guarded.bootstrap.rpartition(":")[2])
    async with asyncio.timeout(30):
        while True:
            name = fresh("mine")
            told = await cluster.admin.send(FindCoordinatorRequest(coordinator_keys=(name,)), 6)
            if told.coordinators[0].port == port:
                return name


async def test_group_pattern_matches_only_topics_that_the_member_may_describe(cluster: Cluster) -> None:
    prefix = fresh("logs")
    allowed, hidden = f"{prefix}-a", f"{prefix}-b"
    for name in (allowed, hidden):
        await create_topic(cluster.admin, name)
    ids = {name: await topic_id_of(cluster.admin, name) for name in (allowed, hidden)}
    group = await group_of(cluster)

    async def beat(epoch: int, **more: Any) -> Any:
        request = ConsumerGroupHeartbeatRequest(group_id=group, member_id="m", member_epoch=epoch, **more)
        return await cluster.client.send(request, 1)

    def given(answer: Any) -> set[UUID]:
        assert answer.error_code == OK, answer
        return {each.topic_id for each in answer.assignment.topic_partitions}

    join = {"rebalance_timeout_ms": 60_000, "subscribed_topic_regex": f"{prefix}.*", "topic_partitions": ()}
    async with cluster.allowing(on_group(Op.READ, group), on_topic(Op.READ, allowed)):
        joined = await beat(0, **join)
        assert given(joined) == {ids[allowed]}
        async with cluster.allowing(on_topic(Op.DESCRIBE, hidden)):
            more = await beat(joined.member_epoch)
            assert given(more) == set(ids.values())
        assert given(await beat(more.member_epoch)) == {ids[allowed]}
        assert (await beat(-1)).error_code == OK


async def group_of(cluster: Cluster) -> str:
    """Return a group whose coordinator is the node with ACLs."""
    port = int(cluster.guarded.bootstrap.rpartition(":")[2])
    names = tuple(fresh("group") for _ in range(100))
    async with asyncio.timeout(30):
        while True:
            # A node that has just started receives its share of the groups a moment later.
            told = await cluster.admin.send(FindCoordinatorRequest(coordinator_keys=names), 6)
            for each in told.coordinators:
                if each.port == port:
                    return each.key


async def topic_id_of(client: WireClient, name: str) -> UUID:
    answer = await client.send(MetadataRequest(topics=(MetadataRequestTopic(name=name),)), 12)
    return answer.topics[0].topic_id


async def coordinators(client: WireClient, *groups: str) -> list[int]:
    answer = await client.send(FindCoordinatorRequest(coordinator_keys=groups), 6)
    return [each.error_code for each in answer.coordinators]


async def test_group_without_describe_permission_is_not_listed(cluster: Cluster) -> None:
    """Commit to each group on both nodes. Only a group's coordinator accepts the commit, and either
    node may be that.
    """
    topic = fresh("topic")
    await create_topic(cluster.admin, topic)
    some = [fresh("listed") for _ in range(20)]

    async def commit(group: str) -> None:
        asked = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=-1,
            topics=(
                OffsetCommitRequestTopic(
                    name=topic, partitions=(OffsetCommitRequestPartition(partition_index=0, committed_offset=5),)
                ),
            ),
        )
        await cluster.admin.send(asked, 9)
        async with cluster.allowing(on_group(Op.READ, group), on_topic(Op.READ, topic)):
            await cluster.client.send(asked, 9)

    async def listed() -> set[str]:
        return {each.group_id for each in (await cluster.client.send(ListGroupsRequest(), 5)).groups}

    all_of_the_node: set[str] = set()
    async with asyncio.timeout(60):
        while not all_of_the_node & set(some):  # a node that has just started coordinates nothing yet
            for group in some:
                await commit(group)
            assert await listed() == set()
            async with cluster.allowing(on_cluster(Op.DESCRIBE)):
                all_of_the_node = await listed()
    one = next(iter(all_of_the_node))
    async with cluster.allowing(on_group(Op.DESCRIBE, one)):
        assert await listed() == {one}


# --- the ACLs themselves ------------------------------------------------------------------------------------------


async def test_changed_acls_apply_at_once_to_the_client_that_changed_them(cluster: Cluster) -> None:
    name = fresh("topic")
    await create_topic(cluster.admin, name)
    granted = on_topic(Op.DESCRIBE, name)
    async with cluster.allowing(on_cluster(Op.ALTER)):
        answer = await cluster.client.send(CreateAclsRequest(creations=(granted,)), 3)
        assert [each.error_code for each in answer.results] == [OK]
        assert await topics_of(cluster.client, name) == {name: OK}
        described = await cluster.client.send(
            DescribeAclsRequest(
                resource_type_filter=ResourceType.TOPIC,
                resource_name_filter=name,
                pattern_type_filter=PatternType.MATCH,
                principal_filter=None,
                host_filter=None,
                operation=Op.ANY,
                permission_type=Permission.ANY,
            ),
            3,
        )
        assert described.error_code == OK
        (resource,) = described.resources
        assert (resource.resource_type, resource.resource_name, resource.pattern_type) == (2, name, 3)
        (entry,) = resource.acls
        assert (entry.principal, entry.host, entry.operation, entry.permission_type) == (ME, "*", Op.DESCRIBE, 3)
        answer = await cluster.client.send(DeleteAclsRequest(filters=(exactly(granted),)), 3)
        assert [len(each.matching_acls) for each in answer.filter_results] == [1]
        assert await topics_of(cluster.client, name) == {name: TOPIC}


# --- groups on one node that allows everything that is not denied ----------------------------------------------------


@pytest.fixture(scope="module")
def alone(postgres: Databases) -> Iterator[GatewayProcess]:
    with gateways(postgres) as start:
        yield start({**AUTHORIZER, "allow.everyone.if.no.acl.found": "true"})


async def deny(client: WireClient, *acls: tuple[Op, ResourceType, str]) -> None:
    creations = tuple(acl(*each, permission=Permission.DENY) for each in acls)
    answer = await client.send(CreateAclsRequest(creations=creations), 3)
    assert [each.error_code for each in answer.results] == [OK] * len(acls), answer


async def test_topic_without_describe_permission_is_hidden_from_group_members(alone: GatewayProcess) -> None:
    async with await WireClient.connect(alone.bootstrap) as client:
        group, topic = fresh("group"), fresh("topic")
        await create_topic(client, topic)

        def joining(member: str) -> ConsumerGroupHeartbeatRequest:
            return ConsumerGroupHeartbeatRequest(
                group_id=group,
                member_id=member,
                member_epoch=0,
                rebalance_timeout_ms=10_000,
                subscribed_topic_names=(topic,),
                topic_partitions=(),
            )

        assert (await client.send(joining("one"), 1)).error_code == OK
        asked = ConsumerGroupDescribeRequest(group_ids=(group,))
        (shown,) = (await client.send(asked, 1)).groups
        assert (shown.error_code, len(shown.members)) == (OK, 1)
        await deny(client, (Op.DESCRIBE, ResourceType.TOPIC, topic))
        assert (await client.send(joining("two"), 1)).error_code == TOPIC
        (hidden,) = (await client.send(asked, 1)).groups
        told = "The group has described topic(s) that the client is not authorized to describe."
        assert (hidden.error_code, hidden.error_message, hidden.members) == (TOPIC, told, ())


async def test_internal_topics_of_a_topology_need_the_create_operation(alone: GatewayProcess) -> None:
    async with await WireClient.connect(alone.bootstrap) as client:
        group, topic = fresh("group"), fresh("topic")
        await create_topic(client, topic)
        one = Instance(client, group, counting(topic, group), "one")
        names = [name for name in of_topology(StreamsGroupHeartbeatRequest(topology=one.topology)) if name != topic]
        # A resource with an ACL is no longer open to all.
        granted = [on_cluster(Op.ALTER), *(on_topic(Op.DESCRIBE, name) for name in set(names))]
        answer = await client.send(CreateAclsRequest(creations=tuple(granted)), 3)
        assert [each.error_code for each in answer.results] == [OK] * len(granted)
        await one.join()
        detail = one.statuses[StatusCode.MISSING_INTERNAL_TOPICS]
        refused = detail.partition("; Unauthorized to CREATE on topics ")[2].removesuffix(".")
        assert sorted(refused.split(", ")) == sorted(set(names))
        assert set(names).isdisjoint(each.name for each in (await client.send(MetadataRequest(topics=None), 12)).topics)
        described = StreamsGroupDescribeRequest(group_ids=(group,))
        (shown,) = (await client.send(described, 0)).groups
        assert shown.error_code == OK
        await deny(client, (Op.DESCRIBE, ResourceType.TOPIC, topic))
        (hidden,) = (await client.send(described, 0)).groups
        told = "The described group uses topics that the client is not authorized to describe."
        assert (hidden.error_code, hidden.error_message, hidden.topology) == (TOPIC, told, None)


async def test_topics_of_groups_that_may_be_read(alone: GatewayProcess) -> None:
    """Every client may use the group, but not the topic."""
    async with await WireClient.connect(alone.bootstrap) as client:
        group, sharing, topic, other = fresh("group"), fresh("sharing"), fresh("topic"), fresh("other")
        topic_id = await create_topic(client, topic)
        await create_topic(client, other)
        await deny(client, (Op.READ, ResourceType.TOPIC, topic), (Op.DESCRIBE, ResourceType.TOPIC, topic))
        part = OffsetCommitRequestPartition(partition_index=0, committed_offset=0)
        commit = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=-1,
            topics=(OffsetCommitRequestTopic(name=other, partitions=(part,)),),
        )
        assert (await client.send(commit, 9)).topics[0].partitions[0].error_code == OK
        for request, version in (
            (
                ShareFetchRequest(
                    group_id=sharing,
                    member_id=MEMBER,
                    share_session_epoch=0,
                    topics=(ShareTopic(topic_id=topic_id, partitions=(SharePartition(partition_index=0),)),),
                ),
                2,
            ),
            (about(addressed(filled(ShareAcknowledgeRequest, 2, (), 1), ApiKey.SHARE_ACKNOWLEDGE), topic_id), 2),
            (filled(TxnOffsetCommitRequest, 2, (), 1), 2),
            (dataclasses.replace(filled(OffsetDeleteRequest, 0, (), 1), group_id=group), 0),
            (dataclasses.replace(filled(AlterShareGroupOffsetsRequest, 0, (), 1), group_id=sharing), 0),
            (filled(DescribeShareGroupOffsetsRequest, 1, (), 1), 1),
        ):
            asked = named_as(request, topic, sharing)
            if isinstance(request, ShareAcknowledgeRequest):
                # This fetch continues a session that an earlier fetch has opened.
                asked = dataclasses.replace(asked, group_id=sharing, member_id=MEMBER, share_session_epoch=1)
            answer = await client.send(asked, version)
            assert TOPIC in set(codes_in(answer)), (request, answer)
            assert not {GROUP, CLUSTER, TRANSACTION}.intersection(codes_in(answer))


def named_as(request: Any, topic: str, group: str) -> Any:
    """Return the request with this topic in each field that names a topic, and with this group in lists of groups."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        if field.name == "groups":
            value = tuple(dataclasses.replace(each, group_id=group) for each in value)
        if field.name in ("name", "topic_name"):
            changed[field.name] = topic
        elif isinstance(value, tuple):
            inner = (named_as(each, topic, group) if dataclasses.is_dataclass(each) else each for each in value)
            changed[field.name] = tuple(inner)
    return dataclasses.replace(request, **changed)


# --- requests to a controller ----------------------------------------------------------------------------------------


async def test_describing_controllers_needs_alter_on_the_cluster(gateway_factory: GatewayFactory) -> None:
    broker, controller = free_ports(2)
    listeners = {
        "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
        "controller.listener.names": "CONTROLLER",
    }
    admin = gateway_factory({**AUTHORIZER, "super.users": ME})
    guarded = gateway_factory({**AUTHORIZER, **listeners}, database_url=admin.database_url)
    async with (
        await WireClient.connect(admin.bootstrap) as as_admin,
        await WireClient.connect(f"127.0.0.1:{broker}") as as_client,
        await WireClient.connect(f"127.0.0.1:{controller}") as of_controller,
    ):
        cluster = Cluster(as_admin, as_client, guarded)
        asked = DescribeClusterRequest(endpoint_type=2)
        assert (await as_client.send(DescribeClusterRequest(), 1)).error_code == OK
        async with cluster.allowing(on_cluster(Op.DESCRIBE)):
            assert (await of_controller.send(asked, 1)).error_code == CLUSTER
        async with cluster.allowing(on_cluster(Op.ALTER)):
            answer = await of_controller.send(asked, 1)
            assert (answer.error_code, [each.port for each in answer.brokers]) == (OK, [controller])
