"""A stock producer accepts the sink, a program that acknowledges records without storing them, as a broker."""

from __future__ import annotations

from confluent_kafka import KafkaError, Message, Producer

from bench.sink import sinking

RECORDS = 500


def test_sink_acknowledges_every_record() -> None:
    outcomes: list[KafkaError | None] = []

    def on_delivery(error: KafkaError | None, _message: Message) -> None:
        outcomes.append(error)

    with sinking(3) as (bootstrap, _):
        producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "message.timeout.ms": 20_000})
        for _ in range(RECORDS):
            producer.produce("any", b"x" * 1000, on_delivery=on_delivery)
        assert producer.flush(30) == 0
    assert outcomes == [None] * RECORDS
