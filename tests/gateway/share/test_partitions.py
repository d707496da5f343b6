"""Share partitions in a node's memory, over a real Postgres: what is durable when, fences, locks, watches, room."""

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
    LogStartMoved,
    PartitionSettings,
    RecordState,
    SharePartition,
)
from gateway.share import partitions as module
from gateway.share.partitions import SharePartitions
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageUnavailable
from storage.groups import GroupStore
from storage.nodes import NodeStore
from storage.pool import Database
from storage.share import ShareKey, ShareRow, ShareStore
from storage.topics import TopicStore
from storage.types import CoordinatorLease, NewTopic, Topic
from tests.storage.test_groups import group, save

A, B = MemberId("a"), MemberId("b")
LONG = PartitionSettings(record_lock_duration_ms=60_000)
SHORT = PartitionSettings(record_lock_duration_ms=50)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=2, cold_connections=1)
    yield opened
    await opened.close()


@pytest.fixture
async def keys(database: Database) -> list[ShareKey]:
    """Four partitions that a share group may read."""
    nodes = NodeStore(database)
    node = await nodes.register("node", {"PLAINTEXT": ("127.0.0.1", 1)}, None, ttl_ms=60_000)
    (lease,) = await leases_of(nodes, node)
    await save(GroupStore(database), group("s", group_type="share", state="Empty", members=()), lease)
    (topic,) = await TopicStore(database).create([NewTopic("shared", 4, {})])
    assert isinstance(topic, Topic)
    return [ShareKey("s", topic.topic_id, index) for index in range(4)]
