"""Metadata, DescribeTopicPartitions and DescribeCluster, on a real Postgres."""

from __future__ import annotations

import sys
from uuid import UUID, uuid4

import pytest

from gateway.apis.admin.new_topics import plan_internal
from gateway.apis.metadata import MAX_CREATED
from gateway.log.catalog import MAX_LOOKUPS
from gateway.net.context import Role
from gateway.quotas.limits import QuotaKey
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.describe_cluster import DescribeClusterRequest
from protocol.messages.describe_topic_partitions import Cursor, DescribeTopicPartitionsRequest, TopicRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.unregister_broker import UnregisterBrokerRequest
from protocol.schema import ZERO_UUID
from storage.errors import StorageUnavailable
from storage.types import ClientQuota, Roles, Topic
from tests.gateway.admin import CLUSTER_ID, AdminNode, admin_node

NOT_ASKED = -(2**31)
VERSIONS = range(14)


def named(*names: str | None) -> tuple[MetadataRequestTopic, ...]:
    return tuple(MetadataRequestTopic(name=name) for name in names)


def by_id(*ids: UUID) -> tuple[MetadataRequestTopic, ...]:
    return tuple(MetadataRequestTopic(topic_id=topic_id, name=None) for topic_id in ids)


async def ask(node: AdminNode, version: int, topics, *, create: bool = True, **flags):
    request = MetadataRequest(topics=topics, allow_auto_topic_creation=create, **flags)
    return await node.ask(ApiKey.METADATA, request, version)


def codes(answer) -> dict[str | None, int]:
    return {topic.name: topic.error_code for topic in answer.topics}


# --- what is there --------------------------------------------------------------------------------------------------


async def test_one_topic_at_every_version(database_url: str) -> None:
    async with admin_node(database_url, name="broker.example", rack="r1") as node:
        topic = await node.create("orders", 3)
        for version in VERSIONS:
            await check_one_topic(node, topic, version)


async def check_one_topic(node: AdminNode, topic: Topic, version: int) -> None:
    answer = await ask(node, version, named("orders"))
    (broker,) = answer.brokers
    assert (broker.node_id, broker.host, broker.port) == (1, "broker.example", 9092)
    (found,) = answer.topics
    assert (found.error_code, found.name, found.is_internal) == (ErrorCode.NONE, "orders", False)
    assert [part.partition_index for part in found.partitions] == [0, 1, 2]
    for part in found.partitions:
        assert (part.error_code, part.leader_id, part.replica_nodes, part.isr_nodes) == (0, 1, (1,), (1,))
        assert part.offline_replicas == ()
        assert part.leader_epoch == (topic.partitions[0].leader_epoch if version >= 7 else -1)
    if version >= 1:
        assert (answer.controller_id, broker.rack) == (1, "r1")
    if version >= 2:
        assert answer.cluster_id == CLUSTER_ID
    if version >= 8:
        assert found.topic_authorized_operations == NOT_ASKED
    if version >= 10:
        assert found.topic_id == topic.topic_id


