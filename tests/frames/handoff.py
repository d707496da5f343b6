"""Members of a group whose partitions are handed over, in frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import confluent_kafka

from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription
from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic
from protocol.messages.sync_group import SyncGroupResponse
from tests.frames.members import Member, create_topic, fresh, join_all, leader_of, member
from tests.frames.transactions import Transactional
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient

NONE, UNSTABLE = ErrorCode.NONE, ErrorCode.UNSTABLE_OFFSET_COMMIT
REBALANCING = ErrorCode.REBALANCE_IN_PROGRESS
GROUP_RESOURCE = 32
RECORDS = 2
MOVED = 1
"""The partition that moves from member a to member b."""
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


async def committed(
    client: WireClient, group_id: str, topic: str, *, stable: bool, partition: int = MOVED
) -> tuple[int, int]:
    """Return the committed offset of the partition that moves, with the error code of OffsetFetch."""
    asked = OffsetFetchRequestTopic(name=topic, partition_indexes=(partition,))
    response = await client.send(OffsetFetchRequest(group_id=group_id, topics=(asked,), require_stable=stable), 7)
    (found,) = response.topics[0].partitions
    return int(found.error_code), found.committed_offset


def produce(bootstrap: str, topic: str, *partitions: int) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for partition in (partitions or (MOVED,)) * RECORDS:
        producer.produce(topic, b"x", partition=partition)
    assert producer.flush(30) == 0


async def produce_in_a_transaction(client: WireClient, topic: str) -> None:
    """Produce two records to the partition that moves, in a transaction. Its marker has the third offset."""
    producer, partition = Transactional(client, fresh("producer")), (topic, MOVED)
    assert await producer.initialize() is NONE
    assert await producer.add(partition) == [NONE]
    assert (await producer.send(partition, *[b"x"] * RECORDS)).error_code == NONE
    assert await producer.end(committed=True) is NONE


def fetch_nowait(
    client: WireClient, topic: str, offset: int, partition: int = MOVED, *, min_bytes: int = 0, max_wait_ms: int = 10
) -> asyncio.Future[FetchResponse]:
    asked = FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=1_000_000)
    request = FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=1_000_000,
        topics=(FetchTopic(topic=topic, partitions=(asked,)),),
    )
    return client.send_nowait(request, 12)


async def fetch(client: WireClient, topic: str, offset: int, partition: int = MOVED) -> None:
    await asyncio.wait_for(fetch_nowait(client, topic, offset, partition), 30)


@asynccontextmanager
async def read_as_java_does(gateway: GatewayProcess, topic: str, end_offset: int) -> AsyncGenerator[None]:
    """On a connection of its own the consumer has received all records, and waits for more."""
    async with await WireClient.connect(gateway.bootstrap, client_id="a") as client:
        await client.send(ApiVersionsRequest(client_software_name="apache-kafka-java", client_software_version="4"), 3)
        await fetch(client, topic, 0)
        parked = fetch_nowait(client, topic, end_offset, min_bytes=1, max_wait_ms=20_000)
        yield
        assert not parked.done()
    with suppress(ConnectionError):
        await parked


@dataclass
class Scene:
    topic: str
    a: Member
    b: Member

    async def generation(self, offers: Mapping[Member, tuple[tuple[str, bytes], ...]]) -> None:
        """Let both members join. Each reports the partitions that it claims to own."""
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


def joining(
    gateway: GatewayProcess, group_id: str, client_id: str, topic: str, name: str, instance: str | None = None
) -> AbstractAsyncContextManager[Member]:
    return member(
        gateway.bootstrap,
        group_id,
        client_id=client_id,
        protocols=owning(topic, name=name),
        group_instance_id=instance,
    )


@asynccontextmanager
async def moving(
    gateway: GatewayProcess,
    mode: str,
    *,
    keeps_the_rule: bool,
    timeout_ms: str = "30000",
    committed_before: int | None = None,
    static: bool = False,
    as_java: bool = False,
    in_a_transaction: bool = False,
    group_id: str | None = None,
    elsewhere: GatewayProcess | None = None,
) -> AsyncGenerator[tuple[Scene, Sync]]:
    """Assign partition 1, which member a owned, to member b. The gateway answers a's SyncGroup and may hold b's.

    With `elsewhere`, member a also fetches the same number of records from that other node. With `in_a_transaction`,
    the records were produced in a transaction, and a marker ends it.
    """
    instances = ("instance a", "instance b") if static else (None, None)
    group_id, topic = group_id or fresh("handoff"), fresh("topic")
    name = "range" if keeps_the_rule else "cooperative-sticky"
    async with (
        joining(gateway, group_id, "a", topic, name, instances[0]) as a,
        joining(gateway, group_id, "b", topic, name, instances[1]) as b,
        AsyncExitStack() as stack,
    ):
        scene = Scene(topic, a, b)
        configs = {"group_handoff_mode": mode, "group_handoff_timeout_ms": timeout_ms}
        assert await configure(a.client, group_id, **configs) == [NONE]
        await create_topic(a.client, topic, 2)
        await join_all(a, b)
        for sync in await scene.assign((0, 1), (), name):
            assert (await sync).error_code == NONE
        end_offset = RECORDS + in_a_transaction
        if in_a_transaction:
            await produce_in_a_transaction(a.client, topic)
        else:
            produce(gateway.bootstrap, topic)
        if as_java:
            await stack.enter_async_context(read_as_java_does(gateway, topic, end_offset))
        else:
            await fetch(a.client, topic, 0)
            if in_a_transaction:
                await fetch(a.client, topic, end_offset)
        if elsewhere is not None:
            produce(gateway.bootstrap, topic)
            async with await WireClient.connect(elsewhere.bootstrap, client_id="a") as client:
                served = await fetch_nowait(client, topic, RECORDS, min_bytes=1, max_wait_ms=20_000)
                assert served.responses[0].partitions[0].records
        if committed_before is not None:
            assert await a.commit(topic, committed_before, partition=MOVED) == NONE
        claimed = () if keeps_the_rule else (0, 1)
        await scene.generation({a: owning(topic, *claimed, name=name), b: owning(topic, name=name)})
        first, second = await scene.assign((0,), (1,), name)
        assert (await asyncio.wait_for(first, 30)).assignment == given(topic, 0)
        yield scene, second
