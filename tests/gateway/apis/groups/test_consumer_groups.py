"""Groups of the consumer protocol on a real Postgres, through the codec: heartbeats, rows, restarts, offsets, admin
APIs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.groups.cluster_feed import ClusterFeed
from protocol.errors import ErrorCode
from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
)
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.describe_groups import DescribeGroupsRequest
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchRequestTopics
from storage.errors import StorageError
from tests.gateway.apis.groups.consumer_groups import G, beat, commit, join, rows, told
from tests.gateway.group_node import GroupNode, forget_everything, group_node
from tests.postgres import Databases


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


async def test_two_members_share_and_each_acknowledgement_is_one_row(node: GroupNode) -> None:
    topic = (await node.create_topic("t", 4)).topic_id
    assert told(await join(node, "a")) == (1, {topic: (0, 1, 2, 3)})
    assert told(await join(node, "b", version=0)) == (2, {})
    assert told(await beat(node, "a", 1)) == (1, {topic: (0, 1)})
    before = await rows(node)
    assert told(await beat(node, "a", 1, {topic: (0, 1)})) == (2, None)
    after = await rows(node)
    assert [each for each in after if after[each] != before[each]] == ["a"]
    assert told(await beat(node, "b", 2)) == (2, {topic: (2, 3)})
    settled = await rows(node)
    assert {each: epoch for each, (epoch, _, _) in settled.items()} == {"a": 2, "b": 2}
    assert told(await beat(node, "a", 2)) == (2, None)
    assert await rows(node) == settled, "a heartbeat without news writes nothing"


async def test_many_joins_at_once_are_stored_by_few_writes(node: GroupNode, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.create_topic("t", 100)
    await join(node, "first")
    writes = 0
    save = node.store.save

    async def counted(*given: Any, **more: Any) -> Any:
        nonlocal writes
        writes += 1
        return await save(*given, **more)

    monkeypatch.setattr(node.store, "save", counted)
    answers = await asyncio.gather(*(join(node, f"m{number:02}") for number in range(60)))
    assert sorted(answer.member_epoch for answer in answers) == list(range(2, 62)), "each is told of its own step"
    assert writes <= 30
    stored = await rows(node)
    assert len(stored) == 61
    assert {answer.member_id: answer.member_epoch for answer in answers}.items() <= {
        member_id: epoch for member_id, (epoch, _, _) in stored.items()
    }.items()


async def test_no_join_of_a_failed_write_is_acknowledged(node: GroupNode, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.create_topic("t", 4)
    await join(node, "first")
    before = await rows(node)

    async def refused(*_given: Any, **_more: Any) -> Any:
        raise StorageError("refused")

    monkeypatch.setattr(node.store, "save", refused)
    asked = (
        beat(node, f"m{number}", 0, {}, rebalance_timeout_ms=60_000, subscribed_topic_names=("t",))
        for number in range(20)
    )
    answers = await asyncio.gather(*asked)
    assert {answer.error_code for answer in answers} == {ErrorCode.UNKNOWN_SERVER_ERROR}
    assert await rows(node) == before


async def test_new_coordinator_continues_after_a_kill(node: GroupNode, database_url: str) -> None:
    topic = (await node.create_topic("t", 4)).topic_id
    await join(node, "a", instance_id="i")
    await join(node, "b")
    assert told(await beat(node, "a", 1)) == (1, {topic: (0, 1)})
    async with group_node(database_url) as other:
        await other.services.catalog.refresh_if_changed()
        ClusterFeed(other.services.catalog, other.groups)
        assert told(await beat(other, "b", 2)) == (2, None), "a has not let go yet"
        assert (await beat(other, "x", 1, instance_id="i")).error_code == ErrorCode.FENCED_INSTANCE_ID
        assert told(await beat(other, "a", 1, {topic: (0, 1)})) == (2, None)
        assert told(await beat(other, "b", 2)) == (2, {topic: (2, 3)})


async def test_topic_just_created_is_assigned_in_the_first_answer(node: GroupNode) -> None:
    """Another node creates the topic. No announcement reaches this node's catalog."""
    assert told(await join(node, "a", "elsewhere")) == (1, {})
    topic = await node.create_topic("t", 2)
    assert told(await beat(node, "a", 1, subscribed_topic_names=("t",))) == (2, {topic.topic_id: (0, 1)})


