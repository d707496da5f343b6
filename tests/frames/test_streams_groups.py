"""Streams groups on the wire (KIP-1071): from a topology to tasks, handed from member to member, through a kill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.coordinator.streams.topology import StatusCode
from protocol.errors import ErrorCode
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from protocol.messages.streams_group_describe import DescribedGroup, StreamsGroupDescribeRequest
from protocol.messages.streams_group_heartbeat import (
    CopartitionGroup,
    Endpoint,
    KeyValue,
    Subtopology,
    TaskIds,
    TopicInfo,
    Topology,
)
from tests.frames.handoff import configure
from tests.frames.members import create_topic, fresh
from tests.frames.streams import NONE, Instance, at_once, client_of, counting, reading, tasks
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import WireClient

TASKS = frozenset(("0", index) for index in range(4))
COUNTED = frozenset(("1", index) for index in range(4))


async def until(instances: list[Instance], done: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Let all instances send heartbeats until `done` is true. No task may have two owners in that time."""
    async with asyncio.timeout(seconds):
        while not done():
            for each in instances:
                await each.report()
                owned = [task for one in instances for task in one.active]
                assert len(owned) == len(set(owned)), owned
            await asyncio.sleep(0.02)


async def described(client: WireClient, group_id: str) -> DescribedGroup:
    response = await client.send(
        StreamsGroupDescribeRequest(group_ids=(group_id,), include_authorized_operations=False), 0
    )
    (group,) = response.groups
    return group


async def test_a_topology_becomes_topics_and_tasks(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 4)
        one = Instance(client, group_id, counting(topic, group_id), "one")
        joined = await one.join()
        assert joined.member_id == "one"
        assert joined.heartbeat_interval_ms == 5_000
        assert StatusCode.MISSING_INTERNAL_TOPICS in one.statuses
        assert not one.active
        await until([one], lambda: one.active == TASKS | COUNTED)
        assert one.statuses == {}
        names = (f"{group_id}-words-repartition", f"{group_id}-counts-changelog")
        asked = tuple(MetadataRequestTopic(name=name) for name in names)
        answer = await client.send(MetadataRequest(topics=asked, allow_auto_topic_creation=False), 9)
        assert [(each.error_code, len(each.partitions)) for each in answer.topics] == [(NONE, 4)] * 2
        shown = await described(client, group_id)
        assert (shown.error_code, shown.group_state, shown.group_epoch) == (NONE, "Stable", shown.assignment_epoch)
        assert shown.topology is not None
        assert [each.subtopology_id for each in shown.topology.subtopologies or ()] == ["0", "1"]
        (member,) = shown.members
        assert tasks(member.assignment.active_tasks) == TASKS | COUNTED == tasks(member.target_assignment.active_tasks)
        assert (member.process_id, member.client_id, member.client_host) == ("process-one", "wire", "/127.0.0.1")


