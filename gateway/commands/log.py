"""Requests of commands to the record log: leaders, and the bounds of partitions. `reader.py` reads the records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from gateway.commands.client import Cluster
from gateway.commands.errors import PassingError

TopicPartition = tuple[str, int]
EARLIEST_MS, LATEST_MS = -2, -1
READ_UNCOMMITTED, READ_COMMITTED = 0, 1

_EPOCH = datetime.fromtimestamp(0, UTC)


class Bounds(NamedTuple):
    start: int
    end: int


def time_ms(text: str) -> int:
    """Return a time in ISO 8601 as Kafka's milliseconds, in UTC if it names no zone. Raise ValueError."""
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    # Kafka takes negative numbers for names such as EARLIEST_MS.
    return max((moment - _EPOCH) // timedelta(milliseconds=1), 0)


def bounds(cluster: Cluster, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
    """Return the first and the next offset of each partition, without partitions that do not exist or cannot be
    read."""
    starts = _list_offsets(cluster, partitions, EARLIEST_MS)
    ends = _list_offsets(cluster, partitions, LATEST_MS)
    found = {key: Bounds(starts[key], ends[key]) for key in partitions if key in starts and key in ends}
    return {key: bounds for key, bounds in found.items() if min(bounds) >= 0}


def high_watermarks(cluster: Cluster, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the end of each partition that answers, with the records of open transactions and those behind them."""
    return _list_offsets(cluster, partitions, LATEST_MS, READ_UNCOMMITTED)


def offsets_at(cluster: Cluster, partitions: Sequence[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
    """Return the offset of the first record at or after a time, without partitions that have no such record.

    Raise PassingError if a partition does not answer. The caller would take that for a partition without such a record.
    """
    found = _list_offsets(cluster, partitions, timestamp_ms, READ_UNCOMMITTED)
    demand_answers(partitions, found)
    return {key: offset for key, offset in found.items() if offset >= 0}


def demand_answers(partitions: Sequence[TopicPartition], found: Container[TopicPartition]) -> None:
    """Raise PassingError if `found` lacks one of the partitions."""
    missing = [f"{topic}[{partition}]" for topic, partition in partitions if (topic, partition) not in found]
    if missing:
        raise PassingError(f"the log of {', '.join(missing)} does not answer now: run this again")


def _list_offsets(
    cluster: Cluster, partitions: Sequence[TopicPartition], timestamp_ms: int, isolation_level: int = READ_COMMITTED
) -> dict[TopicPartition, int]:
    """Return the offset of each partition that answers; -1 if it has no record of that time."""
    from protocol.messages.list_offsets import (
        ListOffsetsPartition,
        ListOffsetsRequest,
        ListOffsetsResponse,
        ListOffsetsTopic,
    )

    found: dict[TopicPartition, int] = {}
    for leader, keys in by_leader(cluster, partitions).items():
        topics = tuple(
            ListOffsetsTopic(
                name=name,
                partitions=tuple(
                    ListOffsetsPartition(partition_index=partition, timestamp=timestamp_ms)
                    for topic, partition in keys
                    if topic == name
                ),
            )
            for name in sorted({topic for topic, _ in keys})
        )
        request = ListOffsetsRequest(replica_id=-1, isolation_level=isolation_level, topics=topics)
        response = cluster.ask(ListOffsetsResponse, request, node_id=leader)
        found |= {
            (topic.name, partition.partition_index): partition.offset
            for topic in response.topics
            for partition in topic.partitions
            if not partition.error_code
        }
    return found


def by_leader(cluster: Cluster, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
    """Return the partitions by their leader, without those that have none."""
    wanted = set(partitions)
    if not wanted:
        return {}
    leaders: dict[int, list[TopicPartition]] = defaultdict(list)
    for topic in cluster.metadata(sorted({name for name, _ in wanted})).topics:
        for partition in topic.partitions:
            key = (topic.name or "", partition.partition_index)
            if key in wanted and partition.leader_id >= 0:
                leaders[partition.leader_id].append(key)
    return dict(leaders)
