"""aiokafka behind the interface of `tests.compat.python.client`: blocking calls on an event loop of its own per
object."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiokafka
import aiokafka.abc
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError, ProducerFenced, for_code
from aiokafka.protocol.group import JoinGroupRequest, SyncGroupRequest

from tests.aiokafka_stop import stop_aiokafka
from tests.compat.python.client import (
    CLIENT_ID,
    HEARTBEAT_INTERVAL_MS,
    JOIN_SECONDS,
    METADATA_MAX_AGE_MS,
    READ_SECONDS,
    TRANSACTION_TIMEOUT_MS,
    Client,
    GroupReader,
    Member,
    MemberOptions,
    Producer,
    ProducerFencedError,
    Reader,
    Record,
    TransactionalProducer,
)
from tests.compat.python.journal import Journal, Partition
from tests.compat.python.options import RAW_TIMEOUT_MS, SESSION_TIMEOUT_MS

ASSIGNORS = {
    "range": RangePartitionAssignor,
    "roundrobin": RoundRobinPartitionAssignor,
    "sticky": StickyPartitionAssignor,
}
MEMBER_ID_REQUIRED = 79
UNKNOWN_TOPIC_OR_PARTITION = 3
LEAVE_GROUP = 13
TRANSACTION_SECONDS = 20.0

T = TypeVar("T")


class Loop:
    """An event loop that runs only during a call."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        self._loop.close()


class AiokafkaMember(Member, aiokafka.abc.ConsumerRebalanceListener):
    def __init__(self, options: MemberOptions, journal: Journal, failures: list[str], bootstrap: str) -> None:
        super().__init__(options, journal, failures)
        self.bootstrap = bootstrap

    def open(self) -> None:
        self.loop = Loop()
        self.consumer = self.loop.run(self._start())

    async def _start(self) -> aiokafka.AIOKafkaConsumer:
        options = self.options
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            group_id=options.group,
            client_id=CLIENT_ID,
            group_instance_id=options.instance_id,
            auto_offset_reset="earliest",
            enable_auto_commit=options.commit == "auto",
            auto_commit_interval_ms=1000,
            session_timeout_ms=options.session_timeout_ms,
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            metadata_max_age_ms=METADATA_MAX_AGE_MS,
            partition_assignment_strategy=(ASSIGNORS[options.assignor],),
        )
        if options.pattern is not None:
            consumer.subscribe(pattern=options.pattern, listener=self)
        else:
            consumer.subscribe(list(options.topics), listener=self)
        await consumer.start()
        leave_version = options.extra.get("leave_version")
        if leave_version is not None:
            for connection in consumer._client._conns.values():
                connection._versions = {**connection._versions, LEAVE_GROUP: (leave_version, leave_version)}
        return consumer

    def subscribe(self, topics: Sequence[str]) -> None:
        self.loop.run(self._subscribe(topics))

    async def _subscribe(self, topics: Sequence[str]) -> None:
        self.consumer.subscribe(list(topics), listener=self)

    def on_partitions_assigned(self, assigned: set[aiokafka.TopicPartition]) -> None:
        self.now_owns(_partitions(assigned))

    async def on_partitions_revoked(self, revoked: set[aiokafka.TopicPartition]) -> None:
        if self.options.commit == "revoke" and revoked:
            # If a revocation happens between a poll and the processing of its records, the member must count those
            # records as processed.
            await self.consumer.commit()
        self.gave_up(_partitions(revoked))

    def poll_once(self) -> None:
        self.loop.run(self._poll_once())

    async def _poll_once(self) -> None:
        for records in (await self.consumer.getmany(timeout_ms=100)).values():
            for record in records:
                self.processed(record.topic, record.partition, record.offset)
                if self.options.commit == "each":
                    await self.consumer.commit(_offsets({(record.topic, record.partition): record.offset + 1}))

    def close(self) -> None:
        self.loop.run(self._leave())
        self.loop.close()

    async def _leave(self) -> None:
        if self.options.commit == "revoke":
            # When aiokafka closes it calls no callback.
            await self.consumer.commit()
        await stop_aiokafka(self.consumer)


