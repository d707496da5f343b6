"""Handing partitions over, frame by frame: who is held and for how long, and what OffsetFetch says meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import confluent_kafka
import pytest

from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription
from protocol.errors import ErrorCode
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic
from protocol.messages.sync_group import SyncGroupResponse
from tests.frames.members import Member, create_topic, fresh, join_all, leader_of, member
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient

NONE, UNSTABLE = ErrorCode.NONE, ErrorCode.UNSTABLE_OFFSET_COMMIT
REBALANCING = ErrorCode.REBALANCE_IN_PROGRESS
GROUP_RESOURCE = 32
RECORDS = 2
MOVED = 1
"""The partition that goes from a to b."""
Sync = asyncio.Future[SyncGroupResponse]


def owning(topic: str, *partitions: int, name: str = "cooperative-sticky") -> tuple[tuple[str, bytes], ...]:
    owned = (TopicPartition(topic, partitions),) if partitions else ()
    return ((name, encode_subscription(Subscription(3, (topic,), None, owned, -1))),)


def given(topic: str, *partitions: int) -> bytes:
    return encode_assignment(Assignment(1, (TopicPartition(topic, partitions),) if partitions else ()))


async def configure(client: WireClient, group_id: str, **configs: str) -> list[int]:
    request = IncrementalAlterConfigsRequest(
        resources=(
            AlterConfigsResource(
                resource_type=GROUP_RESOURCE,
                resource_name=group_id,
                configs=tuple(
                    AlterableConfig(name=name.replace("_", "."), config_operation=0, value=value)
                    for name, value in configs.items()
                ),
            ),
        )
    )
    response = await client.send(request, 1)
    return [int(each.error_code) for each in response.responses]


async def committed(client: WireClient, group_id: str, topic: str, *, stable: bool) -> tuple[int, int]:
    """The code and the offset of the partition that moves."""
    asked = OffsetFetchRequestTopic(name=topic, partition_indexes=(MOVED,))
    response = await client.send(OffsetFetchRequest(group_id=group_id, topics=(asked,), require_stable=stable), 7)
    (partition,) = response.topics[0].partitions
    return int(partition.error_code), partition.committed_offset


def produce(bootstrap: str, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for _ in range(RECORDS):
        producer.produce(topic, b"x", partition=MOVED)
    assert producer.flush(30) == 0


async def fetch(client: WireClient, topic: str, offset: int) -> None:
    partition = FetchPartition(partition=MOVED, fetch_offset=offset, partition_max_bytes=1_000_000)
    await client.send(
        FetchRequest(
            max_wait_ms=10, min_bytes=0, max_bytes=1_000_000, topics=(FetchTopic(topic=topic, partitions=(partition,)),)
        ),
        12,
    )


@dataclass
class Scene:
    topic: str
    a: Member
    b: Member

    async def generation(self, offers: Mapping[Member, tuple[tuple[str, bytes], ...]]) -> None:
        """Both join with what they claim."""
        for each, offer in offers.items():
            each.protocols = offer
        joins = [each.join_nowait() for each in offers]
        for join in joins:
            assert (await join).error_code == NONE

    async def assign(self, first: tuple[int, ...], second: tuple[int, ...], name: str) -> tuple[Sync, Sync]:
        shares = {
            self.a.member_id: given(self.topic, *first),
            self.b.member_id: given(self.topic, *second),
        }
        leader = leader_of(self.a, self.b)
        follower = self.b if leader is self.a else self.a
        syncs = {follower: follower.sync_nowait(protocol_name=name)}
        await asyncio.sleep(0)
        syncs[leader] = leader.sync_nowait(shares, protocol_name=name)
        return syncs[self.a], syncs[self.b]


@asynccontextmanager
async def moving(
    gateway: GatewayProcess, mode: str, *, keeps_the_rule: bool, timeout_ms: str = "30000"
) -> AsyncGenerator[tuple[Scene, Sync]]:
    """Partition 1 of a is assigned to b; the sync of a is answered, that of b may be held."""
    group_id, topic, name = fresh("handoff"), fresh("topic"), "range" if keeps_the_rule else "cooperative-sticky"
    async with (
        member(gateway.bootstrap, group_id, client_id="a", protocols=owning(topic, name=name)) as a,
        member(gateway.bootstrap, group_id, client_id="b", protocols=owning(topic, name=name)) as b,
    ):
        scene = Scene(topic, a, b)
        configs = {"group_handoff_mode": mode, "group_handoff_timeout_ms": timeout_ms}
        assert await configure(a.client, group_id, **configs) == [NONE]
        await create_topic(a.client, topic, 2)
        await join_all(a, b)
        for sync in await scene.assign((0, 1), (), name):
            assert (await sync).error_code == NONE
        produce(gateway.bootstrap, topic)
        await fetch(a.client, topic, 0)
        claimed = () if keeps_the_rule else (0, 1)
        await scene.generation({a: owning(topic, *claimed, name=name), b: owning(topic, name=name)})
        first, second = await scene.assign((0,), (1,), name)
        assert (await asyncio.wait_for(first, 30)).assignment == given(topic, 0)
        yield scene, second


async def test_a_target_is_held_and_the_source_is_not(gateway: GatewayProcess) -> None:
    """27, 29: the source commits in the generation that took the partition from it; the target is told to ask again."""
    async with moving(gateway, "ack", keeps_the_rule=False) as (scene, held):
        a, b = scene.a, scene.b
        assert await a.commit(scene.topic, 3, partition=MOVED) == NONE
        assert await a.heartbeat() == NONE
        assert await committed(a.client, a.group_id, scene.topic, stable=True) == (NONE, 3)
        assert not held.done()
        a.protocols = owning(scene.topic, 0)
        rejoined = a.join_nowait()
        assert (await asyncio.wait_for(held, 30)).error_code == REBALANCING
        assert (await b.join_nowait()).error_code == NONE
        assert (await rejoined).error_code == NONE
        for sync in await scene.assign((0,), (1,), "cooperative-sticky"):
            assert (await asyncio.wait_for(sync, 30)).error_code == NONE
        assert await committed(b.client, b.group_id, scene.topic, stable=True) == (NONE, 3)


async def test_a_held_sync_is_answered_within_half_a_session_and_offsets_are_not_settled(
    gateway: GatewayProcess,
) -> None:
    async with moving(gateway, "ack", keeps_the_rule=False) as (scene, held):
        a, b = scene.a, scene.b
        assert await a.commit(scene.topic, 3, partition=MOVED) == NONE
        while not held.done():
            assert await a.heartbeat() == NONE
            await asyncio.wait((held,), timeout=0.5)
        assert (await held).assignment == given(scene.topic, MOVED)
        assert await committed(b.client, b.group_id, scene.topic, stable=True) == (UNSTABLE, 3)
        assert await committed(a.client, a.group_id, scene.topic, stable=True) == (NONE, 3)
        async with member(gateway.bootstrap, a.group_id, client_id="admin") as admin:
            assert await committed(admin.client, a.group_id, scene.topic, stable=True) == (NONE, 3)
        assert await committed(b.client, b.group_id, scene.topic, stable=False) == (NONE, 3)
        async with asyncio.timeout(10):
            # Once it is stored that the target goes on from there.
            while await committed(b.client, b.group_id, scene.topic, stable=True) != (NONE, 3):
                pass


async def test_a_commit_up_to_the_mark_lets_the_target_go_on(gateway: GatewayProcess) -> None:
    """19, 20: what was served is two records."""
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        assert await scene.a.commit(scene.topic, RECORDS - 1, partition=MOVED) == NONE
        assert not held.done()
        assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(held, 10)).assignment == given(scene.topic, MOVED)


async def test_a_lie_about_the_offset_releases_nothing(gateway: GatewayProcess) -> None:
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        for offset in (-5, 0, 1):
            await fetch(scene.a.client, scene.topic, offset)
        assert await scene.a.commit(scene.topic, 1, partition=MOVED) == NONE
        done, _ = await asyncio.wait((held,), timeout=2)
        assert not done
        assert await scene.a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(held, 10)).error_code == NONE


async def test_who_leaves_is_not_waited_for(gateway: GatewayProcess) -> None:
    """22."""
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        await scene.a.leave()
        assert (await asyncio.wait_for(held, 10)).error_code == REBALANCING


async def test_a_target_that_leaves_is_answered(gateway: GatewayProcess) -> None:
    """23: by an administrator, since its own connection is held."""
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        scene.a.member_id, mine = scene.b.member_id, scene.a.member_id
        await scene.a.leave()
        scene.a.member_id = mine
        assert (await asyncio.wait_for(held, 10)).error_code == ErrorCode.UNKNOWN_MEMBER_ID


async def test_a_wait_ends_when_its_time_is_over(gateway: GatewayProcess) -> None:
    """24."""
    async with moving(gateway, "drain", keeps_the_rule=True, timeout_ms="1000") as (scene, held):
        assert (await asyncio.wait_for(held, 20)).assignment == given(scene.topic, MOVED)
        assert await committed(scene.b.client, scene.b.group_id, scene.topic, stable=True) == (NONE, -1)


async def test_a_deleted_topic_is_not_waited_for(gateway: GatewayProcess) -> None:
    """32."""
    async with moving(gateway, "drain", keeps_the_rule=True) as (scene, held):
        await scene.a.client.send(
            DeleteTopicsRequest(topics=(DeleteTopicState(name=scene.topic),), timeout_ms=10_000), 6
        )
        assert (await asyncio.wait_for(held, 20)).error_code == NONE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_handoff_mode", "never"),
        ("group_handoff_timeout_ms", "0"),
        ("group_handoff_timeout_ms", "soon"),
        ("group_handoff_patience", "1"),
    ],
)
async def test_wrong_settings_are_refused(gateway: GatewayProcess, name: str, value: str) -> None:
    client = await WireClient.connect(gateway.bootstrap)
    try:
        assert await configure(client, fresh("settings"), **{name: value}) == [ErrorCode.INVALID_CONFIG]
    finally:
        await client.close()
