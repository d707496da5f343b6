"""Share groups on a real Postgres: state that was acknowledged survives a kill, and tools see such groups."""

from __future__ import annotations

import base64
from typing import Any
from uuid import UUID

import pytest

from gateway.groups.cluster_feed import ClusterFeed
from protocol.errors import ErrorCode
from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.share_group_describe import ShareGroupDescribeRequest
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from tests.gateway.group_node import GroupNode, group_node

A, B = (base64.urlsafe_b64encode(UUID(int=number).bytes).decode().rstrip("=") for number in (1, 2))


async def beat(node: GroupNode, member_id: str, epoch: int, names: tuple[str, ...] | None = None) -> Any:
    request = ShareGroupHeartbeatRequest(
        group_id="s", member_id=member_id, member_epoch=epoch, rack_id=None, subscribed_topic_names=names
    )
    return await node.ask(request, 1)


async def described(node: GroupNode, group_id: str = "s") -> Any:
    request = ShareGroupDescribeRequest(group_ids=(group_id,), include_authorized_operations=False)
    ((found),) = (await node.ask(request, 1)).groups
    return found


def held(reply: Any) -> dict[UUID, tuple[int, ...]]:
    return {each.topic_id: each.partitions for each in reply.assignment.topic_partitions}


@pytest.mark.asyncio
async def test_members_survive_a_kill(database_url: str) -> None:
    async with group_node(database_url) as node:
        ClusterFeed(node.services.catalog, node.groups)
        topic = await node.create_topic("shared", 2)
        first = await beat(node, A, 0, ("shared",))
        assert (first.error_code, first.member_epoch, held(first)) == (0, 2, {topic.topic_id: (0, 1)})
        second = await beat(node, B, 0, ("shared",))
        assert held(second) == {topic.topic_id: (1,)}
        shown = await described(node)
    async with group_node(database_url) as node:
        ClusterFeed(node.services.catalog, node.groups)
        await node.services.catalog.resolve_all(["shared"])
        again = await described(node)
        assert again == shown
        assert (again.group_state, again.group_epoch, again.assignor_name) == ("Stable", 3, "simple")
        assert {each.member_id: each.member_epoch for each in again.members} == {A: 2, B: 3}
        told = await beat(node, A, 2)
        assert (told.error_code, told.member_epoch, held(told)) == (0, 3, {topic.topic_id: (0,)})


@pytest.mark.asyncio
async def test_tools_list_and_delete_a_share_group(database_url: str) -> None:
    async with group_node(database_url) as node:
        ClusterFeed(node.services.catalog, node.groups)
        await node.create_topic("shared too")
        await beat(node, A, 0, ("shared too",))
        request = ListGroupsRequest(states_filter=(), types_filter=("Share",))
        ((listed),) = (await node.ask(request, 5)).groups
        assert (listed.group_id, listed.group_type, listed.group_state) == ("s", "share", "Stable")
        consumer = ConsumerGroupDescribeRequest(group_ids=("s",), include_authorized_operations=False)
        assert (await node.ask(consumer, 1)).groups[0].error_code == ErrorCode.GROUP_ID_NOT_FOUND
        assert (await described(node, "none")).error_code == ErrorCode.GROUP_ID_NOT_FOUND
        delete = DeleteGroupsRequest(groups_names=("s",))
        assert (await node.ask(delete, 2)).results[0].error_code == ErrorCode.NON_EMPTY_GROUP
        assert (await beat(node, A, -1)).member_epoch == -1
        assert (await described(node)).group_state == "Empty"
        assert (await node.ask(delete, 2)).results[0].error_code == ErrorCode.NONE
        assert (await described(node)).error_code == ErrorCode.GROUP_ID_NOT_FOUND
