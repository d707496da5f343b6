"""Kafka for tests: a real broker in about a second, without Docker or Java.

The one idea: the broker is a process of its own, reached by a Kafka client and by `Kafka`. So nothing of Sluice is
imported into the program under test, and the broker ends with that program, however it ends.

    from sluice.testing import Kafka

    with Kafka() as kafka:
        topic = kafka.create_topic(partitions=4)
        producer = Producer({"bootstrap.servers": kafka.bootstrap})

pytest finds the fixtures `kafka`, `kafka_bootstrap`, `kafka_topic`, `kafka_server` and `kafka_settings` by itself.
docs/testing.md shows each.
"""

from sluice.testing._server import Kafka, KafkaTestError

__all__ = ["Kafka", "KafkaTestError"]
