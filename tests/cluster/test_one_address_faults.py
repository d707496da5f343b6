"""A node behind a shared address is killed, frozen, stopped or started: clients of the others continue."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from protocol.errors import ErrorCode
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.share_fetch import ShareFetchRequest
from tests.chaos.load import Load, assert_nothing_lost
from tests.clients.topics import create_topic
from tests.cluster.conftest import QUICK_TTL, balanced
from tests.cluster.one_address import AGAIN, OneAddress, one_address
from tests.cluster.readers import Readers
from tests.frames.handoff import configure
from tests.frames.members import Member, describe, fresh, settle
from tests.frames.members import create_topic as create_wire_topic
from tests.frames.share import ACCEPT, Reader, send
from tests.frames.transactions import Transactional
from tests.gateway_process import GatewayProcess
from tests.postgres import Databases
from tests.steps.waiting import until
from tests.wire import WireClient

PARTITIONS = 6


@pytest.fixture
def shared(postgres: Databases, database_url: str) -> Iterator[OneAddress]:
    with one_address(postgres, database_url, 3, environment=QUICK_TTL) as running:
        balanced(running.nodes)
        yield running


async def other_coordinator(shared: OneAddress, here: GatewayProcess) -> tuple[str, GatewayProcess]:
    """Return a new group that a node other than `here` coordinates, and that node."""
    while True:
        group_id = fresh("group")
        async with await WireClient.connect(shared.inside[0]) as client:
            found = await client.send(FindCoordinatorRequest(key=group_id), 3)
        if found.error_code == ErrorCode.NONE:
            node = shared.nodes[shared.inside.index(f"{found.host}:{found.port}")]
            if node is not here:
                return group_id, node


def test_stock_clients_lose_nothing_when_nodes_come_and_go(shared: OneAddress) -> None:
    """One node is killed and returns, and another one is stopped and returns."""
    topic = create_topic(shared.address, PARTITIONS)
    load = Load(shared.address, topic, PARTITIONS)
    readers = Readers(shared.address, topic, 3)
    readers.start()
    load.start()
    try:
        load.wait_for(500)
        shared.nodes[1].kill()
        load.wait_for(300)
        shared.nodes[1].start()
        load.wait_for(300)
        shared.nodes[2].stop()
        load.wait_for(300)
        shared.nodes[2].start()
        load.wait_for(300)
    finally:
        load.stop()
    assert_nothing_lost(load)
    readers.finish(load.acknowledged.values())


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_requests_for_a_lost_coordinator_are_answered(shared: OneAddress, fault: signal.Signals) -> None:
    """Each attempt gets a retriable code, and a later one reaches the new coordinator. The connection stays open."""
    here = shared.nodes[0]
    group_id, coordinator = await other_coordinator(shared, here)
    async with await WireClient.connect(here.bootstrap) as client, await WireClient.connect(here.bootstrap) as second:
        one = Member(client, group_id, session_timeout_ms=120_000)
        await settle(one)
        producers = [Transactional(second, fresh("transaction")) for _ in range(6)]
        for producer in producers:
            assert await producer.initialize() == ErrorCode.NONE
        coordinator.send_signal(fault)
        try:

            async def beat() -> int:
                code = await one.heartbeat()
                assert code in {ErrorCode.NONE, *AGAIN}, code
                return code

            async def begin(producer: Transactional) -> int:
                code = await producer.initialize()
                assert code in {ErrorCode.NONE, *AGAIN}, code
                return code

            await until(beat, "the new coordinator answers", holds=lambda code: code == ErrorCode.NONE)
            for producer in producers:
                await until(lambda of=producer: begin(of), "producer", holds=lambda code: code == ErrorCode.NONE)
        finally:
            if fault is signal.SIGSTOP:
                coordinator.send_signal(signal.SIGCONT)


async def test_stopping_node_answers_what_waits_at_other_nodes(shared: OneAddress) -> None:
    """A member whose JoinGroup waits at the coordinator learns at once that its own node stops."""
    here = shared.nodes[0]
    group_id, coordinator = await other_coordinator(shared, here)
    inside = shared.inside[shared.nodes.index(coordinator)]
    async with await WireClient.connect(inside) as staying, await WireClient.connect(here.bootstrap) as client:
        first = Member(staying, group_id, rebalance_timeout_ms=120_000, session_timeout_ms=120_000)
        await settle(first)
        second = Member(client, group_id, session_timeout_ms=120_000)
        await second.knock()
        waiting = second.join_nowait()
        await until(first.heartbeat, "", holds=lambda code: code == ErrorCode.REBALANCE_IN_PROGRESS)
        stopping = asyncio.create_task(asyncio.to_thread(here.stop))
        assert (await waiting).error_code in AGAIN
        assert await stopping == 0


async def test_join_of_a_process_that_has_ended_fences_no_static_member(shared: OneAddress) -> None:
    """The process sends JoinGroup to a frozen node and ends. Its successor joins through another node."""
    here = shared.nodes[0]
    group_id, coordinator = await other_coordinator(shared, here)
    async with (
        await WireClient.connect(coordinator.bootstrap) as client,
        await WireClient.connect(here.bootstrap) as watching,
    ):
        gone = await WireClient.connect(here.bootstrap)
        former = Member(gone, group_id, group_instance_id="instance", session_timeout_ms=120_000)
        successor = Member(client, group_id, group_instance_id="instance", session_timeout_ms=120_000)
        here.send_signal(signal.SIGSTOP)
        try:
            unanswered = former.join_nowait()
            await gone.close()
            await settle(successor)
        finally:
            here.send_signal(signal.SIGCONT)
        for _ in range(20):
            described = await describe(watching, group_id)
            assert described.error_code in {ErrorCode.NONE, *AGAIN}
        assert await successor.heartbeat() == ErrorCode.NONE
        await asyncio.gather(unanswered, return_exceptions=True)


async def until_read(here: GatewayProcess, group_id: str) -> None:
    """Wait until the node has read what lay in its sockets, and has forwarded it."""
    async with await WireClient.connect(here.bootstrap) as client:
        for _ in range(20):
            await describe(client, group_id)


async def test_heartbeat_of_an_old_connection_does_not_outrun_the_newer_one(shared: OneAddress) -> None:
    """The client has given the old connection up. A frozen node forwards its heartbeat after those of the newer one."""
    here = shared.nodes[0]
    group_id, coordinator = await other_coordinator(shared, here)
    old = await WireClient.connect(here.bootstrap)
    async with await WireClient.connect(coordinator.bootstrap) as client:
        topic = fresh("topic")
        await create_wire_topic(client, topic)
        asked = ConsumerGroupHeartbeatRequest(
            group_id=group_id,
            member_id="member",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=(topic,),
            topic_partitions=(),
        )
        joined = await client.send(asked, 1)
        assert joined.error_code == ErrorCode.NONE
        beat = ConsumerGroupHeartbeatRequest(group_id=group_id, member_id="member", member_epoch=joined.member_epoch)
        here.send_signal(signal.SIGSTOP)
        try:
            unanswered = old.send_nowait(beat, 1)
            await old.close()
        finally:
            here.send_signal(signal.SIGCONT)
        await until_read(here, group_id)
        assert (await client.send(beat, 1)).error_code == ErrorCode.NONE
        await asyncio.gather(unanswered, return_exceptions=True)


async def test_share_fetch_of_an_old_connection_ends_no_newer_session(shared: OneAddress) -> None:
    here = shared.nodes[0]
    group_id, coordinator = await other_coordinator(shared, here)
    old = await WireClient.connect(here.bootstrap)
    await describe(old, group_id)  # The node is connected to the coordinator for this client.
    async with await WireClient.connect(coordinator.bootstrap) as client:
        topic = fresh("topic")
        topic_id = await create_wire_topic(client, topic)
        await configure(client, group_id, **{"share.auto.offset.reset": "earliest"})
        await send(client, topic)
        reader = Reader(client, group_id, topic, topic_id)
        await reader.join()
        here.send_signal(signal.SIGSTOP)
        try:
            first = ShareFetchRequest(group_id=group_id, member_id=reader.member_id, max_records=1, max_bytes=1)
            unanswered = old.send_nowait(first, 2)
            await old.close()
            assert await reader.fetch() == [(0, 0, 1)]
        finally:
            here.send_signal(signal.SIGCONT)
        await until_read(here, group_id)
        assert await reader.acknowledge((0, 0, ACCEPT)) == ErrorCode.NONE
        await asyncio.gather(unanswered, return_exceptions=True)
