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
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

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
from storage.staged import StagedRecord, StagedRecords
from storage.types import Appended, NewBatch, Partition, PartitionKey, Refusal, Topic

logger = structlog.get_logger(__name__)

POLL_S = 0.004
"""Interval of looks while transactions commit."""
QUIET_S = 2.0
"""Without a commit for so long, the relay asks to be notified."""
LINGER_S = 0.5
"""How long the relay still polls after it has asked. A transaction that found it polling may only commit now."""
SAFETY_S = 1.0
"""Interval of looks without a notification."""
OWN_INTERVAL_S = 0.25
"""Interval at which other nodes try to become the relay."""
RETRY_S = 1.0
"""How long a transaction waits whose topic could not be created. Others do not wait for it."""

BATCH_BYTES = 1024 * 1024
BATCH_RECORDS = 10_000
THREAD_BYTES = 64 * 1024
"""Records of more bytes are encoded in a thread."""
RECORD_OVERHEAD_BYTES = 40
HEADER_OVERHEAD_BYTES = 10

CreateTopic = Callable[[str], Awaitable[Topic | str]]
"""Creates a topic and returns it, or the reason why it cannot be created."""


class _CannotCreateError(Exception):
    """A topic that the transaction `xid` has staged records for cannot be created."""

    def __init__(self, xid: int, topic: str, reason: str) -> None:
        super().__init__(f"topic {topic} cannot be created: {reason}")
        self.xid = xid


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
        self.relayed = 0
        """Transactions that this node has appended."""

    async def run(self) -> None:
        """Wait until this node may relay, and relay until the session with Postgres is lost. Raise StorageError."""
        session = await StagedRecords.open(self._database, self._notified.set)
        try:
            while True:
                if await session.try_own():
                    await self._relay(session)
                await asyncio.sleep(OWN_INTERVAL_S)
        finally:
            session.close()

    async def _relay(self, session: StagedRecords) -> None:
        loop = asyncio.get_running_loop()
        awake = False
        active_s = loop.time()
        while True:
            self._notified.clear()
            if await self._pass(session):
                active_s = loop.time()
            quiet_s = loop.time() - active_s
            if awake is not (quiet_s < QUIET_S):
                awake = not awake
                await session.set_awake(awake)
                continue
            if quiet_s < QUIET_S + LINGER_S:
                await asyncio.sleep(POLL_S)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._notified.wait(), SAFETY_S)
                active_s = loop.time()

    async def _pass(self, session: StagedRecords) -> bool:
        """Append the next transactions; False if no transaction waits."""
        transactions = await session.look()
        if not transactions:
            return False
        try:
            outcomes = await session.append(transactions, self._build)
        except _CannotCreateError as error:
            logger.warning("the records of a SQL transaction wait for their topic", xid=error.xid, error=str(error))
            session.postpone(error.xid, RETRY_S)
            return True
        except BaseException:
            self._listener.in_doubt()
            raise
        self.relayed += len(transactions)
        now_s = asyncio.get_running_loop().time()
        for batch, outcome in outcomes:
            self._record(batch, outcome, now_s)
        return True

    def _record(self, batch: NewBatch, outcome: Appended | Refusal, now_s: float) -> None:
        if isinstance(outcome, Refusal):
            logger.info(
                "staged records were dropped: their topic has been deleted",
                records=batch.record_count,
                refusal=outcome.value,
            )
            return
        end_offset = outcome.base_offset + batch.record_count
        if batch.records:
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
        else:
            self._tail.heard(batch.partition_key, end_offset)
        self._listener.appended(batch.partition_key, end_offset)

    # --- building -------------------------------------------------------------------------------------------------

    async def _build(self, pieces: AsyncGenerator[list[StagedRecord]]) -> AsyncGenerator[list[NewBatch]]:
        async for records in pieces:
            targets: dict[PartitionKey, _Target] = {}
            size_bytes = 0
            for staged in records:
                found = await self._partition(staged)
                if found is None:
                    logger.info(
                        "a staged record was dropped: its topic has been deleted", topic_id=str(staged.topic_id)
                    )
                    continue
                topic, partition = found
                target = targets.get(partition.partition_key)
                if target is None:
                    target = targets[partition.partition_key] = _Target(partition, self._catalog.config(topic), [])
                target.records.append(Record(0, staged.timestamp_ms, staged.key, staged.value, staged.headers))
                size_bytes += len(staged.key or b"") + len(staged.value or b"")
            now_ms = self._now_ms()
            if size_bytes > THREAD_BYTES:
                yield await asyncio.to_thread(_batches, list(targets.values()), now_ms)
            else:
                yield _batches(list(targets.values()), now_ms)

    async def _partition(self, staged: StagedRecord) -> tuple[Topic, Partition] | None:
        """Return the partition that a record is for; None if its topic has been deleted."""
        if staged.topic_id is not None:
            topic = await self._catalog.resolve_id(staged.topic_id)
        else:
            assert staged.topic is not None
            topic = await self._catalog.resolve(staged.topic)
            if topic is None:
                created = await self._create(staged.topic)
                if isinstance(created, str):
                    raise _CannotCreateError(staged.xid, staged.topic, created)
                topic = created
        if topic is None:
            return None
        count = len(topic.partitions)
        index = staged.partition_index
        if index is None:
            # Placing here costs a microsecond for each record. In the caller's PL/pgSQL it took ten.
            index = staged.xid % count if staged.key is None else murmur2(staged.key) % count
        elif index >= count:
            await self._catalog.refresh_if_changed()
            topic = self._catalog.get_by_id(topic.topic_id)
            if topic is None:
                return None
            index = min(index, len(topic.partitions) - 1)
        return topic, topic.partitions[index]


def _batches(targets: Sequence[_Target], now_ms: int) -> list[NewBatch]:
    return [batch for target in targets for batch in _batches_of(target, now_ms)]


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
