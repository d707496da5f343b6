"""Read the records of a topic: fetch from the leaders, and leave out what a transaction aborted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from gateway.commands.client import PASSING_CODES, Cluster
from gateway.commands.errors import CommandError, PassingError
from gateway.commands.log import READ_COMMITTED, bounds, by_leader
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
from protocol.records import BatchHead, ControlType, Record, control_type_of, iter_records, read_head, split_batches

_FETCH_BY_NAME = 12
_FETCH_BYTES = 8 * 1024 * 1024


class Reader:
    """Reads partitions of one topic from given offsets on, in rounds."""

    def __init__(self, cluster: Cluster, topic: str, positions: dict[int, int]) -> None:
        self._cluster = cluster
        self._topic = topic
        self.positions = positions
        """Maps each partition to the offset that is read next."""

    def read(self, partitions: Sequence[int], *, max_wait_ms: int) -> Iterator[tuple[int, Record]]:
        """Yield (partition, record) of available records, in offset order per partition. Stop after one fetch per
        leader, or after the wait if no partition has a leader."""
        by_node = by_leader(self._cluster, [(self._topic, partition) for partition in partitions])
        if not by_node:
            time.sleep(max_wait_ms / 1000)  # no leader is elected yet
        for leader, keys in by_node.items():
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
            response = self._cluster.ask(FetchResponse, request, node_id=leader, at_most=_FETCH_BY_NAME)
            for topic in response.responses:
                for partition in topic.partitions:
                    yield from self._records(partition)

    def _records(self, answer: PartitionData) -> Iterator[tuple[int, Record]]:
        partition, code = answer.partition_index, answer.error_code
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            # Retention has removed the records at this position. Continue at the log start.
            found = bounds(self._cluster, [(self._topic, partition)])
            self.positions[partition] = found[self._topic, partition].start if found else self.positions[partition]
            return
        if code:
            why = reason(code, needs=f"--operation read --topic {self._topic}")
            said = f"{self._topic}[{partition}] cannot be read: {why}"
            raise (PassingError if code in PASSING_CODES else CommandError)(said)
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
