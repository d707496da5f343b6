"""The gateway without validation serves the same producer as the real one."""

from __future__ import annotations

import confluent_kafka

from bench.librdkafka import create_topic
from bench.servers import running_gateway
from bench.validation import unvalidated


def test_a_gateway_without_validation_accepts_a_compressed_batch() -> None:
    outcomes: list[str] = []
    with running_gateway(unvalidated) as gateway:
        create_topic(gateway.bootstrap, "validation", 1)
        producer = confluent_kafka.Producer({"bootstrap.servers": gateway.bootstrap, "compression.type": "lz4"})
        producer.produce("validation", b"value " * 100, on_delivery=lambda error, _: outcomes.append(str(error)))
        assert producer.flush(30) == 0
    # A KafkaError with the code -1 compares equal to None, so compare the texts.
    assert outcomes == ["None"]
