"""Events that make a drain check at once. The clock of this test never advances."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.coordinator.classic.model import Group
from gateway.coordinator.facts import Fact, MemberId, OffsetsCommitted, TransactionCommitted
from gateway.coordinator.handoff import Draining, HandoffMode, HandoffSettings
from gateway.groups import drains as module
from gateway.groups.drains import Drains
from gateway.groups.groups import Groups
from gateway.groups.marks import Marks
from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription
from storage.offsets import OffsetStore
from storage.types import CommittedOffset, PartitionKey, PartitionState
from tests.gateway.group_node import QUICK, GroupNode, group_node, reply_of, settle
from tests.steps.waiting import until

TOPIC = SimpleNamespace(topic_id=uuid.uuid4(), partitions=(SimpleNamespace(partition_key=1),))
DRAIN = replace(QUICK, handoff=HandoffSettings(HandoffMode.DRAIN, 30_000))
AWAITED = (Draining("t", 0, MemberId("a"), "client", "/127.0.0.1", None, 7),)


class Waiting:
    """A group whose drain waits until the offset of its partition is 7."""

    def __init__(self) -> None:
        self.readers: list[Callable[[str, tuple[Fact, ...]], None]] = []
        self.committed = 5
        self.found: asyncio.Queue[int] = asyncio.Queue()

    def settled(self, group_id: str) -> object:
        return self

    def tell_group(self, group_id: str, progress: Any) -> None:
        self.found.put_nowait(progress.found[0].committed)

    async def fetch(self, group_id: str, partitions: object) -> list[CommittedOffset]:
        return [CommittedOffset(TOPIC.topic_id, 0, self.committed, -1, "", 0)]


@pytest.mark.parametrize("fact", [OffsetsCommitted(MemberId("a"), 1, ()), TransactionCommitted()])
async def test_commit_of_either_kind_is_checked_at_once(fact: Fact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 3600.0)
    monkeypatch.setattr(module, "draining", lambda group: AWAITED if group.committed < 7 else ())
    group = Waiting()
    catalog = SimpleNamespace(get=lambda name: TOPIC, get_by_id=lambda topic_id: TOPIC)
    states = cast(Callable[..., Awaitable[Any]], None)
    drains = Drains(
        cast(Groups, group), cast(OffsetStore, group), cast(Any, catalog), states, Marks(), lambda key: True
    )
    (told,) = group.readers
    async with asyncio.timeout(20):
        told("g", ())
        assert await group.found.get() == 5
        # The drain sleeps after it has notified the group.
        await asyncio.sleep(0)
        group.committed = 6
        told("g", (fact,))
        assert await group.found.get() == 6
    await drains.close()


async def hand_over(node: GroupNode, partition: int) -> Callable[[], bool]:
    """Let the leader assign the partition to one member, and then to another. Return a function that tells whether the
    group waits for the first one."""
    metadata = encode_subscription(Subscription(1, ("t",)))
    topics = TopicPartition("t", (partition,))
    share, nothing = (encode_assignment(Assignment(1, each)) for each in ((topics,), ()))
    one, two = (node.member("g", name, metadata=metadata) for name in ("c1", "c2"))
    await settle(one, two)
    for first, second in ((share, nothing), (nothing, share)):
        await asyncio.gather(one.join(), two.join())
        leader, follower = (one, two) if one.members else (two, one)
        follower.sync()
        await reply_of(leader.sync({one.member_id: first, two.member_id: second}))

    def waits() -> bool:
        group = node.groups.settled("g")
        assert isinstance(group, Group)
        return bool(group.handoffs)

    assert waits()
    return waits


async def test_partition_that_the_node_does_not_know_yet_is_not_taken_for_deleted(database_url: str) -> None:
    """After a change of the coordinator, the new one may not have read the topic yet. The source has not committed."""
    looked: list[PartitionKey] = []

    async def states(keys: Iterable[PartitionKey]) -> dict[PartitionKey, PartitionState]:
        looked.extend(keys)
        return {key: PartitionState(0, 5, 5, 0, 0) for key in looked}

    async with group_node(database_url, settings=DRAIN) as node:
        await node.create_topic("t")
        catalog = node.services.catalog
        assert catalog.get("t") is None
        drains = Drains(node.groups, node.offsets, catalog, states, Marks(), lambda key: True)
        waits = await hand_over(node, 0)
        await until(lambda: looked or not waits())
        assert waits()
        await drains.close()


async def test_drain_does_not_wait_for_a_partition_with_a_negative_number(database_url: str) -> None:
    """A leader's assignor may assign such a partition, which does not exist."""

    async def states(_keys: Iterable[PartitionKey]) -> dict[PartitionKey, PartitionState]:
        return {}

    async with group_node(database_url, settings=DRAIN) as node:
        await node.create_topic("t")
        drains = Drains(node.groups, node.offsets, node.services.catalog, states, Marks(), lambda key: True)
        waits = await hand_over(node, -7)
        await until(lambda: not waits())
        group = node.groups.settled("g")
        assert isinstance(group, Group)
        assert len(group.members) == 2, "the wait ends before the members' sessions do"
        await drains.close()
