"""One `ConsumerThread` per client library, all reporting to a `Scoreboard`.

Each consumer commits automatically, as its library does by default. So it commits offsets when it hands partitions over
and when it closes, and an orderly rebalance must repeat no record.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false
# The type stubs of these client libraries are incomplete, or belong to an older release.

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

import aiokafka
import aiokafka.abc
import confluent_kafka
import kafka
from aiokafka.coordinator.assignors.range import RangePartitionAssignor as AiokafkaRange
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor as AiokafkaRoundRobin
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

from tests.aiokafka_stop import stop_aiokafka
from tests.clients.scoreboard import ConsumerThread, Delivery, Scoreboard
from tests.closing import close

NO_SETTINGS: Mapping[str, str | int] = {}
SESSION_MS = 30_000
"""Session timeout of the clients written in Python. Their threads share one interpreter, so on a slow machine a
heartbeat may be seconds late. Each of these members leaves with LeaveGroup, so no test waits for a session to end.
"""


class ConfluentConsumer(ConsumerThread):
    """A librdkafka consumer: `assignor` is range, roundrobin or cooperative-sticky; `settings` override its
    configuration."""

    def __init__(
        self,
        name: str,
        board: Scoreboard,
        bootstrap: str,
        topic: str,
        group: str,
        assignor: str,
        settings: Mapping[str, str | int] = NO_SETTINGS,
    ) -> None:
        super().__init__(name, board)
        self.bootstrap, self.topic, self.group, self.assignor = bootstrap, topic, group, assignor
        self.settings = settings
        self.awaits_partitions = False
        """A test sets this after it has seen the coordinator withhold the consumer's partitions. The consumer then
        closes at once. Otherwise the consumer would leave only after it has received the partitions. While the
        coordinator withholds them, no event arrives for which the close could wait.
        """

    def open(self) -> None:
        self.consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": self.group,
                "client.id": "same-for-all",
                "partition.assignment.strategy": self.assignor,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 500,
                **self.settings,
            }
        )
        self.consumer.subscribe([self.topic], on_assign=self.on_assign, on_revoke=self.on_revoke, on_lost=self.on_lost)

    def on_assign(self, _consumer: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.board.add(self.name, {partition.partition for partition in partitions})

    def on_revoke(self, _consumer: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.board.remove(self.name, {partition.partition for partition in partitions})

    def on_lost(self, _consumer: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.board.lose(self.name, {partition.partition for partition in partitions})

    def poll_once(self) -> None:
        message = self.consumer.poll(0.1)
        if message is None:
            return
        error = message.error()
        if error is not None:
            raise confluent_kafka.KafkaException(error)
        partition, offset, value = message.partition(), message.offset(), message.value()
        assert partition is not None
        assert offset is not None
        self.board.deliver(Delivery(self.name, partition, offset, value or b""))

    def close_consumer(self) -> None:
        if "group.instance.id" in self.settings:
            self.consumer.close()  # A static member sends no LeaveGroup and stays in its group.
        elif self.awaits_partitions:
            self.consumer.close()
        else:
            close(self.consumer, self.poll_once)


class ConfluentConsumerProtocol(ConfluentConsumer):
    """A librdkafka consumer with `group.protocol=consumer` (KIP-848). `assignor` names the coordinator's assignor:
    uniform or range.
    """

    def open(self) -> None:
        self.consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": self.group,
                "client.id": "same-for-all",
                "group.protocol": "consumer",
                "group.remote.assignor": self.assignor,
                "auto.offset.reset": "earliest",
                **self.settings,
            }
        )
        self.consumer.subscribe([self.topic], on_assign=self.on_assign, on_revoke=self.on_revoke, on_lost=self.on_lost)


class KafkaPythonConsumer(ConsumerThread, kafka.ConsumerRebalanceListener):
    """A kafka-python consumer: `assignor` is range, roundrobin or cooperative-sticky, or several of them with commas
    between."""

    ASSIGNORS: ClassVar[dict[str, type[AbstractPartitionAssignor]]] = {
        "range": RangePartitionAssignor,
        "roundrobin": RoundRobinPartitionAssignor,
        "cooperative-sticky": CooperativeStickyAssignor,
    }

    def __init__(self, name: str, board: Scoreboard, bootstrap: str, topic: str, group: str, assignor: str) -> None:
        super().__init__(name, board)
        self.bootstrap, self.topic, self.group, self.assignor = bootstrap, topic, group, assignor

    def open(self) -> None:
        self.consumer = kafka.KafkaConsumer(
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            client_id="same-for-all",
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=500,
            partition_assignment_strategy=[self.ASSIGNORS[name] for name in self.assignor.split(",")],
        )
        self.consumer.subscribe([self.topic], listener=self)

    def on_partitions_assigned(self, assigned: set[kafka.TopicPartition]) -> None:
        self.board.assign(self.name, {partition.partition for partition in self.consumer.assignment()})

    def on_partitions_revoked(self, revoked: set[kafka.TopicPartition]) -> None:
        self.board.remove(self.name, {partition.partition for partition in revoked})

    def poll_once(self) -> None:
        # Within this time the consumer still commits before a rebalance. If the commit takes longer, the records are
        # read twice.
        for records in self.consumer.poll(1000).values():
            for record in records:
                self.board.deliver(Delivery(self.name, record.partition, record.offset, record.value))

    def close_consumer(self) -> None:
        self.consumer.close()


class AiokafkaConsumer(ConsumerThread, aiokafka.abc.ConsumerRebalanceListener):
    """An aiokafka consumer in an event loop of its own: `assignor` is range or roundrobin."""

    ASSIGNORS: ClassVar = {"range": AiokafkaRange, "roundrobin": AiokafkaRoundRobin}

    def __init__(self, name: str, board: Scoreboard, bootstrap: str, topic: str, group: str, assignor: str) -> None:
        super().__init__(name, board)
        self.bootstrap, self.topic, self.group, self.assignor = bootstrap, topic, group, assignor

    def open(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.consumer = self.loop.run_until_complete(self.start_consumer())

    async def start_consumer(self) -> aiokafka.AIOKafkaConsumer:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            client_id="same-for-all",
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=500,
            metadata_max_age_ms=2000,
            partition_assignment_strategy=(self.ASSIGNORS[self.assignor],),
        )
        consumer.subscribe([self.topic], listener=self)
        await consumer.start()
        return consumer

    def on_partitions_assigned(self, assigned: set[aiokafka.TopicPartition]) -> None:
        self.board.assign(self.name, {partition.partition for partition in assigned})

    def on_partitions_revoked(self, revoked: set[aiokafka.TopicPartition]) -> None:
        self.board.remove(self.name, {partition.partition for partition in revoked})

    def poll_once(self) -> None:
        batches = self.loop.run_until_complete(self.consumer.getmany(timeout_ms=100))
        for records in batches.values():
            for record in records:
                self.board.deliver(Delivery(self.name, record.partition, record.offset, record.value or b""))

    def close_consumer(self) -> None:
        self.loop.run_until_complete(stop_aiokafka(self.consumer))
        self.loop.close()


CONSUMERS = {
    "confluent-range": (ConfluentConsumer, "range"),
    "confluent-roundrobin": (ConfluentConsumer, "roundrobin"),
    "confluent-cooperative-sticky": (ConfluentConsumer, "cooperative-sticky"),
    "confluent-consumer-uniform": (ConfluentConsumerProtocol, "uniform"),
    "confluent-consumer-range": (ConfluentConsumerProtocol, "range"),
    "kafka-python-range": (KafkaPythonConsumer, "range"),
    "kafka-python-roundrobin": (KafkaPythonConsumer, "roundrobin"),
    "kafka-python-cooperative-sticky": (KafkaPythonConsumer, "cooperative-sticky"),
    "aiokafka-range": (AiokafkaConsumer, "range"),
    "aiokafka-roundrobin": (AiokafkaConsumer, "roundrobin"),
}
