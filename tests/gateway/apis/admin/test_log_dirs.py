"""DescribeLogDirs: true sizes from Postgres. AlterReplicaLogDirs: there is one directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from gateway.apis.admin import log_dirs
from gateway.config.settings import load
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirTopic,
)
from protocol.messages.describe_log_dirs import DescribableLogDirTopic, DescribeLogDirsRequest
from protocol.records import Record, build_batch
from storage.types import Appended, NewBatch, PartitionKey
from tests.gateway.admin import AdminNode, admin_node


async def append(node: AdminNode, partition_key: PartitionKey, value: bytes) -> int:
    """Append one batch; return its size in bytes."""
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


def test_volume_of_the_log_is_reported(tmp_path: Path) -> None:
    """If the records are in a bucket, or in a database outside the node, the node has no volume to report."""

    def told(**options: str) -> tuple[int, int]:
        flags = {name.replace("_", "-"): text for name, text in options.items()}
        return log_dirs.volume(load(flags, (), {}).settings)

    total, usable = told(log_store=str(tmp_path))
    assert total == shutil.disk_usage(tmp_path).total
    assert 0 < usable <= total
    assert told(log_store="inline", data_dir=str(tmp_path))[0] == total
    assert told(log_store=str(tmp_path / "absent")) == (-1, -1)
    assert told(log_store="s3://bucket/prefix") == (-1, -1)
    assert told(database_url="postgresql://host/db") == (-1, -1)


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


async def test_log_dirs_follow_topics_that_another_node_creates_or_deletes(database_url: str) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        gone = await node.create("gone")
        await node.create("kept")
        await other.topics.delete(gone.topic_id)
        await other.create("made")
        assert await sizes(node, None, 4) == {("kept", 0): 0, ("made", 0): 0}


async def test_replica_cannot_be_moved_to_another_directory(database_url: str) -> None:
    def directory(path: str, *named: tuple[str, tuple[int, ...]]) -> AlterReplicaLogDir:
        topics = tuple(AlterReplicaLogDirTopic(name=name, partitions=partitions) for name, partitions in named)
        return AlterReplicaLogDir(path=path, topics=topics)

    there, missing, unknown = ErrorCode.NONE, ErrorCode.LOG_DIR_NOT_FOUND, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        await node.create("orders", 3)
        named = (("orders", (0, 1, 2)), ("none", (0,)))
        asked = AlterReplicaLogDirsRequest(
            dirs=(
                directory("postgres", *named, ("orders", (7,))),
                directory("/elsewhere", ("orders", (1,)), ("none", (1,))),
            )
        )
        for version in (1, 2):
            answer = await node.ask(ApiKey.ALTER_REPLICA_LOG_DIRS, asked, version)
            assert {
                (topic.topic_name, part.partition_index): part.error_code
                for topic in answer.results
                for part in topic.partitions
            } == {
                ("orders", 0): there,
                ("orders", 1): missing,
                ("orders", 2): there,
                ("orders", 7): unknown,
                ("none", 0): unknown,
                ("none", 1): missing,
            }, "of a partition that is named twice the last directory counts"
        # While both nodes are alive, each partition's only replica is its leader.
        await node.membership.renew()
        await other.membership.renew()
        asked = AlterReplicaLogDirsRequest(dirs=(directory("postgres", ("orders", (0, 1, 2))),))
        codes = [
            [
                part.error_code
                for part in (await each.ask(ApiKey.ALTER_REPLICA_LOG_DIRS, asked, 2)).results[0].partitions
            ]
            for each in (node, other)
        ]
        assert [set(pair) for pair in zip(*codes, strict=True)] == [{there, ErrorCode.REPLICA_NOT_AVAILABLE}] * 3
