"""Thirteen defects of a peer on Postgres, each as frames against a running gateway.

Tests that need a clock or a background pass first wait for the visible effect on a topic that must change. Only then
they check the topic that must not.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from protocol.errors import ErrorCode
from protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from protocol.messages.end_txn import EndTxnRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from protocol.messages.sasl_handshake import SaslHandshakeRequest
from protocol.records import Record, iter_records, split_batches
from tests.frames.members import create_topic, fresh, join_all, member, settle
from tests.frames.records import batch, create, fetch, produce
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.waiting import until
from tests.wire import WireClient

DAY_MS = 24 * 60 * 60 * 1000
LATEST, EARLIEST = -1, -2
TOPIC, APPEND, SUBTRACT = 2, 2, 3


async def list_offset(client: WireClient, topic: str, timestamp: int) -> int:
    asked = ListOffsetsTopic(name=topic, partitions=(ListOffsetsPartition(partition_index=0, timestamp=timestamp),))
    response = await client.send(ListOffsetsRequest(replica_id=-1, topics=(asked,)), 7)
    partition = response.topics[0].partitions[0]
    assert partition.error_code == ErrorCode.NONE
    return partition.offset


async def emptied(client: WireClient, topic: str) -> None:
    """Wait until the topic's log is empty: its start offset equals its end offset."""

    async def ends() -> tuple[int, int]:
        return await list_offset(client, topic, EARLIEST), await list_offset(client, topic, LATEST)

    await until(ends, "the log is empty", holds=lambda found: found[0] == found[1])


async def test_retention_keeps_for_ever_for_months_and_by_default(gateway_factory: GatewayFactory) -> None:
    """−1 keeps records for ever, thirty days do not overflow, and the default of seven days applies without any
    setting."""
    gateway = gateway_factory({"log.retention.check.interval.ms": "100"})
    async with await WireClient.connect(gateway.bootstrap) as client:
        for_ever = await create(client, "for-ever", retention_ms="-1")
        thirty_days = await create(client, "thirty-days", retention_ms=str(30 * DAY_MS))
        default = await create(client, "default")
        eight_days_ago = int(time.time() * 1000) - 8 * DAY_MS
        for topic in (for_ever, thirty_days, default):
            assert (await produce(client, topic, batch(Record(0, eight_days_ago, b"k", b"v")))).error_code == 0
        await emptied(client, default)
        # The pass that emptied the default topic may not have seen all three topics. The next pass has.
        again = await create(client, "again")
        assert (await produce(client, again, batch(Record(0, eight_days_ago, b"k", b"v")))).error_code == 0
        await emptied(client, again)
        assert await list_offset(client, for_ever, EARLIEST) == 0
        assert await list_offset(client, thirty_days, EARLIEST) == 0


async def test_batch_of_a_transaction_that_has_not_begun_is_refused(gateway: GatewayProcess) -> None:
    """If it were accepted, its records would block read_committed consumers for ever. The gateway also refuses markers
    that a client sends.
    """
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic = fresh("transactional")
        await create_topic(client, topic)
        stray = batch(producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True)
        assert (await produce(client, topic, stray)).error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        assert (await produce(client, topic, stray, of="t")).error_code == ErrorCode.INVALID_TXN_STATE
        marker = batch(producer_id=7, producer_epoch=0, base_sequence=-1, is_transactional=True, is_control=True)
        assert (await produce(client, topic, marker)).error_code == ErrorCode.INVALID_RECORD
        assert (await produce(client, topic, batch())).base_offset == 0
        committed = await fetch(client, topic, 0, isolation_level=1)
        assert (committed.last_stable_offset, committed.high_watermark) == (1, 1)
        assert committed.aborted_transactions == ()


async def test_two_headers_of_one_key(gateway: GatewayProcess) -> None:
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic = fresh("headers")
        await create_topic(client, topic)
        headers = (("same", b"1"), ("same", b"2"), ("same", None))
        assert (await produce(client, topic, batch(Record(0, 1, b"k", b"v", headers)))).error_code == ErrorCode.NONE
        records = (await fetch(client, topic, 0)).records
        assert isinstance(records, bytes | memoryview)
        (record,) = iter_records(split_batches(records)[0])
        assert record.headers == headers


async def test_two_copies_of_one_batch_in_flight_are_one_batch(gateway: GatewayProcess) -> None:
    """Both copies are answered with the same offset. Sequences continue after 2^31 − 1."""
    async with (
        await WireClient.connect(gateway.bootstrap) as one,
        await WireClient.connect(gateway.bootstrap) as other,
    ):
        topic = fresh("copies")
        await create_topic(one, topic)
        producer = await one.send(InitProducerIdRequest(transactional_id=None), 4)
        for number, sequence in enumerate((2**31 - 2, 2**31 - 1, 0, 1)):
            copy = batch(
                producer_id=producer.producer_id, producer_epoch=producer.producer_epoch, base_sequence=sequence
            )
            answers = await asyncio.gather(*(produce(client, topic, copy) for client in (one, other) * 4))
            assert {(answer.error_code, answer.base_offset) for answer in answers} == {(ErrorCode.NONE, number)}
        assert await list_offset(one, topic, LATEST) == 4


