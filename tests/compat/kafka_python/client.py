"""kafka-python behind the interface of `tests.compat.python.client`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import kafka
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient, NewTopic
from kafka.consumer.subscription_state import AsyncConsumerRebalanceListener
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from kafka.errors import (
    FencedInstanceIdError,
    GroupIdNotFoundError,
    KafkaConnectionError,
    KafkaError,
    UnknownTopicOrPartitionError,
)
from kafka.errors import ProducerFencedError as ProducerFenced
from kafka.protocol.consumer import JoinGroupRequest, SyncGroupRequest

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
from tests.compat.python.journal import Journal, Partition
from tests.compat.python.options import RAW_TIMEOUT_MS, SESSION_TIMEOUT_MS

ASSIGNORS = {
    "range": RangePartitionAssignor,
    "roundrobin": RoundRobinPartitionAssignor,
    "sticky": StickyPartitionAssignor,
    "cooperative-sticky": CooperativeStickyAssignor,
}
LEAVE_GROUP = 13
ADMIN_TIMEOUT_MS = 15_000
POLL_MS = 100
# kafka-python drops a JoinGroup's answer if its poll ends while the request is parked and the rejoin came from changed
# topics or metadata. The member then sends no heartbeat until its session has expired, and may not return. In scenarios
# with such rejoins a poll must last longer than a rebalance, and so longer than another member's poll. Only the leader
# watches metadata, so it polls longer than the other members. A member that has changed its topics polls longer than
# the leader.
PATIENT_POLL_MS = 2000
CHANGED_POLL_MS = 5000


class KafkaPythonMember(Member, kafka.ConsumerRebalanceListener):
    def __init__(self, options: MemberOptions, journal: Journal, failures: list[str], bootstrap: str) -> None:
        super().__init__(options, journal, failures)
        self.bootstrap = bootstrap
        self._leave_version = options.extra.get("leave_version")
        self._topics_changed = False

    def open(self) -> None:
        options = self.options
        self.consumer = kafka.KafkaConsumer(
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
            reconnect_backoff_max_ms=500,
            partition_assignment_strategy=[ASSIGNORS[options.assignor]],
        )
        self.listener = CommitInRevoke(self) if options.commit == "revoke" else self
        if options.pattern is not None:
            self.consumer.subscribe(pattern=options.pattern, listener=self.listener)
        else:
            self.consumer.subscribe(list(options.topics), listener=self.listener)

    def subscribe(self, topics: Sequence[str]) -> None:
        self.consumer.subscribe(list(topics), listener=self.listener)
        self._topics_changed = True

    def on_partitions_assigned(self, assigned: set[kafka.TopicPartition]) -> None:
        self.now_owns(_partitions(self.consumer.assignment()))

    def on_partitions_revoked(self, revoked: set[kafka.TopicPartition]) -> None:
        self.gave_up(_partitions(revoked))

    def on_partitions_lost(self, lost: set[kafka.TopicPartition]) -> None:
        self.gave_up(_partitions(lost), lost=True)

    def poll_once(self) -> None:
        try:
            for records in self.consumer.poll(self._patience_ms()).values():
                for record in records:
                    self.processed(record.topic, record.partition, record.offset)
                    if self.options.commit == "each":
                        self.consumer.commit(_offsets({(record.topic, record.partition): record.offset + 1}))
        except FencedInstanceIdError as error:
            raise FencedError(str(error)) from error
        except KafkaConnectionError:
            # poll raises this if the broker is away for more than about five seconds, for which the library looks for a
            # coordinator. An application polls again.
            return

    def _patience_ms(self) -> int:
        changed, self._topics_changed = self._topics_changed, False
        if changed:
            return CHANGED_POLL_MS
        leads = self.consumer._coordinator._is_leader
        return PATIENT_POLL_MS if not self.owned or (leads and self.options.topics_change) else POLL_MS

    def close(self) -> None:
        if self._leave_version is not None:
            # The library decides from the API versions of each connection. By now the connection to the coordinator
            # exists.
            manager = self.consumer._client._manager
            for known in (manager, *manager._conns.values()):
                versions = known.broker_version_data
                versions.api_versions = {**versions.api_versions, LEAVE_GROUP: (0, self._leave_version)}
        self.consumer.close()


class CommitInRevoke(AsyncConsumerRebalanceListener):
    """A rebalance listener that commits when partitions are revoked. The library refuses to block in a callback, so the
    listener is asynchronous.
    """

    def __init__(self, member: KafkaPythonMember) -> None:
        self._member = member

    async def on_partitions_revoked(self, revoked: set[kafka.TopicPartition]) -> None:
        # A cooperative member has already forgotten its positions in revoked partitions. So the commit lists the
        # positions.
        positions = self._member.uncommitted(_partitions(revoked))
        if positions:
            await self._member.consumer.commit_async(_offsets(positions))
        self._member.on_partitions_revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[kafka.TopicPartition]) -> None:
        self._member.on_partitions_assigned(assigned)

    async def on_partitions_lost(self, lost: set[kafka.TopicPartition]) -> None:
        self._member.on_partitions_lost(lost)


class KafkaPythonProducer(Producer):
    def __init__(self, bootstrap: str, compression: str, idempotent: bool, **extra: Any) -> None:
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap,
            client_id=CLIENT_ID,
            acks="all",
            enable_idempotence=idempotent,
            compression_type=None if compression == "none" else compression,
            max_request_size=2_000_000,
            reconnect_backoff_max_ms=500,
            **extra,
        )

    def send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        futures = [
            self._producer.send(
                topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers),
                partition=partition,
                timestamp_ms=record.timestamp_ms,
            )
            for partition, record in records
        ]
        return [future.get(60).offset for future in futures]

    def close(self) -> None:
        self._producer.close(10)


class KafkaPythonTransactionalProducer(KafkaPythonProducer, TransactionalProducer):
    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        super().__init__(bootstrap, "none", True, transactional_id=transactional_id, transaction_timeout_ms=timeout_ms)
        self._producer.init_transactions()

    def begin(self) -> None:
        with _telling_fenced():
            self._producer.begin_transaction()

    def send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        with _telling_fenced():
            return super().send(topic, records)

    def send_offsets(self, reader: GroupReader, group: str, positions: Mapping[Partition, int]) -> None:
        assert isinstance(reader, KafkaPythonGroupReader)
        with _telling_fenced():
            self._producer.send_offsets_to_transaction(_offsets(positions), reader.consumer.group_metadata())

    def commit(self) -> None:
        with _telling_fenced():
            self._producer.commit_transaction()

    def abort(self) -> None:
        with _telling_fenced():
            self._producer.abort_transaction()


@contextlib.contextmanager
def _telling_fenced() -> Iterator[None]:
    try:
        yield
    except KafkaError as error:
        # If the producer has failed for good, the library's exception has the reason among its arguments.
        if any(isinstance(reason, ProducerFenced) for reason in (error, *error.args)):
            raise ProducerFencedError(repr(error)) from error
        raise


class KafkaPythonGroupReader(GroupReader):
    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self.consumer = kafka.KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            client_id=CLIENT_ID,
            group_id=group,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            reconnect_backoff_max_ms=500,
        )

    def read(self, count: int, seconds: float = JOIN_SECONDS) -> list[tuple[int, int, Record]]:
        found: list[tuple[int, int, Record]] = []
        deadline = time.monotonic() + seconds
        while len(found) < count and time.monotonic() < deadline:
            for records in self.consumer.poll(PATIENT_POLL_MS, max_records=count - len(found)).values():
                found += [(record.partition, record.offset, Record(record.value, record.key)) for record in records]
        return found

    def close(self) -> None:
        self.consumer.close()


class KafkaPythonReader(Reader):
    def __init__(self, bootstrap: str, topic: str, partition: int, read_committed: bool) -> None:
        self._partition = kafka.TopicPartition(topic, partition)
        self._consumer = kafka.KafkaConsumer(
            bootstrap_servers=bootstrap,
            client_id=CLIENT_ID,
            isolation_level="read_committed" if read_committed else "read_uncommitted",
            auto_offset_reset="earliest",
            group_id=None,
        )
        self._consumer.assign([self._partition])

    def read(self, count: int, seconds: float = READ_SECONDS) -> list[tuple[int, Record]]:
        found: list[tuple[int, Record]] = []
        while len(found) < count:
            polled = self._consumer.poll(int(seconds * 1000), max_records=count - len(found))
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
        self._consumer.seek_to_beginning(self._partition)

    def seek_to_end(self) -> None:
        self._consumer.seek_to_end(self._partition)
        self._consumer.position(self._partition)

    def bounds(self) -> tuple[int, int]:
        begin = self._consumer.beginning_offsets([self._partition])[self._partition]
        return begin, self._consumer.end_offsets([self._partition])[self._partition]

    def offset_at(self, timestamp_ms: int) -> int | None:
        found = self._consumer.offsets_for_times({self._partition: timestamp_ms})[self._partition]
        return None if found is None else found.offset

    def close(self) -> None:
        self._consumer.close()


class KafkaPython(Client):
    assignors = tuple(ASSIGNORS)
    member_class = KafkaPythonMember
    null_headers = False

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self._opened: KafkaAdminClient | None = None

    @staticmethod
    def version() -> str:
        return kafka.__version__

    @property
    def _admin(self) -> KafkaAdminClient:
        if self._opened is None:
            self._opened = KafkaAdminClient(
                bootstrap_servers=self.bootstrap, client_id=CLIENT_ID, request_timeout_ms=ADMIN_TIMEOUT_MS
            )
        return self._opened

    def producer(self, *, compression: str = "none", idempotent: bool = True) -> Producer:
        return KafkaPythonProducer(self.bootstrap, compression, idempotent)

    def reader(self, topic: str, partition: int, *, read_committed: bool = False) -> Reader:
        return KafkaPythonReader(self.bootstrap, topic, partition, read_committed)

    def transactional_producer(
        self, transactional_id: str, *, timeout_ms: int = TRANSACTION_TIMEOUT_MS
    ) -> TransactionalProducer:
        return KafkaPythonTransactionalProducer(self.bootstrap, transactional_id, timeout_ms)

    def group_reader(self, group: str, topic: str) -> GroupReader:
        return KafkaPythonGroupReader(self.bootstrap, group, topic)

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        named = {(topic, partition): offset for partition, offset in offsets.items()}
        answers = self._admin.alter_group_offsets(group, _offsets(named))
        for error in answers.values():
            if getattr(error, "errno", 0):
                raise error

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        position = kafka.TopicPartition(topic, partition)
        found = self._admin.list_group_offsets({group: [position]})[group].get(position)
        return None if found is None or found.offset < 0 else found.offset

    def create_topic(self, topic: str, partitions: int) -> None:
        self._admin.create_topics([NewTopic(topic, partitions, 1)])

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic])

    def partitions(self, topic: str) -> int | None:
        try:
            described = self._admin.describe_topics([topic])
        except UnknownTopicOrPartitionError:
            return None
        return len(described[0]["partitions"]) or None

    def add_partitions(self, topic: str, total: int) -> None:
        self._admin.create_partitions({topic: total})

    def topic_config(self, topic: str, name: str) -> str | None:
        described = self._admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)], config_filter="all")
        return described["topic"][topic][name]["value"]

    def set_topic_config(self, topic: str, name: str, value: str) -> None:
        self._admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})])

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        self._admin.delete_records({kafka.TopicPartition(topic, partition): before_offset})

    def groups(self) -> set[str]:
        return {group["group_id"] for group in self._admin.list_groups()}

    def group_state(self, group: str) -> tuple[str, int]:
        try:
            described: dict[str, Any] = self._admin.describe_groups([group])[group]
        except GroupIdNotFoundError:
            return "Dead", 0
        return described["group_state"], len(described["members"])

    def delete_group(self, group: str) -> None:
        outcome = dict(self._admin.delete_groups([group]))[group]
        if outcome != "OK":
            raise RuntimeError(outcome)

    def leave_versions(self) -> Mapping[int, Mapping[str, Any]]:
        return {version: {"leave_version": version} for version in range(6)}

    def raw_group(self, protocol_type: str, protocol: str, metadata: bytes, assignment: bytes) -> bytes:
        return self._admin._manager.run(
            self._lead, f"raw-{protocol_type}", protocol_type, protocol, metadata, assignment
        )

    async def _lead(self, group: str, protocol_type: str, protocol: str, metadata: bytes, assignment: bytes) -> bytes:
        manager = self._admin._manager
        node = await self._admin._find_coordinator_id(group)
        offered = [JoinGroupRequest.JoinGroupRequestProtocol(name=protocol, metadata=metadata)]
        member_id = ""
        while True:
            joined = await manager.send(
                JoinGroupRequest(
                    group_id=group,
                    session_timeout_ms=RAW_TIMEOUT_MS,
                    rebalance_timeout_ms=RAW_TIMEOUT_MS,
                    member_id=member_id,
                    group_instance_id=None,
                    protocol_type=protocol_type,
                    protocols=offered,
                ),
                node_id=node,
            )
            if joined.error_code != 79:
                break
            member_id = joined.member_id
        assert joined.error_code == 0, joined
        assert joined.leader == joined.member_id, joined
        assert [bytes(member.metadata) for member in joined.members] == [metadata], joined
        synced = await manager.send(
            SyncGroupRequest(
                group_id=group,
                generation_id=joined.generation_id,
                member_id=joined.member_id,
                group_instance_id=None,
                protocol_type=protocol_type,
                protocol_name=protocol,
                assignments=[
                    SyncGroupRequest.SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment)
                ],
            ),
            node_id=node,
        )
        assert synced.error_code == 0, synced
        return bytes(synced.assignment)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


def _partitions(partitions: set[kafka.TopicPartition]) -> set[Partition]:
    return {(partition.topic, partition.partition) for partition in partitions}


def _offsets(positions: Mapping[Partition, int]) -> dict[kafka.TopicPartition, kafka.structs.OffsetAndMetadata]:
    return {
        kafka.TopicPartition(topic, partition): kafka.structs.OffsetAndMetadata(offset, "", -1)
        for (topic, partition), offset in positions.items()
    }
