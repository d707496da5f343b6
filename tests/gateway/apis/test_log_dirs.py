"""DescribeLogDirs: true sizes from Postgres."""

from __future__ import annotations

from gateway.apis import log_dirs
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.describe_log_dirs import DescribableLogDirTopic, DescribeLogDirsRequest
from protocol.records import Record, build_batch
from storage.types import Appended, NewBatch, PartitionKey
from tests.gateway.admin import AdminNode, admin_node


async def append(node: AdminNode, partition_key: PartitionKey, value: bytes) -> int:
    """One batch; its bytes."""
    batch = bytearray(build_batch([Record(0, 1, b"k", value)]))
    (appended,) = await node.log.append([NewBatch(partition_key, batch, 1, 1)])
    assert isinstance(appended, Appended)
    return len(batch)


async def sizes(node: AdminNode, asked, version: int) -> dict[tuple[str, int], int]:
    answer = await node.ask(ApiKey.DESCRIBE_LOG_DIRS, DescribeLogDirsRequest(topics=asked), version)
    assert answer.error_code == ErrorCode.NONE
    (directory,) = answer.results
    assert (directory.error_code, directory.log_dir) == (ErrorCode.NONE, "postgres")
    assert (directory.total_bytes, directory.usable_bytes) == (-1, -1)
    for topic in directory.topics:
        for part in topic.partitions:
            assert (part.offset_lag, part.is_future_key) == (0, False)
    return {
        (topic.name, part.partition_index): part.partition_size
        for topic in directory.topics
        for part in topic.partitions
    }


async def test_sizes_at_every_version(database_url: str) -> None:
    async with admin_node(database_url) as node:
        orders = await node.create("orders", 2)
        await node.create("empty", 1)
        first = await append(node, orders.partitions[0].partition_key, b"v" * 100)
        second = await append(node, orders.partitions[0].partition_key, b"v" * 5000)
        third = await append(node, orders.partitions[1].partition_key, b"v")
        truth = {("orders", 0): first + second, ("orders", 1): third, ("empty", 0): 0}
        for version in range(1, 5):
            assert await sizes(node, None, version) == truth
            assert await sizes(node, (), version) == {}
            chosen = (
                DescribableLogDirTopic(topic="orders", partitions=(1, 7, -1)),
                DescribableLogDirTopic(topic="missing", partitions=(0,)),
                DescribableLogDirTopic(topic="orders", partitions=(1,)),
            )
            assert await sizes(node, chosen, version) == {("orders", 1): third}


async def test_many_partitions_take_several_queries(database_url: str, monkeypatch) -> None:
    monkeypatch.setattr(log_dirs, "STATES_PER_QUERY", 3)
    async with admin_node(database_url) as node:
        topic = await node.create("orders", 8)
        size = await append(node, topic.partitions[7].partition_key, b"v")
        found = await sizes(node, None, 4)
        assert len(found) == 8
        assert found["orders", 7] == size


async def test_what_another_node_created_and_deleted(database_url: str) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        gone = await node.create("gone")
        await node.create("kept")
        await other.topics.delete(gone.topic_id)
        await other.create("made")
        assert await sizes(node, None, 4) == {("kept", 0): 0, ("made", 0): 0}