async def test_heartbeat_errors_have_messages(node: GroupNode) -> None:
    nobody = await beat(node, "a", 3)
    assert (nobody.error_code, nobody.error_message) == (ErrorCode.UNKNOWN_MEMBER_ID, "no member a")
    assert (nobody.member_id, nobody.assignment) == (None, None)
    nameless = await node.ask(ConsumerGroupHeartbeatRequest(member_id="a"), 1)
    assert (nameless.error_code, nameless.error_message) == (ErrorCode.INVALID_REQUEST, "GroupId can't be empty.")
    for pattern in ("(", r"\pL" * 21, r"\PL" * 21, "a" * 2_049):
        bad = await beat(node, "a", 0, {}, rebalance_timeout_ms=1, subscribed_topic_regex=pattern)
        assert bad.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION, pattern
    bad = await beat(node, "a", 0, {}, rebalance_timeout_ms=1, subscribed_topic_regex="a(b")
    assert bad.error_message == "SubscribedTopicRegex `a(b` is not a valid regular expression: missing )."
    good = await beat(node, "a", 0, {}, rebalance_timeout_ms=1, subscribed_topic_regex=r"\pL" * 20)
    assert good.error_code == ErrorCode.NONE


async def test_subscription_longer_than_the_names_of_all_permitted_topics_is_refused(node: GroupNode) -> None:
    names = tuple(f"{number:032000}" for number in range(5_000 * 249 // 32_000 + 1))
    fields: dict[str, Any] = {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": names}
    assert (await beat(node, "a", 0, {}, **fields)).error_code == ErrorCode.POLICY_VIOLATION
    assert not await rows(node)
    await join(node, "a", *(f"{number:0249}" for number in range(5_000)))


async def test_offsets_are_committed_and_fetched_under_the_member_epoch(node: GroupNode) -> None:
    topic = (await node.create_topic("t", 4)).topic_id
    assert await commit(node, topic, "", -1) == ErrorCode.NONE, "nobody is a member"
    await join(node, "a")
    assert await commit(node, topic, "", -1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert await commit(node, topic, "x", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert await commit(node, topic, "a", 1) == ErrorCode.NONE
    assert await commit(node, topic, "a", 1, version=9) == ErrorCode.NONE
    assert await commit(node, topic, "a", 1, version=8) == ErrorCode.UNSUPPORTED_VERSION
    assert await commit(node, topic, "a", 2, version=8) == ErrorCode.UNSUPPORTED_VERSION, "its epoch is not looked at"
    assert await commit(node, topic, "x", 2, version=8) == ErrorCode.UNKNOWN_MEMBER_ID
    assert await commit(node, topic, "a", 0) == ErrorCode.STALE_MEMBER_EPOCH
    assert await commit(node, topic, "a", 2) == ErrorCode.STALE_MEMBER_EPOCH

    async def fetch(member_id: str | None, epoch: int) -> int:
        asked = OffsetFetchRequestGroup(
            group_id=G,
            member_id=member_id,
            member_epoch=epoch,
            topics=(OffsetFetchRequestTopics(topic_id=topic, partition_indexes=(0,)),),
        )
        (group,) = (await node.ask(OffsetFetchRequest(groups=(asked,)), 10)).groups
        if group.error_code == ErrorCode.NONE:
            assert group.topics[0].partitions[0].committed_offset == 7
        return group.error_code

    assert await fetch(None, -1) == ErrorCode.NONE
    assert await fetch("a", 1) == ErrorCode.NONE
    assert await fetch("a", 0) == ErrorCode.STALE_MEMBER_EPOCH
    assert await fetch("x", 1) == ErrorCode.UNKNOWN_MEMBER_ID


async def test_commit_overtaken_by_a_new_epoch_is_refused_by_postgres(node: GroupNode) -> None:
    topic = (await node.create_topic("t", 4)).topic_id
    await join(node, "a")
    await node.database.hot.fetch("update group_member set member_epoch = 2")
    assert await commit(node, topic, "a", 1) == ErrorCode.STALE_MEMBER_EPOCH
    await node.database.hot.fetch("delete from group_member")
    assert await commit(node, topic, "a", 1) == ErrorCode.UNKNOWN_MEMBER_ID


async def test_consumer_group_is_listed_and_described(node: GroupNode) -> None:
    topic = (await node.create_topic("t", 2)).topic_id
    await join(node, "a", instance_id="i", rack_id="r")
    request = ConsumerGroupDescribeRequest(group_ids=(G, "missing", "", G), include_authorized_operations=True)
    found, missing, nameless = (await node.ask(request, 1)).groups
    assert (missing.error_code, nameless.error_code) == (ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.INVALID_GROUP_ID)
    assert missing.error_message == "Group missing not found."
    assert (found.group_state, found.group_epoch, found.assignment_epoch) == ("Stable", 1, 1)
    assert (found.assignor_name, found.authorized_operations) == ("uniform", sum(1 << bit for bit in (3, 6, 8, 10, 11)))
    (member,) = found.members
    assert (member.member_id, member.instance_id, member.rack_id, member.member_epoch) == ("a", "i", "r", 1)
    assert (member.client_id, member.client_host, member.member_type) == ("client", "/127.0.0.1", 1)
    assert (member.subscribed_topic_names, member.subscribed_topic_regex) == (("t",), "")
    assert member.assignment == member.target_assignment
    (held,) = member.assignment.topic_partitions
    assert (held.topic_id, held.topic_name, held.partitions) == (topic, "t", (0, 1))

    (classic,) = (await node.ask(DescribeGroupsRequest(groups=(G,)), 6)).groups
    assert (classic.group_state, classic.error_code) == ("Dead", ErrorCode.GROUP_ID_NOT_FOUND)
    assert classic.error_message == f"Group {G} is not a classic group."
    (listed,) = (await node.ask(ListGroupsRequest(types_filter=("Consumer",), states_filter=("stable",)), 5)).groups
    assert (listed.group_id, listed.group_state, listed.group_type) == (G, "Stable", "consumer")
    assert (await node.ask(ListGroupsRequest(types_filter=("classic",)), 5)).groups == ()


async def test_group_with_members_and_its_subscribed_offsets_cannot_be_deleted(node: GroupNode) -> None:
    topic = (await node.create_topic("t", 2)).topic_id
    await join(node, "a")
    await commit(node, topic, "a", 1)

    async def delete_offset() -> int:
        asked = OffsetDeleteRequestTopic(name="t", partitions=(OffsetDeleteRequestPartition(partition_index=0),))
        answer = await node.ask(OffsetDeleteRequest(group_id=G, topics=(asked,)), 0)
        assert answer.error_code == ErrorCode.NONE
        return answer.topics[0].partitions[0].error_code

    async def delete_group() -> int:
        return (await node.ask(DeleteGroupsRequest(groups_names=(G,)), 2)).results[0].error_code

    assert await delete_offset() == ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
    assert await delete_group() == ErrorCode.NON_EMPTY_GROUP
    await beat(node, "a", -1)
    assert await delete_offset() == ErrorCode.NONE
    assert await delete_group() == ErrorCode.NONE
    assert await delete_group() == ErrorCode.GROUP_ID_NOT_FOUND
    assert await rows(node) == {}


async def test_empty_group_changes_its_protocol_and_keeps_its_offsets(node: GroupNode) -> None:
    topic = (await node.create_topic("t", 2)).topic_id
    classic = JoinGroupRequest(
        group_id=G,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=(JoinGroupRequestProtocol(name="range", metadata=b""),),
    )
    await join(node, "a")
    await beat(node, "a", 1, {topic: (0, 1)})
    await commit(node, topic, "a", 1)
    refused = await node.ask(classic, 3)
    assert refused.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert told(await beat(node, "a", 1)) == (1, None)
    await beat(node, "a", -1)
    joined = await node.ask(classic, 3)
    assert (joined.error_code, joined.generation_id) == (ErrorCode.NONE, 3)
    other = await beat(node, "b", 0, {}, rebalance_timeout_ms=1, subscribed_topic_names=("t",))
    assert other.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    (described,) = (await node.ask(ConsumerGroupDescribeRequest(group_ids=(G,)), 1)).groups
    assert described.error_message == f"Group {G} is not a consumer group."
    found = await node.database.hot.fetch("select committed_offset from committed_offset")
    assert [row["committed_offset"] for row in found] == [7]


async def test_group_has_its_own_intervals(node: GroupNode) -> None:
    await join(node, "a")
    assert (await beat(node, "a", 1)).heartbeat_interval_ms == 5_000
    await node.topics.set_group_configs(G, {"consumer.heartbeat.interval.ms": "7000"})
    await node.services.catalog.refresh_if_changed()
    assert (await beat(node, "a", 1)).heartbeat_interval_ms == 7_000
    await node.topics.set_group_configs(G, {}, ["consumer.heartbeat.interval.ms"])
    await node.services.catalog.refresh_if_changed()
    assert (await beat(node, "a", 1)).heartbeat_interval_ms == 5_000
