"""Requests that a frozen node reads after their clients have closed the connection."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol.messages.delete_topics import DeleteTopicsRequest
from protocol.messages.end_txn import EndTxnRequest
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.messages.write_txn_markers import WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest
from tests.frames.members import create_topic, fresh
from tests.frames.transactions import OK, Transactional, fetch
from tests.gateway_process import GatewayProcess
from tests.wire import WireClient


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[WireClient]:
    async with await WireClient.connect(gateway.bootstrap) as connected:
        yield connected


async def send_and_go(gateway: GatewayProcess, request: Any, version: int) -> None:
    """Let a frozen gateway find the request of a client that has gone."""
    late = await WireClient.connect(gateway.bootstrap)
    gateway.send_signal(signal.SIGSTOP)
    try:
        late.send_only(request, version)
        await late.close()
    finally:
        gateway.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("version", [0, 4])
async def test_an_end_whose_client_has_gone_ends_no_transaction(
    gateway: GatewayProcess, client: WireClient, version: int
) -> None:
    partition = (fresh("t"), 0)
    await create_topic(client, partition[0])
    producer = Transactional(client, fresh("producer"))
    assert await producer.initialize() is OK
    assert await producer.add(partition) == [OK]
    end = EndTxnRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        committed=True,
    )
    await send_and_go(gateway, end, version)
    # This transaction could be the client's next one: it has the same epoch.
    for number in range(10):
        assert (await producer.send(partition, b"%d" % number)).error_code == OK
    assert await producer.end(committed=True) is OK


async def test_an_initialization_whose_client_has_gone_fences_no_producer(
    gateway: GatewayProcess, client: WireClient
) -> None:
    partition = (fresh("t"), 0)
    await create_topic(client, partition[0])
    producer = Transactional(client, fresh("producer"))
    assert await producer.initialize() is OK
    late = InitProducerIdRequest(transactional_id=producer.transactional_id, transaction_timeout_ms=60_000)
    await send_and_go(gateway, late, 4)
    for number in range(10):
        assert await producer.add(partition) == [OK]
        assert (await producer.send(partition, b"%d" % number)).error_code == OK
        assert await producer.end(committed=True) is OK


async def test_a_marker_whose_client_has_gone_aborts_no_transaction(
    gateway: GatewayProcess, client: WireClient
) -> None:
    partition = (fresh("t"), 0)
    await create_topic(client, partition[0])
    producer = Transactional(client, fresh("producer"))
    assert await producer.initialize() is OK
    assert await producer.add(partition) == [OK]
    marker = WritableTxnMarker(
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        transaction_result=False,
        topics=(WritableTxnMarkerTopic(name=partition[0], partition_indexes=(0,)),),
        coordinator_epoch=0,
    )
    await send_and_go(gateway, WriteTxnMarkersRequest(markers=(marker,)), 1)
    # This transaction could be the producer's next one: it has the same epoch.
    for number in range(10):
        assert (await producer.send(partition, b"%d" % number)).error_code == OK
    assert await producer.end(committed=True) is OK


async def test_a_deletion_whose_client_has_gone_deletes_no_topic(gateway: GatewayProcess, client: WireClient) -> None:
    # The client may have deleted the topic through another node, and may have created it again.
    topic = fresh("t")
    await create_topic(client, topic)
    await send_and_go(gateway, DeleteTopicsRequest(topic_names=(topic,), timeout_ms=10_000), 4)
    for _ in range(10):
        assert (await fetch(client, (topic, 0), 0, committed=False)).error_code == OK
