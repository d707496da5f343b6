"""Transactional producers that remember the outcome of each transaction, and a reader with read_committed.

The one idea: a transaction is all of its records or none. So the expected end of a reader follows from what each
producer learned: committed, aborted, or nothing. Each record names its producer, its transaction and its position in
the transaction.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition

PATIENCE_S = 60.0
CALL_S = 5.0
"""Seconds that one call of a client may take before the test repeats it."""

Place = tuple[int, int, int]
"""Identity of a record: its producer, its transaction, and its index within the transaction."""


class Outcome(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class _AbortRequiredError(Exception):
    """The client reports that this transaction can only be aborted."""


class Progress:
    """Number of ended transactions of all producers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def count(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, more: int) -> None:
        with self._changed:
            target = self._count + more
            assert self._changed.wait_for(lambda: self._count >= target, PATIENCE_S), (
                f"{target - self._count} of {more} transactions do not end"
            )


class TransactionalProducer(threading.Thread):
    """Commits or aborts one transaction after the other until it is stopped."""

    def __init__(self, number: int, seed: int, bootstrap: str, topic: str, partitions: int, progress: Progress) -> None:
        super().__init__(daemon=True)
        self.number = number
        self._progress = progress
        self.planned: list[Counter[tuple[int, Place]]] = []
        """Planned records of each transaction, with their partitions."""
        self.outcomes: list[Outcome] = []
        self.failure: BaseException | None = None
        self._chance = random.Random(seed * 1_000 + number)
        self._servers, self._topic, self._partitions = bootstrap, topic, partitions
        self._transactional_id = f"{topic}-{number}"
        self._asked = False
        """True once this producer has asked the client to commit the current transaction."""
        self._stop_requested = threading.Event()

    def run(self) -> None:
        try:
            producer = self._fresh()
            while not self._stop_requested.is_set():
                self.planned.append(Counter())
                outcome = self._run_transaction(producer)
                if outcome is None:
                    # A new producer aborts the transaction that its predecessor left open.
                    producer = self._fresh()
                    outcome = Outcome.UNKNOWN if self._asked else Outcome.ABORTED
                self.outcomes.append(outcome)
                self._progress.count()
        except BaseException as error:
            self.failure = error
            raise

    def stop(self) -> None:
        self._stop_requested.set()

    def finish(self) -> None:
        self.join(2 * PATIENCE_S)
        assert not self.is_alive(), "the producer still waits for answers"
        assert self.failure is None, self.failure

    def _fresh(self) -> confluent_kafka.Producer:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self._servers,
                "transactional.id": self._transactional_id,
                "transaction.timeout.ms": 60_000,
                "linger.ms": 1,
                "request.timeout.ms": 5_000,
                "socket.timeout.ms": 10_000,
                "reconnect.backoff.ms": 50,
                "reconnect.backoff.max.ms": 300,
                "retry.backoff.ms": 50,
                "log_level": 0,
            }
        )
        _insist(lambda: producer.init_transactions(CALL_S))
        return producer

    def _run_transaction(self, producer: confluent_kafka.Producer) -> Outcome | None:
        """Run one transaction. Return None if the client cannot do anything more."""
        self._asked = False
        try:
            producer.begin_transaction()
            try:
                self._produce(producer)
                if self._chance.random() < 0.7:
                    self._asked = True
                    _insist(lambda: producer.commit_transaction(CALL_S))
                    return Outcome.COMMITTED
            except _AbortRequiredError:
                pass
            except KafkaException as error:
                if not _kafka_error(error).txn_requires_abort():
                    raise
            _insist(lambda: producer.abort_transaction(CALL_S))
            return Outcome.ABORTED
        except (KafkaException, _AbortRequiredError):
            return None

    def _produce(self, producer: confluent_kafka.Producer) -> None:
        transaction = len(self.planned) - 1
        for position in range(self._chance.choice((1, 3, 10, 40))):
            partition = self._chance.randrange(self._partitions)
            place = self.number, transaction, position
            producer.produce(self._topic, "-".join(map(str, place)).encode(), partition=partition)
            self.planned[-1][partition, place] += 1
            if self._chance.random() < 0.1:
                producer.poll(0.005)
        if self._chance.random() < 0.5:
            producer.flush(CALL_S)


