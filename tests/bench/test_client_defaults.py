"""Stock producers with their default settings: the programs that run them against a gateway, and what they report."""

from __future__ import annotations

import statistics

import pytest
from confluent_kafka import Consumer, TopicPartition

from bench import client_defaults, librdkafka
from bench.client_defaults import CLIENT_WORKLOADS, PARTITIONS, PRODUCERS, StockProducer, run
from bench.peers import explanation, runnable
from tests.gateway_process import GatewayProcess

PACE = 200
SECONDS = 3.0
WARM_UP_S = 1.0


def stored(bootstrap: str, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "stored"})
    try:
        ends = [consumer.get_watermark_offsets(TopicPartition(topic, index), 30)[1] for index in range(PARTITIONS)]
    finally:
        consumer.close()
    return sum(ends)


@pytest.fixture(params=PRODUCERS, ids=lambda producer: producer.name)
def producer(request: pytest.FixtureRequest) -> StockProducer:
    found: StockProducer = request.param
    if missing := found.missing():
        pytest.skip(f"{found.name} {missing}")
    return found


@pytest.mark.long
def test_paced_producer_keeps_its_pace_and_times_each_record(gateway: GatewayProcess, producer: StockProducer) -> None:
    topic = f"paced-{producer.name}"
    librdkafka.create_topic(gateway.bootstrap, topic, PARTITIONS)
    produced = run(producer, gateway, topic, seconds=SECONDS, pace=PACE, warm_up_s=WARM_UP_S)
    assert len(produced.latencies_ms) == pytest.approx(SECONDS * PACE, rel=0.1)
    # If the client starts slowly, records of the warm-up may be acknowledged in the measured time.
    assert 0.8 * SECONDS * PACE <= produced.records <= 1.1 * (SECONDS + WARM_UP_S) * PACE
    assert len(produced.latencies_ms) < stored(gateway.bootstrap, topic) <= 1.1 * (SECONDS + WARM_UP_S) * PACE
    assert SECONDS <= produced.seconds < 2 * SECONDS
    assert produced.server_cpu_s > 0
    assert 0 < statistics.median(produced.latencies_ms) < SECONDS * 1000


@pytest.mark.long
def test_producer_at_full_speed_counts_no_record_twice(gateway: GatewayProcess, producer: StockProducer) -> None:
    topic = f"produce-{producer.name}"
    librdkafka.create_topic(gateway.bootstrap, topic, PARTITIONS)
    produced = run(producer, gateway, topic, seconds=SECONDS, pace=0, warm_up_s=WARM_UP_S)
    assert not produced.latencies_ms
    assert 10 * PACE < produced.records < stored(gateway.bootstrap, topic)


def test_failed_record_ends_the_program_with_its_error(gateway: GatewayProcess) -> None:
    librdkafka.create_topic(gateway.bootstrap, "small", PARTITIONS, {"max.message.bytes": "100"})
    with pytest.raises(RuntimeError, match=r"(?s)librdkafka's producer ended with 1: .*MSG_SIZE_TOO_LARGE"):
        run(next(each for each in PRODUCERS if each.name == "librdkafka"), gateway, "small", seconds=1, pace=PACE)


def test_workload_whose_client_cannot_run_here_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_defaults.shutil, "which", lambda name: None if name == "go" else f"/usr/bin/{name}")
    able, left_out = runnable(["produce", "produce-franz-go", "paced-java"])
    assert able == ["produce", "paced-java"]
    assert left_out == ["`produce-franz-go` is left out: its client needs go, not on PATH."]


@pytest.mark.parametrize("name", CLIENT_WORKLOADS)
def test_report_explains_each_client_with_its_version_and_pace(name: str) -> None:
    said = explanation(name)
    assert any(character.isdigit() for character in said.partition("1 KiB")[2].partition(",")[0])
    assert said.endswith("at full speed." if name.startswith("produce-") else "from send to acknowledgement.")
