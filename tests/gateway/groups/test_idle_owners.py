"""The observer names members that read nothing of their assignment, and no other members."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from gateway.coordinator.facts import Fact, MemberSynced, OffsetsCommitted, ProtocolViolated, Violation
from gateway.groups.idle_owners import IdleOwners
from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription
from protocol.errors import ErrorCode
from storage.types import Topic
from tests.gateway.group_node import GroupNode, group_node, settle

PATIENCE_S = 0.3
STICKY = "cooperative-sticky"


class Watched:
    """A group of one member that has just been assigned both partitions of a topic."""

    def __init__(self, node: GroupNode, topic: Topic, idle: IdleOwners, protocol_name: str = STICKY) -> None:
        metadata = encode_subscription(Subscription(3, (topic.name,), None, (), -1))
        self.idle, self.topic = idle, topic
        self.member = node.member("g", "c", metadata=metadata, protocol_name=protocol_name)
        self.seen: list[ProtocolViolated] = []
        self.node = node
        node.groups.readers.append(self._told)

    def _told(self, group_id: str, facts: tuple[Fact, ...]) -> None:
        self.seen += [fact for fact in facts if isinstance(fact, ProtocolViolated)]

    async def assigned(self) -> None:
        assert (await self.member.join()).error is ErrorCode.NONE
        given = encode_assignment(Assignment(1, (TopicPartition(self.topic.name, (0, 1)),)))
        answer = self.member.sync({self.member.member_id: given})
        assert (await answer if isinstance(answer, asyncio.Future) else answer).error is ErrorCode.NONE
        await asyncio.sleep(0)

    async def after_patience(self) -> list[ProtocolViolated]:
        """Return the violations that are seen once the waiting time has passed for every assignment that is watched
        now.
        """
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(2 * PATIENCE_S, over.set_result, None)
        await over
        return self.seen


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode]:
    async with group_node(database_url) as node:
        yield node


async def watched(node: GroupNode, protocol_name: str = STICKY, *, leads: bool = True) -> Watched:
    topic = await node.create_topic("t", 2)
    node.services.catalog.apply(topic)
    idle = IdleOwners(node.groups, node.services.catalog, lambda _: leads, patience_s=PATIENCE_S)
    scene = Watched(node, topic, idle, protocol_name)
    await scene.assigned()
    return scene


async def test_a_member_that_reads_nothing_is_named_once(node: GroupNode) -> None:
    scene = await watched(node)
    assert scene.idle.watching
    (fact,) = await scene.after_patience()
    assert (fact.violation, fact.members) == (Violation.NOTHING_READ, (scene.member.member_id,))
    assert fact.partitions == (("t", 0), ("t", 1))
    assert not scene.idle.watching


@pytest.mark.parametrize(
    "sign", ["asks on its connection", "asks on another connection", "fetches one partition", "commits"]
)
async def test_member_that_fetches_or_commits_is_not_named(node: GroupNode, sign: str) -> None:
    scene = await watched(node)
    match sign:
        case "asks on its connection":
            scene.idle.asked_offsets("g", "c", "other", "/10.0.0.1")
        case "asks on another connection":
            scene.idle.asked_offsets("g", "d", "client", "/127.0.0.1")
        case "commits":
            offsets = ((scene.topic.topic_id, 0, 7),)
            node.groups.told("g", (OffsetsCommitted(scene.member.member_id, scene.member.generation_id, offsets),))
        case _:
            scene.idle.fetched([(scene.topic.topic_id, 1)])
    assert not scene.idle.watching
    assert not await scene.after_patience()


async def test_activity_of_other_members_does_not_count(node: GroupNode) -> None:
    scene = await watched(node)
    scene.idle.asked_offsets("another group", "c", "client", "/127.0.0.1")
    scene.idle.asked_offsets("g", "d", "another client", "/127.0.0.1")
    scene.idle.fetched([(scene.topic.topic_id, 2)])
    assert [fact.violation for fact in await scene.after_patience()] == [Violation.NOTHING_READ]


@pytest.mark.parametrize("why", ["eager", "led elsewhere", "joined again"])
async def test_member_that_cannot_be_judged_is_not_named(node: GroupNode, why: str) -> None:
    scene = await watched(node, "range" if why == "eager" else STICKY, leads=why != "led elsewhere")
    if why == "joined again":
        assert (await scene.member.join()).error is ErrorCode.NONE
    else:
        assert not scene.idle.watching
    assert not await scene.after_patience()


async def test_a_member_that_syncs_costs_no_look_at_the_other_members(node: GroupNode) -> None:
    owned = (TopicPartition("t", tuple(range(20))),)
    metadata = encode_subscription(Subscription(3, ("t",), None, owned, 1))
    members = [node.member("g", f"c{number}", metadata=metadata, protocol_name=STICKY) for number in range(200)]
    await settle(*members)
    idle = IdleOwners(node.groups, node.services.catalog, lambda _: True)
    began = time.process_time()
    for member in members:
        idle.told("g", (MemberSynced(member.member_id),))
    await asyncio.sleep(0)
    # This takes some milliseconds. To read the subscriptions of all members each time takes most of a second.
    assert time.process_time() - began < 0.1