class AiokafkaProducer(Producer):
    def __init__(self, bootstrap: str, compression: str, idempotent: bool, **extra: Any) -> None:
        self._loop = Loop()
        self._producer = self._loop.run(self._start(bootstrap, compression, idempotent, extra))

    async def _start(
        self, bootstrap: str, compression: str, idempotent: bool, extra: dict[str, Any]
    ) -> aiokafka.AIOKafkaProducer:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            client_id=CLIENT_ID,
            acks="all",
            enable_idempotence=idempotent,
            compression_type=None if compression == "none" else compression,
            max_request_size=2_000_000,
            **extra,
        )
        await producer.start()
        return producer

    def send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        return self._loop.run(self._send(topic, records))

    async def _send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        sent = [
            await self._producer.send(
                topic,
                value=record.value,
                key=record.key,
                partition=partition,
                headers=list(record.headers),
                timestamp_ms=record.timestamp_ms,
            )
            for partition, record in records
        ]
        return [(await future).offset for future in sent]

    def close(self) -> None:
        self._loop.run(self._producer.stop())
        self._loop.close()


class AiokafkaTransactionalProducer(AiokafkaProducer, TransactionalProducer):
    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        super().__init__(bootstrap, "none", True, transactional_id=transactional_id, transaction_timeout_ms=timeout_ms)

    def begin(self) -> None:
        self._in_time(self._producer.begin_transaction())

    def send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        return self._in_time(self._send(topic, records))

    def send_offsets(self, reader: GroupReader, group: str, positions: Mapping[Partition, int]) -> None:
        self._in_time(self._producer.send_offsets_to_transaction(_offsets(positions), group))

    def commit(self) -> None:
        self._in_time(self._producer.commit_transaction())

    def abort(self) -> None:
        self._in_time(self._producer.abort_transaction())

    def _in_time(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(asyncio.wait_for(coroutine, TRANSACTION_SECONDS))
        except ProducerFenced as error:
            raise ProducerFencedError(repr(error)) from error

    def close(self) -> None:
        # aiokafka raises the error that ended the producer a second time.
        with contextlib.suppress(KafkaError):
            super().close()


class AiokafkaGroupReader(GroupReader):
    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self._loop = Loop()
        self._consumer = self._loop.run(self._start(bootstrap, group, topic))

    async def _start(self, bootstrap: str, group: str, topic: str) -> aiokafka.AIOKafkaConsumer:
        consumer = aiokafka.AIOKafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            client_id=CLIENT_ID,
            group_id=group,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
        )
        await consumer.start()
        return consumer

    def read(self, count: int, seconds: float = JOIN_SECONDS) -> list[tuple[int, int, Record]]:
        return self._loop.run(self._read(count, seconds))

    async def _read(self, count: int, seconds: float) -> list[tuple[int, int, Record]]:
        found: list[tuple[int, int, Record]] = []
        deadline = time.monotonic() + seconds
        while len(found) < count and time.monotonic() < deadline:
            polled = await self._consumer.getmany(timeout_ms=100, max_records=count - len(found))
            for records in polled.values():
                found += [(record.partition, record.offset, Record(record.value, record.key)) for record in records]
        return found

    def close(self) -> None:
        self._loop.run(stop_aiokafka(self._consumer))
        self._loop.close()


