"""DescribeQuorum, on a real Postgres: the catalog's leader, how far each node follows it, and fixed voters."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from gateway.apis.admin.quorum import LEADS
from gateway.config.settings import load
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.add_raft_voter import AddRaftVoterRequest, Listener
from protocol.messages.describe_quorum import DescribedPartition, DescribedTopic, DescribeQuorumRequest
from protocol.messages.remove_raft_voter import RemoveRaftVoterRequest
from protocol.schema import ZERO_UUID
from storage.nodes import NodeStore
from storage.pool import Database
from storage.types import LeaseKind, Roles
from tests.gateway.admin import CLUSTER_ID, AdminNode, admin_node

METADATA = "__cluster_metadata"
VOTER = UUID(int=7)
ASKED_AS_BOTH = (
    "listeners=PLAINTEXT://a:9092,CONTROLLER://a:9093",
    "controller.listener.names=CONTROLLER",
)


def asked(*named: tuple[str, tuple[int, ...]]) -> DescribeQuorumRequest:
    return DescribeQuorumRequest(
        topics=tuple(
            DescribedTopic(
                topic_name=name, partitions=tuple(DescribedPartition(partition_index=index) for index in indexes)
            )
            for name, indexes in named
        )
    )


async def describe(node: AdminNode, version: int = 2) -> Any:
    answer = await node.ask(ApiKey.DESCRIBE_QUORUM, asked((METADATA, (0,))), version)
    assert (answer.error_code, answer.error_message) == (ErrorCode.NONE, "")
    (topic,) = answer.topics
    assert topic.topic_name == METADATA
    (partition,) = topic.partitions
    assert partition.partition_index == 0
    return answer, partition


def is_controller(node: AdminNode) -> None:
    node.services = dataclasses.replace(node.services, settings=load({}, ASKED_AS_BOTH, {}).settings)


async def lead(database: Database, node: AdminNode) -> int:
    """Acquire the controller's lease; return its epoch."""
    store: NodeStore = node.membership._store  # noqa: SLF001 - who registered has the leases
    (lease,) = await store.acquire_leases(node.membership.node_id, [LEADS], 60_000, LeaseKind.JOBS)
    return lease.lease_epoch


@pytest.mark.parametrize("version", range(3))
async def test_lease_holder_leads_the_catalog(database_url: str, version: int) -> None:
    listeners = {"PLAINTEXT": ("node-1", 9092), "CONTROLLER": ("node-1", 9093)}
    async with (
        admin_node(database_url, listeners=listeners, roles=Roles(controller_listeners=("CONTROLLER",))) as leader,
        admin_node(database_url, name="node-2") as follower,
    ):
        epoch = await lead(leader.database, leader)
        await leader.create("t")
        follower.membership.connect(catalog_revision=lambda: 1)
        await follower.membership.renew()
        answer, partition = await describe(leader, version)
        revision = await leader.topics.revision()
        assert revision > 1
        assert (partition.error_code, partition.error_message) == (ErrorCode.NONE, "")
        assert (partition.leader_id, partition.leader_epoch, partition.high_watermark) == (1, epoch, revision)
        first, second = partition.current_voters
        assert [(each.replica_id, each.log_end_offset) for each in (first, second)] == [(1, revision), (2, 1)]
        assert partition.observers == ()
        if version == 0:
            assert {each.last_fetch_timestamp for each in (first, second)} == {-1}
        else:
            assert first.last_fetch_timestamp == first.last_caught_up_timestamp >= second.last_fetch_timestamp > 0
            assert second.last_caught_up_timestamp == -1, "it lags, and when it did not nobody knows"
        told = [(node.node_id, [(each.name, each.host, each.port) for each in node.listeners]) for node in answer.nodes]
        assert told == ([(1, [("CONTROLLER", "node-1", 9093)]), (2, [])] if version == 2 else [])


async def test_caught_up_time_is_that_of_the_last_renewal(
    database_url: str,
) -> None:
    async with admin_node(database_url) as leader, admin_node(database_url, name="node-2") as follower:
        await lead(leader.database, leader)
        _, partition = await describe(leader)
        assert partition.current_voters[1].log_end_offset == -1, "it has not said"
        follower.membership.connect(catalog_revision=lambda: 10**6)
        sql = await asyncpg.connect(database_url)
        try:
            # The node was registered long ago and renewed its registration since. Only the renewal counts.
            await sql.execute("update sluice.node set registered_at = registered_at - interval '1 hour'")
            await follower.membership.renew()
            renewed_ms = await sql.fetchval(
                "select (extract(epoch from renewed_at) * 1000)::bigint from sluice.node where node_id = 2"
            )
        finally:
            await sql.close()
        _, partition = await describe(leader)
        state = partition.current_voters[1]
        assert state.log_end_offset == partition.high_watermark
        assert state.last_fetch_timestamp == state.last_caught_up_timestamp == renewed_ms


