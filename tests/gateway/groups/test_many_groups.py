"""Work on very many groups at once must yield to other requests."""

from __future__ import annotations

import asyncio
from types import MappingProxyType, SimpleNamespace
from typing import Any
from uuid import UUID

from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.consumer.model import ConsumerGroupHeartbeat
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId
from gateway.coordinator.requests import JoinGroup, SyncGroup
from gateway.coordinator.settings import Settings
from gateway.groups.groups import Groups
from gateway.groups.kinds import MACHINES, AnyGroup
from gateway.groups.runtime import Runtime
from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription
from protocol.errors import ErrorCode
from storage.groups import GroupStore
from storage.types import CoordinatorLease, NodeId
from tests.gateway.groups.records import Record, Records
from tests.turns import HELD_MS, watched

COUNT = 5_000
LEASE = CoordinatorLease(0, NodeId(1), 1)


class Leases:
    def lease_for(self, group_id: str) -> CoordinatorLease | None:
        return LEASE


SETTINGS = Settings(group_initial_rebalance_delay_ms=600_000)
"""Disable the delay for new groups, because on a slow machine it would end during a measurement."""


def runtime(records: Records) -> Runtime[AnyGroup, Settings, Record]:
    return Runtime(MACHINES, records, Leases(), SETTINGS, lambda before, after, facts: None)


def cluster(revision: int, partition_count: int) -> Cluster:
    topic = ClusterTopic(UUID(int=1), "t", partition_count)
    return Cluster(MappingProxyType({"t": topic}), MappingProxyType({topic.topic_id: topic}), revision)


async def joined(groups: Runtime) -> None:
    """Let one member join each group and read the one topic."""
    groups.cluster_changed(cluster(1, 1))
    for number in range(COUNT):
        event = ConsumerGroupHeartbeat(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId("c"),
            connection_number=1,
            version=1,
            client_id="client",
            client_host="/127.0.0.1",
            new_member_id=MemberId("m"),
            member_id=MemberId("m"),
            member_epoch=0,
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=("t",),
            owned={},
        )
        reply = groups.submit(f"g{number}", event)
        assert isinstance(reply, asyncio.Future)
        assert (await reply).error is ErrorCode.NONE


async def test_change_of_a_topic_reaches_very_many_groups() -> None:
    records = Records()
    groups = runtime(records)
    await joined(groups)
    async with watched() as turns:
        groups.cluster_changed(cluster(2, 2))
        while any(_partitions(records.stored[f"g{number}"]) < 2 for number in (0, COUNT - 1)):  # noqa: ASYNC110
            await asyncio.sleep(0)
        while groups.under_way:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert all(_partitions(group) == 2 for group in records.stored.values())
    assert turns.longest_ms < HELD_MS
    await groups.drain()


async def test_shard_of_very_many_groups_is_taken_over() -> None:
    records = Records()
    before = runtime(records)
    await joined(before)
    after = runtime(records)
    async with watched() as turns:
        after.shard_acquired(LEASE)
        while after.shards_loading:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert len(after.group_ids()) == COUNT
    assert turns.longest_ms < HELD_MS
    await asyncio.gather(before.drain(), after.drain())


def _partitions(group: Any) -> int:
    (target,) = group.target.values()
    return len(target[UUID(int=1)])


async def test_rows_of_very_many_groups_are_read() -> None:
    rows = [
        {
            "group_id": f"g{number // 4}",
            "group_type": "classic",
            "state": "Stable",
            "protocol_type": "consumer",
            "generation_id": 1,
            "document": '{"leader": "m"}',
            "silent_ms": None,
            "member_id": f"m{number % 4}" if number < 4 * COUNT else None,
            "member_epoch": 0,
            "member_document": '{"client_id": "c", "protocols": [["range", "AAAAAA"]]}',
        }
        for number in range(4 * COUNT + 1)
    ]

    async def fetch(query: str, *arguments: object) -> list[dict[str, object]]:
        return rows

    database: Any = SimpleNamespace(hot=SimpleNamespace(fetch=fetch))
    async with watched() as turns:
        records = await GroupStore(database).load_shard(0)
    assert [len(record.members) for record in records] == [4] * COUNT + [0]
    assert records[-2].members[3].member_id == "m3"
    assert turns.longest_ms < HELD_MS