class AiokafkaReader(Reader):
    def __init__(self, bootstrap: str, topic: str, partition: int, read_committed: bool) -> None:
        self._loop = Loop()
        self._partition = aiokafka.TopicPartition(topic, partition)
        self._consumer = self._loop.run(self._start(bootstrap, read_committed))

    async def _start(self, bootstrap: str, read_committed: bool) -> aiokafka.AIOKafkaConsumer:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            client_id=CLIENT_ID,
            isolation_level="read_committed" if read_committed else "read_uncommitted",
            auto_offset_reset="earliest",
        )
        consumer.assign([self._partition])
        await consumer.start()
        return consumer

    def read(self, count: int, seconds: float = READ_SECONDS) -> list[tuple[int, Record]]:
        return self._loop.run(self._read(count, seconds))

    async def _read(self, count: int, seconds: float) -> list[tuple[int, Record]]:
        found: list[tuple[int, Record]] = []
        while len(found) < count:
            polled = await self._consumer.getmany(timeout_ms=int(seconds * 1000), max_records=count - len(found))
            records = polled.get(self._partition, [])
            if not records:
                break
            found += [
                (record.offset, Record(record.value, record.key, tuple(record.headers), record.timestamp))
                for record in records
            ]
        return found

    def seek(self, offset: int) -> None:
        self._consumer.seek(self._partition, offset)

    def seek_to_beginning(self) -> None:
        self._loop.run(self._consumer.seek_to_beginning(self._partition))

    def seek_to_end(self) -> None:
        self._loop.run(self._consumer.seek_to_end(self._partition))

    def bounds(self) -> tuple[int, int]:
        begin = self._loop.run(self._consumer.beginning_offsets([self._partition]))
        return begin[self._partition], self._loop.run(self._consumer.end_offsets([self._partition]))[self._partition]

    def offset_at(self, timestamp_ms: int) -> int | None:
        found = self._loop.run(self._consumer.offsets_for_times({self._partition: timestamp_ms}))[self._partition]
        return None if found is None else found.offset

    def close(self) -> None:
        self._loop.run(stop_aiokafka(self._consumer))
        self._loop.close()


