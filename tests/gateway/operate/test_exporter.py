"""Metrics of the cluster in a scrape, and their bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import asyncpg
import pytest
from prometheus_client import CollectorRegistry

from gateway.cluster.leases import Leases
from gateway.cluster.membership import Membership
from gateway.operate.exporter import Exporter, Snapshot
from storage.errors import StorageUnavailable
from storage.groups import GroupStore
from storage.log import LogStore
from storage.monitor import Monitor
from storage.nodes import NodeStore
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.topics import TopicStore
from storage.types import GroupChange, MemberRecord, NewTopic, OffsetCommit, Saved, Topic
from tests.storage.batches import append
from tests.storage.transactions import Producer, plain_batch

GROUP_ID = "a\0b"
"""Kafka allows characters in a group id that a Postgres text cannot store."""


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=2, cold_connections=3)
    yield opened
    await opened.close()


def value(snapshot: Snapshot, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(snapshot)
    return registry.get_sample_value(name, labels)


async def populated(database: Database) -> tuple[Membership, Topic]:
    nodes = NodeStore(database)
    membership = Membership(nodes, {"PLAINTEXT": ("127.0.0.1", 9092)}, None, 60_000)
    await membership.join()
    leases = Leases(nodes, membership, 60_000)
    await leases.renew()
    (topic,) = await TopicStore(database).create([NewTopic("t", 3, {})])
    assert isinstance(topic, Topic)
    lease = leases.lease_for(GROUP_ID)
    assert lease is not None
    change = GroupChange(lease, GROUP_ID, "classic", "Stable", "consumer", 1, {}, True, (MemberRecord("m", {}),))
    assert await GroupStore(database).save([change]) == [Saved.SAVED]
    commits = [OffsetCommit(lease, GROUP_ID, 1, topic.topic_id, partition, 0, -1, "") for partition in range(3)]
    assert await OffsetStore(database).commit(commits) == [None] * 3
    return membership, topic


async def test_a_snapshot_shows_topics_groups_and_lag(database: Database) -> None:
    membership, _ = await populated(database)
    snapshot = await Exporter(Monitor(database), membership, 100, lambda: True).snapshot()
    assert value(snapshot, "kafka_brokers") == 1
    assert value(snapshot, "kafka_topic_partitions", topic="t") == 3
    assert value(snapshot, "kafka_consumergroup_members", consumergroup=GROUP_ID) == 1
    assert value(snapshot, "kafka_consumergroup_lag", consumergroup=GROUP_ID, topic="t", partition="2") == 0
    assert value(snapshot, "kafka_consumergroup_lag_sum", consumergroup=GROUP_ID, topic="t") == 0
    assert value(snapshot, "sluice_exporter_up") == 1
    assert value(snapshot, "sluice_exporter_truncated") == 0


async def test_snapshot_shows_open_transactions_and_moving_groups(database: Database) -> None:
    membership, topic = await populated(database)
    exporter = Exporter(Monitor(database), membership, 100, lambda: True)
    lag = "sluice_topic_partition_last_stable_offset_lag"
    log, (one, two, _) = LogStore(database), (partition.partition_key for partition in topic.partitions)
    snapshot = await exporter.snapshot()
    assert value(snapshot, "sluice_open_transactions") == 0
    assert value(snapshot, "sluice_open_transaction_age_seconds") == 0
    early, late = Producer(database, log, 4_000), Producer(database, log, 4_001)
    record = (b"k", b"v")
    await append(log, plain_batch(one, record))
    await early.append(one, record)
    await late.append(one, record, record)
    await late.take_in(two)
    await append(log, plain_batch(two, record))
    snapshot = await exporter.snapshot()
    assert value(snapshot, "sluice_open_transactions") == 2
    assert 0 < (value(snapshot, "sluice_open_transaction_age_seconds") or 0) < 60
    assert value(snapshot, lag, topic="t", partition="0") == 3
    assert value(snapshot, lag, topic="t", partition="1") is None, "it has appended nothing there"
    await early.end(committed=True)
    snapshot = await exporter.snapshot()
    assert value(snapshot, "sluice_open_transactions") == 1
    assert value(snapshot, lag, topic="t", partition="0") == 3
    await late.end(committed=False)
    snapshot = await exporter.snapshot()
    assert value(snapshot, "sluice_open_transactions") == 0
    assert value(snapshot, lag, topic="t", partition="0") is None
    assert value(snapshot, "kafka_topic_partition_current_offset", topic="t", partition="0") == 6


async def test_snapshot_is_bounded_and_reports_it(database: Database) -> None:
    membership, _ = await populated(database)
    snapshot = await Exporter(Monitor(database), membership, 2, lambda: True).snapshot()
    assert len(snapshot.partitions) == len(snapshot.lag) == 2
    assert value(snapshot, "sluice_exporter_truncated") == 1


async def test_nodes_are_shown_without_storage(database: Database) -> None:
    membership, _ = await populated(database)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            async def refuse(*limits: int) -> Any:
                raise StorageUnavailable("gone")

            return refuse

    snapshot = await Exporter(cast(Monitor, Gone()), membership, 100, lambda: True).snapshot()
    assert value(snapshot, "kafka_brokers") == 1
    assert value(snapshot, "sluice_exporter_up") == 0


async def test_read_that_ended_late_is_not_shown_an_hour_later(database: Database, database_url: str) -> None:
    membership, topic = await populated(database)
    now_s = 0.0
    exporter = Exporter(Monitor(database), membership, 100, lambda: True, lambda: now_s)
    connection: asyncpg.Connection = await asyncpg.connect(database_url)
    async with connection.transaction():
        await connection.execute("lock table sluice.committed_offset")
        assert value(await exporter.snapshot(), "sluice_exporter_up") == 0
    await connection.close()
    await append(LogStore(database), plain_batch(topic.partitions[0].partition_key, (b"k", b"v")))
    now_s = 3_600
    snapshot = await exporter.snapshot()
    assert value(snapshot, "kafka_topic_partition_current_offset", topic="t", partition="0") == 1
