"""Answers to a producer whose transaction the server has ended, as frames. Apache Kafka 4.2 answered the same codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from protocol.errors import ErrorCode
from protocol.messages.describe_transactions import DescribeTransactionsRequest
from protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from tests.frames.members import create_topic, fresh
from tests.frames.transactions import Transactional, delivered, fetch
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.waiting import until
from tests.wire import WireClient

OK = ErrorCode.NONE
FENCED, OLD_EPOCH = ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH
TIMEOUT_MS = 500
VERSIONS = [pytest.param(1, id="named"), pytest.param(2, id="unnamed")]
"""Values of `transaction.version` that the client uses. With 1 it names partitions in AddPartitionsToTxn, with 2 it
does not.
"""


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[WireClient]:
    async with await WireClient.connect(gateway.bootstrap) as connected:
        yield connected


async def begin(
    client: WireClient, partition: tuple[str, int], version: int, timeout_ms: int = 60_000
) -> Transactional:
    producer = Transactional(client, fresh("late"))
    assert await producer.initialize(timeout_ms=timeout_ms) is OK
    await write(producer, partition, version, b"lost")
    return producer


async def write(producer: Transactional, partition: tuple[str, int], version: int, value: bytes) -> None:
    if version == 1:
        assert await producer.add(partition) == [OK]
    assert (await producer.send(partition, value, version=10 + version)).error_code == OK


async def wait_for_time_out(client: WireClient, producer: Transactional) -> None:
    asked = DescribeTransactionsRequest(transactional_ids=(producer.transactional_id,))

    async def state() -> str:
        return (await client.send(asked, 0)).transaction_states[0].transaction_state

    await until(state, "the transaction times out", holds=lambda found: found == "CompleteAbort")


async def hears(producer: Transactional, partition: tuple[str, int], version: int) -> None:
    """Return the error codes of a producer that does not know yet that its transaction is over."""
    late = replace(producer, sequences=dict(producer.sequences))
    produce_version = 10 + version
    assert (await late.send(partition, b"late", version=produce_version)).error_code == OLD_EPOCH
    late.sequences.clear()
    assert (await late.send(partition, b"lost", version=produce_version)).error_code == OLD_EPOCH, (
        "its first batch again"
    )
    assert [await late.add(partition, version=asked) for asked in (1, 3)] == [[OLD_EPOCH], [FENCED]]
    assert [await late.add_offsets("g", version=asked) for asked in (1, 3)] == [OLD_EPOCH, FENCED]
    for committed in (True, False):
        assert [await late.end(committed=committed, version=asked) for asked in (1, 3, 4)] == [
            OLD_EPOCH,
            FENCED,
            FENCED,
        ]
    assert await late.end(committed=True, version=5) is ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
async def test_a_producer_whose_transaction_timed_out_may_continue(
    gateway_factory: GatewayFactory, version: int, *, restarts: bool
) -> None:
    gateway = gateway_factory()
    partition = (fresh("late"), 0)
    async with await WireClient.connect(gateway.bootstrap) as client:
        await create_topic(client, partition[0])
        aborting = await begin(client, partition, version, TIMEOUT_MS)
        initializing = await begin(client, partition, version, TIMEOUT_MS)
        for producer in (aborting, initializing):
            await wait_for_time_out(client, producer)
    if restarts:
        gateway.kill()
        gateway.start()
    async with await WireClient.connect(gateway.bootstrap) as client:
        aborting.client = initializing.client = client
        for producer in (aborting, initializing):
            await hears(producer, partition, version)
        again = replace(aborting)
        for producer in (aborting, again):
            assert await producer.end(committed=False, version=5) is OK
            assert producer.producer_epoch == 1
        again = replace(initializing)
        for producer in (initializing, again):
            assert await producer.initialize(itself=True) is OK
            assert producer.producer_epoch == 1
        for producer in (aborting, initializing):
            await write(producer, partition, version, b"on")
            assert await producer.end(committed=True, version=5) is OK
        answer = await fetch(client, partition, 0, committed=True)
        assert [value for _, value in delivered(answer)] == [b"on", b"on"]
        assert answer.last_stable_offset == answer.high_watermark == 8


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_producer_whose_transaction_an_administrator_aborted_may_continue(
    client: WireClient, version: int
) -> None:
    partition = (fresh("aborted"), 0)
    await create_topic(client, partition[0])
    producer = await begin(client, partition, version)
    marker = WritableTxnMarker(
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        transaction_result=False,
        topics=(WritableTxnMarkerTopic(name=partition[0], partition_indexes=(0,)),),
        coordinator_epoch=0,
    )
    answer = await client.send(WriteTxnMarkersRequest(markers=(marker,)), 1)
    assert answer.markers[0].topics[0].partitions[0].error_code == OK
    await hears(producer, partition, version)
    assert await producer.end(committed=False, version=5) is OK
    await write(producer, partition, version, b"on")
    assert await producer.end(committed=True, version=5) is OK
    assert [value for _, value in delivered(await fetch(client, partition, 0, committed=True))] == [b"on"]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_producer_that_another_has_replaced_may_not_continue(client: WireClient, version: int) -> None:
    partition = (fresh("replaced"), 0)
    await create_topic(client, partition[0])
    producer = await begin(client, partition, version, TIMEOUT_MS)
    await wait_for_time_out(client, producer)
    assert await Transactional(client, producer.transactional_id).initialize() is OK
    assert await producer.initialize(itself=True) is FENCED
    assert await producer.end(committed=False, version=5) is FENCED


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize(
    ("version", "code"),
    [(3, ErrorCode.INVALID_TXN_STATE), (9, ErrorCode.INVALID_TXN_STATE), (11, ErrorCode.TRANSACTION_ABORTABLE)],
)
async def test_a_batch_that_is_repeated_after_its_transaction_is_refused(
    client: WireClient, version: int, code: ErrorCode, *, committed: bool
) -> None:
    """Within a transaction, and in the next one, a repeated batch is answered with the offset of its first copy."""
    partition = (fresh("repeated"), 0)
    await create_topic(client, partition[0])
    producer = Transactional(client, fresh("repeating"))
    assert await producer.initialize() is OK

    async def send_first() -> tuple[int, int]:
        producer.sequences.clear()
        answer = await producer.send(partition, b"x", version=version)
        return answer.error_code, answer.base_offset

    assert await producer.add(partition) == [OK]
    assert [await send_first() for _ in range(2)] == [(OK, 0), (OK, 0)]
    assert await producer.end(committed=committed) is OK
    assert await send_first() == (code, -1)
    assert await producer.add(partition) == [OK]
    assert await send_first() == (OK, 0)
    assert (await fetch(client, partition, 0, committed=False)).high_watermark == 2
