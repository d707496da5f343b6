"""Groups of stock consumers that read what a producer writes."""

from __future__ import annotations

from confluent_kafka import Producer

PARTITIONS = 4


class Feed:
    """Produce numbered records evenly over the partitions, and remember them."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
        self.topic = topic
        self.values: set[bytes] = set()

    def send(self, count: int) -> None:
        failures: list[object] = []
        for _ in range(count):
            value = str(len(self.values)).encode()
            self.values.add(value)
            self.producer.produce(
                self.topic,
                value,
                partition=len(self.values) % PARTITIONS,
                on_delivery=lambda error, _message: failures.append(error) if error else None,
            )
        assert self.producer.flush(30) == 0
        assert not failures, failures
