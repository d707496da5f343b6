"""Measure two attacks on a gateway's memory: clients that read no answers, and clients that send while Postgres is
stopped.

One bound limits what a node holds for its clients (`ConnectionLimits.max_node_bytes`). It applies once to requests in
work and once more to requests that are arriving, however their bytes are divided. So the process must not grow by much
more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from bench.frames import Connection, frame
from bench.librdkafka import create_topic
from gateway.net.connection import ConnectionLimits
from protocol.api_keys import ApiKey
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from protocol.records import Record, build_batch
from tests.gateway_process import GatewayProcess

FETCH_VERSION, PRODUCE_VERSION = 11, 9
PARTITIONS = 8
SAMPLE_S = 0.05
BOUND_BYTES = 2 * ConnectionLimits().max_node_bytes
SPARE_BYTES = 96 * 1024 * 1024
"""Growth allowed beyond the limit. It consists of one read that waits its turn and the contents of the socket's buffer
for each connection, of reads from Postgres and files that have begun, and of memory that the allocator keeps.
"""
ALLOWED_BYTES = BOUND_BYTES + SPARE_BYTES


@dataclass(frozen=True, slots=True)
class Grown:
    """Resident bytes of the gateway's process."""

    before: int
    greatest: int
    after: int
    """Resident bytes of the process after the clients have disconnected."""
    sent_bytes: int
    """Bytes that all clients sent until the gateway stopped reading from them."""

    @property
    def within(self) -> bool:
        return self.greatest - self.before <= ALLOWED_BYTES


def resident(gateway: GatewayProcess) -> int:
    """Return the bytes resident in the gateway's own process. Its Postgres is another process."""
    return psutil.Process(gateway.pid).memory_info().rss


async def unread_answers(
    gateway: GatewayProcess, *, peers: int = 40, megabytes: int = 8, seconds: float = 8, cold: bool = True
) -> Grown:
    """Let each client request all records 40 times and read no answer."""
    topic = f"unread-{time.time_ns()}"
    await asyncio.to_thread(create_topic, gateway.bootstrap, topic, PARTITIONS)
    await _fill(gateway, topic, megabytes)
    if cold:
        await asyncio.to_thread(gateway.restart)
    partitions = tuple(
        FetchPartition(partition=index, fetch_offset=0, partition_max_bytes=2**30, current_leader_epoch=-1)
        for index in range(PARTITIONS)
    )
    request = FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=1,
        max_bytes=2**30,
        session_epoch=-1,
        topics=(FetchTopic(topic=topic, partitions=partitions),),
    )
    return await _attack(gateway, frame(ApiKey.FETCH, FETCH_VERSION, 1, request) * 40, 1, peers, seconds)


async def stalled_storage(
    gateway: GatewayProcess, *, peers: int = 40, record_bytes: int = 15_000, seconds: float = 8
) -> Grown:
    """Let each client send Produce requests while Postgres is stopped, until the gateway stops reading."""
    topic = f"stalled-{time.time_ns()}"
    await asyncio.to_thread(create_topic, gateway.bootstrap, topic, PARTITIONS)
    request = frame(ApiKey.PRODUCE, PRODUCE_VERSION, 1, _produce(topic, 0, record_bytes))
    await asyncio.to_thread(gateway.pause_postgres)
    try:
        return await _attack(gateway, request, 1_000_000, peers, seconds)
    finally:
        await asyncio.to_thread(gateway.resume_postgres)


async def _attack(gateway: GatewayProcess, request: bytes, times: int, peers: int, seconds: float) -> Grown:
    with _peers(gateway, peers) as sockets:
        before = greatest = resident(gateway)
        sent = [0] * peers
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for number, peer in enumerate(sockets):
                sent[number] += _send(peer, request, times, sent[number])
            greatest = max(greatest, resident(gateway))
            await asyncio.sleep(SAMPLE_S)
    await asyncio.sleep(1)
    return Grown(before, greatest, resident(gateway), sum(sent))


def _send(peer: socket.socket, request: bytes, times: int, sent: int) -> int:
    """Send as much of `times` requests as the socket accepts now; `sent` bytes of them have been sent already."""
    whole = 0
    # Limit the call, so that a client from which the gateway reads does not keep the others from sending.
    while whole < 4 * 1024 * 1024 and sent + whole < times * len(request):
        position = (sent + whole) % len(request)
        try:
            whole += peer.send(memoryview(request)[position:])
        except BlockingIOError:
            break
        except OSError:
            # The gateway has closed the connection.
            break
    return whole


@contextlib.contextmanager
def _peers(gateway: GatewayProcess, count: int) -> Iterator[list[socket.socket]]:
    host, _, port = gateway.bootstrap.rpartition(":")
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        for _ in range(count):
            peer = stack.enter_context(socket.create_connection((host, int(port))))
            peer.setblocking(False)
            sockets.append(peer)
        yield sockets


async def _fill(gateway: GatewayProcess, topic: str, megabytes: int) -> None:
    """Fill each partition with this many megabytes."""
    host, _, port = gateway.bootstrap.rpartition(":")
    connection = await Connection.open(host, int(port))
    for index in range(PARTITIONS):
        for _ in range(megabytes):
            answer = await connection.ask(
                ApiKey.PRODUCE, PRODUCE_VERSION, _produce(topic, index, 1_000_000), ProduceResponse
            )
            assert isinstance(answer, ProduceResponse)
            if code := answer.responses[0].partition_responses[0].error_code:
                raise RuntimeError(f"Produce answered {code}")
    connection.writer.close()


def _produce(topic: str, index: int, record_bytes: int) -> ProduceRequest:
    record = Record(offset=0, timestamp=time.time_ns() // 1_000_000, key=None, value=os.urandom(record_bytes))
    data = PartitionProduceData(index=index, records=memoryview(build_batch([record])))
    return ProduceRequest(
        acks=-1, timeout_ms=30_000, topic_data=(TopicProduceData(name=topic, partition_data=(data,)),)
    )
