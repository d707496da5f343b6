"""Turn records that SQL transactions have staged into batches of the log, a moment after those transactions commit.

The one idea: offsets are given here and not in the user's transaction. So no user transaction ever holds a partition's
lock, many commits become one batch, and the batches are like any other: built by the code that builds all batches, with
the topic's compression and time. One node at a time relays for all; another one takes over when that node's session
with Postgres ends. See docs/decisions/0022.

The relay polls while transactions commit. After a quiet time it waits for a notification, which only a transaction that
commits in that state sends, because Postgres serialises the commits of transactions that notify.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

import structlog

from gateway.config.topic import TopicConfig
from gateway.log.append_listener import AppendListener
from gateway.log.catalog import Catalog
from gateway.log.recompression import CODECS, PRODUCER
from gateway.log.tail import Tail
from protocol.compression import Compression
from protocol.murmur import murmur2
from protocol.records import Record, TimestampType, build_batch
from storage.pool import Database
from storage.staged import StagedRecord, StagedRecords, StagedTransaction
from storage.types import Appended, NewBatch, Partition, PartitionKey, Refusal, Topic
from storage.written_chunks import Grown

logger = structlog.get_logger(__name__)

POLL_S = 0.004
"""Interval between two reads while transactions commit."""
BUSY_POLL_S = 0.010
"""Interval while at least BUSY_PER_S transactions commit. An append costs the node and Postgres about a millisecond of
processor, however few transactions it carries, and they share it with the clients."""
BUSY_PER_S = 100
QUIET_S = 2.0
"""After this time without a commit, the relay requests notifications instead of polling."""
LINGER_S = 0.5
"""How long the relay continues to poll after it has asked to be notified. A transaction that saw the relay polling
sends no notification, and may commit only now.
"""
SAFETY_S = 1.0
"""Interval between two reads if no notification arrives."""
FOREIGN_INTERVAL_S = 10.0
"""Interval at which a node that is not the relay looks whether the relay is a node at all."""
OWN_INTERVAL_S = 0.25
"""Interval at which other nodes try to become the relay."""
REFUSED_AT_ONCE = 10
"""Maximal number of topics in one pass that cannot be created. All other transactions wait for these attempts."""

BATCH_BYTES = 1024 * 1024
BATCH_RECORDS = 10_000
THREAD_BYTES = 64 * 1024
THREAD_RECORDS = 500
"""Records of more bytes, and more records, are encoded in a thread."""
RECORD_OVERHEAD_BYTES = 40
HEADER_OVERHEAD_BYTES = 10

CreateTopic = Callable[[str], Awaitable[Topic | str]]
"""Creates a topic and returns it, or the reason why it cannot be created."""


class _CannotCreateError(Exception):
    """A topic that the transaction `xid` has staged records for cannot be created."""

    def __init__(self, xid: int, topic: str, reason: str) -> None:
        super().__init__(f"topic {topic} cannot be created: {reason}")
        self.xid = xid
        self.topic = topic


@dataclass(slots=True)
class _Target:
    partition: Partition
    config: TopicConfig
    records: list[Record]


class Relay:
    """`run` is a pass of a supervisor: it relays until the session is lost."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        tail: Tail,
        create: CreateTopic,
        *,
        listener: AppendListener,
        now_ms: Callable[[], int],
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._tail = tail
        self._create = create
        self._notified = asyncio.Event()
        self._listener = listener
        self._now_ms = now_ms

    async def run(self) -> None:
        """Wait until this node may relay, and relay until the session with Postgres is lost. Raise StorageError."""
        session = await StagedRecords.open(self._database, self._notified.set)
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        try:
            while True:
                if await session.try_own():
                    await self._relay(session)
                if loop.time() > looked_s + FOREIGN_INTERVAL_S:
                    looked_s = loop.time()
                    await self._look_for_foreign_owner(session)
                await asyncio.sleep(OWN_INTERVAL_S)
        finally:
            session.close()

    async def _look_for_foreign_owner(self, session: StagedRecords) -> None:
        owner = await session.foreign_owner()
        if owner is not None:
            pid, role = owner
            logger.error(
                "records of SQL transactions wait: a session that is no node's holds the lock of the relay",
                role=role,
                end_it_by=f"select pg_terminate_backend({pid})",
            )

    async def _relay(self, session: StagedRecords) -> None:
        loop = asyncio.get_running_loop()
        # The predecessor may have ended in either state. Until it finds a transaction, a relay is quiet.
        awake: bool | None = None
        active_s = loop.time() - QUIET_S
        while True:
            self._notified.clear()
            found = await self._pass(session)
            now_s = loop.time()
            interval_s = poll_interval_s(found, now_s - active_s)
            if found:
                active_s = now_s
            quiet_s = now_s - active_s
            if awake is not (quiet_s < QUIET_S):
                awake = quiet_s < QUIET_S
                await session.set_awake(awake)
                continue
            if quiet_s < QUIET_S + LINGER_S:
                await asyncio.sleep(interval_s)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._notified.wait(), SAFETY_S)
                active_s = loop.time()

    async def _pass(self, session: StagedRecords) -> int:
        """Append the next transactions. Return the number of those that were waiting."""
        transactions = await session.look()
        if not transactions:
            return 0
        ready = await self._with_topics(session, transactions)
        if not ready:
            return len(transactions)
        outcomes: list[tuple[NewBatch, Appended | Refusal]] = []
        grown: list[Grown] = []
        try:
            if ready[0].is_small:
                outcomes = await session.append(ready, self._build)
            else:
                grown = await session.append_large(ready[0], self._build)
        except _CannotCreateError as error:
            for transaction in ready:
                if transaction.xid == error.xid:
                    self._postpone(session, transaction, error)
            return len(transactions)
        except BaseException:
            self._tail.doubt(asyncio.get_running_loop().time())
            self._listener.in_doubt()
            raise
        now_s = asyncio.get_running_loop().time()
        for batch, outcome in outcomes:
            self._record(batch, outcome, now_s)
        for end in grown:
            self._announce(end)
        return len(transactions)

    async def _with_topics(
        self, session: StagedRecords, transactions: Sequence[StagedTransaction]
    ) -> list[StagedTransaction]:
        """Create missing topics, and return the first transactions, without those whose topics cannot be created."""
        ready: list[StagedTransaction] = []
        names = await session.new_topics(transactions)
        refused: set[str] = set()
        for transaction in transactions:
            wanted = names.get(transaction.xid, ())
            if lacking := refused.intersection(wanted):
                session.postpone(transaction, lacking.pop())
                continue
            try:
                for name in wanted:
                    await self._existing(name, transaction.xid)
            except _CannotCreateError as error:
                self._postpone(session, transaction, error)
                refused.add(error.topic)
                if len(refused) == REFUSED_AT_ONCE:
                    break  # the other transactions keep their order, and the next pass relays them
            else:
                ready.append(transaction)
        return ready

    def _postpone(self, session: StagedRecords, transaction: StagedTransaction, error: _CannotCreateError) -> None:
        logger.warning("the records of a SQL transaction wait for their topic", xid=error.xid, error=str(error))
        session.postpone(transaction, error.topic)

    def _announce(self, grown: Grown) -> None:
        """Wake fetches here and on other nodes. They read the records from Postgres, because a large transaction would
        push everything else out of the tail."""
        if grown.end_offset is None:
            _log_dropped(grown.record_count)
            return
        self._tail.heard(grown.partition_key, grown.end_offset, asyncio.get_running_loop().time())
        self._listener.appended(grown.partition_key, grown.end_offset)

    def _record(self, batch: NewBatch, outcome: Appended | Refusal, now_s: float) -> None:
        if isinstance(outcome, Refusal):
            _log_dropped(batch.record_count)
            return
        end_offset = outcome.base_offset + batch.record_count
        self._tail.record_append(
            batch.partition_key,
            base_offset=outcome.base_offset,
            last_offset=end_offset - 1,
            records=batch.records,
            log_start_offset=outcome.log_start_offset,
            leader_epoch=outcome.leader_epoch,
            now_s=now_s,
            last_stable_offset=outcome.open_since_offset,
        )
        self._listener.appended(batch.partition_key, end_offset)

    # --- building -------------------------------------------------------------------------------------------------

    async def _build(self, records: list[StagedRecord]) -> list[NewBatch]:
        topics = await self._topics(records)
        configs = {topic.topic_id: self._catalog.config(topic) for topic in topics.values() if topic is not None}
        now_ms = self._now_ms()
        if len(records) > THREAD_RECORDS or _size_bytes(records) > THREAD_BYTES:
            batches, dropped = await asyncio.to_thread(_batches, records, topics, configs, now_ms)
        else:
            batches, dropped = _batches(records, topics, configs, now_ms)
        if dropped:
            _log_dropped(dropped)
        return batches

    async def _topics(self, records: Sequence[StagedRecord]) -> dict[UUID | str | None, Topic | None]:
        """Return the topics of these records by id or, if a topic did not exist, by name; None for a deleted one. Each
        topic is looked up once, however many records name it."""
        topics: dict[UUID | str | None, Topic | None] = {}
        for staged in records:
            named = staged.topic_id or staged.topic
            if named in topics:
                continue
            if staged.topic_id is not None:
                topics[named] = await self._catalog.resolve_id(staged.topic_id)
            else:
                assert staged.topic is not None
                topics[named] = await self._existing(staged.topic, staged.xid)
        # Postgres knew the partition when the record was staged. This node may not have heard of it yet.
        if any(
            staged.partition_index is not None
            and staged.topic_id is not None
            and (topic := topics[staged.topic_id]) is not None
            and staged.partition_index >= len(topic.partitions)
            for staged in records
        ):
            await self._catalog.refresh_if_changed()
            for named, topic in topics.items():
                topics[named] = None if topic is None else self._catalog.get_by_id(topic.topic_id)
        return topics

    async def _existing(self, name: str, xid: int) -> Topic:
        """Return the topic of this name, created if necessary. Raise _CannotCreateError."""
        topic = await self._catalog.resolve(name)
        if topic is not None:
            return topic
        created = await self._create(name)
        if isinstance(created, str):
            raise _CannotCreateError(xid, name, created)
        return created


