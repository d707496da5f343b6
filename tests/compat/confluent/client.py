"""librdkafka through confluent-kafka, behind the interface of `tests.compat.python.client`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import confluent_kafka
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from tests.compat.python.client import (
    CLIENT_ID,
    HEARTBEAT_INTERVAL_MS,
    JOIN_SECONDS,
    METADATA_MAX_AGE_MS,
    READ_SECONDS,
    TRANSACTION_TIMEOUT_MS,
    Client,
    FencedError,
    GroupReader,
    Member,
    MemberOptions,
    Producer,
    ProducerFencedError,
    Reader,
    Record,
    TransactionalProducer,
)
from tests.compat.python.groups import SERVER_SIDE
from tests.compat.python.journal import Journal, Partition
from tests.compat.python.options import SESSION_TIMEOUT_MS

SEND_SECONDS = 60.0
TRANSACTION_SECONDS = 15.0
ADMIN_SECONDS = 30.0
# librdkafka continues by itself after these errors.
PASSING = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
    }
)


UNIFORM = "uniform"


class ConfluentMember(Member):
    def __init__(self, options: MemberOptions, journal: Journal, failures: list[str], bootstrap: str) -> None:
        super().__init__(options, journal, failures)
        self.bootstrap = bootstrap

    def open(self) -> None:
        options = self.options
        static = {} if options.instance_id is None else {"group.instance.id": options.instance_id}
        self.consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": options.group,
                "client.id": CLIENT_ID,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": options.commit == "auto",
                "auto.commit.interval.ms": 1000,
                "topic.metadata.refresh.interval.ms": METADATA_MAX_AGE_MS,
                "reconnect.backoff.max.ms": 500,
                **self.protocol(),
                **static,
            }
        )
        self.subscribe(options.topics if options.pattern is None else [options.pattern])

    def protocol(self) -> dict[str, str | int]:
        if self.options.assignor == UNIFORM:
            # Requesting an assignor of the coordinator selects the consumer protocol (KIP-848).
            return {"group.protocol": "consumer", "group.remote.assignor": UNIFORM}
        return {
            "partition.assignment.strategy": self.options.assignor,
            "session.timeout.ms": self.options.session_timeout_ms,
            "heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
        }

    def subscribe(self, topics: Sequence[str]) -> None:
        self.consumer.subscribe(list(topics), on_assign=self.on_assign, on_revoke=self.on_revoke, on_lost=self.on_lost)

    def on_assign(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.gained(_partitions(partitions))

    def on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        positions = self.uncommitted(_partitions(partitions)) if self.options.commit == "revoke" else {}
        if positions:
            consumer.commit(offsets=_offsets(positions), asynchronous=False)
        self.gave_up(_partitions(partitions))

    def on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.gave_up(_partitions(partitions), lost=True)

    def poll_once(self) -> None:
        message = self.consumer.poll(0.1)
        if message is None:
            return
        error = message.error()
        if error is not None:
            if error.code() in (KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL):
                raise FencedError(str(error))
            if error.code() not in PASSING:
                raise KafkaException(error)
            return
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        self.processed(topic, partition, offset)
        if self.options.commit == "each":
            self.commit({(topic, partition): offset + 1})

    def commit(self, positions: Mapping[Partition, int]) -> None:
        self.consumer.commit(offsets=_offsets(positions), asynchronous=False)

    def close(self) -> None:
        self.consumer.close()


class ServerSideMember(ConfluentMember):
    """A member of the consumer protocol. The broker determines the assignor and the session timeout."""

    def protocol(self) -> dict[str, str | int]:
        return {"group.protocol": "consumer"}


class ConfluentProducer(Producer):
    def __init__(
        self, bootstrap: str, compression: str, idempotent: bool, extra: Mapping[str, str | int] | None = None
    ) -> None:
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "client.id": CLIENT_ID,
                "compression.type": compression,
                "enable.idempotence": idempotent,
                "linger.ms": 0,
                "reconnect.backoff.max.ms": 500,
                **(extra or {}),
            }
        )

    def send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        acknowledged: dict[int, int] = {}
        failures: list[KafkaError] = []

        def report(index: int, error: KafkaError | None, message: confluent_kafka.Message) -> None:
            if error is not None:
                failures.append(error)
            else:
                acknowledged[index] = message.offset() or 0

        for index, (partition, record) in enumerate(records):
            self._producer.produce(
                topic,
                record.value,
                record.key,
                partition=partition,
                headers=list(record.headers),
                timestamp=record.timestamp_ms or 0,
                on_delivery=lambda error, message, index=index: report(index, error, message),
            )
        # Do not use flush: after a fatal error it still calls callbacks, and then crashes.
        deadline = time.monotonic() + SEND_SECONDS
        while unsent := len(records) - len(acknowledged) - len(failures):
            assert time.monotonic() < deadline, f"{unsent} records were not acknowledged in {SEND_SECONDS:.0f} s"
            self._producer.poll(0.1)
        if failures:
            raise KafkaException(failures[0])
        return [acknowledged[index] for index in range(len(records))]

    def close(self) -> None:
        self._producer.flush(10)


class ConfluentTransactionalProducer(ConfluentProducer, TransactionalProducer):
    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        extra: dict[str, str | int] = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            # After a rebootstrap librdkafka keeps sending a transaction's offsets to a broker that it has abandoned.
            "metadata.recovery.strategy": "none",
        }
        super().__init__(bootstrap, "none", True, extra)
        self._producer.init_transactions(SEND_SECONDS)

    def begin(self) -> None:
        with _telling_fenced():
            self._producer.begin_transaction()

    def send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        with _telling_fenced():
            return super().send(topic, records)

    def send_offsets(self, reader: GroupReader, group: str, positions: Mapping[Partition, int]) -> None:
        assert isinstance(reader, ConfluentGroupReader)
        with _telling_fenced():
            metadata = reader.consumer.consumer_group_metadata()
            self._producer.send_offsets_to_transaction(_offsets(positions), metadata, TRANSACTION_SECONDS)

    def commit(self) -> None:
        with _telling_fenced():
            self._producer.commit_transaction(TRANSACTION_SECONDS)

    def abort(self) -> None:
        with _telling_fenced():
            self._producer.abort_transaction(TRANSACTION_SECONDS)

    def close(self) -> None:
        # librdkafka raises the error that ended the producer a second time.
        with contextlib.suppress(KafkaException):
            super().close()


@contextlib.contextmanager
def _telling_fenced() -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        if error.args[0].code() == KafkaError._FENCED:
            raise ProducerFencedError(str(error)) from error
        raise


class ConfluentGroupReader(GroupReader):
    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self.consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "client.id": CLIENT_ID,
                "group.id": group,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": SESSION_TIMEOUT_MS,
                "heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
                "reconnect.backoff.max.ms": 500,
            }
        )
        self.consumer.subscribe([topic])

    def read(self, count: int, seconds: float = JOIN_SECONDS) -> list[tuple[int, int, Record]]:
        found: list[tuple[int, int, Record]] = []
        deadline = time.monotonic() + seconds
        while len(found) < count and time.monotonic() < deadline:
            message = self.consumer.poll(0.1)
            if message is None:
                continue
            error = message.error()
            if error is None:
                found.append((message.partition() or 0, message.offset() or 0, Record(message.value(), message.key())))
            elif error.code() not in PASSING:
                raise KafkaException(error)
        return found

    def close(self) -> None:
        self.consumer.close()


class ConfluentReader(Reader):
    def __init__(self, bootstrap: str, topic: str, partition: int, read_committed: bool) -> None:
        self._topic, self._partition = topic, partition
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "client.id": CLIENT_ID,
                "group.id": "none",
                "isolation.level": "read_committed" if read_committed else "read_uncommitted",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        self.seek(confluent_kafka.OFFSET_BEGINNING)

    def read(self, count: int, seconds: float = READ_SECONDS) -> list[tuple[int, Record]]:
        found: list[tuple[int, Record]] = []
        while len(found) < count:
            message = self._consumer.poll(seconds)
            if message is None:
                break
            error = message.error()
            if error is not None:
                raise KafkaException(error)
            headers = tuple((name, value) for name, value in message.headers() or ())
            record = Record(message.value(), message.key(), headers, message.timestamp()[1])
            found.append((message.offset() or 0, record))
        return found

    def seek(self, offset: int) -> None:
        self._consumer.assign([TopicPartition(self._topic, self._partition, offset)])

    def seek_to_beginning(self) -> None:
        self.seek(confluent_kafka.OFFSET_BEGINNING)

    def seek_to_end(self) -> None:
        self.seek(self.bounds()[1])

    def bounds(self) -> tuple[int, int]:
        return self._consumer.get_watermark_offsets(TopicPartition(self._topic, self._partition), READ_SECONDS)

    def offset_at(self, timestamp_ms: int) -> int | None:
        asked = [TopicPartition(self._topic, self._partition, timestamp_ms)]
        found = self._consumer.offsets_for_times(asked, READ_SECONDS)[0]
        if found.error is not None:
            raise KafkaException(found.error)
        return None if found.offset < 0 else found.offset

    def close(self) -> None:
        self._consumer.close()


class Confluent(Client):
    assignors = ("range", "roundrobin", "cooperative-sticky")
    member_class = ConfluentMember

    def member(self, options: MemberOptions, journal: Journal, failures: list[str]) -> Member:
        if options.assignor == UNIFORM:
            # Scenarios iterate over the assignors of the classic protocol. This assignor is not one of them.
            return ConfluentMember(options, journal, failures, self.bootstrap)
        return super().member(options, journal, failures)

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "client.id": CLIENT_ID})

    @staticmethod
    def version() -> str:
        return f"librdkafka {confluent_kafka.libversion()[0]}, confluent-kafka {confluent_kafka.version()}"

    def producer(self, *, compression: str = "none", idempotent: bool = True) -> Producer:
        return ConfluentProducer(self.bootstrap, compression, idempotent)

    def reader(self, topic: str, partition: int, *, read_committed: bool = False) -> Reader:
        return ConfluentReader(self.bootstrap, topic, partition, read_committed)

    def transactional_producer(
        self, transactional_id: str, *, timeout_ms: int = TRANSACTION_TIMEOUT_MS
    ) -> TransactionalProducer:
        return ConfluentTransactionalProducer(self.bootstrap, transactional_id, timeout_ms)

    def group_reader(self, group: str, topic: str) -> GroupReader:
        return ConfluentGroupReader(self.bootstrap, group, topic)

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        named = _offsets({(topic, partition): offset for partition, offset in offsets.items()})
        altered = _one(self._admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, named)]))
        for partition in altered.topic_partitions:
            if partition.error is not None:
                raise KafkaException(partition.error)

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, partition)])
        found = _one(self._admin.list_consumer_group_offsets([asked])).topic_partitions[0]
        if found.error is not None:
            raise KafkaException(found.error)
        return None if found.offset < 0 else found.offset

    def create_topic(self, topic: str, partitions: int) -> None:
        _one(self._admin.create_topics([NewTopic(topic, partitions, 1)]))

    def delete_topic(self, topic: str) -> None:
        _one(self._admin.delete_topics([topic]))

    def partitions(self, topic: str) -> int | None:
        try:
            described = _one(self._admin.describe_topics(confluent_kafka.TopicCollection([topic])))
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise
        return len(described.partitions)

    def add_partitions(self, topic: str, total: int) -> None:
        _one(self._admin.create_partitions([NewPartitions(topic, total)]))

    def topic_config(self, topic: str, name: str) -> str | None:
        return _one(self._admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]))[name].value

    def set_topic_config(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        _one(self._admin.incremental_alter_configs([resource]))

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        _one(self._admin.delete_records([TopicPartition(topic, partition, before_offset)]))

    def groups(self) -> set[str]:
        listed = self._admin.list_consumer_groups().result(ADMIN_SECONDS)
        assert not listed.errors, listed.errors
        return {group.group_id for group in listed.valid}

    def group_state(self, group: str) -> tuple[str, int]:
        described = _one(self._admin.describe_consumer_groups([group]))
        return described.state.name, len(described.members)

    def delete_group(self, group: str) -> None:
        _one(self._admin.delete_consumer_groups([group]))

    def leave_versions(self) -> Mapping[int, Mapping[str, Any]]:
        return {1: {}}

    def close(self) -> None:
        """Do nothing: librdkafka closes the admin client when it is garbage-collected."""


def _one(futures: Mapping[Any, Future[Any]]) -> Any:
    """Return the result of the only request, or raise its KafkaException."""
    (future,) = futures.values()
    return future.result(ADMIN_SECONDS)


def _partitions(partitions: Sequence[TopicPartition]) -> set[Partition]:
    return {(partition.topic, partition.partition) for partition in partitions}


def _offsets(positions: Mapping[Partition, int]) -> list[TopicPartition]:
    return [TopicPartition(topic, partition, offset) for (topic, partition), offset in positions.items()]


class ServerSideConfluent(Confluent):
    assignors = (SERVER_SIDE,)
    member_class = ServerSideMember
