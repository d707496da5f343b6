"""Requests of consumer groups: every version, refusals, and offsets of groups without members."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from protocol import codec
from protocol.api_keys import ApiKey
from protocol.consumer import Assignment, TopicPartition, decode_assignment, encode_assignment
from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from protocol.messages.describe_groups import DescribeGroupsRequest
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.metadata import MetadataRequest
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from tests.frames.members import create_topic, describe, fresh, join_all, member, settle
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import WireClient, encode_frame, read_frame

NONE = ErrorCode.NONE
GROUP_APIS = (
    ApiKey.OFFSET_COMMIT,
    ApiKey.OFFSET_FETCH,
    ApiKey.FIND_COORDINATOR,
    ApiKey.JOIN_GROUP,
    ApiKey.HEARTBEAT,
    ApiKey.LEAVE_GROUP,
    ApiKey.SYNC_GROUP,
    ApiKey.DESCRIBE_GROUPS,
    ApiKey.LIST_GROUPS,
    ApiKey.DELETE_GROUPS,
    ApiKey.OFFSET_DELETE,
)


async def served(client: WireClient) -> dict[ApiKey, range]:
    response = await client.send(ApiVersionsRequest(client_software_name="wire", client_software_version="1"), 3)
    assert response.error_code == NONE
    return {ApiKey(api.api_key): range(api.min_version, api.max_version + 1) for api in response.api_keys}


async def test_groups_are_described_and_listed_at_every_version(gateway: GatewayProcess) -> None:
    group_id = fresh("group")
    async with member(gateway.bootstrap, group_id) as one:
        await join_all(one)
        given = encode_assignment(Assignment(1, (TopicPartition("t", (0, 1)),), b"user data"))
        assert (await one.sync({one.member_id: given})).assignment == given
        for version in range(7):
            described = await describe(one.client, group_id, version)
            assert (described.group_state, described.protocol_type, described.protocol_data) == (
                "Stable",
                "consumer",
                "range",
            )
            assignment = decode_assignment(described.members[0].member_assignment)
            assert assignment.assigned_partitions == (TopicPartition("t", (0, 1)),)
            assert described.members[0].client_host == "/127.0.0.1"
        for version in range(6):
            listed = await one.client.send(ListGroupsRequest(), version)
            (mine,) = [group for group in listed.groups if group.group_id == group_id]
            assert mine.protocol_type == "consumer"
            assert mine.group_state == ("Stable" if version >= 4 else "")
            assert mine.group_type == ("classic" if version >= 5 else "")


async def test_every_version_of_the_group_apis_is_answered(gateway: GatewayProcess) -> None:
    async with member(gateway.bootstrap, fresh("group")) as one:
        advertised = await served(one.client)
        for api_key in GROUP_APIS:
            request = codec.request_class(api_key)()
            for version in advertised[api_key]:
                # An empty request is refused, never ignored: the answer decodes to the last byte.
                assert await one.client.send(request, version) is not None


@pytest.mark.parametrize("api_key", GROUP_APIS)
async def test_version_beyond_the_advertised_is_refused_in_the_apis_shape(
    gateway: GatewayProcess, api_key: ApiKey
) -> None:
    async with member(gateway.bootstrap, fresh("group")) as one:
        highest = (await served(one.client))[api_key][-1]
    host, _, port = gateway.bootstrap.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        frame = bytearray(encode_frame(codec.request_class(api_key)(), highest, 5))
        struct.pack_into(">h", frame, 6, highest + 1)
        writer.write(frame)
        try:
            answer = await asyncio.wait_for(read_frame(reader), 10)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # this API's response has no field for a code, so the gateway closes the connection
        response: Any
        position = 4 if api_key is ApiKey.OFFSET_DELETE else 5
        response, end = codec.decode(codec.response_class(api_key), highest, answer, position)
        assert end == len(answer)
        assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
    finally:
        writer.close()


async def test_an_unknown_version_of_api_versions_is_answered_in_version_0(gateway: GatewayProcess) -> None:
    host, _, port = gateway.bootstrap.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(struct.pack(">ihhih4s", 14, 18, 99, 5, 4, b"wire"))
        answer = await asyncio.wait_for(read_frame(reader), 10)
    finally:
        writer.close()
    response, end = codec.decode(ApiVersionsResponse, 0, answer, 4)
    assert end == len(answer)
    assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert ApiKey.API_VERSIONS in [api.api_key for api in response.api_keys]


async def test_a_request_over_the_limit_costs_its_own_connection_only(gateway: GatewayProcess) -> None:
    async with member(gateway.bootstrap, fresh("group")) as one:
        await settle(one)
        hostile = await WireClient.connect(gateway.bootstrap)
        hostile.send_bytes(struct.pack(">i", 100 * 1024 * 1024 + 1))
        await hostile.closed_by_peer(seconds=10)
        await hostile.close()
        assert await one.heartbeat() == NONE


@pytest.mark.parametrize("version", range(2, 10))
async def test_commit_without_a_member_counts_while_the_group_has_none(gateway: GatewayProcess, version: int) -> None:
    group_id, topic = fresh("group"), fresh("topic")
    request = OffsetCommitRequest(
        group_id=group_id,
        topics=(
            OffsetCommitRequestTopic(
                name=topic,
                partitions=(
                    OffsetCommitRequestPartition(partition_index=0, committed_offset=11, committed_metadata="note"),
                ),
            ),
        ),
    )
    async with member(gateway.bootstrap, group_id) as one:
        await create_topic(one.client, topic)
        answer = await one.client.send(request, version)
        assert answer.topics[0].partitions[0].error_code == NONE
        described = await describe(one.client, group_id)
        assert (described.group_state, described.protocol_type) == ("Empty", "")

        for fetch_version in range(2, 8):
            fetched = await one.client.send(OffsetFetchRequest(group_id=group_id, topics=None), fetch_version)
            assert [(t.name, p.committed_offset, p.metadata) for t in fetched.topics for p in t.partitions] == [
                (topic, 11, "note")
            ]
        for fetch_version in (8, 9):
            groups = (OffsetFetchRequestGroup(group_id=group_id, topics=None),)
            fetched = await one.client.send(OffsetFetchRequest(groups=groups), fetch_version)
            (group,) = fetched.groups
            assert [(t.name, p.committed_offset) for t in group.topics for p in t.partitions] == [(topic, 11)]

        await settle(one)
        refused = await one.client.send(request, version)
        assert refused.topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID
        assert await one.commit(topic, 12) == NONE


async def test_groups_and_offsets_survive_a_kill_of_the_gateway(gateway_factory: Any) -> None:
    gateway = gateway_factory()
    group_id, topic = fresh("kill"), fresh("topic")
    async with member(gateway.bootstrap, group_id) as one:
        topic_id = await create_topic(one.client, topic)
        assignments = await settle(one)
        assert await one.commit(topic, 41, version=10, topic_id=topic_id) == NONE
        before = one.member_id, one.generation_id
    gateway.kill()
    gateway.restart()
    async with member(gateway.bootstrap, group_id) as again:
        again.member_id, again.generation_id = before
        assert await again.heartbeat() == NONE
        assert (await again.sync()).assignment == assignments[again.member_id]
        fetched = await again.client.send(OffsetFetchRequest(group_id=group_id, topics=None), 7)
        assert fetched.topics[0].partitions[0].committed_offset == 41
        described = await again.client.send(DescribeGroupsRequest(groups=(group_id,)), 6)
        assert described.groups[0].group_state == "Stable"


async def test_a_drained_gateway_answers_held_joins_and_keeps_the_group(gateway_factory: Any) -> None:
    gateway = gateway_factory()
    group_id = fresh("drain")
    async with member(gateway.bootstrap, group_id) as first, member(gateway.bootstrap, group_id) as second:
        await settle(first)
        await second.knock()
        held = second.join_nowait()
        stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
        assert (await held).error_code == ErrorCode.NOT_COORDINATOR
        assert await stopping == 0
        before = first.member_id, first.generation_id
    gateway.start()
    async with member(gateway.bootstrap, group_id) as again:
        again.member_id, again.generation_id = before
        assert await again.heartbeat() == NONE


async def test_offsets_topic_is_listed_after_the_first_coordinator_lookup(gateway_factory: GatewayFactory) -> None:
    """Like in Kafka, the topic does not exist from the start."""
    gateway = gateway_factory({"offsets.topic.num.partitions": "3"}, coordinated=False)
    async with await WireClient.connect(gateway.bootstrap) as client:
        assert (await client.send(MetadataRequest(topics=None), 12)).topics == ()
        await client.send(FindCoordinatorRequest(coordinator_keys=("group",)), 4)
        listed = (await client.send(MetadataRequest(topics=None), 12)).topics
        told = [(topic.name, topic.is_internal, len(topic.partitions)) for topic in listed]
        assert told == [("__consumer_offsets", True, 3)]
