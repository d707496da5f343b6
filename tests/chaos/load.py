"""A load that remembers what was acknowledged: records with their offsets, and committed offsets.

The one idea: acknowledgements go into plain sets as they arrive. After a fault the log is read from the start and
compared with these sets. An idempotent producer retries through the fault, so each acknowledged record is in the log
exactly once.
"""

from __future__ import annotations

import threading
import time
import uuid

import confluent_kafka


class Load(threading.Thread):
    """Produces until it is stopped, and commits a rising offset for each partition."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, *, pause_s: float = 0.005) -> None:
        """`pause_s` is the pause after each 50 records. It limits what a long load has to compare."""
        super().__init__(daemon=True)
        self.bootstrap, self.topic, self.partitions = bootstrap, topic, partitions
        self._pause_s = pause_s
        self.group = f"g-{uuid.uuid4().hex[:8]}"
        self.acknowledged: dict[bytes, tuple[int, int]] = {}
        self.unplaced: dict[bytes, int] = {}
        """Partitions of acknowledged records whose offset librdkafka does not know: the answer to a later batch, or to
        a repetition, has shown that they were appended."""
        self.failed: list[str] = []
        self.committed: dict[int, int] = {}
        self._stop_requested = threading.Event()
        self._enough = 0
        """`wait_for` waits for this many acknowledgements."""
        self._progress = threading.Condition()

    def run(self) -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "enable.idempotence": True,
                "linger.ms": 2,
                "delivery.timeout.ms": 120_000,
                "request.timeout.ms": 10_000,
                "log_level": 0,
                "reconnect.backoff.ms": 50,
                "reconnect.backoff.max.ms": 500,
            }
        )
        committer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": self.group,
                "enable.auto.commit": False,
                "log_level": 0,
                # A commit blocks this thread, and a sleeping node neither answers nor closes the connection.
                "socket.timeout.ms": 5_000,
            }
        )
        number = 0
        while not self._stop_requested.is_set():
            for _ in range(50):
                value = str(number).encode()
                place = number % self.partitions
                try:
                    producer.produce(self.topic, value, partition=place, on_delivery=self.on_delivery)
                except BufferError:  # The queue is full of records that wait for an unavailable node.
                    producer.poll(0.1)
                    break
                number += 1
            self._pace(producer)
            if number % 500 == 0:
                self.commit(committer, number)
        undelivered = producer.flush(120)
        if undelivered:
            self.failed.append(f"{undelivered} records never answered")
        committer.close()

    def _pace(self, producer: confluent_kafka.Producer) -> None:
        until_s = time.monotonic() + self._pause_s
        while (left_s := until_s - time.monotonic()) > 0:
            producer.poll(left_s)

    def on_delivery(self, error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        if error is not None:
            self.failed.append(str(error))
            return
        value, partition, offset = message.value(), message.partition(), message.offset()
        assert value is not None
        assert partition is not None
        with self._progress:
            if offset is None:
                self.unplaced[value] = partition
            else:
                self.acknowledged[value] = (partition, offset)
            if self._count() == self._enough:
                self._progress.notify_all()

    def _count(self) -> int:
        return len(self.acknowledged) + len(self.unplaced)

    def commit(self, committer: confluent_kafka.Consumer, offset: int) -> None:
        wanted = [confluent_kafka.TopicPartition(self.topic, index, offset) for index in range(self.partitions)]
        try:
            answered = committer.commit(offsets=wanted, asynchronous=False)
        except confluent_kafka.KafkaException:
            return  # The commit was refused or got no answer, so the gateway has promised nothing.
        for partition in answered or ():
            if partition.error is None:
                self.committed[partition.partition] = partition.offset

    def wait_for(self, count: int, timeout_s: float = 90) -> None:
        with self._progress:
            self._enough = self._count() + count
            assert self._progress.wait_for(lambda: self._count() >= self._enough, timeout_s), (
                f"no {count} further acknowledgements within {timeout_s} s; failures: {self.failed[:3]}"
            )

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(150)
        assert not self.is_alive(), "the producer still waits for answers"


def read_all(bootstrap: str, topic: str, partitions: int) -> dict[tuple[int, int], bytes]:
    """Return every record of the topic by (partition, offset), up to the present high watermarks."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": uuid.uuid4().hex, "enable.auto.commit": False}
    )
    try:
        ends = {
            index: consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, index), 30)[1]
            for index in range(partitions)
        }
        consumer.assign([confluent_kafka.TopicPartition(topic, index, 0) for index in range(partitions)])
        records: dict[tuple[int, int], bytes] = {}
        # Reading a long load takes long on a busy machine. The wait ends only when no record arrives.
        came_s = time.monotonic()
        while len(records) < sum(ends.values()):
            messages = consumer.consume(5000, 0.1)
            came_s = time.monotonic() if messages else came_s
            assert time.monotonic() < came_s + 60, f"{len(records)} of {sum(ends.values())} records read"
            for message in messages:
                assert message.error() is None, message.error()
                partition, offset, value = message.partition(), message.offset(), message.value()
                assert partition is not None
                assert offset is not None
                assert value is not None
                assert (partition, offset) not in records
                records[(partition, offset)] = value
        return records
    finally:
        consumer.close()


def assert_nothing_lost(load: Load) -> None:
    """Assert that every acknowledged record is at its offset exactly once, and that each committed offset is the
    acknowledged one or a later one.
    """
    assert not load.failed, load.failed[:5]
    assert load.acknowledged
    records = read_all(load.bootstrap, load.topic, load.partitions)
    missing = [value for value, place in load.acknowledged.items() if records.get(place) != value]
    assert not missing, f"{len(missing)} acknowledged records are not at their offset, e.g. {missing[:5]}"
    partitions = {value: partition for (partition, _), value in records.items()}
    lost = [value for value, partition in load.unplaced.items() if partitions.get(value) != partition]
    assert not lost, f"{len(lost)} acknowledged records are not in their partition, e.g. {lost[:5]}"
    values = list(records.values())
    assert len(values) == len(set(values)), f"{len(values) - len(set(values))} records are there twice"
    consumer = confluent_kafka.Consumer({"bootstrap.servers": load.bootstrap, "group.id": load.group})
    try:
        asked = [confluent_kafka.TopicPartition(load.topic, index) for index in load.committed]
        stored = {partition.partition: partition.offset for partition in consumer.committed(asked, 30)}
    finally:
        consumer.close()
    assert load.committed
    assert all(stored[index] >= offset for index, offset in load.committed.items()), (stored, load.committed)