def poll_interval_s(found: int, since_s: float) -> float:
    """Return how long to wait after a look that found `found` transactions, `since_s` after the last look that found
    any."""
    return BUSY_POLL_S if found and found >= BUSY_PER_S * since_s else POLL_S


def _partition(topic: Topic, staged: StagedRecord) -> Partition:
    count = len(topic.partitions)
    index = staged.partition_index
    if index is None:
        # Placing here costs a microsecond for each record. In the caller's PL/pgSQL it took ten.
        index = staged.xid % count if staged.key is None else murmur2(staged.key) % count
    return topic.partitions[min(index, count - 1)]


def _log_dropped(count: int) -> None:
    logger.info("staged records were dropped: their topic has been deleted", records=count)


def _size_bytes(records: Sequence[StagedRecord]) -> int:
    return sum(len(staged.key or b"") + len(staged.value or b"") for staged in records)


def _batches(
    records: Sequence[StagedRecord],
    topics: Mapping[UUID | str | None, Topic | None],
    configs: Mapping[UUID, TopicConfig],
    now_ms: int,
) -> tuple[list[NewBatch], int]:
    """Return the batches of these records, and how many records have lost their topic."""
    targets: dict[PartitionKey, _Target] = {}
    dropped = 0
    for staged in records:
        topic = topics[staged.topic_id or staged.topic]
        if topic is None:
            dropped += 1
            continue
        partition = _partition(topic, staged)
        target = targets.get(partition.partition_key)
        if target is None:
            target = targets[partition.partition_key] = _Target(partition, configs[topic.topic_id], [])
        target.records.append(Record(0, staged.timestamp_ms, staged.key, staged.value, staged.headers))
    return [batch for target in targets.values() for batch in _batches_of(target, now_ms)], dropped


