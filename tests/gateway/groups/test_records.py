"""Groups with very long subscriptions, as they are written and read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from gateway.coordinator.classic.model import Group
from gateway.coordinator.cluster import NO_TOPICS
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import LONG_BYTES, ConnectionId, RequestId
from gateway.coordinator.settings import Settings
from gateway.groups.kinds import MACHINES
from gateway.groups.records import GroupRecords
from gateway.groups.slot import Unstored
from protocol.consumer import Subscription, encode_subscription
from protocol.errors import ErrorCode
from storage.types import GroupChange, GroupRecord, Saved
from tests.gateway.group_node import GroupNode, group_node, settle
from tests.steps.waiting import until

NAMES = tuple(f"{number:0249}" for number in range(5_000))


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    async with group_node(database_url) as started:
        yield started


async def test_members_with_long_subscriptions_are_not_written_in_one_transaction(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other groups wait for such a transaction, and Postgres refuses a statement of a gigabyte."""
    written: list[int] = []
    save = node.store.save

    async def noted(changes: Sequence[GroupChange], *, wait: bool = False) -> list[Saved]:
        written.append(len(changes))
        return await save(changes, wait=wait)

    monkeypatch.setattr(node.store, "save", noted)
    records = GroupRecords(node.store, MACHINES, 1_000)

    async def write(group_id: str) -> None:
        joins = ConsumerGroupHeartbeat(
            request_id=RequestId(1),
            connection_id=ConnectionId("c"),
            connection_number=1,
            version=1,
            client_id="client",
            client_host="/127.0.0.1",
            new_member_id=MemberId("m"),
            member_id=MemberId("m"),
            member_epoch=0,
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=NAMES,
            owned={},
        )
        taken = CONSUMER.step(CONSUMER.missing(group_id), joins, NO_TOPICS, 0, Settings())
        unstored, lease = Unstored(), node.leases.lease_for(group_id)
        unstored.note(taken.facts)
        assert lease is not None
        assert isinstance(taken.group, ConsumerGroup)
        await records.write(group_id, taken.group, unstored, lease, lambda: True)

    await asyncio.gather(*(write(f"g{number}") for number in range(5)))
    assert sum(written) == 5
    assert max(written) == 3


@pytest.mark.parametrize("is_acquired", [False, True])
async def test_group_with_long_subscriptions_is_read_in_a_thread(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch, *, is_acquired: bool
) -> None:
    """A thousand members with a thousand topics each would block the event loop for a second."""
    topics = NAMES[: LONG_BYTES // 249]
    long = node.member("long", "c1", metadata=encode_subscription(Subscription(1, topics)))
    short = node.member("short", "c2")
    await settle(long)
    await settle(short)
    threads: dict[str, int] = {}
    restored = GroupRecords.restored

    def noted(records: GroupRecords, record: GroupRecord, now_ms: int, settings: Settings) -> Any:
        threads[record.group_id] = threading.get_ident()
        return restored(records, record, now_ms, settings)

    monkeypatch.setattr(GroupRecords, "restored", noted)
    for group_id in ("long", "short"):
        node.groups.shard_lost(node.leases.shard_of(group_id))
    if is_acquired:
        for group_id in ("long", "short"):
            node.groups.shard_acquired(node.leases.lease_for(group_id) or pytest.fail("no lease"))
        await until(lambda: not node.groups.shards_loading)
    for member in (long, short):
        assert await member.beat() is ErrorCode.NONE
    here = threading.get_ident()
    assert {group_id: thread == here for group_id, thread in threads.items()} == {"long": False, "short": True}
    group = node.groups.settled("long")
    assert isinstance(group, Group)
    assert group.subscribed_topics == frozenset(topics)