async def test_a_large_answer_is_the_same_as_its_small_ones_before_and_after_every_change(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node caches encoded topics. The cache must follow changes of topics, live nodes and requested fields."""

    async def both(version: int, **flags: bool) -> None:
        kept = await ask(node, version, None if version else (), **flags)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["gateway.apis.metadata"], "MIN_PARTITIONS", 10**9)
            assert await ask(node, version, None if version else (), **flags) == kept
        assert len(kept.topics) == len(node.catalog.topics())

    monkeypatch.setattr(sys.modules["gateway.apis.metadata"], "MIN_PARTITIONS", 1)
    async with admin_node(database_url) as node:
        await node.create("a", 3)
        b = await node.create("b", 2)
        for version in VERSIONS:
            await both(version)
        for version in range(8, 14):
            await both(version, include_topic_authorized_operations=True)
        wider = await node.topics.create_partitions(b.topic_id, 5)
        assert isinstance(wider, Topic)
        await both(12)
        for listener in ("PLAINTEXT", "OTHER"):
            # The second time, the node comes back under its id before the first registration expires.
            async with admin_node(database_url, listeners={listener: ("other.example", 9092)}):
                await node.membership.renew()
                await both(12)
        await node.topics.delete(b.topic_id)
        await both(12)


async def test_null_means_all_topics_and_empty_means_none_except_in_version_0(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("a")
        await node.create("b")
        for version in VERSIONS:
            assert set(codes(await ask(node, version, ()))) == ({"a", "b"} if version == 0 else set())
            if version >= 1:
                assert set(codes(await ask(node, version, None))) == {"a", "b"}


async def test_topic_named_twice_is_described_once(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("a")
        assert [topic.name for topic in (await ask(node, 9, named("a", "a"))).topics] == ["a"]


async def test_internal_topic_is_marked_as_internal(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.topics.create([plan_internal("__consumer_offsets", node.catalog.broker)])
        await node.create("orders")
        answer = await ask(node, 12, None)
        assert {topic.name: (topic.is_internal, len(topic.partitions)) for topic in answer.topics} == {
            "__consumer_offsets": (True, 50),
            "orders": (False, 1),
        }


async def test_topics_authorized_operations_are_returned_if_requested(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("a")
        for version in (8, 9, 10):
            await check_operations(node, version)


async def check_operations(node: AdminNode, version: int) -> None:
    answer = await ask(
        node,
        version,
        named("a"),
        include_topic_authorized_operations=True,
        include_cluster_authorized_operations=True,
    )
    assert answer.topics[0].topic_authorized_operations == 3576
    assert answer.cluster_authorized_operations == 8096
    plain = await ask(node, version, named("a"))
    assert plain.cluster_authorized_operations == NOT_ASKED


async def test_another_nodes_topics_are_seen_at_once(database_url: str) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        await node.create("listed")
        assert set(codes(await ask(other, 9, None))) == {"listed"}
        await node.create("named")
        assert codes(await ask(other, 9, named("named"), create=False)) == {"named": ErrorCode.NONE}


# --- leaders and replicas -------------------------------------------------------------------------------------------


async def test_replicas_are_live_nodes_up_to_the_factor(database_url: str) -> None:
    async with (
        admin_node(database_url) as node,
        admin_node(database_url, name="node-2"),
        admin_node(database_url, name="node-3"),
    ):
        await node.membership.renew()
        for factor in (1, 2, 3, 5):
            await node.create(f"factor-{factor}", 6, factor=factor)
        answer = await ask(node, 12, None)
        assert [broker.node_id for broker in answer.brokers] == [1, 2, 3]
        assert answer.controller_id in {1, 2, 3}
        for topic in answer.topics:
            factor = int(topic.name.removeprefix("factor-"))
            assert {part.leader_id for part in topic.partitions} == {1, 2, 3}, "leaders are spread"
            for part in topic.partitions:
                assert part.replica_nodes[0] == part.leader_id
                assert len(set(part.replica_nodes)) == len(part.replica_nodes) == min(factor, 3)
                assert part.isr_nodes == part.replica_nodes


# --- by id ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [12, 13])
async def test_topic_is_described_by_id(database_url: str, version: int) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        topic = await node.create("orders")
        await node.create("ignored")
        unknown = uuid4()
        asked = (*by_id(topic.topic_id, unknown), *named("ignored", "also-ignored"))
        for each in (node, other):
            answer = await ask(each, version, asked)
            assert [(found.name, found.topic_id, found.error_code) for found in answer.topics] == [
                ("orders", topic.topic_id, ErrorCode.NONE),
                (None, unknown, ErrorCode.UNKNOWN_TOPIC_ID),
            ]
        assert await node.topics.find("also-ignored") is None


async def test_many_unknown_ids_are_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        answer = await ask(node, 12, by_id(*(uuid4() for _ in range(MAX_LOOKUPS + 1))))
        assert {topic.error_code for topic in answer.topics} == {ErrorCode.UNKNOWN_TOPIC_ID}
        assert len(answer.topics) == MAX_LOOKUPS + 1


async def test_topic_id_in_an_older_version_is_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        for version, asked in (
            (10, by_id(uuid4())),
            (11, by_id(uuid4())),
            (10, by_id(ZERO_UUID)),
            (11, by_id(ZERO_UUID)),
        ):
            with pytest.raises(KafkaError) as refused:
                await ask(node, version, asked)
            assert refused.value.code is ErrorCode.INVALID_REQUEST


async def test_topic_with_neither_name_nor_id_is_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        with pytest.raises(KafkaError) as refused:
            await ask(node, 12, by_id(ZERO_UUID))
        assert refused.value.code is ErrorCode.INVALID_REQUEST


# --- missing topics -------------------------------------------------------------------------------------------------


async def test_missing_topic_is_created_if_client_and_broker_allow_it(database_url: str) -> None:
    async with admin_node(database_url, broker={"num.partitions": "2"}) as node:
        for version in VERSIONS:
            name = f"fresh{version}"
            if version >= 4:
                # Versions below 4 have no such flag: a request for the topic allows its creation.
                answer = await ask(node, version, named(name), create=False)
                assert codes(answer) == {name: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
                assert await node.topics.find(name) is None
            answer = await ask(node, version, named(name))
            assert codes(answer) == {name: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}, "as Kafka has it: not at once"
            assert answer.topics[0].partitions == ()
            answer = await ask(node, version, named(name))
            assert codes(answer) == {name: ErrorCode.NONE}
            assert len(answer.topics[0].partitions) == 2
            assert (await node.topics.find(name)) == node.catalog.get(name) is not None


async def test_broker_forbids_automatic_creation(database_url: str) -> None:
    async with admin_node(database_url, broker={"auto.create.topics.enable": "false"}) as node:
        for version in (0, 3, 4, 13):
            assert codes(await ask(node, version, named("x"))) == {"x": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
        assert (await node.topics.changes(0)).topics == ()


async def test_illegal_topic_name_is_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        names = ["", ".", "..", "a b", "ö", "x" * 250]
        answer = await ask(node, 9, named(*names, "fine"))
        fine = {"fine": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
        assert codes(answer) == {**dict.fromkeys(names, ErrorCode.INVALID_TOPIC_EXCEPTION), **fine}
        assert await node.topics.find("fine") is not None


async def test_colliding_topic_name_is_not_created(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("a.b")
        assert codes(await ask(node, 9, named("a_b"))) == {"a_b": ErrorCode.INVALID_TOPIC_EXCEPTION}


async def test_creations_of_one_request_are_bounded(database_url: str) -> None:
    async with admin_node(database_url) as node:
        names = [f"t{index:03}" for index in range(MAX_CREATED + 2)]
        answer = await ask(node, 9, named(*names))
        assert codes(answer) == {
            name: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if index < MAX_CREATED else ErrorCode.LEADER_NOT_AVAILABLE
            for index, name in enumerate(names)
        }
        again = codes(await ask(node, 9, named(*names)))
        assert {name for name, code in again.items() if code == ErrorCode.NONE} == set(names[:MAX_CREATED])
        assert set(codes(await ask(node, 9, named(*names))).values()) == {ErrorCode.NONE}


async def test_created_topics_count_towards_the_clients_quota_of_mutations(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.topics.set_client_quotas([ClientQuota(None, "tests", None, QuotaKey.CONTROLLER_MUTATION_RATE, 1e-3)])
        await node.catalog.refresh_if_changed()
        later = dict.fromkeys(("b", "c"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        answer = await ask(node, 13, named("a", "b", "c"))
        assert codes(answer) == {"a": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, **later}
        assert codes(await ask(node, 13, named("a", "b", "c"))) == {"a": ErrorCode.NONE, **later}


async def test_two_nodes_create_the_same_topic(database_url: str) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        original = other.topics.create

        async def lose_the_race(topics):
            await node.create("fresh")
            return await original(topics)

        other.topics.create = lose_the_race  # type: ignore[method-assign]
        answer = await ask(other, 10, named("fresh"))
        assert codes(answer) == {"fresh": ErrorCode.NONE}
        fresh = node.catalog.get("fresh")
        assert fresh is not None
        assert answer.topics[0].topic_id == fresh.topic_id


# --- without Postgres -----------------------------------------------------------------------------------------------


async def test_known_topics_are_answered_without_postgres(database_url: str) -> None:
    async with admin_node(database_url) as node:
        topic = await node.create("known")

        async def unavailable(*_arguments):
            raise StorageUnavailable("away")

        node.topics.changes = node.topics.find = node.topics.find_by_id = unavailable  # type: ignore[method-assign]
        assert codes(await ask(node, 9, None)) == {"known": ErrorCode.NONE}
        assert codes(await ask(node, 9, named("known", "other"))) == {
            "known": ErrorCode.NONE,
            "other": ErrorCode.LEADER_NOT_AVAILABLE,
        }
        answer = await ask(node, 12, by_id(topic.topic_id, uuid4()))
        assert [found.error_code for found in answer.topics] == [ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE]


# --- DescribeTopicPartitions ----------------------------------------------------------------------------------------


async def pages(node: AdminNode, limit: int, *names: str):
    cursor = None
    found = []
    for _ in range(50):
        answer = await node.ask(
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            DescribeTopicPartitionsRequest(
                topics=tuple(TopicRequest(name=name) for name in names), response_partition_limit=limit, cursor=cursor
            ),
            0,
        )
        found.append([(topic.name, [part.partition_index for part in topic.partitions]) for topic in answer.topics])
        cursor = answer.next_cursor
        if cursor is None:
            return found
    raise AssertionError("the cursor does not end")


async def test_describe_topic_partitions(database_url: str) -> None:
    async with admin_node(database_url) as node:
        topic = await node.create("orders", 2)
        answer = await node.ask(
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            DescribeTopicPartitionsRequest(topics=tuple(TopicRequest(name=name) for name in ("orders", "x", "a b"))),
            0,
        )
        by_name = {found.name: found for found in answer.topics}
        assert [found.name for found in answer.topics] == ["a b", "orders", "x"]
        assert by_name["a b"].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
        assert by_name["x"].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        found = by_name["orders"]
        assert (found.topic_id, found.topic_authorized_operations) == (topic.topic_id, 3576)
        for part in found.partitions:
            assert (part.leader_id, part.replica_nodes, part.isr_nodes) == (1, (1,), (1,))
            assert part.eligible_leader_replicas == part.last_known_elr == part.offline_replicas == ()
        assert answer.next_cursor is None
        assert await node.topics.find("x") is None, "describing never creates"


async def test_pages_follow_the_cursor(database_url: str) -> None:
    async with admin_node(database_url) as node:
        for name, count in (("b", 3), ("a", 2), ("c", 1)):
            await node.create(name, count)
        assert await pages(node, 2000) == [[("a", [0, 1]), ("b", [0, 1, 2]), ("c", [0])]]
        assert await pages(node, 3) == [[("a", [0, 1]), ("b", [0])], [("b", [1, 2]), ("c", [0])]]
        assert await pages(node, 2) == [[("a", [0, 1])], [("b", [0, 1])], [("b", [2]), ("c", [0])]]
        assert await pages(node, 0) == [
            [("a", [0])],
            [("a", [1])],
            [("b", [0])],
            [("b", [1])],
            [("b", [2])],
            [("c", [0])],
        ]
        assert await pages(node, 4, "c", "b") == [[("b", [0, 1, 2]), ("c", [0])]]


async def test_cursor_of_a_deleted_topic_continues_at_the_next(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("a", 2)
        await node.create("c", 2)
        answer = await node.ask(
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            DescribeTopicPartitionsRequest(cursor=Cursor(topic_name="b", partition_index=1)),
            0,
        )
        assert [(topic.name, len(topic.partitions)) for topic in answer.topics] == [("c", 2)]


async def test_negative_cursor_is_refused(database_url: str) -> None:
    async with admin_node(database_url) as node:
        with pytest.raises(KafkaError) as refused:
            await node.ask(
                ApiKey.DESCRIBE_TOPIC_PARTITIONS,
                DescribeTopicPartitionsRequest(cursor=Cursor(topic_name="b", partition_index=-1)),
                0,
            )
        assert refused.value.code is ErrorCode.INVALID_REQUEST


# --- listeners ------------------------------------------------------------------------------------------------------


INSIDE_AND_OUTSIDE = {"INSIDE": ("10.0.0.1", 9092), "OUTSIDE": ("kafka.example.org", 443)}


async def test_client_receives_addresses_of_its_own_listener(database_url: str) -> None:
    async with admin_node(database_url, listeners=INSIDE_AND_OUTSIDE) as node:
        for listener, address in INSIDE_AND_OUTSIDE.items():
            answer = await node.ask(ApiKey.METADATA, MetadataRequest(), 13, listener=listener)
            assert [(each.host, each.port) for each in answer.brokers] == [address]
            answer = await node.ask(ApiKey.DESCRIBE_CLUSTER, DescribeClusterRequest(), 2, listener=listener)
            assert [(each.host, each.port) for each in answer.brokers] == [address]


async def test_a_node_without_the_listener_is_not_named(database_url: str) -> None:
    """Partitions led by such a node have LISTENER_NOT_FOUND, or LEADER_NOT_AVAILABLE before v6 (KRaftMetadataCache)."""
    async with (
        admin_node(database_url, listeners=INSIDE_AND_OUTSIDE) as node,
        admin_node(database_url, listeners={"INSIDE": ("10.0.0.2", 9092)}),
    ):
        await node.membership.renew()
        await node.create("t", 8, factor=2)
        for version, code in ((5, ErrorCode.LEADER_NOT_AVAILABLE), (6, ErrorCode.LISTENER_NOT_FOUND)):
            answer = await node.ask(ApiKey.METADATA, MetadataRequest(topics=named("t")), version, listener="OUTSIDE")
            assert [each.node_id for each in answer.brokers] == [answer.controller_id] == [1]
            partitions = answer.topics[0].partitions
            assert {(part.error_code, part.leader_id) for part in partitions} == {(0, 1), (code, -1)}
            assert {part.offline_replicas for part in partitions} == {(2,)}
        request = DescribeTopicPartitionsRequest(topics=(TopicRequest(name="t"),))
        described = await node.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, request, 0, listener="OUTSIDE")
        partitions = described.topics[0].partitions
        found = {(part.error_code, part.leader_id) for part in partitions}
        assert found == {(0, 1), (ErrorCode.LISTENER_NOT_FOUND, -1)}
        inside = await node.ask(ApiKey.METADATA, MetadataRequest(topics=named("t")), 13, listener="INSIDE")
        assert {part.error_code for part in inside.topics[0].partitions} == {0}
        assert [each.node_id for each in inside.brokers] == [1, 2]


# --- DescribeCluster ------------------------------------------------------------------------------------------------


async def test_describe_cluster(database_url: str) -> None:
    async with admin_node(database_url, rack="r1") as node, admin_node(database_url, name="node-2"):
        await node.membership.renew()
        for version in range(3):
            await check_cluster(node, version)


async def check_cluster(node: AdminNode, version: int) -> None:
    answer = await node.ask(ApiKey.DESCRIBE_CLUSTER, DescribeClusterRequest(), version)
    assert (answer.error_code, answer.cluster_id) == (ErrorCode.NONE, CLUSTER_ID)
    assert [(each.broker_id, each.host, each.rack, each.is_fenced) for each in answer.brokers] == [
        (1, "node-1", "r1", False),
        (2, "node-2", None, False),
    ]
    assert answer.controller_id in {1, 2}
    assert answer.cluster_authorized_operations == NOT_ASKED
    asked = DescribeClusterRequest(include_cluster_authorized_operations=True)
    assert (await node.ask(ApiKey.DESCRIBE_CLUSTER, asked, version)).cluster_authorized_operations == 8096


async def test_departed_nodes_are_shown_as_fenced_until_unregistered(database_url: str) -> None:
    """`kafka-cluster list-endpoints --include-fenced-brokers` shows which nodes can be unregistered."""

    async def told(node: AdminNode, version: int, *, fenced: bool) -> list[tuple[int, str, str | None, bool]]:
        asked = DescribeClusterRequest(include_fenced_brokers=fenced)
        brokers = (await node.ask(ApiKey.DESCRIBE_CLUSTER, asked, version)).brokers
        return [(each.broker_id, each.host, each.rack, each.is_fenced) for each in brokers]

    async with (
        admin_node(database_url, name="node-1") as first,
        admin_node(database_url, name="node-2", rack="r2") as node,
    ):
        alive, gone = (2, "node-2", "r2", False), (1, "node-1", None, True)
        await node.membership.renew()
        assert await told(node, 2, fenced=True) == [(1, "node-1", None, False), alive]
        await first.membership.withdraw()
        # This node's list of live nodes may be older than the registrations in Postgres.
        assert await told(node, 2, fenced=True) == [(1, "node-1", None, False), alive]
        await node.membership.renew()
        assert await told(node, 2, fenced=True) == [gone, alive]
        assert await told(node, 2, fenced=False) == [alive]
        assert await told(node, 1, fenced=False) == [alive]
        await node.ask(ApiKey.UNREGISTER_BROKER, UnregisterBrokerRequest(broker_id=1), 0)
        assert await told(node, 2, fenced=True) == [alive]


@pytest.mark.parametrize(
    ("role", "version", "endpoint", "code", "message"),
    [
        (Role.BROKER, 1, 2, ErrorCode.MISMATCHED_ENDPOINT_TYPE, "type BROKER, but we wanted an endpoint of type CONTR"),
        (Role.CONTROLLER, 1, 1, ErrorCode.MISMATCHED_ENDPOINT_TYPE, "CONTROLLER, but we wanted an endpoint of type B"),
        # In versions without the field, the request asks for brokers, and the answer has no code for a mismatch.
        (Role.CONTROLLER, 0, 1, ErrorCode.INVALID_REQUEST, "but we wanted an endpoint of type BROKER"),
        (Role.BROKER, 2, 0, ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, "Unsupported endpoint type 0"),
        (Role.CONTROLLER, 2, 3, ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, "Unsupported endpoint type 3"),
    ],
)
async def test_describe_cluster_of_the_wrong_role_is_refused(
    database_url: str, role: Role, version: int, endpoint: int, code: ErrorCode, message: str
) -> None:
    asked = DescribeClusterRequest(endpoint_type=endpoint)
    async with admin_node(database_url) as node:
        with pytest.raises(KafkaError, match=message) as refused:
            await node.ask(ApiKey.DESCRIBE_CLUSTER, asked, version, role=role)
        assert refused.value.code == code


async def test_controllers_are_live_nodes_with_the_clients_listener(database_url: str) -> None:
    """Controllers have no rack, and nodes that have left are not listed."""
    both = {"PLAINTEXT": ("node-1", 9092), "CONTROLLER": ("node-1", 9093)}
    other = {"PLAINTEXT": ("node-3", 9092), "CONTROLLER": ("node-3", 9093)}
    asked = DescribeClusterRequest(endpoint_type=2, include_fenced_brokers=True)
    async with (
        admin_node(database_url, listeners=both, rack="r1") as node,
        admin_node(database_url, name="node-2"),
        admin_node(database_url, listeners=other) as gone,
    ):
        await gone.membership.withdraw()
        await node.membership.renew()
        answer = await node.ask(ApiKey.DESCRIBE_CLUSTER, asked, 2, listener="CONTROLLER", role=Role.CONTROLLER)
        assert (answer.error_code, answer.endpoint_type, answer.cluster_id) == (ErrorCode.NONE, 2, CLUSTER_ID)
        assert [(each.broker_id, each.host, each.port, each.rack, each.is_fenced) for each in answer.brokers] == [
            (1, "node-1", 9093, None, False)
        ]
        assert answer.controller_id == 1


async def test_broker_alone_is_not_listed_as_a_controller(database_url: str) -> None:
    """The result does not depend on the names of the node's listeners."""
    async with (
        admin_node(database_url),
        admin_node(database_url, name="node-2", roles=Roles(is_controller=False)) as two,
    ):
        asked = DescribeClusterRequest(endpoint_type=2)
        described = await two.ask(ApiKey.DESCRIBE_CLUSTER, asked, 2, role=Role.CONTROLLER)
        assert [each.broker_id for each in described.brokers] == [1]


async def test_controller_alone_is_not_listed_as_a_broker(database_url: str) -> None:
    """Clients of brokers do not see this node, regardless of its listeners' names. Clients of controllers do."""
    cast = Roles(is_broker=False, controller_listeners=("PLAINTEXT",))
    async with (
        admin_node(database_url, roles=cast) as controller,
        admin_node(database_url, name="node-2") as broker,
    ):
        await broker.create("t", 4)
        await controller.membership.renew()
        answer = await broker.ask(ApiKey.METADATA, MetadataRequest(topics=None), 12)
        assert [each.node_id for each in answer.brokers] == [2]
        (topic,) = answer.topics
        assert {part.leader_id for part in topic.partitions} == {2}
        assert {part.replica_nodes for part in topic.partitions} == {(2,)}
        described = await broker.ask(ApiKey.DESCRIBE_CLUSTER, DescribeClusterRequest(), 1)
        assert [each.broker_id for each in described.brokers] == [2]
        asked = DescribeClusterRequest(endpoint_type=2)
        described = await controller.ask(ApiKey.DESCRIBE_CLUSTER, asked, 2, role=Role.CONTROLLER)
        assert [each.broker_id for each in described.brokers] == [1, 2], "the other is asked at that listener, too"
        await controller.membership.withdraw()
        await broker.membership.renew()
        asked = DescribeClusterRequest(include_fenced_brokers=True)
        described = await broker.ask(ApiKey.DESCRIBE_CLUSTER, asked, 2)
        assert [each.broker_id for each in described.brokers] == [2]