async def test_group_waits_for_its_source_topics(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        one = Instance(client, group_id, reading(topic), "one")
        await one.join()
        assert topic in one.statuses[StatusCode.MISSING_SOURCE_TOPICS]
        assert (await described(client, group_id)).group_state == "NotReady"
        await create_topic(client, topic, 4)
        await until([one], lambda: one.active == TASKS)
        assert one.statuses == {}


async def test_tasks_move_between_members_and_back(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 4)
        one, two = (Instance(client, group_id, reading(topic), name) for name in ("one", "two"))
        await one.join()
        await until([one], lambda: one.active == TASKS)
        await two.join()
        assert not two.active
        await until([one, two], lambda: len(one.active) == len(two.active) == 2)
        await two.leave()
        await until([one], lambda: one.active == TASKS)
        assert one.epoch == (await described(client, group_id)).group_epoch


async def test_initial_rebalance_waits_for_more_members(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = fresh("group"), fresh("topic")
        assert await configure(client, group_id, streams_initial_rebalance_delay_ms="1500") == [NONE]
        await create_topic(client, topic, 4)
        one, two = (Instance(client, group_id, reading(topic), name) for name in ("one", "two"))
        await one.join()
        await two.join()
        assert (one.epoch, two.epoch, one.active, two.active) == (1, 1, frozenset(), frozenset())
        await until([one, two], lambda: len(one.active) == len(two.active) == 2)
        assert one.epoch == two.epoch == 2


async def test_a_kill_loses_neither_members_nor_tasks(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({})
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 4)
        one, two = (Instance(client, group_id, reading(topic), name) for name in ("one", "two"))
        await one.join()
        await two.join()
        await until([one, two], lambda: len(one.active) == len(two.active) == 2)
    owned = one.active, two.active
    gateway.kill()
    gateway.restart()
    async with client_of(gateway) as client:
        one.client = two.client = client
        await until([one, two], lambda: True)
        for each in (one, two):
            await each.report()
        assert (one.active, two.active) == owned
        assert (await described(client, group_id)).group_state == "Stable"


async def test_fenced_streams_member_joins_again(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 4)
        one = Instance(client, group_id, reading(topic), "one")
        await one.join()
        await until([one], lambda: one.active == TASKS)
        one.epoch += 5
        await one.beat(code=ErrorCode.FENCED_MEMBER_EPOCH)
        stranger = Instance(client, group_id, reading(topic), "stranger")
        stranger.epoch = 3
        await stranger.beat(code=ErrorCode.UNKNOWN_MEMBER_ID)
        await one.join()
        await until([one], lambda: one.active == TASKS)


async def test_commit_is_accepted_at_an_epoch_at_which_the_member_had_the_task(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 4)
        one = Instance(client, group_id, reading(topic), "one")
        await one.join()
        await until([one], lambda: one.active == TASKS)

        async def commit(member_id: str, epoch: int, index: int = 0) -> int:
            partition = OffsetCommitRequestPartition(partition_index=index, committed_offset=7, committed_metadata="")
            request = OffsetCommitRequest(
                group_id=group_id,
                generation_id_or_member_epoch=epoch,
                member_id=member_id,
                topics=(OffsetCommitRequestTopic(name=topic, partitions=(partition,)),),
            )
            answer = await client.send(request, 9)
            return int(answer.topics[0].partitions[0].error_code)

        assert await commit("one", one.epoch) == NONE
        assert await commit("one", one.epoch - 1) == ErrorCode.STALE_MEMBER_EPOCH
        assert await commit("stranger", one.epoch) == ErrorCode.UNKNOWN_MEMBER_ID
        asked = OffsetFetchRequestGroup(group_id=group_id, member_id="one", member_epoch=one.epoch, topics=None)
        answer = await client.send(OffsetFetchRequest(groups=(asked,)), 9)
        (found,) = answer.groups[0].topics[0].partitions
        assert (answer.groups[0].error_code, found.committed_offset) == (NONE, 7)
        late = OffsetFetchRequestGroup(group_id=group_id, member_id="one", member_epoch=one.epoch - 1, topics=None)
        answer = await client.send(OffsetFetchRequest(groups=(late,)), 9)
        assert answer.groups[0].error_code == ErrorCode.STALE_MEMBER_EPOCH
        before, two = one.epoch, Instance(client, group_id, reading(topic), "two")
        await two.join()
        await until([one, two], lambda: len(one.active) == len(two.active) == 2)
        assert one.epoch > before
        for kept, code in ((one.active, NONE), (two.active, ErrorCode.STALE_MEMBER_EPOCH)):
            assert [await commit("one", before, index) for _, index in sorted(kept)] == [code, code]


async def test_a_group_is_listed_and_deleted_once_it_is_empty(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 4)
        one = Instance(client, group_id, reading(topic), "one")
        await one.join()
        await until([one], lambda: one.active == TASKS)
        listed = await client.send(ListGroupsRequest(types_filter=("streams",)), 5)
        (mine,) = [each for each in listed.groups if each.group_id == group_id]
        assert (mine.group_type, mine.protocol_type, mine.group_state) == ("streams", "streams", "Stable")

        async def delete() -> int:
            answer = await client.send(DeleteGroupsRequest(groups_names=(group_id,)), 2)
            return int(answer.results[0].error_code)

        assert await delete() == ErrorCode.NON_EMPTY_GROUP
        await one.leave()
        assert (await described(client, group_id)).group_state == "Empty"
        assert await delete() == NONE
        assert (await described(client, group_id)).error_code == ErrorCode.GROUP_ID_NOT_FOUND


async def test_offsets_of_subscribed_topics_are_not_deleted(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, read, other = fresh("app"), fresh("read"), fresh("other")
        for topic in (read, other):
            await create_topic(client, topic, 4)
        assert await configure(client, group_id, streams_initial_rebalance_delay_ms="0") == [NONE]
        one = Instance(client, group_id, reading(read), "one")
        await one.join()

        async def deleted() -> tuple[int, list[list[int]]]:
            asked = tuple(
                OffsetDeleteRequestTopic(name=name, partitions=(OffsetDeleteRequestPartition(partition_index=0),))
                for name in (read, other)
            )
            answer = await client.send(OffsetDeleteRequest(group_id=group_id, topics=asked), 0)
            return answer.error_code, [[part.error_code for part in topic.partitions] for topic in answer.topics]

        assert await deleted() == (NONE, [[ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC], [NONE]])
        await one.leave()
        assert await deleted() == (NONE, [[NONE], [NONE]])


async def test_join_with_the_protocol_of_another_group_type_is_refused(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 4)
        one = Instance(client, group_id, reading(topic), "one")
        await one.join()
        join = ConsumerGroupHeartbeatRequest(
            group_id=group_id,
            member_id="consumer",
            member_epoch=0,
            rebalance_timeout_ms=5_000,
            subscribed_topic_names=(topic,),
            topic_partitions=(),
        )
        assert (await client.send(join, 1)).error_code == ErrorCode.GROUP_ID_NOT_FOUND
        classic = JoinGroupRequest(
            group_id=group_id,
            session_timeout_ms=10_000,
            rebalance_timeout_ms=10_000,
            protocol_type="consumer",
            protocols=(JoinGroupRequestProtocol(name="range", metadata=b"\x00\x00"),),
        )
        assert (await client.send(classic, 3)).error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL

        other = fresh("group")
        await client.send(
            ConsumerGroupHeartbeatRequest(
                group_id=other,
                member_id="consumer",
                member_epoch=0,
                rebalance_timeout_ms=5_000,
                subscribed_topic_names=(topic,),
                topic_partitions=(),
            ),
            1,
        )
        await Instance(client, other, reading(topic), "one").join(code=ErrorCode.GROUP_ID_NOT_FOUND)
        assert (await described(client, other)).error_code == ErrorCode.GROUP_ID_NOT_FOUND


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"topology": None}, ErrorCode.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -1}, ErrorCode.INVALID_REQUEST),
        ({"warmup_tasks": None}, ErrorCode.INVALID_REQUEST),
        ({"active_tasks": (TaskIds(subtopology_id="0", partitions=(0,)),)}, ErrorCode.INVALID_REQUEST),
        ({"topology": reading("__consumer_offsets")}, ErrorCode.STREAMS_INVALID_TOPOLOGY),
        ({"topology": reading("no topic")}, ErrorCode.STREAMS_INVALID_TOPOLOGY),
        (
            {
                "topology": Topology(
                    subtopologies=(
                        Subtopology(
                            subtopology_id="0",
                            source_topics=("t",),
                            copartition_groups=(CopartitionGroup(source_topics=(1,)),),
                        ),
                    )
                )
            },
            ErrorCode.STREAMS_INVALID_TOPOLOGY,
        ),
    ],
)
async def test_invalid_heartbeat_is_refused_and_creates_no_group(
    gateway: GatewayProcess, change: dict[str, Any], code: ErrorCode
) -> None:
    async with client_of(gateway) as client:
        group_id = fresh("group")
        await Instance(client, group_id, reading("t"), "one").join(code=code, **change)
        assert (await described(client, group_id)).error_code == ErrorCode.GROUP_ID_NOT_FOUND


