"""A stock producer takes the sink for a broker."""

from __future__ import annotations

from confluent_kafka import KafkaError, Message, Producer

from bench.sink import sinking

RECORDS = 500


def test_everything_is_acknowledged() -> None:
    outcomes: list[KafkaError | None] = []

    def on_delivery(error: KafkaError | None, _message: Message) -> None:
        outcomes.append(error)

    with sinking(3) as (bootstrap, _):
        producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "message.timeout.ms": 20_000})
        for _ in range(RECORDS):
            producer.produce("any", b"x" * 1000, on_delivery=on_delivery)
        assert producer.flush(30) == 0
    assert outcomes == [None] * RECORDS
