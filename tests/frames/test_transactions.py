"""Transactions as frames against a running gateway: which producer may do what, and what readers see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.apis.transactions.lifecycle import MAX_TRANSACTIONS
from protocol.errors import ErrorCode
from protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.records import Record, build_batch
from tests.frames.members import create_topic, fresh
from tests.frames.transactions import OK, Transactional, batches_of, delivered, fetch, produce, producer_of
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.wire import WireClient

LATEST = -1


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[WireClient]:
    async with await WireClient.connect(gateway.bootstrap) as connected:
        yield connected


def plain(value: bytes) -> bytes:
    return build_batch([Record(0, 1_000, None, value)])


@pytest.mark.parametrize("version", range(5))
async def test_a_transaction_over_two_topics(client: WireClient, version: int) -> None:
    first, second = (fresh("one"), 0), (fresh("two"), 1)
    await create_topic(client, first[0])
    await create_topic(client, second[0], 2)
    producer = Transactional(client, fresh("producer"))
    assert await producer.initialize(version=version) is OK
    assert producer.producer_epoch == 0
    for round_, committed in enumerate((True, False, True)):
        assert await producer.add(first, second, version=min(version, 3)) == [OK, OK]
        assert (await producer.send(first, b"%d" % round_)).base_offset == 2 * round_
        assert (await producer.send(second, b"%d" % round_)).base_offset == 2 * round_
        assert await producer.end(committed=committed, version=version) is OK
        assert await producer.end(committed=committed, version=version) is OK, "asked again"
        assert await producer.end(committed=not committed, version=version) is ErrorCode.INVALID_TXN_STATE
    for partition in (first, second):
        everything = await fetch(client, partition, 0, committed=False)
        assert delivered(everything) == [(0, b"0"), (2, b"1"), (4, b"2")]
        assert everything.aborted_transactions is None
        committed_only = await fetch(client, partition, 0, committed=True)
        assert delivered(committed_only) == [(0, b"0"), (4, b"2")]
        assert (committed_only.last_stable_offset, committed_only.high_watermark) == (6, 6)


async def test_read_committed_readers_wait_for_the_end_of_open_transactions(
    gateway: GatewayProcess, client: WireClient
) -> None:
    partition = (fresh("open"), 0)
    await create_topic(client, partition[0])
    producer = await producer_of(client)
    assert (await produce(client, partition, plain(b"before"))).base_offset == 0
    assert await producer.add(partition) == [OK]
    assert (await producer.send(partition, b"open")).base_offset == 1
    assert (await produce(client, partition, plain(b"behind"))).base_offset == 2
    held = await fetch(client, partition, 0, committed=True)
    assert delivered(held) == [(0, b"before")]
    assert (held.last_stable_offset, held.high_watermark) == (1, 3)
    for isolation_level, end_offset in ((0, 3), (1, 1)):
        asked = ListOffsetsTopic(
            name=partition[0], partitions=(ListOffsetsPartition(partition_index=0, timestamp=LATEST),)
        )
        answer = await client.send(ListOffsetsRequest(isolation_level=isolation_level, topics=(asked,)), 5)
        assert answer.topics[0].partitions[0].offset == end_offset
    waiting = asyncio.ensure_future(fetch(client, partition, 1, committed=True, max_wait_ms=30_000))
    # Another connection, because a parked Fetch delays the answers on its own.
    async with await WireClient.connect(gateway.bootstrap) as other:
        producer.client = other
        assert (await producer.send(partition, b"more")).base_offset == 3
        assert await producer.end(committed=True) is OK
    answered = await waiting
    assert delivered(answered, 1) == [(1, b"open"), (2, b"behind"), (3, b"more")]


async def test_second_producer_fences_the_first_and_aborts_its_transaction(client: WireClient) -> None:
    partition = (fresh("fenced"), 0)
    await create_topic(client, partition[0])
    first = await producer_of(client)
    assert await first.add(partition) == [OK]
    assert (await first.send(partition, b"left")).base_offset == 0
    second = await producer_of(client, first.transactional_id)
    assert (second.producer_id, second.producer_epoch) == (first.producer_id, 1)
    answer = await fetch(client, partition, 0, committed=True)
    assert (delivered(answer), answer.last_stable_offset) == ([], 2), "before the second has done anything"
    assert (await first.send(partition, b"late")).error_code == ErrorCode.INVALID_PRODUCER_EPOCH
    for version, code in ((1, ErrorCode.INVALID_PRODUCER_EPOCH), (2, ErrorCode.PRODUCER_FENCED)):
        assert await first.add(partition, version=version) == [code]
        assert await first.add_offsets("g", version=version) is code
        assert await first.end(committed=True, version=version) is code
    assert await first.initialize(version=3, itself=True) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert await first.initialize(version=4, itself=True) is ErrorCode.PRODUCER_FENCED
    assert await second.add(partition) == [OK]
    assert (await second.send(partition, b"new")).base_offset == 2
    assert await second.end(committed=True) is OK
    assert delivered(await fetch(client, partition, 0, committed=True)) == [(2, b"new")]


async def test_partition_that_is_not_enlisted_is_refused(client: WireClient) -> None:
    named, other = (fresh("named"), 0), (fresh("other"), 0)
    await create_topic(client, named[0])
    await create_topic(client, other[0])
    producer = await producer_of(client)
    assert await producer.end(committed=True) is ErrorCode.INVALID_TXN_STATE, "nothing has begun"
    assert (await producer.send(named, b"x")).error_code == ErrorCode.INVALID_TXN_STATE
    assert await producer.add(named) == [OK]
    assert (await producer.send(other, b"x", version=9)).error_code == ErrorCode.INVALID_TXN_STATE
    assert (await producer.send(other, b"x", version=11)).error_code == ErrorCode.TRANSACTION_ABORTABLE
    assert (await producer.send(named, b"x")).base_offset == 0
    outside = build_batch(
        [Record(0, 1_000, None, b"x")],
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=1,
    )
    assert (await produce(client, named, outside)).error_code == ErrorCode.INVALID_TXN_STATE
    assert await producer.end(committed=True) is OK
    assert (await producer.send(named, b"late")).error_code == ErrorCode.INVALID_TXN_STATE


async def test_all_partitions_are_added_or_none(client: WireClient) -> None:
    there, missing = (fresh("there"), 0), (fresh("missing"), 0)
    await create_topic(client, there[0])
    producer = await producer_of(client)
    assert await producer.add(there, missing, (there[0], 7)) == [
        ErrorCode.OPERATION_NOT_ATTEMPTED,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert (await producer.send(there, b"x")).error_code == ErrorCode.INVALID_TXN_STATE
    assert await producer.end(committed=False) is ErrorCode.INVALID_TXN_STATE


async def test_internal_topics_are_not_enlisted(client: WireClient) -> None:
    """The writer of `__consumer_offsets` would take an ABORT marker for a record of a group without a name."""
    partition = (fresh("there"), 0)
    await create_topic(client, partition[0])
    await client.send(FindCoordinatorRequest(key="g"), 1)
    producer = await producer_of(client)
    assert await producer.add(partition, ("__consumer_offsets", 0)) == [
        ErrorCode.OPERATION_NOT_ATTEMPTED,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ]
    assert await producer.end(committed=False) is ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize("version", range(4))
async def test_strangers_are_refused(client: WireClient, version: int) -> None:
    topic = fresh("strangers")
    await create_topic(client, topic)
    known = await producer_of(client)
    for stranger in (
        Transactional(client, fresh("nobody"), known.producer_id, 0),
        Transactional(client, known.transactional_id, known.producer_id + 1, 0),
    ):
        assert await stranger.add((topic, 0), version=version) == [ErrorCode.INVALID_PRODUCER_ID_MAPPING]
        assert await stranger.add_offsets("g", version=version) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
        assert await stranger.end(committed=True, version=version) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    nameless = Transactional(client, "", known.producer_id, 0)
    assert await nameless.add((topic, 0), version=version) == [ErrorCode.INVALID_REQUEST]
    assert await nameless.add_offsets("g", version=version) is ErrorCode.INVALID_REQUEST
    assert await nameless.end(committed=True, version=version) is ErrorCode.INVALID_REQUEST


async def test_repeated_init_producer_id_is_given_the_same_epoch(client: WireClient) -> None:
    """KIP-360: a producer that names its id and epoch, and repeats this request, receives the same epoch each time."""
    producer = await producer_of(client)
    again = Transactional(client, producer.transactional_id, producer.producer_id, producer.producer_epoch)
    assert await producer.initialize(itself=True) is OK
    assert await again.initialize(itself=True) is OK
    assert (producer.producer_epoch, again.producer_epoch) == (1, 1)


async def test_open_and_ended_transactions_survive_a_kill(gateway_factory: GatewayFactory) -> None:
    """After a kill, open transactions are still open, and ended ones have ended. A repeated EndTxn
    gets the same code.
    """
    gateway = gateway_factory()
    partition = (fresh("kill"), 0)
    async with await WireClient.connect(gateway.bootstrap) as client:
        await create_topic(client, partition[0])
        ended, left = await producer_of(client), await producer_of(client)
        for producer in (ended, left):
            assert await producer.add(partition) == [OK]
            assert (await producer.send(partition, b"first")).error_code == OK
        assert await ended.end(committed=True) is OK
    gateway.kill()
    gateway.start()
    async with await WireClient.connect(gateway.bootstrap) as client:
        ended.client = left.client = client
        assert await ended.end(committed=True) is OK
        assert delivered(await fetch(client, partition, 0, committed=True)) == [(0, b"first")]
        assert (await left.send(partition, b"second")).error_code == OK
        assert await left.end(committed=False) is OK
        answer = await fetch(client, partition, 0, committed=True)
        assert delivered(answer) == [(0, b"first")]
        assert answer.last_stable_offset == answer.high_watermark == 5


@pytest.mark.parametrize("version", range(1, 7))
async def test_every_transactional_id_has_a_coordinator(client: WireClient, version: int) -> None:
    asked = FindCoordinatorRequest(key="t", key_type=1, coordinator_keys=("t",))
    answer = await client.send(asked, version)
    found = answer if version < 4 else answer.coordinators[0]
    assert (found.error_code, found.node_id) == (OK, 1)


@pytest.mark.parametrize("version", [4, 5])
async def test_each_transaction_of_a_batched_request_succeeds_or_fails_alone(client: WireClient, version: int) -> None:
    topic = fresh("batched")
    await create_topic(client, topic, 3)
    mine, unknown, nameless = (
        await producer_of(client),
        Transactional(client, fresh("nobody")),
        Transactional(client, ""),
    )

    def named(
        producer: Transactional, *partitions: tuple[str, int], verify: bool = False, newer: int = 0, other: int = 0
    ) -> AddPartitionsToTxnTransaction:
        return AddPartitionsToTxnTransaction(
            transactional_id=producer.transactional_id,
            producer_id=producer.producer_id + other,
            producer_epoch=producer.producer_epoch + newer,
            verify_only=verify,
            topics=tuple(AddPartitionsToTxnTopic(name=name, partitions=(index,)) for name, index in partitions),
        )

    async def ask(*transactions: AddPartitionsToTxnTransaction) -> list[list[ErrorCode]]:
        """Return the error code of each partition of each transaction, in the order of the request."""
        answer = await client.send(AddPartitionsToTxnRequest(transactions=transactions), version)
        assert answer.error_code == OK
        named = [(each.transactional_id, [topic.name for topic in each.topics]) for each in transactions]
        told = answer.results_by_transaction
        assert [(each.transactional_id, [topic.name for topic in each.topic_results]) for each in told] == named
        return [
            [
                ErrorCode(part.partition_error_code)
                for topic in each.topic_results
                for part in topic.results_by_partition
            ]
            for each in told
        ]

    first, second, missing = (topic, 0), (topic, 1), ("missing", 0)
    assert await ask(
        named(mine, first, verify=True),
        named(mine, first),
        named(unknown, first),
        named(mine, second, missing),
        named(mine, second, newer=1),
        named(mine, first, second, verify=True),
        named(mine, first, verify=True, other=1),
        named(mine, first, verify=True, newer=-1),
        named(nameless, first),
    ) == [
        [ErrorCode.TRANSACTION_ABORTABLE],
        [OK],
        [ErrorCode.INVALID_PRODUCER_ID_MAPPING],
        [ErrorCode.OPERATION_NOT_ATTEMPTED, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION],
        [ErrorCode.PRODUCER_FENCED],
        [OK, ErrorCode.TRANSACTION_ABORTABLE],
        [ErrorCode.INVALID_PRODUCER_ID_MAPPING],
        [ErrorCode.PRODUCER_FENCED],
        [ErrorCode.INVALID_REQUEST],
    ]
    await mine.send(first, b"taken in")
    assert await mine.end(committed=True) is OK
    assert delivered(await fetch(client, first, 0, committed=True)) == [(0, b"taken in")]
    assert await ask(named(mine, first, verify=True)) == [[ErrorCode.TRANSACTION_ABORTABLE]], "it is over"
    many = (named(mine, first, verify=True),) * (MAX_TRANSACTIONS + 1)
    refused = await client.send(AddPartitionsToTxnRequest(transactions=many), version)
    assert (refused.error_code, refused.results_by_transaction) == (ErrorCode.POLICY_VIOLATION, ())


async def test_marker_is_a_control_batch_of_one_offset(client: WireClient) -> None:
    partition = (fresh("marker"), 0)
    await create_topic(client, partition[0])
    producer = await producer_of(client)
    asked = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=producer.transactional_id,
        v3_and_below_producer_id=producer.producer_id,
        v3_and_below_producer_epoch=producer.producer_epoch,
        v3_and_below_topics=(AddPartitionsToTxnTopic(name=partition[0], partitions=(0, 0)),),
    )
    answer = await client.send(asked, 3)
    assert len(answer.results_by_topic_v3_and_below[0].results_by_partition) == 2
    assert await producer.end(committed=True) is OK
    data = await fetch(client, partition, 0, committed=False)
    (marker,) = batches_of(data)
    assert data.high_watermark == 1
    assert delivered(data) == []
    assert len(marker) == 78