async def test_transaction_of_a_dead_producer_is_aborted(gateway: GatewayProcess) -> None:
    """A transaction without an end is aborted after its timeout, and its producer is fenced."""
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic, name = fresh("dead"), fresh("dead-producer")
        await create_topic(client, topic)
        producer = await client.send(InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=100), 4)
        identity = {"producer_id": producer.producer_id, "producer_epoch": producer.producer_epoch}
        added = await client.send(
            AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=name,
                v3_and_below_producer_id=producer.producer_id,
                v3_and_below_producer_epoch=producer.producer_epoch,
                v3_and_below_topics=(AddPartitionsToTxnTopic(name=topic, partitions=(0,)),),
            ),
            3,
        )
        assert added.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code == ErrorCode.NONE
        left = batch(**identity, base_sequence=0, is_transactional=True)
        assert (await produce(client, topic, left, of=name)).base_offset == 0
        assert (await produce(client, topic, batch())).base_offset == 1
        answer = await fetch(client, topic, 0, isolation_level=1, max_wait_ms=30_000)
        assert (answer.last_stable_offset, answer.high_watermark) == (3, 3)
        assert answer.aborted_transactions is not None
        (aborted,) = answer.aborted_transactions
        assert (aborted.producer_id, aborted.first_offset) == (producer.producer_id, 0)
        ended = await client.send(EndTxnRequest(transactional_id=name, **identity, committed=True), 3)
        assert ended.error_code == ErrorCode.PRODUCER_FENCED
        more = batch(**identity, base_sequence=1, is_transactional=True)
        assert (await produce(client, topic, more, of=name)).error_code == ErrorCode.INVALID_PRODUCER_EPOCH


async def test_fetch_out_of_range_is_refused_with_that_code(gateway: GatewayProcess) -> None:
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic = fresh("range")
        await create_topic(client, topic)
        await produce(client, topic, batch())
        for offset in (2, 1_000_000, -1):
            answer = await fetch(client, topic, offset, max_wait_ms=10_000)
            assert answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
            assert (answer.log_start_offset, answer.high_watermark) == (0, 1)


async def test_sasl_on_a_plain_listener_is_refused(gateway: GatewayProcess) -> None:
    """A client that tries to authenticate on a listener without authentication learns that it cannot."""
    async with await WireClient.connect(gateway.bootstrap) as client:
        for version in (0, 1):
            shaken = await client.send(SaslHandshakeRequest(mechanism="PLAIN"), version)
            assert (shaken.error_code, shaken.mechanisms) == (ErrorCode.ILLEGAL_SASL_STATE, ())
        answer = await client.send(SaslAuthenticateRequest(auth_bytes=b"\0user\0any"), 2)
        assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE


async def test_offset_of_a_zombie_is_refused_and_not_written(gateway: GatewayProcess) -> None:
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic, group_id = fresh("zombie"), fresh("zombies")
        await create_topic(client, topic)
        async with member(gateway.bootstrap, group_id) as one, member(gateway.bootstrap, group_id) as two:
            await join_all(one)
            await settle(one)
            old_generation = one.generation_id
            assert await one.commit(topic, 1) == ErrorCode.NONE
            await join_all(one, two)
            await settle(one, two)
            one.generation_id = old_generation
            assert await one.commit(topic, 99) == ErrorCode.ILLEGAL_GENERATION
        asked = OffsetFetchRequest(groups=(OffsetFetchRequestGroup(group_id=group_id, topics=None),))
        answer = await client.send(asked, 8)
        assert answer.groups[0].topics[0].partitions[0].committed_offset == 1


async def test_requests_that_crashed_the_peer_are_answered(gateway: GatewayProcess) -> None:
    """InitProducerId with an existing id, longer and shorter lists of settings, and a truncated AddPartitionsToTxn."""
    async with await WireClient.connect(gateway.bootstrap) as client:
        first = await client.send(InitProducerIdRequest(transactional_id=None), 4)
        again = await client.send(
            InitProducerIdRequest(
                transactional_id=None, producer_id=first.producer_id, producer_epoch=first.producer_epoch
            ),
            4,
        )
        assert again.error_code == ErrorCode.NONE
        assert (again.producer_id, again.producer_epoch) != (first.producer_id, first.producer_epoch)
        topic = fresh("lists")
        await create(client, topic)
        for operation, policies in ((APPEND, {"compact", "delete"}), (SUBTRACT, {"delete"})):
            change = AlterableConfig(name="cleanup.policy", config_operation=operation, value="compact")
            resource = AlterConfigsResource(resource_type=TOPIC, resource_name=topic, configs=(change,))
            altered = await client.send(IncrementalAlterConfigsRequest(resources=(resource,)), 1)
            assert altered.responses[0].error_code == ErrorCode.NONE
            asked = DescribeConfigsResource(
                resource_type=TOPIC, resource_name=topic, configuration_keys=("cleanup.policy",)
            )
            described = await client.send(DescribeConfigsRequest(resources=(asked,)), 4)
            assert set(described.results[0].configs[0].value.split(",")) == policies
        client.send_bytes(b"\x00\x00\x00\x0a" + (24).to_bytes(2, "big") + b"\x00\x04\x00\x00\x00\x01\xff\xff")
        await client.closed_by_peer()


@pytest.mark.parametrize("version", [4, 11, 12])
async def test_a_fetch_never_hangs(gateway: GatewayProcess, version: int) -> None:
    """The fetch returns empty at its deadline, and returns the record as soon as one is there."""
    async with (
        await WireClient.connect(gateway.bootstrap) as consumer,
        await WireClient.connect(gateway.bootstrap) as producer,
    ):
        topic = fresh("poll")
        await create_topic(producer, topic)
        asked = FetchTopic(
            topic=topic, partitions=(FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20),)
        )
        empty = await consumer.send(FetchRequest(max_wait_ms=100, min_bytes=1, topics=(asked,)), version, seconds=10)
        assert not empty.responses[0].partitions[0].records
        parked = consumer.send_nowait(FetchRequest(max_wait_ms=600_000, min_bytes=1, topics=(asked,)), version)
        assert (await produce(producer, topic, batch())).base_offset == 0
        woken = await asyncio.wait_for(parked, 10)
        assert woken.responses[0].partitions[0].records
