"""A cooperative group of librdkafka consumers that records what it was assigned and read. The test checks this
record."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Collection

import confluent_kafka

from tests.closing import close
from tests.compat.checker import Event, Log, check

FINISH_S = 90.0
"""Seconds within which a tenth of the outstanding records must arrive."""

Place = tuple[int, int]


class Readers:
    """Run `members` consumers, a thread each.

    They commit at each revocation and at times in between, as an application does that must not read a record twice.
    """

    def __init__(self, bootstrap: str, topic: str, members: int) -> None:
        self.topic = topic
        self.delivered: set[Place] = set()
        self._missing: set[Place] = set()
        self._enough = -1
        """`finish` waits until no more records than this are missing."""
        self._settings: dict[str, str | int | bool] = {
            "bootstrap.servers": bootstrap,
            "group.id": f"readers-{uuid.uuid4().hex[:8]}",
            "partition.assignment.strategy": "cooperative-sticky",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            # A member's JoinGroup may wait at a sleeping node. Until it is answered, the member sends no heartbeats to
            # another node, but it must remain a member.
            "session.timeout.ms": 120_000,
            "heartbeat.interval.ms": 500,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
        self._events: list[Event] = []
        self._errors: list[str] = []
        self._progress = threading.Condition()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(f"m{number}",), daemon=True) for number in range(members)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self, places: Collection[Place]) -> None:
        """Wait until each of `places` (partition, offset) has been read, end the group, and check the assignments and
        reads.
        """
        wanted = len(places)
        with self._progress:
            self._missing = set(places) - self.delivered
            while left := len(self._missing):
                self._enough = int(left * 0.9)
                came = self._progress.wait_for(lambda: len(self._missing) <= self._enough, FINISH_S)
                assert came, f"{len(self._missing)} of {wanted} records were not read; {self._errors[-3:]}"
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a consumer does not close"
        events = sorted(self._events, key=lambda event: event.t)
        header = {"mode": "cooperative", "redelivery_allowed": True, "topic": self.topic}
        verdict = check(Log(header, tuple(events)), outage=True)
        assert verdict.deliveries >= wanted
        assert not verdict.problems, verdict.problems

    def _write(self, event: str, member: str, partition: int = -1, offset: int = -1) -> None:
        written = Event(time.time() * 1000, event, member, self.topic, partition, offset)
        with self._progress:
            self._events.append(written)
            if event == "delivered":
                self.delivered.add((partition, offset))
                self._missing.discard((partition, offset))
                if len(self._missing) == self._enough:
                    self._progress.notify_all()

    def _read(self, member: str) -> None:
        def commit(consumer: confluent_kafka.Consumer) -> None:
            try:
                consumer.commit(asynchronous=False)
            except confluent_kafka.KafkaException as error:
                # The commit was refused or got no answer, so the next owner repeats the records since the last
                # successful commit.
                self._errors.append(str(error))

        def on_assign(_: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]) -> None:
            for partition in partitions:
                self._write("assigned", member, partition.partition)

        def on_revoke(consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]) -> None:
            commit(consumer)
            for partition in partitions:
                self._write("revoked", member, partition.partition)

        def on_lost(_: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]) -> None:
            for partition in partitions:
                self._write("lost", member, partition.partition)

        consumer = confluent_kafka.Consumer(self._settings)
        consumer.subscribe([self.topic], on_assign=on_assign, on_revoke=on_revoke, on_lost=on_lost)
        try:
            read = 0
            while not self._stop.is_set():
                if self._take(consumer, member):
                    read += 1
                    if read % 500 == 0:
                        commit(consumer)
        finally:
            close(consumer, lambda: self._take(consumer, member))
            self._write("closed", member)

    def _take(self, consumer: confluent_kafka.Consumer, member: str) -> bool:
        message = consumer.poll(0.1)
        if message is None:
            return False
        if message.error() is not None:
            self._errors.append(str(message.error()))
            return False
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        self._write("delivered", member, partition, offset)
        return True