class CommittedReader(threading.Thread):
    """Reads every partition from its first record with read_committed, up to given ends."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        super().__init__(daemon=True)
        self.records: list[list[Place]] = [[] for _ in range(partitions)]
        self._offsets = [-1] * partitions
        self._reached = [0] * partitions
        self._ends: Sequence[int] | None = None
        self._failure: BaseException | None = None
        self._deadline_s = float("inf")
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": uuid.uuid4().hex,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 200,
                "socket.timeout.ms": 10_000,
                "reconnect.backoff.ms": 50,
                "reconnect.backoff.max.ms": 300,
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])

    def run(self) -> None:
        try:
            while not self._is_done():
                for message in self._consumer.consume(500, 0.1):
                    self._take(message)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._consumer.close()

    def finish(self, ends: Sequence[int]) -> list[list[Place]]:
        """Wait until all is read, and return the records of each partition up to its end."""
        self._deadline_s = time.monotonic() + PATIENCE_S
        self._ends = ends
        self.join(2 * PATIENCE_S)
        assert not self.is_alive()
        assert self._failure is None, self._failure
        return self.records

    def _is_done(self) -> bool:
        if self._ends is None:
            return False
        done = all(reached >= end for reached, end in zip(self._reached, self._ends, strict=True))
        assert done or time.monotonic() < self._deadline_s, f"stuck at {self._reached} of {self._ends}"
        return done

    def _take(self, message: confluent_kafka.Message) -> None:
        error, partition, offset = message.error(), message.partition(), message.offset()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
            assert error.retriable() or error.code() < 0, error
            return
        assert partition is not None
        assert offset is not None
        if error is not None:
            self._reached[partition] = max(self._reached[partition], offset)
            return
        assert offset > self._offsets[partition], f"offset {offset} of {partition} after {self._offsets[partition]}"
        self._offsets[partition] = offset
        value = message.value()
        assert value is not None
        producer, transaction, position = map(int, value.split(b"-"))
        self.records[partition].append((producer, transaction, position))


def ends_of(bootstrap: str, topic: str, partitions: int) -> list[int]:
    """Return the end of each partition's log."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": uuid.uuid4().hex})
    try:
        return [consumer.get_watermark_offsets(TopicPartition(topic, index), 30)[1] for index in range(partitions)]
    finally:
        consumer.close()


def assert_whole(records: Sequence[Sequence[Place]], producers: Sequence[TransactionalProducer]) -> Counter[Outcome]:
    """Assert that each transaction is complete, once and in order, or absent, as its producer learned. Return how many
    transactions had each outcome.
    """
    seen: dict[tuple[int, int], Counter[tuple[int, Place]]] = {}
    for partition, places in enumerate(records):
        for place in places:
            seen.setdefault(place[:2], Counter())[partition, place] += 1
        for producer in producers:
            own = [place for place in places if place[0] == producer.number]
            assert own == sorted(own), (
                f"records of producer {producer.number} in partition {partition} are out of order"
            )
    counted: Counter[Outcome] = Counter()
    for producer in producers:
        assert len(producer.planned) == len(producer.outcomes)
        for transaction, (planned, outcome) in enumerate(zip(producer.planned, producer.outcomes, strict=True)):
            name = f"transaction {transaction} of producer {producer.number}, {outcome.value}"
            found = seen.pop((producer.number, transaction), Counter[tuple[int, Place]]())
            counted[outcome] += 1
            if outcome is Outcome.COMMITTED or (outcome is Outcome.UNKNOWN and found):
                assert found == planned, f"{name}: {found.total()} of {planned.total()} records"
            else:
                assert not found, f"{name}: {found.total()} of {planned.total()} records"
    assert not seen
    return counted


def _insist(call: Callable[[], object]) -> None:
    """Repeat the call until it succeeds or cannot succeed."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            call()
            return
        except KafkaException as raised:
            error = _kafka_error(raised)
            if error.txn_requires_abort():
                raise _AbortRequiredError(str(error)) from raised
            if error.fatal() or not error.retriable():
                raise
            assert time.monotonic() < deadline_s, error


def _kafka_error(raised: KafkaException) -> KafkaError:
    error = raised.args[0]
    assert isinstance(error, KafkaError)
    return error
