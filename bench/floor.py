"""Measure the cost of one small record at each layer: the disk's sync, the commit in Postgres, the gateway, the client.

The layers are measured in turns, a few samples at a time. So other load on the machine affects all layers, and their
differences are meaningful.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from bench import librdkafka
from bench.frames import frame
from protocol.api_keys import ApiKey
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.records import Record, build_batch
from storage.append_group import AppendGroup
from storage.embedded import EmbeddedPostgres
from storage.pool import SESSION_SETTINGS
from storage.queries import statement
from storage.types import NewBatch, PartitionKey
from tests.gateway_process import GatewayProcess

TURNS = 20
SAMPLES = 50
"""Number of samples of each layer in each turn."""
PRODUCE_VERSION = 9


@dataclass(frozen=True, slots=True)
class Floor:
    """The median of each layer, in milliseconds."""

    disk_sync: float
    statement: float
    """A statement that does nothing, on a connection of its own."""
    decide: float
    """`append_one` for one record of 100 bytes, without a wait for its commit (synchronous_commit = off)."""
    append: float
    """`append_one` with a wait for its commit. No gateway can be faster."""
    gateway: float
    """A Produce request over a bare socket."""
    client: float
    """From produce() to the delivery report of librdkafka."""


async def measure(gateway: GatewayProcess, topic: str) -> Floor:
    """Measure each layer. `topic` has one partition."""
    batch = build_batch([Record(offset=0, timestamp=time.time_ns() // 1_000_000, key=None, value=os.urandom(100))])
    url = EmbeddedPostgres(gateway.data_dir).running_url()
    assert url is not None
    settings = {name: value for name, value in SESSION_SETTINGS.items() if name != "application_name"}
    times: dict[str, list[float]] = {}
    connection = await asyncpg.connect(url, server_settings=settings)
    try:
        key = PartitionKey(
            await connection.fetchval(
                "select partition_key from partition join topic using (topic_id) where topic.name = $1", topic
            )
        )
        query = statement("append_one")

        async def append() -> None:
            records = bytearray(batch)
            group = AppendGroup([NewBatch(key, memoryview(records), 1, 0, -1, -1, -1)])
            arguments = group.one_arguments([records])
            assert arguments is not None
            decided = await connection.fetchrow(query, *arguments)
            assert decided is not None
            group.settle_one(decided)

        async def nothing() -> None:
            await connection.fetchval("select 1")

        host, _, port = gateway.bootstrap.rpartition(":")
        with (
            _scratch_file(gateway.data_dir) as scratch,
            socket.create_connection((host, int(port))) as peer,
        ):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = frame(
                ApiKey.PRODUCE,
                PRODUCE_VERSION,
                1,
                ProduceRequest(
                    acks=-1,
                    timeout_ms=30_000,
                    topic_data=(
                        TopicProduceData(
                            name=topic, partition_data=(PartitionProduceData(index=0, records=memoryview(batch)),)
                        ),
                    ),
                ),
            )

            async def produce() -> None:
                peer.sendall(request)
                (size_bytes,) = struct.unpack(">i", _receive(peer, 4))
                _receive(peer, size_bytes)

            async def sync() -> None:
                os.pwrite(scratch, batch.ljust(8192, b"\0"), 0)
                os.fdatasync(scratch)

            for _ in range(TURNS):
                await _sample(times, "disk_sync", sync)
                await _sample(times, "statement", nothing)
                await connection.execute("set synchronous_commit = off")
                await _sample(times, "decide", append)
                await connection.execute("set synchronous_commit = on")
                await _sample(times, "append", append)
                await _sample(times, "gateway", produce)
                client = librdkafka.one_in_flight(gateway.bootstrap, topic, samples=SAMPLES)
                times.setdefault("client", []).append(client.p50_ms)
    finally:
        await connection.close()
    return Floor(**{storey: statistics.median(values) for storey, values in times.items()})


async def _sample(times: dict[str, list[float]], storey: str, work: Callable[[], Awaitable[None]]) -> None:
    for _ in range(SAMPLES):
        started = time.perf_counter()
        await work()
        times.setdefault(storey, []).append((time.perf_counter() - started) * 1000)
        await asyncio.sleep(0)


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[int]:
    path = directory / "sync-probe"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink()


def _receive(peer: socket.socket, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        chunk = peer.recv(size_bytes - len(received))
        if not chunk:
            raise ConnectionError("the gateway has closed the connection")
        received += chunk
    return received
