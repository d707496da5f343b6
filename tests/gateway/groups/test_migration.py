"""A group that changes its protocol while it has members, on a real Postgres, through the codec: rows, commits, admin
APIs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from gateway.groups.cluster_feed import ClusterFeed
from protocol.consumer import (
    Assignment,
    Subscription,
    TopicPartition,
    decode_assignment,
    encode_assignment,
    encode_subscription,
)
from protocol.errors import ErrorCode
from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from storage.types import OffsetCommit
from tests.gateway.apis.groups.consumer_groups import G, beat, commit, join, rows, told
from tests.gateway.group_node import GroupNode, forget_everything, group_node
from tests.postgres import Databases

ALL = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def database_url(postgres: Databases) -> Iterator[str]:
    url = postgres.create()
    yield url
    postgres.drop(url)


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    await forget_everything(database_url)
    async with group_node(database_url) as started:
        ClusterFeed(started.services.catalog, started.groups)
        yield started


async def join_classic(node: GroupNode, member_id: str, owned: Sequence[int] = ()) -> JoinGroupResponse:
    """Join as version 5: a member without an id receives one first."""
    claimed = (TopicPartition("t", tuple(owned)),) if owned else ()
    request = JoinGroupRequest(
        group_id=G,
        member_id=member_id,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=(
            JoinGroupRequestProtocol(
                name="range", metadata=encode_subscription(Subscription(1, ("t",), None, claimed))
            ),
        ),
    )
    return await node.ask(request, 5, connection=f"c-{member_id}")


async def share(
    node: GroupNode, member_id: str, generation: int, given: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Send SyncGroup, and return the member's assignment. A leader passes the assignments of all members."""
    assignments: tuple[Any, ...] = ()
    if given is not None:
        assignment = encode_assignment(Assignment(1, (TopicPartition("t", tuple(given)),)))
        assignments = (SyncGroupRequestAssignment(member_id=member_id, assignment=assignment),)
    request = SyncGroupRequest(
        group_id=G,
        member_id=member_id,
        generation_id=generation,
        protocol_type="consumer",
        protocol_name="range",
        assignments=assignments,
    )
    answer = await node.ask(request, 5, connection=f"c-{member_id}")
    assert answer.error_code == ErrorCode.NONE, answer
    return tuple(index for _, indexes in decode_assignment(answer.assignment).assigned_partitions for index in indexes)


async def alive(node: GroupNode, member_id: str, generation: int) -> int:
    request = HeartbeatRequest(group_id=G, member_id=member_id, generation_id=generation)
    return (await node.ask(request, 4, connection=f"c-{member_id}")).error_code


async def classic_group(node: GroupNode) -> tuple[str, int]:
    """Build a Stable classic group of one member, which owns all of "t". Return its id and its generation."""
    required = await join_classic(node, "")
    assert required.error_code == ErrorCode.MEMBER_ID_REQUIRED
    joined = await join_classic(node, required.member_id)
    assert await share(node, joined.member_id, joined.generation_id, ALL) == ALL
    return joined.member_id, joined.generation_id


async def group_row(node: GroupNode) -> tuple[str, str, int]:
    (row,) = await node.database.hot.fetch("select group_type, state, generation_id from consumer_group")
    return row["group_type"], row["state"], row["generation_id"]


