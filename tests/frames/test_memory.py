"""Clients that try to fill a gateway's memory: its process grows by no more than the bound of what a node holds."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from bench.attacks import ALLOWED_BYTES, Grown, stalled_storage, unread_answers
from gateway.net.connection import ConnectionLimits
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.gateway_process import GatewayFactory
from tests.wire import WireClient

pytestmark = pytest.mark.timeout(300)


async def test_memory_stays_bounded_if_clients_read_no_answers(gateway_factory: GatewayFactory) -> None:
    """Each client has requested sixty-four megabytes forty times. The bound covers all records read for all clients
    together.
    """
    grown = await unread_answers(gateway_factory(embedded=True), seconds=6)
    assert_within(grown)


async def test_memory_stays_bounded_if_producers_send_while_postgres_is_stopped(
    gateway_factory: GatewayFactory,
) -> None:
    """Many small frames must not exceed the memory bound either."""
    assert_within(await stalled_storage(gateway_factory(embedded=True), seconds=6))


async def test_half_requests_of_two_addresses_leave_room_to_a_third(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(embedded=True)
    host, _, port = gateway.bootstrap.rpartition(":")
    bound_bytes = ConnectionLimits().max_node_bytes
    loop = asyncio.get_running_loop()
    enough = asyncio.Event()
    sent_bytes = 0

    async def send_half_requests(address: str) -> None:
        nonlocal sent_bytes
        with socket.create_connection((host, int(port)), source_address=(address, 0)) as peer:
            peer.setblocking(False)
            await loop.sock_sendall(peer, struct.pack(">i", 100_000_000))
            for _ in range(99):
                await loop.sock_sendall(peer, bytes(1_000_000))
                sent_bytes += 1_000_000
                if sent_bytes > bound_bytes:
                    enough.set()
            while True:
                await loop.sock_sendall(peer, b"0")
                await asyncio.sleep(1)

    async with asyncio.TaskGroup() as attackers, await WireClient.connect(gateway.bootstrap) as client:
        tasks = [
            attackers.create_task(send_half_requests(address)) for address in ("127.0.0.2", "127.0.0.3") for _ in "12"
        ]
        try:
            async with asyncio.timeout(60):
                await enough.wait()
            names = tuple(MetadataRequestTopic(name=f"{number:0100}") for number in range(1_160))
            answer = await client.send(MetadataRequest(topics=names, allow_auto_topic_creation=False), 4)
            assert len(answer.topics) == len(names)
        finally:
            for task in tasks:
                task.cancel()


def assert_within(grown: Grown) -> None:
    assert grown.sent_bytes, "the peers have sent something"
    assert grown.greatest - grown.before <= ALLOWED_BYTES, grown
