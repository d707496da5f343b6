"""Apache Kafka is mirrored into a gateway, and consumers resume there."""

from __future__ import annotations

import time
import uuid

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from tests.clients.topics import create_topic
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.mirror.mirrors import (
    CODECS,
    committed,
    consume,
    fill,
    mirror_once,
    needs_kafka,
    read_partition,
    transact,
    watermarks,
)

pytestmark = [pytest.mark.long, needs_kafka]

CLEAN_SECONDS = 60


@pytest.fixture
def target(gateway_factory: GatewayFactory) -> GatewayProcess:
    return gateway_factory()


def assert_same(kafka: str, target: GatewayProcess, topic: str, partitions: int = 1) -> None:
    for partition in range(partitions):
        assert read_partition(target.bootstrap, topic, partition) == read_partition(kafka, topic, partition)
        assert watermarks(target.bootstrap, topic, partition) == watermarks(kafka, topic, partition)


def test_records_of_every_codec_and_of_transactions_keep_their_offsets(kafka: str, target: GatewayProcess) -> None:
    topic = create_topic(kafka, 3)
    for codec in CODECS:
        fill(kafka, topic, CODECS.index(codec) % 3, 300, **{"compression.type": codec, "enable.idempotence": True})
    transact(kafka, topic, [b"aborted"] * 3, commits=False)
    transact(kafka, topic, [b"committed"] * 3, commits=True)
    transact(kafka, topic, [b"aborted"], commits=False)
    mirror_once(kafka, target, "--topics", topic)
    assert_same(kafka, target, topic, 3)


def test_a_compacted_log_keeps_its_gaps(kafka: str, target: GatewayProcess) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    config = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(30)
    deadline = time.monotonic() + CLEAN_SECONDS
    while True:
        _keyed(kafka, topic)
        found = read_partition(kafka, topic)
        if len(found) < watermarks(kafka, topic)[1] - 100:
            break
        assert time.monotonic() < deadline, "Kafka has not cleaned the log"
    mirror_once(kafka, target, "--topics", topic)
    assert read_partition(target.bootstrap, topic)[-1] == read_partition(kafka, topic)[-1]
    assert set(read_partition(target.bootstrap, topic)) <= set(found) | set(read_partition(kafka, topic))
    assert watermarks(target.bootstrap, topic) == watermarks(kafka, topic)


def _keyed(bootstrap: str, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for number in range(100):
        producer.produce(topic, key=b"%d" % (number % 10), value=b"%d" % number)
    assert producer.flush(30) == 0


def test_a_group_resumes_at_its_offset(kafka: str, target: GatewayProcess) -> None:
    topic, group = create_topic(kafka, 1), f"g-{uuid.uuid4().hex[:8]}"
    fill(kafka, topic, 0, 100)
    transact(kafka, topic, [b"aborted"] * 5, commits=False)
    fill(kafka, topic, 0, 20)
    first = consume(kafka, topic, group, 102)
    mirror_once(kafka, target, "--topics", topic, "--groups", f"{group[:4]}*")
    assert committed(target.bootstrap, group, (topic, 0)) == committed(kafka, group, (topic, 0))
    rest = consume(target.bootstrap, topic, group, 18)
    assert [*first, *rest] == [record.offset for record in read_partition(kafka, topic)]


def test_a_log_and_its_groups_go_to_kafka(kafka: str, target: GatewayProcess) -> None:
    topic, group = create_topic(target.bootstrap, 1), f"g-{uuid.uuid4().hex[:8]}"
    fill(target.bootstrap, topic, 0, 200, **{"compression.type": "zstd"})
    mirror_once(target.bootstrap, target, "--to", kafka, "--produce", "--topics", topic)
    assert_same(kafka, target, topic)
    transact(target.bootstrap, topic, [b"aborted"], commits=False)
    fill(target.bootstrap, topic, 0, 50, **{"compression.type": "lz4"})
    first = consume(target.bootstrap, topic, group, 210)
    mirror_once(target.bootstrap, target, "--to", kafka, "--produce", "--topics", topic, "--groups", group)
    rest = consume(kafka, topic, group, 40)
    assert [first[0], first[-1], rest[0], rest[-1]] == [0, 211, 210, 249]
    copy, original = read_partition(kafka, topic), read_partition(target.bootstrap, topic)
    assert [record[1:] for record in copy] == [record[1:] for record in original]


def test_a_topic_with_the_time_of_the_append_goes_back_to_kafka(kafka: str, target: GatewayProcess) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    wanted = NewTopic(topic, 1, 1, config={"message.timestamp.type": "LogAppendTime"})
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([wanted])[topic].result(30)
    fill(kafka, topic, 0, 20)
    mirror_once(kafka, target, "--topics", topic)
    fill(target.bootstrap, topic, 0, 10)  # by now producers write to the gateway
    mirror_once(target.bootstrap, target, "--to", kafka, "--produce", "--topics", topic)
    copy, original = read_partition(kafka, topic), read_partition(target.bootstrap, topic)
    assert [(record.offset, *record[2:]) for record in copy] == [(record.offset, *record[2:]) for record in original]
