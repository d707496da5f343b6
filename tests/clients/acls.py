"""Clients without authentication, for tests of ACLs."""

from __future__ import annotations

from confluent_kafka import KafkaError, Producer

TIMEOUT_S = 30
ME = "User:ANONYMOUS"


def delivered(bootstrap: str, topic: str) -> KafkaError | None:
    outcomes: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": bootstrap})
    producer.produce(topic, b"value", on_delivery=lambda error, _: outcomes.append(error))
    assert producer.flush(TIMEOUT_S) == 0
    return outcomes[0]