def _batches_of(target: _Target, now_ms: int) -> list[NewBatch]:
    """Encode the records of one partition, in batches that the topic's max.message.bytes allows."""
    config = target.config
    limit = min(BATCH_BYTES, config.max_message_bytes)
    codec = Compression.NONE if config.compression_type == PRODUCER else CODECS[config.compression_type]
    batches: list[NewBatch] = []
    held: list[Record] = []
    size_bytes = 0

    def finish() -> None:
        numbered = [
            Record(offset, record.timestamp, record.key, record.value, record.headers)
            for offset, record in enumerate(held)
        ]
        max_timestamp_ms = now_ms if config.log_append_time else max(record.timestamp for record in held)
        records = build_batch(
            numbered,
            compression=codec,
            timestamp_type=TimestampType.LOG_APPEND_TIME if config.log_append_time else TimestampType.CREATE_TIME,
            max_timestamp=max_timestamp_ms,
        )
        batches.append(NewBatch(target.partition.partition_key, bytearray(records), len(numbered), max_timestamp_ms))
        held.clear()

    for record in target.records:
        record_bytes = RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"")
        record_bytes += sum(
            HEADER_OVERHEAD_BYTES + len(name.encode()) + len(value or b"") for name, value in record.headers
        )
        if held and (size_bytes + record_bytes > limit or len(held) == BATCH_RECORDS):
            finish()
            size_bytes = 0
        held.append(record)
        size_bytes += record_bytes
    if held:
        finish()
    return batches
