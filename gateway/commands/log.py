"""Requests of commands to the record log: the bounds of partitions, and the records in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.refusals import reason
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages.fetch import (
    AbortedTransaction,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from protocol.records import (
    BatchHead,
    ControlType,
    Record,
    control_type_of,
    iter_records,
    read_head,
    split_batches,
)

TopicPartition = tuple[str, int]
EARLIEST_MS, LATEST_MS = -2, -1
READ_COMMITTED = 1

_FETCH_BY_NAME = 12
_FETCH_BYTES = 8 * 1024 * 1024


class Bounds(NamedTuple):
    start: int
    end: int


def bounds(cluster: Cluster, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
    """Return the first and the next offset of each partition, without partitions that do not exist or cannot be
    read."""
    starts = _list_offsets(cluster, partitions, EARLIEST_MS)
    ends = _list_offsets(cluster, partitions, LATEST_MS)
    return {key: Bounds(starts[key], ends[key]) for key in partitions if key in starts and key in ends}


def offsets_at(cluster: Cluster, partitions: Sequence[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
    """Return the offset of the first record at or after a time, without partitions that have no such record."""
    return _list_offsets(cluster, partitions, timestamp_ms)


def _list_offsets(
    cluster: Cluster, partitions: Sequence[TopicPartition], timestamp_ms: int
) -> dict[TopicPartition, int]:
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
        request = ListOffsetsRequest(replica_id=-1, isolation_level=READ_COMMITTED, topics=topics)
        response: ListOffsetsResponse = cluster.ask(request, node_id=leader)
        found |= {
            (topic.name, partition.partition_index): partition.offset
            for topic in response.topics
            for partition in topic.partitions
            if not partition.error_code and partition.offset >= 0
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


class Reader:
    """Read partitions of one topic from given offsets on, in rounds."""

    def __init__(self, cluster: Cluster, topic: str, positions: dict[int, int]) -> None:
        self._cluster = cluster
        self._topic = topic
        self.positions = positions
        """Partition to the offset that is read next."""

    def read(self, partitions: Sequence[int], *, max_wait_ms: int) -> Iterator[tuple[int, Record]]:
        """Yield (partition, record) of available records, in offset order per partition. Stop after one fetch per
        leader."""
        for leader, keys in by_leader(self._cluster, [(self._topic, partition) for partition in partitions]).items():
            asked = tuple(
                FetchPartition(
                    partition=partition, fetch_offset=self.positions[partition], partition_max_bytes=_FETCH_BYTES
                )
                for _, partition in keys
            )
            request = FetchRequest(
                max_wait_ms=max_wait_ms,
                min_bytes=1,
                max_bytes=_FETCH_BYTES,
                isolation_level=READ_COMMITTED,
                topics=(FetchTopic(topic=self._topic, partitions=asked),),
            )
            response: FetchResponse = self._cluster.ask(request, node_id=leader, at_most=_FETCH_BY_NAME)
            for topic in response.responses:
                for partition in topic.partitions:
                    yield from self._records(partition)

    def _records(self, answer: PartitionData) -> Iterator[tuple[int, Record]]:
        partition, code = answer.partition_index, answer.error_code
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            # Retention removed the records at this position: go on at the log start.
            found = bounds(self._cluster, [(self._topic, partition)])
            self.positions[partition] = found[self._topic, partition].start if found else self.positions[partition]
            return
        if code:
            why = reason(code, needs=f"--operation read --topic {self._topic}")
            raise CommandError(f"{self._topic}[{partition}] cannot be read: {why}")
        aborted = Aborted(answer.aborted_transactions or ())
        for batch in split_batches(cast("Buffer", answer.records or b""), fetched=True):
            head = read_head(batch)
            try:
                for record in () if aborted.leaves_out(batch, head) else iter_records(batch):
                    if record.offset >= self.positions[partition]:
                        yield partition, record
            except ProtocolError as error:
                raise CommandError(f"{self._topic}[{partition}] at {head.base_offset}: {error}") from error
            self.positions[partition] = max(self.positions[partition], head.last_offset + 1)


class Aborted:
    """Filter of aborted transactions and control batches: the client's part of reading committed records."""

    def __init__(self, transactions: Iterable[AbortedTransaction]) -> None:
        self._waiting = sorted(((each.first_offset, each.producer_id) for each in transactions), reverse=True)
        self._producer_ids: set[int] = set()

    def leaves_out(self, batch: memoryview, head: BatchHead) -> bool:
        """Return whether the reader must skip the batch. Batches come in the order of their offsets."""
        while self._waiting and self._waiting[-1][0] <= head.last_offset:
            self._producer_ids.add(self._waiting.pop()[1])
        if head.is_control:
            if control_type_of(batch) is ControlType.ABORT:
                self._producer_ids.discard(head.producer_id)
            return True
        return head.is_transactional and head.producer_id in self._producer_ids