async def test_very_many_groups_are_listed() -> None:
    rows: list[tuple[str, str, str | None, str]] = [
        (f"g{number}", "classic", "consumer", "Empty") for number in range(10 * COUNT)
    ]

    async def stored() -> list[tuple[str, str, str | None, str]]:
        return rows

    groups: Any = SimpleNamespace(_stored=SimpleNamespace(get=stored), _slots={}, lease_for=Leases().lease_for)
    async with watched() as turns:
        listed = await Groups.list(groups)
    assert len(listed) == 10 * COUNT
    assert turns.longest_ms < HELD_MS


async def test_close_of_a_connection_with_members_of_very_many_groups() -> None:
    records = Records()
    groups = runtime(records)
    for number in range(COUNT):
        event = JoinGroup(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId("c"),
            version=5,
            client_id="client",
            client_host="/127.0.0.1",
            member_id=MemberId(""),
            group_instance_id=f"i{number}",
            session_timeout_ms=60_000,
            rebalance_timeout_ms=60_000,
            protocol_type="consumer",
            protocols=(("range", b""),),
            new_member_id=MemberId("m"),
            reason=None,
            connection_number=1,
        )
        groups.submit(f"g{number}", event)
    while groups.under_way:  # noqa: ASYNC110
        await asyncio.sleep(0)
    async with watched() as turns:
        groups.connection_closed("c")
        while groups.telling:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert not groups.connections
    assert all(_is_alone(groups.settled(group_id)) for group_id in groups.group_ids())
    assert turns.longest_ms < HELD_MS
    await groups.drain()


def _is_alone(group: Any) -> bool:
    """Return whether the group's only member has a closed connection and no held request."""
    return all(member.connection_id is None and member.parked_join is None for member in group.members.values())


async def test_very_large_subscriptions_and_assignments_give_way() -> None:
    """Names between a leader and its members are opaque bytes. The gateway must not parse megabytes of them while other
    requests wait.
    """
    many = 300_000
    metadata = encode_subscription(Subscription(1, tuple(f"t{number}" for number in range(many))))
    assignment = encode_assignment(Assignment(1, tuple(TopicPartition(f"t{number}", (0,)) for number in range(many))))
    groups = runtime(Records())
    groups.settings = Settings(group_initial_rebalance_delay_ms=0)
    async with watched() as turns:
        joining = groups.submit(
            "g",
            JoinGroup(
                request_id=groups.next_request_id(),
                connection_id=ConnectionId("c"),
                version=5,
                client_id="client",
                client_host="/127.0.0.1",
                member_id=MemberId(""),
                group_instance_id="i",
                session_timeout_ms=60_000,
                rebalance_timeout_ms=60_000,
                protocol_type="consumer",
                protocols=(("range", metadata),),
                new_member_id=MemberId("m"),
            ),
        )
        assert isinstance(joining, asyncio.Future)
        joined = await joining
        syncing = groups.submit(
            "g",
            SyncGroup(
                request_id=groups.next_request_id(),
                connection_id=ConnectionId("c"),
                member_id=joined.member_id,
                group_instance_id="i",
                generation_id=joined.generation_id,
                protocol_type="consumer",
                protocol_name="range",
                assignments=((joined.member_id, assignment),),
            ),
        )
        assert isinstance(syncing, asyncio.Future)
        synced = await syncing
    assert (joined.error, synced.error, synced.assignment) == (ErrorCode.NONE, ErrorCode.NONE, assignment)
    assert turns.longest_ms < HELD_MS
    await groups.drain()
