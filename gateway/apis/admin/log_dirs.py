"""DescribeLogDirs, AlterReplicaLogDirs: the size of each partition in Postgres, and its place.

The one idea: there is one log directory, called `postgres`, and every node answers for the partitions of which it is a
replica. Sizes are those of the stored batches. Total and usable bytes are those of the volume below the node's segments
or its embedded Postgres; a node with neither does not know them (−1).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from gateway.apis.metadata import Placement
from gateway.apis.services import HasCatalog, HasLog, HasMembership, HasSettings
from gateway.config.broker_table import BROKER_CONFIGS
from gateway.config.definition import render
from gateway.config.settings import Settings
from gateway.config.topic import requested_replication_factor
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from protocol.errors import ErrorCode
from protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)
from protocol.messages.describe_log_dirs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from storage.types import Partition, Topic

LOG_DIR = render(BROKER_CONFIGS["log.dirs"].default) or ""

STATES_PER_QUERY = 5_000
UNKNOWN = -1


class LogDirsServices(HasCatalog, HasLog, HasMembership, HasSettings, Protocol): ...


async def describe_log_dirs(
    request: DescribeLogDirsRequest, context: RequestContext[LogDirsServices]
) -> DescribeLogDirsResponse:
    """Describe the log directory. Null topics means all. Partitions that do not exist, or of which this node is no
    replica, are left out, as upstream does."""
    services = context.services
    await services.catalog.refresh_if_changed()
    if request.topics is None:
        chosen = [(topic, topic.partitions) for topic in services.catalog.topics()]
    else:
        wanted: dict[str, set[int]] = {}
        async for asked in in_pieces(request.topics):
            wanted.setdefault(asked.topic, set()).update(asked.partitions)
        chosen = [found async for found in in_pieces(_choose(wanted, services)) if found is not None]
    placement, node_id, broker = Placement(context), services.membership.node_id, services.catalog.broker
    held: list[tuple[Topic, list[Partition]]] = []
    async for topic, partitions in in_pieces(chosen):
        factor = requested_replication_factor(topic.configs, broker)
        here = [part async for part in in_pieces(partitions) if placement.holds(node_id, part, factor)]
        if here:
            held.append((topic, here))
    sizes = await _sizes([partition for _, partitions in held for partition in partitions], services)
    topics: list[DescribeLogDirsTopic] = []
    async for topic, partitions in in_pieces(held):
        described = [
            DescribeLogDirsPartition(
                partition_index=partition.partition_index, partition_size=sizes[partition.partition_key]
            )
            async for partition in in_pieces(partitions)
            if partition.partition_key in sizes
        ]
        topics.append(DescribeLogDirsTopic(name=topic.name, partitions=tuple(described)))
    total, usable = await asyncio.to_thread(volume, services.settings)
    result = DescribeLogDirsResult(log_dir=LOG_DIR, topics=tuple(topics), total_bytes=total, usable_bytes=usable)
    return DescribeLogDirsResponse(results=(result,))


def volume(settings: Settings) -> tuple[int, int]:
    """Return total and usable bytes of the volume with the node's records, or −1 if they lie elsewhere."""
    place = settings.log_place
    if not isinstance(place, Path):
        if place is not None or settings.database_url is not None:
            return UNKNOWN, UNKNOWN
        place = settings.data_dir
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return UNKNOWN, UNKNOWN
    return usage.total, usage.free


def refuse_describe_log_dirs(
    _request: DescribeLogDirsRequest, _version: int, code: ErrorCode, _message: str | None
) -> DescribeLogDirsResponse:
    """Refuse with one nameless directory that failed: before version 3 there is no other place for the code."""
    return DescribeLogDirsResponse(error_code=code, results=(DescribeLogDirsResult(error_code=code),))


def _choose(wanted: dict[str, set[int]], services: HasCatalog) -> Iterable[tuple[Topic, tuple[Partition, ...]] | None]:
    """Yield the chosen partitions by topic, and None for each topic that does not exist. A missing topic is yielded
    too, because its look-up also takes time.
    """
    for name, indexes in wanted.items():
        topic = services.catalog.get(name)
        partitions: tuple[Partition, ...] = ()
        if topic is not None:
            partitions = tuple(part for part in topic.partitions if part.partition_index in indexes)
        yield (topic, partitions) if topic is not None and partitions else None


async def _sizes(partitions: list[Partition], services: HasLog) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for start in range(0, len(partitions), STATES_PER_QUERY):
        keys = [partition.partition_key for partition in partitions[start : start + STATES_PER_QUERY]]
        sizes.update({key: state.size_bytes for key, state in (await services.log.states(keys)).items()})
    return sizes


# --- AlterReplicaLogDirs --------------------------------------------------------------------------------------------


async def alter_replica_log_dirs(
    request: AlterReplicaLogDirsRequest, context: RequestContext[LogDirsServices]
) -> AlterReplicaLogDirsResponse:
    """Accept each partition by itself: a replica already lies in its only possible place.

    If a partition is named twice, the last directory counts (upstream: ReplicaManager.alterReplicaLogDirs).
    """
    services = context.services
    await services.catalog.refresh_if_changed()
    placement = Placement(context)
    wanted: dict[str, dict[int, str]] = {}
    async for directory in in_pieces(request.dirs):
        async for topic in in_pieces(directory.topics):
            paths = wanted.setdefault(topic.name, {})
            async for index in in_pieces(topic.partitions):
                paths[index] = directory.path
    results: list[AlterReplicaLogDirTopicResult] = []
    async for name, paths in in_pieces(list(wanted.items())):
        topic = services.catalog.get(name)
        there = {} if topic is None else {part.partition_index: part for part in topic.partitions}
        factor = 0 if topic is None else requested_replication_factor(topic.configs, services.catalog.broker)
        judged: list[AlterReplicaLogDirPartitionResult] = []
        async for index, path in in_pieces(list(paths.items())):
            part = there.get(index)
            code = ErrorCode.NONE
            if path != LOG_DIR:
                code = ErrorCode.LOG_DIR_NOT_FOUND
            elif part is None:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif not placement.holds(services.membership.node_id, part, factor):
                code = ErrorCode.REPLICA_NOT_AVAILABLE
            judged.append(AlterReplicaLogDirPartitionResult(partition_index=index, error_code=code))
        results.append(AlterReplicaLogDirTopicResult(topic_name=name, partitions=tuple(judged)))
    return AlterReplicaLogDirsResponse(results=tuple(results))


def refuse_alter_replica_log_dirs(
    request: AlterReplicaLogDirsRequest, _version: int, code: ErrorCode, _message: str | None
) -> AlterReplicaLogDirsResponse:
    return AlterReplicaLogDirsResponse(
        results=tuple(
            AlterReplicaLogDirTopicResult(
                topic_name=topic.name,
                partitions=tuple(
                    AlterReplicaLogDirPartitionResult(partition_index=index, error_code=code)
                    for index in topic.partitions
                ),
            )
            for directory in request.dirs
            for topic in directory.topics
        )
    )
