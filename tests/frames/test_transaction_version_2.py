"""Transactions whose producer enlists no partitions and has a later epoch after each transaction,
as frames (KIP-890).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from protocol.errors import ErrorCode
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.describe_transactions import DescribeTransactionsRequest
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from protocol.records import Record, build_batch, read_head
from tests.frames.members import create_topic, fresh
from tests.frames.transactions import Transactional, batches_of, delivered, fetch, produce
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import WireClient

OK = ErrorCode.NONE
PRODUCE, END, COMMIT = 12, 5, 5
"""Versions of Produce, EndTxn and TxnOffsetCommit from which on a client uses transaction.version 2."""


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[WireClient]:
    async with await WireClient.connect(gateway.bootstrap) as connected:
        yield connected


@pytest.fixture
async def partition(client: WireClient) -> tuple[str, int]:
    topic = fresh("unnamed")
    await create_topic(client, topic, 2)
    return topic, 1


async def producer_of(client: WireClient, name: str | None = None) -> Transactional:
    producer = Transactional(client, name or fresh("producer"))
    assert await producer.initialize() is OK
    return producer


async def write(producer: Transactional, partition: tuple[str, int], value: bytes) -> int:
    answer = await producer.send(partition, value, version=PRODUCE)
    assert answer.error_code == OK, answer
    return answer.base_offset


async def committed_offset(client: WireClient, group_id: str, partition: tuple[str, int]) -> int:
    topic, index = partition
    asked = OffsetFetchRequestTopic(name=topic, partition_indexes=(index,))
    answer = await client.send(OffsetFetchRequest(group_id=group_id, topics=(asked,)), 6)
    return answer.topics[0].partitions[0].committed_offset


@pytest.mark.parametrize("version", [3, 4])
async def test_transaction_version_2_is_announced_as_finalized(client: WireClient, version: int) -> None:
    answer = await client.send(ApiVersionsRequest(client_software_name="tests", client_software_version="1"), version)
    finalized = {each.name: (each.min_version_level, each.max_version_level) for each in answer.finalized_features}
    always = ("eligible.leader.replicas.version", "group.version", "share.version", "streams.version")
    facts = {"metadata.version": (33, 33), "share.version": (2, 2), "transaction.version": (2, 2)}
    assert finalized == dict.fromkeys(always, (1, 1)) | facts
    assert answer.finalized_features_epoch >= 0
    supported = {each.name: (each.min_version, each.max_version) for each in answer.supported_features}
    from_zero = {
        **dict.fromkeys(("group.version", "streams.version", "kraft.version"), (0, 1)),
        **dict.fromkeys(("share.version", "transaction.version"), (0, 2)),
    }
    from_one = {"eligible.leader.replicas.version": (1, 1), "metadata.version": (7, 33)}
    assert supported == ({} if version == 3 else from_zero) | from_one


async def test_a_partition_belongs_to_the_transaction_from_its_first_batch_on(
    client: WireClient, partition: tuple[str, int]
) -> None:
    other = (partition[0], 0)
    producer = await producer_of(client)
    for round_, committed in enumerate((True, False, True)):
        assert producer.producer_epoch == round_
        assert await write(producer, partition, b"%d" % round_) == 3 * round_
        assert await write(producer, partition, b"again") == 3 * round_ + 1
        assert await write(producer, other, b"other") == 2 * round_
        held = await fetch(client, partition, 3 * round_, committed=True)
        assert held.last_stable_offset == 3 * round_
        assert await producer.end(committed=committed, version=END) is OK
    answer = await fetch(client, partition, 0, committed=True)
    assert delivered(answer) == [(0, b"0"), (1, b"again"), (6, b"2"), (7, b"again")]
    markers = [head for head in map(read_head, batches_of(answer)) if head.is_control]
    assert [head.producer_epoch for head in markers] == [1, 2, 3], "as its producer is from then on"


async def test_repeated_end_is_answered_with_the_same_epoch(client: WireClient, partition: tuple[str, int]) -> None:
    producer = await producer_of(client)
    for committed in (True, False):
        await write(producer, partition, b"x")
        again = replace(producer)
        assert await producer.end(committed=committed, version=END) is OK
        assert await again.end(committed=not committed, version=END) is ErrorCode.INVALID_TXN_STATE
        assert await again.end(committed=committed, version=END) is OK
        assert again.producer_epoch == producer.producer_epoch
    assert (await fetch(client, partition, 0, committed=True)).high_watermark == 4


async def test_late_batch_is_not_counted_in_a_later_transaction(client: WireClient, partition: tuple[str, int]) -> None:
    """KIP-890 exists because of this case: if transactions share one epoch, nothing shows to which transaction a late
    batch belongs.
    """
    producer = await producer_of(client)
    await write(producer, partition, b"first")
    late = replace(producer, sequences=dict(producer.sequences))
    assert await producer.end(committed=True, version=END) is OK
    assert (await late.send(partition, b"late", version=PRODUCE)).error_code == ErrorCode.INVALID_PRODUCER_EPOCH
    await write(producer, partition, b"second")
    assert (await late.send(partition, b"late", version=PRODUCE)).error_code == ErrorCode.INVALID_PRODUCER_EPOCH
    other = (partition[0], 0)
    refused = await late.send(other, b"late", version=PRODUCE)
    assert refused.error_code == ErrorCode.INVALID_PRODUCER_EPOCH, "nor does it begin one elsewhere"
    assert await late.commit_offset("g", partition, 1, COMMIT) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert await producer.end(committed=True, version=END) is OK
    assert delivered(await fetch(client, partition, 0, committed=True)) == [(0, b"first"), (2, b"second")]
    assert (await fetch(client, other, 0, committed=True)).high_watermark == 0


async def test_partition_without_the_producer_accepts_its_first_batch_only(
    client: WireClient, partition: tuple[str, int]
) -> None:
    """If the second batch were accepted first, the log would hold the second batch before the first. The gateway would
    then refuse the repeated first batch for good.
    """
    producer = await producer_of(client)
    producer.sequences[partition] = 1
    early = await producer.send(partition, b"second", version=PRODUCE)
    assert early.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    producer.sequences[partition] = 0
    assert await write(producer, partition, b"first") == 0
    assert await write(producer, partition, b"second") == 1
    assert await producer.end(committed=True, version=END) is OK


async def test_producer_that_enlists_partitions_continues_as_before(
    client: WireClient, partition: tuple[str, int]
) -> None:
    """A client may know the new version of Produce but not that of EndTxn. Its sequence numbers then continue across
    transactions.
    """
    producer = await producer_of(client)
    for round_ in range(3):
        assert await producer.add(partition) == [OK]
        assert await write(producer, partition, b"%d" % round_) == 2 * round_
        assert await producer.end(committed=True, version=4) is OK
        assert producer.producer_epoch == 0
    fresh_one = await producer_of(client)
    fresh_one.sequences[partition] = 7
    assert await fresh_one.add(partition) == [OK]
    assert await write(fresh_one, partition, b"its first are forgotten") == 6


async def test_implicit_enlisting_continues_after_an_end_of_version_4(
    client: WireClient, partition: tuple[str, int]
) -> None:
    """Between two transactions of one epoch, a client may learn that it need not enlist partitions."""
    producer = await producer_of(client)
    for round_ in range(3):
        assert await write(producer, partition, b"%d" % round_) == 2 * round_
        assert await producer.end(committed=True, version=4) is OK
        assert producer.producer_epoch == 0


async def test_transaction_that_has_not_begun_can_be_aborted(client: WireClient, partition: tuple[str, int]) -> None:
    producer = await producer_of(client)
    assert await producer.end(committed=True, version=END) is ErrorCode.INVALID_TXN_STATE
    for epoch in (1, 2):
        assert await producer.end(committed=False, version=END) is OK
        assert producer.producer_epoch == epoch
    await write(producer, partition, b"x")
    assert await producer.end(committed=True, version=END) is OK


async def test_offset_commit_enlists_its_group(client: WireClient, partition: tuple[str, int]) -> None:
    group, producer = fresh("group"), await producer_of(client)
    assert await producer.commit_offset(group, partition, 3, 4) is ErrorCode.TRANSACTION_ABORTABLE
    assert await producer.commit_offset(group, partition, 3, COMMIT) is OK
    assert await committed_offset(client, group, partition) == -1
    assert await producer.end(committed=True, version=END) is OK
    assert await committed_offset(client, group, partition) == 3
    assert await producer.commit_offset(group, partition, 9, COMMIT) is OK
    assert await producer.end(committed=False, version=END) is OK
    assert await committed_offset(client, group, partition) == 3
    assert await producer.commit_offset("", partition, 9, COMMIT) is ErrorCode.INVALID_GROUP_ID


async def test_strangers_are_refused(client: WireClient, partition: tuple[str, int]) -> None:
    known = await producer_of(client)
    stranger = Transactional(client, known.transactional_id, known.producer_id + 1, 0)
    unknown = ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert (await stranger.send(partition, b"x", version=PRODUCE)).error_code == unknown
    assert await stranger.commit_offset("g", partition, 1, COMMIT) is unknown
    assert await stranger.end(committed=True, version=END) is unknown
    ahead = Transactional(client, known.transactional_id, known.producer_id, 1)
    fenced = ErrorCode.INVALID_PRODUCER_EPOCH
    assert (await ahead.send(partition, b"x", version=PRODUCE)).error_code == fenced
    assert await ahead.end(committed=True, version=END) is ErrorCode.PRODUCER_FENCED
    nameless = replace(known, transactional_id="")
    refused = await nameless.send(partition, b"x", version=PRODUCE)
    assert refused.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    described = await client.send(DescribeTransactionsRequest(transactional_ids=(known.transactional_id,)), 0)
    assert described.transaction_states[0].transaction_state == "Empty", "nobody has begun one"


async def test_one_produce_enlists_many_partitions_and_refuses_those_of_others(
    client: WireClient, partition: tuple[str, int]
) -> None:
    producer, fenced = await producer_of(client), await producer_of(client)
    assert await producer_of(client, fenced.transactional_id)

    def data(index: int, of: Transactional) -> PartitionProduceData:
        identity = (of.producer_id, of.producer_epoch)
        return PartitionProduceData(
            index=index,
            records=build_batch(
                [Record(0, 1_000, None, b"x")],
                producer_id=identity[0],
                producer_epoch=identity[1],
                base_sequence=0,
                is_transactional=True,
            ),
        )

    topic = TopicProduceData(name=partition[0], partition_data=(data(0, producer), data(1, fenced)))
    asked = ProduceRequest(transactional_id=producer.transactional_id, acks=-1, timeout_ms=10_000, topic_data=(topic,))
    answers = (await client.send(asked, PRODUCE)).responses[0].partition_responses
    assert [answer.error_code for answer in answers] == [OK, ErrorCode.INVALID_PRODUCER_ID_MAPPING]
    assert await producer.end(committed=True, version=END) is OK
    assert (await fetch(client, (partition[0], 0), 0, committed=True)).last_stable_offset == 2


async def test_pipelined_batches_keep_their_order_behind_the_first_batch(
    client: WireClient, partition: tuple[str, int]
) -> None:
    producer = await producer_of(client)
    batches = [
        build_batch(
            [Record(0, 1_000, None, b"%d" % sequence)],
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            base_sequence=sequence,
            is_transactional=True,
        )
        for sequence in range(20)
    ]
    name = producer.transactional_id
    answers = await asyncio.gather(
        *(produce(client, partition, batch, PRODUCE, transactional_id=name) for batch in batches)
    )
    assert [(answer.error_code, answer.base_offset) for answer in answers] == [(OK, offset) for offset in range(20)]
    assert await producer.end(committed=True, version=END) is OK


async def test_many_connections_may_begin_a_transaction_concurrently(
    gateway: GatewayProcess, client: WireClient
) -> None:
    topic = fresh("wide")
    await create_topic(client, topic, 12)
    producer = await producer_of(client)

    async def one(index: int) -> int:
        async with await WireClient.connect(gateway.bootstrap) as other:
            return await write(replace(producer, client=other, sequences={}), (topic, index), b"x")

    assert await asyncio.gather(*map(one, range(12))) == [0] * 12
    assert await producer.end(committed=True, version=END) is OK
    for index in range(12):
        assert (await fetch(client, (topic, index), 0, committed=True)).last_stable_offset == 2


async def test_administrators_marker_needs_a_later_epoch_if_epochs_rise(
    client: WireClient, partition: tuple[str, int]
) -> None:
    """KIP-1228: a marker that has the epoch of the written batches comes from an administrator, not from the
    coordinator.
    """
    producer = await producer_of(client)
    await write(producer, partition, b"x")

    async def mark(epoch: int, transaction_version: int) -> ErrorCode:
        topic = WritableTxnMarkerTopic(name=partition[0], partition_indexes=(partition[1],))
        marker = WritableTxnMarker(
            producer_id=producer.producer_id,
            producer_epoch=epoch,
            transaction_result=False,
            topics=(topic,),
            coordinator_epoch=0,
            transaction_version=transaction_version,
        )
        answer = await client.send(WriteTxnMarkersRequest(markers=(marker,)), 2)
        return ErrorCode(answer.markers[0].topics[0].partitions[0].error_code)

    assert await mark(0, 2) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert await mark(1, 2) is OK
    assert (await producer.send(partition, b"x", version=PRODUCE)).error_code == ErrorCode.INVALID_PRODUCER_EPOCH
    assert await producer.initialize() is OK
    await write(producer, partition, b"x")
    assert await mark(producer.producer_epoch, 1) is OK


async def test_transaction_continues_after_a_kill_of_the_gateway(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory()
    partition = (fresh("kill"), 0)
    async with await WireClient.connect(gateway.bootstrap) as client:
        await create_topic(client, partition[0])
        ended, left = await producer_of(client), await producer_of(client)
        for producer in (ended, left):
            await write(producer, partition, b"first")
        before = replace(ended)
        assert await ended.end(committed=True, version=END) is OK
    gateway.kill()
    gateway.start()
    async with await WireClient.connect(gateway.bootstrap) as client:
        ended.client = left.client = before.client = client
        assert await before.end(committed=True, version=END) is OK
        assert before.producer_epoch == ended.producer_epoch == 1
        assert await write(left, partition, b"second") == 3
        assert await left.end(committed=True, version=END) is OK
        answer = await fetch(client, partition, 0, committed=True)
        assert delivered(answer) == [(0, b"first"), (1, b"first"), (3, b"second")]