class Aiokafka(Client):
    assignors = tuple(ASSIGNORS)
    member_class = AiokafkaMember
    deletes_groups = False
    no_upgrade = "no cooperative assignor"
    # Before a rebalance aiokafka commits all positions. It retries for ever while one of them belongs to a deleted
    # topic.
    commit_where_topics_go = "each"
    not_fenced = "its heartbeats carry no group.instance.id, so a second of the name is not told from a first"

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self._loop = Loop()
        self._opened: AIOKafkaAdminClient | None = None

    @staticmethod
    def version() -> str:
        return aiokafka.__version__

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine)

    @property
    def _admin(self) -> AIOKafkaAdminClient:
        if self._opened is None:
            self._opened = self._run(self._open())
        return self._opened

    async def _open(self) -> AIOKafkaAdminClient:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap, client_id=CLIENT_ID)
        await admin.start()
        return admin

    def producer(self, *, compression: str = "none", idempotent: bool = True) -> Producer:
        return AiokafkaProducer(self.bootstrap, compression, idempotent)

    def reader(self, topic: str, partition: int, *, read_committed: bool = False) -> Reader:
        return AiokafkaReader(self.bootstrap, topic, partition, read_committed)

    def transactional_producer(
        self, transactional_id: str, *, timeout_ms: int = TRANSACTION_TIMEOUT_MS
    ) -> TransactionalProducer:
        return AiokafkaTransactionalProducer(self.bootstrap, transactional_id, timeout_ms)

    def group_reader(self, group: str, topic: str) -> GroupReader:
        return AiokafkaGroupReader(self.bootstrap, group, topic)

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        named = {(topic, partition): offset for partition, offset in offsets.items()}
        self._run(self._commit(group, named))

    async def _commit(self, group: str, positions: Mapping[Partition, int]) -> None:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap, client_id=CLIENT_ID, group_id=group, enable_auto_commit=False
        )
        consumer.assign([aiokafka.TopicPartition(*partition) for partition in positions])
        await consumer.start()
        try:
            await consumer.commit(_offsets(positions))
        finally:
            await stop_aiokafka(consumer)

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        position = aiokafka.TopicPartition(topic, partition)
        found = self._run(self._admin.list_consumer_group_offsets(group, partitions=[position])).get(position)
        return None if found is None or found.offset < 0 else found.offset

    def create_topic(self, topic: str, partitions: int) -> None:
        answer = self._run(self._admin.create_topics([NewTopic(topic, partitions, 1)]))
        _raise_errors(answer.topic_errors)

    def delete_topic(self, topic: str) -> None:
        _raise_errors(self._run(self._admin.delete_topics([topic])).topic_error_codes)

    def partitions(self, topic: str) -> int | None:
        (described,) = self._run(self._admin.describe_topics([topic]))
        if described["error_code"] == UNKNOWN_TOPIC_OR_PARTITION:
            return None
        _raise_errors([(topic, described["error_code"])])
        return len(described["partitions"])

    def add_partitions(self, topic: str, total: int) -> None:
        answer = self._run(self._admin.create_partitions({topic: NewPartitions(total)}))
        _raise_errors(answer.topic_errors)

    def topic_config(self, topic: str, name: str) -> str | None:
        answers = self._run(self._admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)]))
        entries = answers[0].resources[0][4]
        return next(entry[1] for entry in entries if entry[0] == name)

    def set_topic_config(self, topic: str, name: str, value: str) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})
        answers = self._run(self._admin.alter_configs([resource]))
        _raise_errors([(name, answers[0].resources[0][0])])

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        position = aiokafka.TopicPartition(topic, partition)
        self._run(self._admin.delete_records({position: RecordsToDelete(before_offset=before_offset)}))

    def groups(self) -> set[str]:
        return {name for name, _protocol_type in self._run(self._admin.list_consumer_groups())}

    def group_state(self, group: str) -> tuple[str, int]:
        (answer,) = self._run(self._admin.describe_consumer_groups([group]))
        described = answer.groups[0]
        return described[2], len(described[5])

    def leave_versions(self) -> Mapping[int, Mapping[str, Any]]:
        return {version: {"leave_version": version} for version in (0, 1)}

    def raw_group(self, protocol_type: str, protocol: str, metadata: bytes, assignment: bytes) -> bytes:
        lead = self._lead(self._admin, f"raw-{protocol_type}", protocol_type, protocol, metadata, assignment)
        return self._run(lead)

    @staticmethod
    async def _lead(
        admin: AIOKafkaAdminClient, group: str, protocol_type: str, protocol: str, metadata: bytes, assignment: bytes
    ) -> bytes:
        client = admin._client
        node = await admin.find_coordinator(group)
        member_id = ""
        while True:
            request = JoinGroupRequest(
                group, RAW_TIMEOUT_MS, RAW_TIMEOUT_MS, member_id, None, protocol_type, [(protocol, metadata)]
            )
            joined = await client.send(node, request)
            member_id = joined.member_id
            if joined.error_code != MEMBER_ID_REQUIRED:
                break
        assert joined.error_code == 0, joined
        assert joined.leader_id == member_id, joined
        assert [bytes(member[-1]) for member in joined.members] == [metadata], joined
        synced = await client.send(
            node, SyncGroupRequest(group, joined.generation_id, member_id, None, [(member_id, assignment)])
        )
        assert synced.error_code == 0, synced
        return bytes(synced.member_assignment)

    def close(self) -> None:
        if self._opened is not None:
            self._run(self._opened.close())
        self._loop.close()


def _raise_errors(outcomes: Sequence[Sequence[Any]]) -> None:
    """Raise the first error in a list of rows. A row consists of name, code, and perhaps a message."""
    for _name, code, *message in outcomes:
        if code:
            raise for_code(code)(*message)


def _partitions(partitions: set[aiokafka.TopicPartition]) -> set[Partition]:
    return {(partition.topic, partition.partition) for partition in partitions}


def _offsets(positions: Mapping[Partition, int]) -> dict[aiokafka.TopicPartition, int]:
    return {aiokafka.TopicPartition(*partition): offset for partition, offset in positions.items()}
