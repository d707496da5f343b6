"""A node's data plane without sockets: the real parts on the test's own Postgres, and requests as clients make them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast
from uuid import UUID

import asyncpg

from gateway.apis.coordinator_topics import InternalTopics
from gateway.apis.data.fetch import fetch
from gateway.apis.data.list_offsets import list_offsets
from gateway.apis.data.produce import produce
from gateway.apis.metadata_cache import DescribedTopics
from gateway.building.services import Services
from gateway.cluster.membership import Membership
from gateway.config.broker import BrokerConfig
from gateway.log.append_listener import NO_LISTENER
from gateway.log.appender import Appender
from gateway.log.catalog import Catalog
from gateway.log.recompression import Recompressor
from gateway.log.tail import Tail
from gateway.log.validator import BatchValidator
from gateway.net.context import ConnectionInfo, RequestContext
from gateway.net.places import NO_PLACE
from gateway.operate.metrics import Metrics
from gateway.quotas.throttles import Throttles
from gateway.share.partitions import SharePartitions
from gateway.share.sessions import ShareSessions
from gateway.transactions.coordinator import Transactions
from protocol.api_keys import ApiKey
from protocol.compression import Compression
from protocol.errors import ErrorCode
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData
from protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from protocol.records import Record, build_batch, iter_records, split_batches
from storage.history import HistoryStore
from storage.log import LogStore
from storage.nodes import NodeStore
from storage.pool import Database
from storage.producers import ProducerStore
from storage.share import ShareStore
from storage.topics import TopicStore
from storage.transactions import TransactionStore
from storage.types import NewTopic, PartitionKey, Topic
from storage.users import UserStore

PRODUCE_VERSION = 9
FETCH_VERSION = 11
FIRST_VERSION_WITH_IDS = 13


class LongKnown(Membership):
    """The membership of a node that all other nodes have known for a long time."""

    @property
    def known_since_s(self) -> float:
        return float("-inf")

    def lapse(self) -> None:
        """Behave as if the registration had expired."""
        self._registered_until_s = float("-inf")


class Relay:
    """Forwards notifications of appends to a listener that a test may replace."""

    def __init__(self) -> None:
        self.listener = NO_LISTENER

    def appended(self, key: PartitionKey, high_watermark: int) -> None:
        self.listener.appended(key, high_watermark)

    def in_doubt(self) -> None:
        self.listener.in_doubt()


class Hears:
    """A listener built from functions."""

    def __init__(
        self,
        appended: Callable[[PartitionKey, int], object] = lambda key, high_watermark: None,
        in_doubt: Callable[[], object] = lambda: None,
    ) -> None:
        self._appended, self._in_doubt = appended, in_doubt

    def appended(self, key: PartitionKey, high_watermark: int) -> None:
        self._appended(key, high_watermark)

    def in_doubt(self) -> None:
        self._in_doubt()


class DataPlane:
    """One node. Two instances on one database are two nodes."""

    def __init__(self, database: Database, *, tail_bytes: int, committers: int, name: str) -> None:
        self.database = database
        nodes = NodeStore(database)
        self.topics = TopicStore(database, nodes.registration)
        self.log = LogStore(database)
        self.tail = Tail(tail_bytes)
        self.connections: dict[str, ConnectionInfo] = {}
        self.commits: list[tuple[int, int]] = []
        self.appends, self.markers = Relay(), Relay()
        self.outcomes: list[str] = []
        """Results of ended transactions."""
        self.settled: Callable[[PartitionKey], Callable[[], bool]] = lambda key: lambda: True
        self.appender = Appender(
            self.log,
            self.tail,
            committers=committers,
            observe_commit=lambda batches, size_bytes, _: self.commits.append((batches, size_bytes)),
            listener=self.appends,
        )
        self.validator = BatchValidator()
        self.recompressor = Recompressor()
        self.catalog = Catalog(self.topics, self.tail, BrokerConfig(), settled=lambda key: self.settled(key))
        self.membership = LongKnown(nodes, {"PLAINTEXT": (name, 9092)}, None, 60_000)
        producers = ProducerStore(database)
        self.transactions = Transactions(
            TransactionStore(database),
            producers,
            self.tail,
            self.membership,
            listener=self.markers,
            observe_end=self.outcomes.append,
        )
        unused = cast("Any", None)
        self.services = Services(
            settings=unused,
            catalog=self.catalog,
            topics=self.topics,
            log=self.log,
            validator=self.validator,
            recompressor=self.recompressor,
            appender=self.appender,
            tail=self.tail,
            producers=producers,
            offsets=unused,
            groups=unused,
            membership=self.membership,
            metrics=Metrics(),
            cluster_id="cluster",
            described_topics=DescribedTopics(),
            internal_topics=InternalTopics(),
            history=HistoryStore(database),
            transactions=self.transactions,
            throttles=Throttles(lambda: self.catalog.quotas),
            share=SharePartitions(ShareStore(database)),
            share_sessions=ShareSessions(),
            share_store=ShareStore(database),
            users=UserStore(database),
        )

    async def create_topic(
        self, name: str, partitions: int = 1, configs: dict[str, str] | None = None, *, internal: bool = False
    ) -> Topic:
        (topic,) = await self.topics.create([NewTopic(name, partitions, configs or {}, internal)])
        assert isinstance(topic, Topic)
        self.catalog.apply(topic)
        return topic

    async def delete_topic(self, topic: Topic) -> None:
        assert await self.topics.delete(topic.topic_id)
        self.catalog.remove(topic.topic_id)

    def context(self, api_key: ApiKey, version: int, connection_id: str = "connection") -> RequestContext:
        connection = self.connections.setdefault(connection_id, ConnectionInfo(connection_id, "/127.0.0.1"))
        place = connection.line.take() if api_key is ApiKey.PRODUCE else NO_PLACE
        return RequestContext(api_key, version, 1, "tests", connection, self.services, place)

    # --- produce ------------------------------------------------------------------------------------------------------

    async def send(
        self,
        topic: Topic | str,
        records: bytes | bytearray | None,
        *,
        partition: int = 0,
        version: int = PRODUCE_VERSION,
        connection_id: str = "connection",
    ) -> PartitionProduceResponse:
        """Produce one batch to one partition with acks=all."""
        request = produce_request([(topic, partition, records)])
        response = await produce(request, self.context(ApiKey.PRODUCE, version, connection_id))
        assert response is not None
        return only(response.responses[0].partition_responses)

    async def send_all(
        self, batches: Sequence[tuple[Topic | str, int, bytes | bytearray | None]], *, version: int = PRODUCE_VERSION
    ) -> list[PartitionProduceResponse]:
        """Produce several batches in one request. Return their answers in the same order."""
        response = await produce(produce_request(batches), self.context(ApiKey.PRODUCE, version))
        assert isinstance(response, ProduceResponse)
        return [partition for topic in response.responses for partition in topic.partition_responses]

    async def fill(self, topic: Topic, sizes: Iterable[int], *, partition: int = 0) -> list[int]:
        """Produce batches of one record, each of exactly this size. Return their offsets."""
        offsets: list[int] = []
        for size in sizes:
            answer = await self.send(topic, batch_of_size(size), partition=partition)
            assert answer.error_code == ErrorCode.NONE, answer
            offsets.append(answer.base_offset)
        return offsets

    # --- fetch --------------------------------------------------------------------------------------------------------

    async def fetch(
        self,
        asked: Sequence[tuple[Topic | str, FetchPartition]],
        *,
        version: int = FETCH_VERSION,
        max_wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 2**31 - 1,
        isolation_level: int = 0,
        session: tuple[int, int] = (0, -1),
    ) -> FetchResponse:
        return await fetch(
            FetchRequest(
                max_wait_ms=max_wait_ms,
                min_bytes=min_bytes,
                max_bytes=max_bytes,
                isolation_level=isolation_level,
                session_id=session[0],
                session_epoch=session[1],
                topics=tuple(
                    FetchTopic(topic=name_of(topic), topic_id=id_of(topic), partitions=(partition,))
                    for topic, partition in asked
                ),
            ),
            self.context(ApiKey.FETCH, version),
        )

    async def fetch_one(
        self, topic: Topic, offset: int, *, partition: int = 0, partition_max_bytes: int = 2**20, **options: Any
    ) -> PartitionData:
        response = await self.fetch([(topic, at(offset, partition, max_bytes=partition_max_bytes))], **options)
        return only(only(response.responses).partitions)

    async def list_offset(
        self,
        topic: Topic | str,
        timestamp: int,
        *,
        partition: int = 0,
        version: int = 7,
        current_leader_epoch: int = -1,
        isolation_level: int = 0,
    ) -> ListOffsetsPartitionResponse:
        response = await list_offsets(
            ListOffsetsRequest(
                replica_id=-1,
                isolation_level=isolation_level,
                topics=(
                    ListOffsetsTopic(
                        name=name_of(topic),
                        partitions=(
                            ListOffsetsPartition(
                                partition_index=partition,
                                timestamp=timestamp,
                                current_leader_epoch=current_leader_epoch,
                            ),
                        ),
                    ),
                ),
            ),
            self.context(ApiKey.LIST_OFFSETS, version),
        )
        return only(only(response.topics).partitions)


@asynccontextmanager
async def data_plane(
    url: str, *, tail_bytes: int = 2**24, committers: int = 2, name: str = "node-1"
) -> AsyncGenerator[DataPlane]:
    database = await Database.open(url, hot_connections=4, cold_connections=2)
    try:
        node = DataPlane(database, tail_bytes=tail_bytes, committers=committers, name=name)
        await node.membership.join()
        await node.catalog.refresh_if_changed()
        yield node
        await node.appender.drain(5.0)
        await node.validator.close()
        await node.recompressor.close()
    finally:
        await database.close()


@asynccontextmanager
async def locked_partition(url: str, key: PartitionKey) -> AsyncGenerator[asyncpg.Connection]:
    """Block appends to this partition until the block ends."""
    connection: asyncpg.Connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute("select 1 from sluice.partition where partition_key = $1 for update", key)
            yield connection
    finally:
        await connection.close()


async def terminate_backends(connection: asyncpg.Connection) -> None:
    """Close every other connection to this database, as a crash of Postgres does."""
    await connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"
    )


# --- values ----------------------------------------------------------------------------------------------------------


def only(items: Sequence[Any]) -> Any:
    assert len(items) == 1, items
    return items[0]


def name_of(topic: Topic | str) -> str:
    return topic if isinstance(topic, str) else topic.name


def id_of(topic: Topic | str) -> UUID:
    return UUID(int=0) if isinstance(topic, str) else topic.topic_id


def produce_request(
    batches: Sequence[tuple[Topic | str, int, bytes | bytearray | None]], *, acks: int = -1, timeout_ms: int = 30_000
) -> ProduceRequest:
    return ProduceRequest(
        acks=acks,
        timeout_ms=timeout_ms,
        topic_data=tuple(
            TopicProduceData(
                name=name_of(topic),
                topic_id=id_of(topic),
                partition_data=(
                    PartitionProduceData(
                        index=index, records=None if records is None else memoryview(bytearray(records))
                    ),
                ),
            )
            for topic, index, records in batches
        ),
    )


def batch_of(
    *values: bytes | None,
    timestamps: Sequence[int] = (),
    keys: Sequence[bytes | None] = (),
    compression: Compression = Compression.NONE,
    producer: tuple[int, int, int] = (-1, -1, -1),
) -> bytes:
    """Return a batch of these values; `producer` is (id, epoch, base sequence)."""
    now_ms = time.time_ns() // 1_000_000
    records = [
        Record(offset, timestamps[offset] if timestamps else now_ms, keys[offset] if keys else b"k%d" % offset, value)
        for offset, value in enumerate(values)
    ]
    producer_id, producer_epoch, base_sequence = producer
    return build_batch(
        records,
        compression=compression,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def batch_of_size(size_bytes: int) -> bytes:
    """Return a batch of one record with a total size of exactly this many bytes (at least 200)."""
    overhead = len(batch_of(b"x" * 1000)) - 1000
    batch = batch_of(b"x" * (size_bytes - overhead))
    if len(batch) != size_bytes:
        batch = batch_of(b"x" * (size_bytes - overhead + size_bytes - len(batch)))
    assert len(batch) == size_bytes
    return batch


def at(
    offset: int,
    partition: int = 0,
    *,
    max_bytes: int = 2**20,
    current_leader_epoch: int = -1,
    last_fetched_epoch: int = -1,
) -> FetchPartition:
    return FetchPartition(
        partition=partition,
        fetch_offset=offset,
        partition_max_bytes=max_bytes,
        current_leader_epoch=current_leader_epoch,
        last_fetched_epoch=last_fetched_epoch,
    )


def raw(part: PartitionData) -> bytes:
    """Return the records field of an answer as the client receives it."""
    records = part.records
    if isinstance(records, tuple):
        return b"".join(bytes(chunk) for chunk in records)
    return bytes(records or b"")


def batches_in(part: PartitionData) -> list[memoryview]:
    return split_batches(raw(part), fetched=True)


def records_in(part: PartitionData) -> list[Record]:
    return [record for batch in batches_in(part) for record in iter_records(batch)]


def offsets_in(part: PartitionData) -> list[int]:
    return [record.offset for record in records_in(part)]