async def test_upgrade_and_downgrade_write_the_expected_rows(node: GroupNode) -> None:
    topic = (await node.create_topic("t", 4)).topic_id
    member_id, generation = await classic_group(node)
    assert await group_row(node) == ("classic", "Stable", generation)

    assert told(await join(node, "a")) == (generation + 1, {})
    assert await group_row(node) == ("consumer", "Reconciling", generation + 1)
    stored = await rows(node)
    assert {each: epoch for each, (epoch, _, _) in stored.items()} == {member_id: generation, "a": generation + 1}
    assert await commit(node, topic, member_id, generation, version=8) == ErrorCode.NONE
    assert await alive(node, member_id, generation) == ErrorCode.REBALANCE_IN_PROGRESS
    joined = await join_classic(node, member_id)
    assert (joined.error_code, joined.generation_id) == (ErrorCode.NONE, generation + 1)
    mine = await share(node, member_id, generation + 1)
    _, its = told(await beat(node, "a", generation + 1))
    assert its is not None
    assert sorted((*mine, *its[topic])) == list(ALL)
    assert await commit(node, topic, member_id, generation, version=8) == ErrorCode.ILLEGAL_GENERATION

    (group,) = (await node.ask(ConsumerGroupDescribeRequest(group_ids=(G,)), 1)).groups
    assert {member.member_id: member.member_type for member in group.members} == {member_id: 0, "a": 1}
    (listed,) = (await node.ask(ListGroupsRequest(), 5)).groups
    assert (listed.group_type, listed.protocol_type) == ("consumer", "consumer")

    assert told(await beat(node, "a", -1)) == (-1, None)
    assert (await group_row(node))[:2] == ("classic", "PreparingRebalance")
    assert {each: epoch for each, (epoch, _, _) in (await rows(node)).items()} == {member_id: generation + 1}
    assert await commit(node, topic, member_id, generation + 1, version=8) == ErrorCode.NONE
    assert await alive(node, member_id, generation + 1) == ErrorCode.REBALANCE_IN_PROGRESS
    back = await join_classic(node, member_id)
    assert (back.error_code, back.leader) == (ErrorCode.NONE, member_id)
    assert await share(node, member_id, back.generation_id, ALL) == ALL
    assert await group_row(node) == ("classic", "Stable", back.generation_id)
    assert await commit(node, topic, member_id, generation + 1, version=8) == ErrorCode.ILLEGAL_GENERATION
    assert await commit(node, topic, member_id, back.generation_id, version=8) == ErrorCode.NONE


@pytest.mark.parametrize("way", ["upgrade", "downgrade"])
async def test_commit_overtaken_by_a_conversion_counts(node: GroupNode, way: str) -> None:
    """The coordinator accepts the commit and then converts the group. Postgres fences the commit by the generation from
    before the conversion.
    """
    topic = (await node.create_topic("t", 4)).topic_id
    member_id, generation = await classic_group(node)
    if way == "downgrade":
        await join(node, "a")
        await beat(node, "a", -1)
    committer = node.groups.offset_committer
    real = committer.submit

    async def overtaken(commits: Sequence[OffsetCommit], number: int | None, again: bool) -> Any:
        committer.submit = real  # type: ignore[method-assign]
        if way == "upgrade":
            await join(node, "a")
        else:
            assert (await join_classic(node, member_id)).error_code == ErrorCode.NONE
        return await real(commits, number, again=again)

    committer.submit = lambda commits, number, *, again=False: asyncio.ensure_future(  # type: ignore
        overtaken(commits, number, again)
    )
    error = await commit(node, topic, member_id, generation, version=8)
    # A commit of an earlier generation is different: its partitions may have another owner now.
    assert error == (ErrorCode.NONE if way == "upgrade" else ErrorCode.ILLEGAL_GENERATION)


@pytest.mark.parametrize("when", ["upgraded", "downgraded"])
async def test_new_coordinator_continues_after_a_conversion(node: GroupNode, database_url: str, when: str) -> None:
    topic = (await node.create_topic("t", 4)).topic_id
    member_id, generation = await classic_group(node)
    await join(node, "a")
    if when == "downgraded":
        await beat(node, "a", -1)
    async with group_node(database_url) as other:
        await other.services.catalog.refresh_if_changed()
        ClusterFeed(other.services.catalog, other.groups)
        assert await commit(other, topic, member_id, generation, version=8) == ErrorCode.NONE
        assert await alive(other, member_id, generation) == ErrorCode.REBALANCE_IN_PROGRESS
        joined = await join_classic(other, member_id)
        assert joined.error_code == ErrorCode.NONE
        given = await share(other, member_id, joined.generation_id, ALL if when == "downgraded" else None)
        assert len(given) == (4 if when == "downgraded" else 2)


async def test_administrator_removes_a_member_of_the_consumer_protocol(node: GroupNode) -> None:
    await node.create_topic("t", 4)
    _, generation = await classic_group(node)
    await join(node, "a", instance_id="i")
    request = LeaveGroupRequest(group_id=G, members=(MemberIdentity(member_id="", group_instance_id="i"),))
    answer = await node.ask(request, 5)
    assert [member.error_code for member in answer.members] == [ErrorCode.NONE]
    assert (await group_row(node))[0] == "classic"
    lost = await beat(node, "a", generation + 1, instance_id="i")
    assert lost.error_code == ErrorCode.UNKNOWN_MEMBER_ID, "which tells it to join"
