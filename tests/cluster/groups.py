"""Groups whose coordinator a test chooses, and clients of several nodes."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence

from confluent_kafka import Consumer, TopicPartition

from tests.closing import close
from tests.cluster.coordinators import coordinator_of
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient


@contextlib.asynccontextmanager
async def connected(nodes: Sequence[GatewayProcess]) -> AsyncIterator[list[WireClient]]:
    clients = [await WireClient.connect(node.bootstrap) for node in nodes]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


def group_coordinated_by(node: GatewayProcess, nodes: Sequence[GatewayProcess]) -> str:
    while True:
        group = f"g-{uuid.uuid4().hex[:8]}"
        if asyncio.run(coordinator_of(group, nodes)) is node:
            return group


@contextlib.contextmanager
def consumer_of(node: GatewayProcess, group: str) -> Iterator[Consumer]:
    consumer = Consumer({"bootstrap.servers": node.bootstrap, "group.id": group})
    try:
        yield consumer
    finally:
        close(consumer)


def commit(node: GatewayProcess, group: str, offsets: list[TopicPartition]) -> None:
    with consumer_of(node, group) as consumer:
        consumer.commit(offsets=offsets, asynchronous=False)
