"""A transactional producer in frames."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import ErrorCode
from protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
)
from protocol.messages.end_txn import EndTxnRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, PartitionData
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    TopicProduceData,
)
from protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from protocol.records import ControlType, Record, build_batch, control_type_of, iter_records, read_head, split_batches
from tests.frames.members import fresh
from tests.wire import WireClient

Partition = tuple[str, int]


@dataclass
class Transactional:
    """One producer on one connection. Its methods return error codes, so that a test can expect a code."""

    client: WireClient
    transactional_id: str
    producer_id: int = -1
    producer_epoch: int = -1
    sequences: dict[Partition, int] = field(default_factory=dict[Partition, int])

    async def initialize(self, *, timeout_ms: int = 60_000, version: int = 4, itself: bool = False) -> ErrorCode:
        """Request a new epoch. With `itself`, the request names the producer's current id and epoch (KIP-360)."""
        named: dict[str, Any] = (
            {"producer_id": self.producer_id, "producer_epoch": self.producer_epoch} if itself else {}
        )
        answer = await self.client.send(
            InitProducerIdRequest(transactional_id=self.transactional_id, transaction_timeout_ms=timeout_ms, **named),
            version,
        )
        if answer.error_code == ErrorCode.NONE:
            self.producer_id, self.producer_epoch = answer.producer_id, answer.producer_epoch
            self.sequences.clear()
        return ErrorCode(answer.error_code)

    async def add(self, *partitions: Partition, version: int = 3) -> list[ErrorCode]:
        """Enlist the partitions. Return the code of each, in the order given."""
        answer = await self.client.send(
            AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self.transactional_id,
                v3_and_below_producer_id=self.producer_id,
                v3_and_below_producer_epoch=self.producer_epoch,
                v3_and_below_topics=tuple(
                    AddPartitionsToTxnTopic(name=topic, partitions=(index,)) for topic, index in partitions
                ),
            ),
            version,
        )
        return [
            ErrorCode(result.partition_error_code)
            for topic in answer.results_by_topic_v3_and_below
            for result in topic.results_by_partition
        ]

    async def add_offsets(self, group_id: str, version: int = 3) -> ErrorCode:
        asked = AddOffsetsToTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            group_id=group_id,
        )
        return ErrorCode((await self.client.send(asked, version)).error_code)

    async def send(self, partition: Partition, *values: bytes, version: int = 9) -> PartitionProduceResponse:
        """Send a batch of the transaction. Its sequence advances only if the batch is accepted."""
        sequence = self.sequences.get(partition, 0)
        now_ms = time.time_ns() // 1_000_000
        records = build_batch(
            [Record(number, now_ms, None, value) for number, value in enumerate(values)],
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            base_sequence=sequence,
            is_transactional=True,
        )
        answer = await produce(self.client, partition, records, version, transactional_id=self.transactional_id)
        if answer.error_code == ErrorCode.NONE:
            self.sequences[partition] = sequence + len(values)
        return answer

    async def commit_offset(
        self, group_id: str, partition: Partition, offset: int, version: int = 3, **given: Any
    ) -> ErrorCode:
        """Commit an offset in the transaction. `given` is the group member that commits, if the version of the request
        names one.
        """
        topic, index = partition
        one = TxnOffsetCommitRequestPartition(partition_index=index, committed_offset=offset, committed_metadata="")
        asked = TxnOffsetCommitRequest(
            transactional_id=self.transactional_id,
            group_id=group_id,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            topics=(TxnOffsetCommitRequestTopic(name=topic, partitions=(one,)),),
            **given,
        )
        return ErrorCode((await self.client.send(asked, version)).topics[0].partitions[0].error_code)

    async def end(self, *, committed: bool, version: int = 3) -> ErrorCode:
        """End the transaction. From version 5 on the answer has the id and epoch with which the producer continues."""
        asked = EndTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            committed=committed,
        )
        answer = await self.client.send(asked, version)
        assert (answer.producer_id == -1) is (version < 5 or answer.error_code != ErrorCode.NONE)
        if answer.producer_id != -1:
            self.producer_id, self.producer_epoch = answer.producer_id, answer.producer_epoch
            self.sequences.clear()
        return ErrorCode(answer.error_code)


async def produce(
    client: WireClient, partition: Partition, records: bytes, version: int = 9, *, transactional_id: str | None = None
) -> PartitionProduceResponse:
    topic, index = partition
    data = TopicProduceData(name=topic, partition_data=(PartitionProduceData(index=index, records=records),))
    asked = ProduceRequest(transactional_id=transactional_id, acks=-1, timeout_ms=10_000, topic_data=(data,))
    return (await client.send(asked, version)).responses[0].partition_responses[0]


async def fetch(
    client: WireClient, partition: Partition, offset: int, *, committed: bool, max_wait_ms: int = 0, **fields: Any
) -> PartitionData:
    topic, index = partition
    part = FetchPartition(partition=index, fetch_offset=offset, partition_max_bytes=1 << 20)
    asked = FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        isolation_level=int(committed),
        topics=(FetchTopic(topic=topic, partitions=(part,)),),
        **fields,
    )
    return (await client.send(asked, 12)).responses[0].partitions[0]


def batches_of(data: PartitionData) -> list[memoryview]:
    """Return the batches in an answer, without a truncated last one."""
    assert isinstance(data.records, bytes | memoryview)
    return split_batches(data.records, fetched=True)


def delivered(data: PartitionData, from_offset: int = 0) -> list[tuple[int, bytes | None]]:
    """Return offset and value of each record that an application with read_committed would receive from an answer. A
    client leaves out the aborted records.
    """
    begun = sorted((each.first_offset, each.producer_id) for each in data.aborted_transactions or ())
    leaving_out: set[int] = set()
    found: list[tuple[int, bytes | None]] = []
    for batch in batches_of(data):
        head = read_head(batch)
        while begun and begun[0][0] <= head.last_offset:
            leaving_out.add(begun.pop(0)[1])
        if head.is_control:
            if control_type_of(batch) is ControlType.ABORT:
                leaving_out.discard(head.producer_id)
        elif not (head.is_transactional and head.producer_id in leaving_out):
            found += [(record.offset, record.value) for record in iter_records(batch) if record.offset >= from_offset]
    return found


OK = ErrorCode.NONE


async def producer_of(client: WireClient, name: str | None = None) -> Transactional:
    producer = Transactional(client, name or fresh("producer"))
    assert await producer.initialize() is OK
    return producer