async def test_failed_creation_of_internal_topics_is_reported(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 1)
        changelog = TopicInfo(name=f"{group_id}-log", topic_configs=(KeyValue(key="cleanup.policy", value="burn"),))
        topology = Topology(
            subtopologies=(
                Subtopology(subtopology_id="0", source_topics=(topic,), state_changelog_topics=(changelog,)),
            )
        )
        one = Instance(client, group_id, topology, "one")
        await one.join()
        assert "burn" in one.statuses[StatusCode.MISSING_INTERNAL_TOPICS]
        assert (await described(client, group_id)).group_state == "NotReady"


async def test_members_receive_the_partitions_by_endpoint(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 4)
        one, two = (Instance(client, group_id, reading(topic), name) for name in ("one", "two"))
        await one.join(user_endpoint=Endpoint(host="one.example", port=65_000))
        await two.join(user_endpoint=Endpoint(host="two.example", port=8_080))
        await until([one, two], lambda: len(one.active) == len(two.active) == 2)
        answer = await one.beat(endpoint_information_epoch=-1)
        assert answer.partitions_by_user_endpoint is not None
        told = {
            (each.user_endpoint.host, each.user_endpoint.port): {
                ("0", index) for partitions in each.active_partitions for index in partitions.partitions
            }
            for each in answer.partitions_by_user_endpoint
        }
        assert told == {("one.example", 65_000): one.active, ("two.example", 8_080): two.active}
        again = await one.beat(endpoint_information_epoch=answer.endpoint_information_epoch)
        assert again.partitions_by_user_endpoint is None


async def test_shutdown_is_announced_to_every_member(gateway: GatewayProcess) -> None:
    async with client_of(gateway) as client:
        group_id, topic = await at_once(client), fresh("topic")
        await create_topic(client, topic, 4)
        one, two = (Instance(client, group_id, reading(topic), name) for name in ("one", "two"))
        await one.join()
        await two.join()
        await two.beat(shutdown_application=True)
        await one.beat()
        assert StatusCode.SHUTDOWN_APPLICATION in one.statuses
