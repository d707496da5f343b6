"""Produce and consume with stock clients: every codec, headers, keys, nulls, large records, positions and times."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false
# The type stubs of these client libraries are incomplete, or belong to an older release.

from __future__ import annotations

import asyncio
import os
import time
import uuid

import aiokafka
import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient

from tests.clients.topics import create_topic
from tests.gateway_process import GatewayProcess

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
HEADERS = [("h", b"1"), ("h", b"2"), ("empty", b""), ("null", None)]
RECORDS: list[tuple[bytes | None, bytes | None]] = [
    (b"key", b"value"),
    (None, b"no key"),
    (b"tombstone", None),
    (b"", b""),
    (b"large", os.urandom(900_000)),
]


@pytest.fixture
def topic(gateway: GatewayProcess) -> str:
    return create_topic(gateway.bootstrap, 1)


def produce_with_confluent(bootstrap: str, topic: str, codec: str, *, idempotent: bool = False) -> list[int]:
    offsets: list[int] = []
    failures: list[object] = []

    def on_delivery(error: object, message: confluent_kafka.Message) -> None:
        if error is None:
            offsets.append(message.offset() or 0)
        else:
            failures.append(error)

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": bootstrap,
            "compression.type": codec,
            "enable.idempotence": idempotent,
            "linger.ms": 20,
        }
    )
    for key, value in RECORDS:
        producer.produce(topic, value, key, headers=HEADERS, on_delivery=on_delivery)
    assert producer.flush(30) == 0
    assert not failures, failures
    return offsets


def read_with_confluent(bootstrap: str, topic: str, count: int) -> list[confluent_kafka.Message]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest"}
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        messages: list[confluent_kafka.Message] = []
        deadline = time.monotonic() + 30
        while len(messages) < count and time.monotonic() < deadline:
            for message in consumer.consume(count - len(messages), 1):
                assert message.error() is None, message.error()
                messages.append(message)
        return messages
    finally:
        consumer.close()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("idempotent", [False, True])
def test_confluent_kafka_reads_what_it_produced(
    gateway: GatewayProcess, topic: str, codec: str, idempotent: bool
) -> None:
    offsets = produce_with_confluent(gateway.bootstrap, topic, codec, idempotent=idempotent)
    assert offsets == list(range(len(RECORDS)))
    messages = read_with_confluent(gateway.bootstrap, topic, len(RECORDS))
    assert [(message.key(), message.value()) for message in messages] == RECORDS
    assert all(message.headers() == HEADERS for message in messages)
    assert [message.offset() for message in messages] == offsets


@pytest.mark.parametrize("codec", CODECS)
def test_kafka_python_reads_what_it_produced(gateway: GatewayProcess, topic: str, codec: str) -> None:
    producer = kafka.KafkaProducer(
        bootstrap_servers=gateway.bootstrap,
        compression_type=None if codec == "none" else codec,
        acks="all",
        linger_ms=20,
    )
    headers = [("h", b"1"), ("h", b"2")]
    pending = [producer.send(topic, value=value, key=key, headers=headers) for key, value in RECORDS]
    assert [future.get(30).offset for future in pending] == list(range(len(RECORDS)))
    producer.close()
    consumer = kafka.KafkaConsumer(
        topic, bootstrap_servers=gateway.bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=15000
    )
    records = [record for _, record in zip(RECORDS, consumer, strict=False)]
    consumer.close()
    assert [(record.key, record.value) for record in records] == RECORDS
    assert all(list(record.headers) == headers for record in records)


@pytest.mark.parametrize("codec", CODECS)
async def test_aiokafka_reads_what_it_produced(gateway: GatewayProcess, topic: str, codec: str) -> None:
    headers = [("h", b"1"), ("h", b"2")]
    async with aiokafka.AIOKafkaProducer(
        bootstrap_servers=gateway.bootstrap,
        compression_type=None if codec == "none" else codec,
        enable_idempotence=True,
        linger_ms=20,
    ) as producer:
        pending = [await producer.send(topic, value=value, key=key, headers=headers) for key, value in RECORDS]
        metadata = [await asyncio.wait_for(future, 30) for future in pending]
    assert [record.offset for record in metadata] == list(range(len(RECORDS)))
    async with aiokafka.AIOKafkaConsumer(
        topic, bootstrap_servers=gateway.bootstrap, auto_offset_reset="earliest"
    ) as consumer:
        records = [await asyncio.wait_for(consumer.getone(), 30) for _ in RECORDS]
    assert [(record.key, record.value) for record in records] == RECORDS
    assert all(list(record.headers) == headers for record in records)


def test_a_record_of_one_megabyte_passes_and_a_larger_one_is_refused(gateway: GatewayProcess, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": gateway.bootstrap, "message.max.bytes": 4_000_000})
    outcomes: list[object] = []
    for size in (1_048_000, 2_000_000):
        producer.produce(topic, os.urandom(size), on_delivery=lambda error, _message: outcomes.append(error))
        assert producer.flush(30) == 0
    assert outcomes[0] is None
    refusal = outcomes[1]
    assert isinstance(refusal, confluent_kafka.KafkaError)
    assert refusal.code() == confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE
    (message,) = read_with_confluent(gateway.bootstrap, topic, 1)
    assert len(message.value() or b"") == 1_048_000


def test_a_consumer_seeks_by_offset_and_by_time(gateway: GatewayProcess, topic: str) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=gateway.bootstrap, acks="all")
    base_ms = int(time.time() * 1000) - 100_000
    for index in range(10):
        producer.send(topic, value=str(index).encode(), timestamp_ms=base_ms + index * 1000).get(30)
    producer.close()
    partition = kafka.TopicPartition(topic, 0)
    consumer = kafka.KafkaConsumer(bootstrap_servers=gateway.bootstrap, group_id=None, consumer_timeout_ms=15000)
    consumer.assign([partition])
    assert consumer.beginning_offsets([partition]) == {partition: 0}
    assert consumer.end_offsets([partition]) == {partition: 10}
    for wanted_ms, offset in ((base_ms, 0), (base_ms + 4000, 4), (base_ms + 4001, 5)):
        found = consumer.offsets_for_times({partition: wanted_ms})[partition]
        assert found is not None
        assert (found.offset, found.timestamp) == (offset, base_ms + offset * 1000)
    assert consumer.offsets_for_times({partition: base_ms + 9001})[partition] is None
    consumer.seek(partition, 7)
    assert consumer.position(partition) == 7
    assert next(consumer).value == b"7"
    assert consumer.position(partition) == 8
    consumer.seek_to_beginning(partition)
    assert next(consumer).offset == 0
    consumer.close()


def test_offsets_for_times_finds_a_record_inside_a_compressed_batch(gateway: GatewayProcess, topic: str) -> None:
    base_ms = int(time.time() * 1000) - 100_000
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": gateway.bootstrap, "compression.type": "zstd", "linger.ms": 500}
    )
    for index in range(10):
        producer.produce(topic, str(index).encode(), timestamp=base_ms + index * 1000)
    assert producer.flush(30) == 0
    consumer = confluent_kafka.Consumer({"bootstrap.servers": gateway.bootstrap, "group.id": uuid.uuid4().hex})
    try:
        (found,) = consumer.offsets_for_times([confluent_kafka.TopicPartition(topic, 0, base_ms + 6500)], timeout=10)
        assert found.offset == 7
        (none,) = consumer.offsets_for_times([confluent_kafka.TopicPartition(topic, 0, base_ms + 60_000)], timeout=10)
        assert none.offset == confluent_kafka.OFFSET_END
    finally:
        consumer.close()


def test_an_offset_out_of_range_triggers_the_reset_policy(gateway: GatewayProcess, topic: str) -> None:
    produce_with_confluent(gateway.bootstrap, topic, "none")
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=gateway.bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=15000
    )
    partition = kafka.TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, 1_000_000)
    assert next(consumer).offset == 0
    consumer.close()


def test_delete_records_moves_the_beginning(gateway: GatewayProcess, topic: str) -> None:
    produce_with_confluent(gateway.bootstrap, topic, "none")
    admin = AdminClient({"bootstrap.servers": gateway.bootstrap})
    (future,) = admin.delete_records([confluent_kafka.TopicPartition(topic, 0, 3)]).values()
    assert future.result(30).low_watermark == 3
    consumer = confluent_kafka.Consumer({"bootstrap.servers": gateway.bootstrap, "group.id": uuid.uuid4().hex})
    try:
        assert consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, 0), 10) == (3, 5)
    finally:
        consumer.close()
