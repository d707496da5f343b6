"""Share partitions on a real Postgres, and a store whose writes a test can stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.coordinator.facts import MemberId
from gateway.coordinator.share.partition import (
    Acknowledge,
    AcknowledgedBatch,
    AcknowledgeType,
    Acquire,
    PartitionSettings,
)
from gateway.share.partitions import SharePartitions
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageUnavailable
from storage.groups import GroupStore
from storage.nodes import NodeStore
from storage.pool import Database
from storage.share import ShareKey, ShareStore
from storage.topics import TopicStore
from storage.types import NewTopic, Topic
from tests.storage.groups import group, save

SETTLED = (2, 4)
A, B = MemberId("a"), MemberId("b")
LONG = PartitionSettings(record_lock_duration_ms=60_000)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=2, cold_connections=1)
    yield opened
    await opened.close()


@pytest.fixture
async def keys(database: Database) -> list[ShareKey]:
    """Return four partitions that a share group may read."""
    nodes = NodeStore(database)
    node_id = await nodes.register("node", {"PLAINTEXT": ("127.0.0.1", 1)}, None, 60_000)
    (lease,) = await nodes.acquire_leases(node_id, [0], 60_000)
    await save(GroupStore(database), group("s", group_type="share", state="Empty", generation_id=1, members=()), lease)
    (topic,) = await TopicStore(database).create([NewTopic("shared", 4, {})])
    assert isinstance(topic, Topic)
    return [ShareKey("s", topic.topic_id, index) for index in range(4)]


class Halting(ShareStore):
    """A store whose writes wait until the test allows them or lets them fail."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing = False
        self.tried = 0
        self.tries = asyncio.Semaphore(0)

    async def write(self, rows: Any) -> list[bool]:
        self.tried += 1
        self.tries.release()
        await self.gate.wait()
        if self.failing:
            raise StorageUnavailable("gone")
        return await super().write(rows)


async def nowhere() -> int:
    raise AssertionError("the partition has been read already")


async def beginning() -> int:
    return 0


async def begun(store: ShareStore, *keys: ShareKey, settings: PartitionSettings = LONG) -> SharePartitions:
    partitions = SharePartitions(store)
    for key in keys:
        await partitions.load(key, beginning, settings)
    return partitions


async def acquire(partitions: SharePartitions, key: ShareKey, member: MemberId = A, end: int = 4) -> int:
    """Acquire records; return how many were acquired."""
    event = Acquire(member, 0, end, ((0, end - 1),), 500)
    taken = await partitions.apply(key, event)
    return sum(each.last_offset - each.first_offset + 1 for each in taken.acquired)


def accepted(first: int, last: int, member: MemberId = A) -> Acknowledge:
    return Acknowledge(member, (AcknowledgedBatch(first, last, (AcknowledgeType.ACCEPT,)),))


async def refused(awaiting: Any) -> ErrorCode:
    with pytest.raises(KafkaError) as error:
        await awaiting
    return error.value.code