async def test_controllers_vote_and_brokers_observe(database_url: str) -> None:
    named = {"CONTROLLER": ("node-1", 9093)}
    cast = Roles(is_broker=False, controller_listeners=("CONTROLLER",))
    async with (
        admin_node(database_url, listeners=named, roles=cast) as controller,
        admin_node(database_url, name="node-2", roles=Roles(is_controller=False)) as broker,
    ):
        await lead(controller.database, controller)
        broker.membership.connect(catalog_revision=lambda: 10**6)
        await broker.membership.renew()
        answer, partition = await describe(broker)
        assert partition.leader_id == 1
        assert [each.replica_id for each in partition.current_voters] == [1]
        (observer,) = partition.observers
        assert (observer.replica_id, observer.log_end_offset) == (2, partition.high_watermark)
        assert observer.last_caught_up_timestamp == observer.last_fetch_timestamp > 0
        assert observer.replica_directory_id != ZERO_UUID
        assert partition.current_voters[0].replica_directory_id == ZERO_UUID, "as of a voter of kraft.version 0"
        (node,) = answer.nodes
        assert [(each.name, each.host, each.port) for each in node.listeners] == [("CONTROLLER", "node-1", 9093)], (
            "though the node that was asked has no such listener"
        )
        await controller.membership.withdraw()
        _, partition = await describe(broker)
        assert partition.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        store: NodeStore = controller.membership._store  # noqa: SLF001 - who registered has the leases
        await store.release_leases(controller.membership.node_id, {LEADS: None}, LeaseKind.JOBS)
        await lead(broker.database, broker)
        _, partition = await describe(broker)
        assert (partition.leader_id, [each.replica_id for each in partition.current_voters]) == (2, [2]), "it stands in"


async def test_lease_holder_leads_until_a_controller_takes_the_lease(database_url: str) -> None:
    cast = Roles(is_broker=False, controller_listeners=("CONTROLLER",))
    async with admin_node(database_url, roles=Roles(is_controller=False)) as broker:
        await lead(broker.database, broker)
        async with admin_node(database_url, listeners={"CONTROLLER": ("node-2", 9093)}, roles=cast):
            _, partition = await describe(broker)
            assert (partition.error_code, partition.leader_id) == (ErrorCode.NONE, 1)
            assert [each.replica_id for each in partition.current_voters] == [1, 2]


async def test_another_leader_has_another_epoch(database_url: str) -> None:
    async with admin_node(database_url) as first, admin_node(database_url, name="node-2") as second:
        before = await lead(first.database, first)
        store: NodeStore = first.membership._store  # noqa: SLF001 - who registered has the leases
        await store.release_leases(first.membership.node_id, {LEADS: second.membership.node_id}, LeaseKind.JOBS)
        _, partition = await describe(second)
        assert (partition.error_code, partition.leader_id) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1), "nobody leads"
        after = await lead(second.database, second)
        _, partition = await describe(first)
        assert (partition.leader_id, partition.leader_epoch) == (2, after)
        assert after > before


@pytest.mark.parametrize(
    "named",
    [
        ((METADATA, (1,)),),
        ((METADATA, (0, 1)),),
        (("orders", (0,)),),
        ((METADATA, (0,)), ("orders", (0,))),
        ((METADATA, (0,)), (METADATA, (0,))),
    ],
)
async def test_quorum_of_other_topics_is_refused(
    database_url: str, named: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    async with admin_node(database_url) as node:
        await lead(node.database, node)
        answer = await node.ask(ApiKey.DESCRIBE_QUORUM, asked(*named), 2)
        assert [
            (topic.topic_name, tuple((part.partition_index, part.error_code) for part in topic.partitions))
            for topic in answer.topics
        ] == [
            (name, tuple((index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) for index in indexes)) for name, indexes in named
        ]


HERE = Listener(name="CONTROLLER", host="c", port=9093)


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (
            {"cluster_id": "another"},
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f'The given id "another" doesn\'t match the cluster id "{CLUSTER_ID}"',
        ),
        ({"voter_directory_id": UUID(int=0)}, ErrorCode.INVALID_REQUEST, "voter request didn't include a valid voter"),
        ({"voter_id": -1}, ErrorCode.INVALID_REQUEST, "voter request didn't include a valid voter"),
        ({}, ErrorCode.UNSUPPORTED_VERSION, " voter because the kraft.version feature is 0"),
        ({"cluster_id": CLUSTER_ID}, ErrorCode.UNSUPPORTED_VERSION, " voter because the kraft.version feature is 0"),
    ],
)
async def test_voters_are_not_changed_by_request(
    database_url: str, given: dict[str, Any], code: ErrorCode, message: str
) -> None:
    given = {"cluster_id": None, "voter_id": 9, "voter_directory_id": VOTER} | given
    async with admin_node(database_url) as node:
        is_controller(node)
        for api_key, request, versions in (
            (ApiKey.ADD_RAFT_VOTER, AddRaftVoterRequest(listeners=(HERE,), **given), (0, 1)),
            (ApiKey.REMOVE_RAFT_VOTER, RemoveRaftVoterRequest(**given), (0,)),
        ):
            for version in versions:
                with pytest.raises(KafkaError) as refused:
                    await node.ask(api_key, request, version)
                assert refused.value.code == code
                assert message in (refused.value.message or "")


async def test_a_voter_must_be_reachable_as_a_controller(database_url: str) -> None:
    elsewhere = Listener(name="OTHER", host="c", port=9093)
    async with admin_node(database_url) as node:
        is_controller(node)
        request = AddRaftVoterRequest(cluster_id=None, voter_id=9, voter_directory_id=VOTER, listeners=(elsewhere,))
        expected = r"didn't include the endpoint \(OTHER://c:9093\) for the default listener CONTROLLER"
        with pytest.raises(KafkaError, match=expected) as refused:
            await node.ask(ApiKey.ADD_RAFT_VOTER, request, 1)
        assert refused.value.code is ErrorCode.INVALID_REQUEST
