"""Additions of Apache Kafka 4.4 to its protocol, as frames. Each answer is the one that Apache Kafka 4.4.0 gave."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.describe_cluster import DescribeClusterRequest
from protocol.messages.describe_log_dirs import DescribeLogDirsRequest
from protocol.messages.streams_group_describe import StreamsGroupDescribeRequest
from protocol.messages.streams_group_heartbeat import StreamsGroupHeartbeatRequest, StreamsGroupHeartbeatResponse
from protocol.messages.streams_group_topology_description_update import StreamsGroupTopologyDescriptionUpdateRequest
from protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from protocol.messages.unregister_controller import UnregisterControllerRequest
from tests.frames.members import create_topic, fresh
from tests.frames.streams import at_once, client_of, reading, tasks
from tests.frames.transactions import Transactional
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient

NONE = ErrorCode.NONE
AWAY = -2
SOFTWARE: dict[str, Any] = {"client_software_name": "tests", "client_software_version": "1"}


@pytest.mark.parametrize(
    ("other_cluster", "other_node", "code"),
    [
        (False, False, NONE),
        (True, False, ErrorCode.REBOOTSTRAP_REQUIRED),
        (False, True, ErrorCode.REBOOTSTRAP_REQUIRED),
    ],
)
async def test_client_at_the_wrong_broker_must_rebootstrap(
    gateway: GatewayProcess, other_cluster: bool, other_node: bool, code: ErrorCode
) -> None:
    async with client_of(gateway) as client:
        cluster = await client.send(DescribeClusterRequest(), 1)
        node_id = cluster.brokers[0].broker_id + other_node
        cluster_id = "another" if other_cluster else cluster.cluster_id
        answer = await client.send(ApiVersionsRequest(**SOFTWARE, cluster_id=cluster_id, node_id=node_id), 5)
        assert answer.error_code == code
        assert bool(answer.api_keys) is (code is NONE)
        assert (await client.send(ApiVersionsRequest(**SOFTWARE), 5)).error_code == NONE, "it names no cluster"


async def test_a_transaction_commits_offsets_of_a_topic_by_its_id(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        topic_id = await create_topic(client, fresh("topic"), 1)
        producer = Transactional(client, fresh("producer"))
        assert await producer.initialize(version=5) is NONE
        part = TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=7, committed_metadata="")
        absent = TxnOffsetCommitRequestPartition(partition_index=9, committed_offset=7, committed_metadata="")
        unknown = uuid.uuid4()
        answer = await client.send(
            TxnOffsetCommitRequest(
                transactional_id=producer.transactional_id,
                group_id=fresh("group"),
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                topics=(
                    TxnOffsetCommitRequestTopic(topic_id=topic_id, partitions=(part, absent)),
                    TxnOffsetCommitRequestTopic(topic_id=unknown, partitions=(part,)),
                ),
            ),
            6,
        )
        assert {
            (topic.topic_id, each.partition_index): each.error_code
            for topic in answer.topics
            for each in topic.partitions
        } == {
            (topic_id, 0): NONE,
            (topic_id, 9): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            (unknown, 0): ErrorCode.UNKNOWN_TOPIC_ID,
        }
        assert await producer.end(committed=True, version=5) is NONE


async def test_a_group_that_cannot_be_deleted_has_a_code_and_no_message(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        (result,) = (await client.send(DeleteGroupsRequest(groups_names=(fresh("group"),)), 3)).results
        assert (result.error_code, result.error_message) == (ErrorCode.GROUP_ID_NOT_FOUND, None)


async def test_no_log_directory_is_cordoned(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        (result,) = (await client.send(DescribeLogDirsRequest(topics=None), 5)).results
        assert (result.error_code, result.is_cordoned) == (NONE, False)


async def test_a_controller_that_is_not_registered_cannot_be_unregistered(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        answer = await client.send(UnregisterControllerRequest(controller_id=77), 0)
        assert answer.error_code == ErrorCode.CONTROLLER_ID_NOT_REGISTERED
        assert answer.error_message == "Controller ID 77 is not currently registered."


async def test_topology_description_is_neither_requested_nor_stored(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        update = StreamsGroupTopologyDescriptionUpdateRequest(group_id=fresh("group"), member_id="m")
        answer = await client.send(update, 0)
        assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION
        assert answer.error_message == "The broker has no streams group topology description plugin configured."


class Static:
    """A static member of a streams group. Each restart of the member's process has another `member_id`."""

    def __init__(self, client: WireClient, group_id: str, topic: str) -> None:
        self.client, self.group_id, self.topology = client, group_id, reading(topic)

    async def beat(
        self, member_id: str, epoch: int, *, code: ErrorCode = NONE, instance_id: str | None = "static", **more: Any
    ) -> StreamsGroupHeartbeatResponse:
        asked = StreamsGroupHeartbeatRequest(
            group_id=self.group_id, member_id=member_id, member_epoch=epoch, instance_id=instance_id, **more
        )
        answer: StreamsGroupHeartbeatResponse = await self.client.send(asked, 1)
        assert answer.error_code == code, answer.error_message
        return answer

    async def join(self, member_id: str, *, code: ErrorCode = NONE) -> StreamsGroupHeartbeatResponse:
        return await self.beat(
            member_id,
            0,
            code=code,
            rebalance_timeout_ms=5_000,
            topology=self.topology,
            active_tasks=(),
            standby_tasks=(),
            warmup_tasks=(),
            process_id="process",
            client_tags=(),
            task_offsets=(),
            task_end_offsets=(),
        )


async def given_tasks(member: Static, joined: StreamsGroupHeartbeatResponse) -> StreamsGroupHeartbeatResponse:
    """Send heartbeats until an answer assigns the member its tasks, and return that answer."""
    answer = joined
    async with asyncio.timeout(20):
        while not answer.active_tasks:
            await asyncio.sleep(0.1)
            answer = await member.beat(joined.member_id, answer.member_epoch)
    return answer


async def test_restarted_static_streams_member_gets_its_tasks_back(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 2)
        member = Static(client, group_id, topic)
        joined = await given_tasks(member, await member.join("one"))
        assert joined.active_tasks is not None
        assert tasks(joined.active_tasks) == {("0", 0), ("0", 1)}
        assert (joined.task_offset_interval_ms, joined.acceptable_recovery_lag) == (60_000, 10_000)
        assert joined.topology_description_required is False
        await member.join("two", code=ErrorCode.UNRELEASED_INSTANCE_ID)
        await member.beat("two", joined.member_epoch, code=ErrorCode.FENCED_INSTANCE_ID)
        await member.beat("one", AWAY, instance_id=None, code=ErrorCode.INVALID_REQUEST)
        left = await member.beat("one", AWAY)
        assert left.member_epoch == AWAY
        back = await member.join("two")
        assert back.active_tasks is not None
        assert tasks(back.active_tasks) == {("0", 0), ("0", 1)}
        assert back.member_epoch == joined.member_epoch
        await member.beat("one", joined.member_epoch, code=ErrorCode.FENCED_INSTANCE_ID)
        request = StreamsGroupDescribeRequest(group_ids=(group_id,), include_topology_description=True)
        (group,) = (await client.send(request, 1)).groups
        assert (group.assignor_name, group.topology_description, group.topology_description_status) == (
            "sticky",
            None,
            1,
        )
        assert [(each.member_id, each.instance_id) for each in group.members] == [("two", "static")]
        await member.beat("two", -1)
