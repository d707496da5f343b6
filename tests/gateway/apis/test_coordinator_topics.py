"""Groups have coordinators once `__consumer_offsets` exists, on the node that creates the topic and on another node."""

from __future__ import annotations

from gateway.apis.admin.new_topics import plan_internal
from gateway.apis.coordinator_topics import COORDINATED, prepare
from gateway.config.broker import BrokerConfig
from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.log.topic_names import CONSUMER_OFFSETS, TRANSACTION_STATE
from gateway.net.context import ConnectionInfo, RequestContext
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.heartbeat import HeartbeatRequest
from storage.types import Topic
from tests.gateway.group_node import GroupNode, group_node

HEARTBEAT = HeartbeatRequest(group_id="g", member_id="m", generation_id=1)


async def code_of(node: GroupNode) -> int:
    """Return the error code of a heartbeat that passes the stages before its handler."""
    context = RequestContext(ApiKey.HEARTBEAT, 4, 1, None, ConnectionInfo("c", "/127.0.0.1"), node.services)
    preparing = prepare(context)
    if preparing is not None:
        await preparing
    return (await node.ask(HEARTBEAT, 4)).error_code


async def test_node_checks_for_the_topic_before_it_refuses(database_url: str) -> None:
    async with group_node(database_url) as node:
        node.groups.begun = False
        assert await code_of(node) == ErrorCode.NOT_COORDINATOR
        # Another node creates the topic. No announcement reaches this node.
        await node.topics.create([plan_internal(CONSUMER_OFFSETS, BrokerConfig())])
        assert await code_of(node) == ErrorCode.UNKNOWN_MEMBER_ID
        assert node.groups.begun


async def test_node_informed_of_the_topic_need_not_check(database_url: str) -> None:
    async with group_node(database_url) as node:
        node.groups.begun = False
        (topic,) = await node.topics.create([plan_internal(CONSUMER_OFFSETS, BrokerConfig())])
        assert isinstance(topic, Topic)
        node.groups.cluster_changed(Cluster({CONSUMER_OFFSETS: ClusterTopic(topic.topic_id, CONSUMER_OFFSETS, 50)}))
        assert node.groups.begun
        node.groups.cluster_changed(Cluster())
        assert node.groups.begun, "who deletes it ends no group"


async def test_other_requests_do_not_wait_for_the_check(database_url: str) -> None:
    async with group_node(database_url) as node:
        node.groups.begun = False
        connection = ConnectionInfo("c", "/127.0.0.1")
        for api_key in set(ApiKey) - COORDINATED:
            assert prepare(RequestContext(api_key, 0, 1, None, connection, node.services)) is None
        node.groups.begun = True
        for api_key in COORDINATED:
            assert prepare(RequestContext(api_key, 0, 1, None, connection, node.services)) is None


async def test_each_kind_of_coordinator_has_its_topic(database_url: str) -> None:
    async with group_node(database_url) as node:
        node.groups.begun = False
        await node.ask(FindCoordinatorRequest(key_type=1, coordinator_keys=("t",)), 6)
        state = node.services.catalog.get(TRANSACTION_STATE)
        assert state is not None
        assert (state.internal, len(state.partitions), state.configs) == (True, 50, {"cleanup.policy": "compact"})
        assert not node.groups.begun
        await node.ask(FindCoordinatorRequest(coordinator_keys=("g",)), 6)
        assert node.services.catalog.get(CONSUMER_OFFSETS) is not None
        assert node.groups.begun
