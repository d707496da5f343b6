"""Dead letters on a real Postgres: the dead-letter topic, or the log of the records, changes while they wait."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.coordinator.settings import ShareSettings
from gateway.coordinator.share.partition import (
    Acknowledge,
    AcknowledgedBatch,
    AcknowledgeType,
    PartitionSettings,
    SharePartition,
)
from gateway.share.dead_letters import DeadLetters
from storage.groups import GroupStore
from storage.nodes import NodeStore
from storage.share import ShareKey
from storage.types import NewTopic, Topic
from tests.gateway.data_plane import DataPlane, batch_of, data_plane, records_in
from tests.gateway.share.partitions import A, acquire, beginning, nowhere
from tests.storage.groups import group, save

KEEPS = PartitionSettings(keeps_dead_letters=True)
ENABLED = {"errors.deadletterqueue.group.enable": "true"}
REJECTED = Acknowledge(A, (AcknowledgedBatch(0, 3, (AcknowledgeType.REJECT,)),))


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


async def share_partition(node: DataPlane) -> ShareKey:
    coordinators = NodeStore(node.database)
    coordinator = await coordinators.register("coordinator", {"PLAINTEXT": ("127.0.0.1", 1)}, None, 60_000)
    (lease,) = await coordinators.acquire_leases(coordinator, [0], 60_000)
    empty = group("s", group_type="share", state="Empty", generation_id=1, members=())
    await save(GroupStore(node.database), empty, lease)
    await coordinators.withdraw(coordinator)
    return ShareKey("s", (await node.create_topic("shared")).topic_id, 0)


async def not_made(name: str) -> Topic:
    raise AssertionError(f"{name} exists")


def writer_of(node: DataPlane, failed: list[int], *, copies: bool = False) -> DeadLetters:
    """Make the node's writer. `failed` receives the numbers of dead letters that it gives up."""
    writer = DeadLetters(
        node.services.share,
        node.catalog,
        node.log,
        node.appender,
        settings_of=lambda _: ShareSettings(dead_letter_topic="dlq.t", copies_dead_letters=copies),
        make_topic=not_made,
        now_ms=lambda: 1,
        count_written=lambda _: None,
        count_failed=failed.append,
    )
    node.services.share.report_dead_letters(writer.notice)
    return writer


async def test_dead_letters_go_to_the_topic_that_has_replaced_a_deleted_one(node: DataPlane) -> None:
    key, partitions = await share_partition(node), node.services.share
    gone = await node.create_topic("dlq.t", configs=ENABLED)
    failed: list[int] = []
    writer = writer_of(node, failed)
    await partitions.load(key, beginning, KEEPS)
    assert await acquire(partitions, key) == 4
    # Another node does this, and this node has not heard of it yet.
    assert await node.topics.delete(gone.topic_id)
    (again,) = await node.topics.create([NewTopic("dlq.t", 1, ENABLED)])
    assert isinstance(again, Topic)
    await partitions.apply(key, REJECTED)
    await writer.run()
    (partition_key,) = (each.partition_key for each in again.partitions)
    assert (await node.log.states([partition_key]))[partition_key].high_watermark == 4
    assert failed == []
    assert await partitions.load(key, nowhere, KEEPS) == SharePartition(4)


async def test_values_of_records_that_still_exist_are_copied(node: DataPlane) -> None:
    key, partitions = await share_partition(node), node.services.share
    target = await node.create_topic("dlq.t", configs=ENABLED)
    source = node.catalog.get("shared")
    assert source is not None
    for value in (b"0", b"1", b"2", b"3"):
        await node.send(source, batch_of(value))
    failed: list[int] = []
    writer = writer_of(node, failed, copies=True)
    await partitions.load(key, beginning, KEEPS)
    assert await acquire(partitions, key) == 4
    await node.log.delete_records(source.partitions[0].partition_key, 2)
    await partitions.apply(key, REJECTED)
    await writer.run()
    assert [record.value for record in records_in(await node.fetch_one(target, 0))] == [None, None, b"2", b"3"]
    assert failed == []
