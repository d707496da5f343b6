"""The other side of each scenario: kafka-python produces what Spark reads and consumes what Spark wrote."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kafka
from kafka.admin import KafkaAdminClient, NewTopic

POLL_MS = 500
READ_SECONDS = 30.0
SEND_SECONDS = 60.0
FEED_INTERVAL_SECONDS = 0.01
Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class Stored:
    """A record with its partition and offset."""

    partition: int
    offset: int
    record: Record


class Peer:
    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._admin = KafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=15_000)

    # --- admin ------------------------------------------------------------------------------------------------

    def create(self, partitions: int = 1, *, name: str | None = None, **configs: str) -> str:
        """Create a fresh topic. Configs are given with underscores for dots."""
        topic = name or f"t-{uuid.uuid4().hex[:10]}"
        settings = {key.replace("_", "."): value for key, value in configs.items()}
        self._admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=settings)])
        return topic

    def delete(self, topic: str) -> None:
        self._admin.delete_topics([topic])

    def add_partitions(self, topic: str, total: int) -> None:
        self._admin.create_partitions({topic: total})

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        self._admin.delete_records({kafka.TopicPartition(topic, partition): before_offset})

    def groups(self) -> set[str]:
        return {group["group_id"] for group in self._admin.list_groups()}

    # --- data -------------------------------------------------------------------------------------------------

    def send(self, topic: str, records: Sequence[tuple[int, Record]], *, compression: str = "none") -> None:
        """Send records to partitions, and wait until all are acknowledged."""
        with self._producer(compression) as producer:
            futures = [_send(producer, topic, partition, record) for partition, record in records]
            for future in futures:
                future.get(SEND_SECONDS)

    def fill(self, topic: str, partitions: Sequence[int], numbers: Sequence[int]) -> list[str]:
        """Send the texts `partition:number` to each partition in order, and return the texts."""
        records = [(partition, number) for number in numbers for partition in partitions]
        self.send(topic, [(partition, Record(f"{partition}:{number}".encode())) for partition, number in records])
        return [f"{partition}:{number}" for partition, number in records]

    @contextlib.contextmanager
    def transaction(
        self, topic: str, partitions: Sequence[int], numbers: Sequence[int], *, abort: bool = False
    ) -> Iterator[None]:
        """Send the same texts as `fill`, in a transaction that is open for as long as the context lasts. Then commit or
        abort it.
        """
        with self._producer("none", transactional_id=f"x-{uuid.uuid4().hex[:10]}") as producer:
            producer.init_transactions()
            producer.begin_transaction()
            for number in numbers:
                for partition in partitions:
                    _send(producer, topic, partition, Record(f"{partition}:{number}".encode()))
            producer.flush(SEND_SECONDS)
            yield
            (producer.abort_transaction if abort else producer.commit_transaction)()

    def read(self, topic: str) -> list[Stored]:
        """Return all records of a topic by partition and offset. Raise AssertionError if they do not arrive."""
        with contextlib.closing(self._consumer()) as consumer:
            partitions = [kafka.TopicPartition(topic, number) for number in sorted(self._partitions(consumer, topic))]
            consumer.assign(partitions)
            ends = consumer.end_offsets(partitions)
            consumer.seek_to_beginning()
            found: list[Stored] = []
            deadline = time.monotonic() + READ_SECONDS
            while any(consumer.position(partition) < ends[partition] for partition in partitions):
                assert time.monotonic() < deadline, f"{topic}: {len(found)} records came, ends are {ends}"
                for records in consumer.poll(POLL_MS).values():
                    found += [
                        Stored(
                            record.partition,
                            record.offset,
                            Record(record.value, record.key, tuple(record.headers), record.timestamp),
                        )
                        for record in records
                    ]
        return sorted(found, key=lambda stored: (stored.partition, stored.offset))

    def texts(self, topic: str) -> list[str]:
        return [(stored.record.value or b"").decode() for stored in self.read(topic)]

    def ends(self, topic: str) -> dict[int, int]:
        with contextlib.closing(self._consumer()) as consumer:
            partitions = [kafka.TopicPartition(topic, number) for number in self._partitions(consumer, topic)]
            return {partition.partition: end for partition, end in consumer.end_offsets(partitions).items()}

    @contextlib.contextmanager
    def feed(self, topic: str, partitions: Sequence[int]) -> Iterator[Feed]:
        """Start a feed."""
        with self._producer("none") as producer:
            feed = Feed(producer, topic, partitions)
            feed.start()
            try:
                yield feed
            finally:
                feed.stop_requested.set()
                feed.join(SEND_SECONDS)

    def close(self) -> None:
        self._admin.close()

    @contextlib.contextmanager
    def _producer(self, compression: str, **extra: Any) -> Iterator[kafka.KafkaProducer]:
        producer = kafka.KafkaProducer(
            bootstrap_servers=self.bootstrap,
            acks="all",
            enable_idempotence=True,
            compression_type=None if compression == "none" else compression,
            max_request_size=2_000_000,
            reconnect_backoff_max_ms=500,
            **extra,
        )
        try:
            yield producer
        finally:
            producer.close(10)

    def _consumer(self) -> kafka.KafkaConsumer:
        return kafka.KafkaConsumer(bootstrap_servers=self.bootstrap, group_id=None, auto_offset_reset="earliest")

    @staticmethod
    def _partitions(consumer: kafka.KafkaConsumer, topic: str) -> set[int]:
        deadline = time.monotonic() + READ_SECONDS
        while not (found := consumer.partitions_for_topic(topic)):
            assert time.monotonic() < deadline, f"{topic} has no partitions"
            time.sleep(0.05)
        return found


class Feed(threading.Thread):
    """Sends the texts `partition:number` to each partition again and again, also during outages."""

    def __init__(self, producer: kafka.KafkaProducer, topic: str, partitions: Sequence[int]) -> None:
        super().__init__(name="feed", daemon=True)
        self._producer, self._topic, self._partitions = producer, topic, list(partitions)
        self.stop_requested = threading.Event()
        self._sent: list[tuple[str, Any]] = []
        self._error: Exception | None = None

    @property
    def count(self) -> int:
        return len(self._sent)

    def run(self) -> None:
        number = 0
        try:
            while not self.stop_requested.wait(FEED_INTERVAL_SECONDS):
                for partition in list(self._partitions):
                    text = f"{partition}:{number}"
                    self._sent.append((text, _send(self._producer, self._topic, partition, Record(text.encode()))))
                number += 1
        except Exception as error:  # `stop` raises the error in the scenario's thread.
            self._error = error

    def also(self, partitions: Sequence[int]) -> None:
        self._partitions += partitions

    def stop(self) -> list[str]:
        """Stop, wait until all texts are acknowledged, and return the texts."""
        self.stop_requested.set()
        self.join(SEND_SECONDS)
        assert not self.is_alive(), "the feed hangs"
        if self._error is not None:
            raise AssertionError(f"the feed failed: {self._error!r}") from self._error
        for _, future in self._sent:
            future.get(SEND_SECONDS)
        return [text for text, _ in self._sent]


def _send(producer: kafka.KafkaProducer, topic: str, partition: int, record: Record) -> Any:
    return producer.send(
        topic,
        value=record.value,
        key=record.key,
        headers=list(record.headers),
        partition=partition,
        timestamp_ms=record.timestamp_ms,
    )


def by_partition(texts: Sequence[str]) -> Mapping[str, list[int]]:
    """Return the numbers of `partition:number` texts by partition, in their order."""
    found: dict[str, list[int]] = {}
    for text in texts:
        partition, _, number = text.partition(":")
        found.setdefault(partition, []).append(int(number))
    return found
