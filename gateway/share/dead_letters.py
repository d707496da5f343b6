"""Dead letters: records that a share group rejected or delivered too often, written to another topic (KIP-1191).

The one idea is level-triggered writing. A share partition stores such records as ARCHIVING until they are settled here.
So the node that reads the partition after a crash continues where this node stopped. A record may be written twice, and
none is forgotten. If a setting forbids the write, the record is archived all the same, as by Kafka, so that it does not
block the partition. The log and a counter report it, and the record itself stays in its topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import structlog

from gateway.coordinator.settings import ShareSettings
from gateway.coordinator.share.partition import DeadLettersSettled, Range
from gateway.log.appender import Appender
from gateway.log.catalog import Catalog
from gateway.share.partitions import SharePartitions
from protocol.errors import ErrorCode, KafkaError, ProtocolError
from protocol.records import Record, build_batch, iter_records, read_head, set_log_append_time
from storage.errors import StorageError
from storage.log import LogStore
from storage.share import ShareKey
from storage.types import Appended, NewBatch, Partition, ReadRequest, ReadResult, StoredBatch, Topic

logger = structlog.stdlib.get_logger(__name__)

FEATURE, FROM_LEVEL = "share.version", 2
"""The feature, and its level from which on there are dead letters."""
RESERVED_PREFIX = "__"
PAUSE_S = 1.0
"""How long a node waits before it repeats a failed storage operation."""
RECORDS_AT_A_TIME = 500
MAX_READ_BYTES = 1 << 20
"""Bytes of records, as stored, that are copied at a time. One batch may be larger."""
MAX_SHOWN = 5
"""Ranges of offsets that one line of the log names."""

Values = Mapping[int, tuple[bytes | None, bytes | None]]
"""Maps each offset to the record's key and value."""
NO_VALUE: tuple[bytes | None, bytes | None] = (None, None)
NO_VALUES: Values = {}
MakeTopic = Callable[[str], Awaitable[Topic]]


class DeadLetters:
    def __init__(
        self,
        partitions: SharePartitions,
        catalog: Catalog,
        log: LogStore,
        appender: Appender,
        *,
        settings_of: Callable[[str], ShareSettings],
        make_topic: MakeTopic,
        now_ms: Callable[[], int],
        count_written: Callable[[int], None],
        count_failed: Callable[[int], None],
    ) -> None:
        """`settings_of` returns the settings of a group. `make_topic` creates a dead-letter topic; it raises
        KafkaError. `now_ms` returns the timestamp of the written records."""
        self._partitions = partitions
        self._catalog = catalog
        self._log = log
        self._appender = appender
        self._settings_of = settings_of
        self._make_topic = make_topic
        self._now_ms = now_ms
        self._count_written = count_written
        self._count_failed = count_failed
        self._due: dict[ShareKey, None] = {}
        self._has_some: Final = asyncio.Event()

    def notice(self, key: ShareKey) -> None:
        """The stored state of a share partition has dead letters."""
        self._due[key] = None
        self._has_some.set()

    async def run(self) -> None:
        """Do one pass: settle pending records, or wait until there are some."""
        if not self._due:
            await self._has_some.wait()
        self._has_some.clear()
        while self._due:
            key = next(iter(self._due))
            del self._due[key]
            try:
                await self._settle(key)
            except StorageError as error:
                logger.warning("dead letters wait for storage", group_id=key.group_id, error=str(error))
                self.notice(key)
                await asyncio.sleep(PAUSE_S)
            except KafkaError:
                # Another node leads the partition now, and finds the dead letters in its row.
                continue

    async def _settle(self, key: ShareKey) -> None:
        """Write the partition's waiting records to the dead-letter topic, or give them up. Raise StorageError, or
        KafkaError if the partition must be read again.
        """
        settings = self._settings_of(key.group_id)
        while waiting := self._partitions.dead_letters(key):
            target = await self._target(settings)
            if isinstance(target, str):
                await self._give_up(key, waiting, target)
                return
            part = waiting[0].between(
                waiting[0].first_offset,
                min(waiting[0].last_offset, waiting[0].first_offset + RECORDS_AT_A_TIME - 1),
            )
            await self._write(key, part, target, settings)

    async def _target(self, settings: ShareSettings) -> Topic | str:
        """Return the dead-letter topic, or the reason why none can be used."""
        name = settings.dead_letter_topic
        broker = self._catalog.broker
        prefix = broker.errors_deadletterqueue_topic_name_prefix
        if not name:
            return "the group names no dead-letter topic any more"
        if name.startswith(RESERVED_PREFIX):
            return f"{name} begins with {RESERVED_PREFIX}"
        if not name.startswith(prefix):
            return f"{name} does not begin with {prefix}, errors.deadletterqueue.topic.name.prefix of the broker"
        topic = await self._catalog.resolve(name)
        if topic is None:
            if not broker.errors_deadletterqueue_auto_create_topics_enable:
                return f"there is no topic {name}, and errors.deadletterqueue.auto.create.topics.enable=false"
            try:
                topic = await self._make_topic(name)
            except KafkaError as error:
                # Another node that leads a partition of the group may have created the topic in the meantime.
                exists = error.code is ErrorCode.TOPIC_ALREADY_EXISTS
                topic = await self._catalog.resolve(name) if exists else None
                if topic is None:
                    return f"{name} cannot be created: {error.message or error.code.name}"
        if not self._catalog.config(topic).errors_deadletterqueue_group_enable:
            return f"{name} has errors.deadletterqueue.group.enable=false"
        return topic

    async def _write(self, key: ShareKey, part: Range, target: Topic, settings: ShareSettings) -> None:
        source = self._catalog.get_by_id(key.topic_id)
        values: Values = {}
        if settings.copies_dead_letters and source is not None:
            values, last_offset = await self._values(source.partitions[key.partition_index], part)
            part = part.between(part.first_offset, last_offset)
        now_ms = self._now_ms()
        headers = _headers(key, str(key.topic_id) if source is None else source.name, part, settings)
        config = self._catalog.config(target)
        batch, last_offset = _batch(part, headers, values, now_ms, config.max_message_bytes)
        written = part.between(part.first_offset, last_offset)
        if batch is None:
            too_large = f"a dead letter is larger than max.message.bytes of {target.name}"
            await self._give_up(key, [written], too_large)
            return
        records = memoryview(bytearray(batch))
        if config.log_append_time:
            set_log_append_time(records, now_ms)
        partition = target.partitions[key.partition_index % len(target.partitions)]
        appended = await self._appender.submit(
            NewBatch(partition.partition_key, records, len(written), now_ms), request=self
        )
        if not isinstance(appended, Appended):
            # The topic may have been deleted. Then the next look finds, or creates, the topic of its name.
            await self._catalog.refresh_if_changed()
            if self._catalog.get_by_id(target.topic_id) is not None:
                await self._give_up(key, [written], f"{target.name} refused it: {appended.value}")
            return
        self._count_written(len(written))
        await self._partitions.apply(key, DeadLettersSettled(written.first_offset, written.last_offset))

    async def _values(self, partition: Partition, part: Range) -> tuple[Values, int]:
        """Return the keys and values of the part's records that still exist, and the last offset that was read."""
        request = ReadRequest(partition.partition_key, part.first_offset, MAX_READ_BYTES)
        (found,) = await self._log.read([request], max_bytes=MAX_READ_BYTES)
        if isinstance(found, ReadResult) and part.first_offset < found.state.log_start_offset:
            # The read returned nothing, although records behind the log start may exist.
            return {}, min(found.state.log_start_offset - 1, part.last_offset)
        if not isinstance(found, ReadResult) or not found.batches:
            return {}, part.last_offset
        try:
            values = await asyncio.to_thread(_read, found.batches, part)
        except ProtocolError as error:
            logger.warning("dead letters are written without their values", error=str(error))
            return {}, part.last_offset
        return values, max(part.first_offset, min(part.last_offset, read_head(found.batches[-1].records).last_offset))

    async def _give_up(self, key: ShareKey, parts: Sequence[Range], reason: str) -> None:
        count = sum(map(len, parts))
        self._count_failed(count)
        source = self._catalog.get_by_id(key.topic_id)
        shown = ", ".join(f"{each.first_offset}-{each.last_offset}" for each in parts[:MAX_SHOWN])
        logger.warning(
            "dead letters were not written: the records are archived, and stay in their topic",
            group_id=key.group_id,
            topic=str(key.topic_id) if source is None else source.name,
            partition=key.partition_index,
            records=count,
            offsets=shown + (" and more" if len(parts) > MAX_SHOWN else ""),
            reason=reason,
        )
        for each in parts:
            _, stored = self._partitions.submit(key, DeadLettersSettled(each.first_offset, each.last_offset))
            if stored is not None and each is parts[-1]:
                await stored


def keeps_dead_letters(settings: ShareSettings, levels: Mapping[str, int]) -> bool:
    """Return whether undeliverable records of a group with these settings become dead letters. `levels` has the
    levels of features that were set."""
    return bool(settings.dead_letter_topic) and levels.get(FEATURE, FROM_LEVEL) >= FROM_LEVEL


def _headers(
    key: ShareKey, topic_name: str, part: Range, settings: ShareSettings
) -> Callable[[int], tuple[tuple[str, bytes | None], ...]]:
    """Return Kafka's headers for a record at an offset (upstream: ShareGroupDLQStateManager.ProduceRequestHandler).
    After a restart only the count of deliveries is known, and it serves as the reason, as upstream."""
    is_rejected = part.member_id is not None or part.delivery_count < settings.delivery_count_limit
    message = b"Offset rejected by client." if is_rejected else b"Offset delivery count exceeded the threshold."
    before = (
        ("__dlq.errors.topic", topic_name.encode()),
        ("__dlq.errors.partition", str(key.partition_index).encode()),
    )
    after = (
        ("__dlq.errors.group", key.group_id.encode()),
        ("__dlq.errors.delivery.count", str(part.delivery_count).encode()),
        ("__dlq.errors.message", message),
    )
    return lambda offset: (*before, ("__dlq.errors.offset", str(offset).encode()), *after)


def _batch(
    part: Range,
    headers: Callable[[int], tuple[tuple[str, bytes | None], ...]],
    values: Values,
    now_ms: int,
    max_bytes: int,
) -> tuple[bytes | None, int]:
    """Return a batch with as many records as fit, at least one, and their last offset; None: not even the first
    fits. A record that does not fit with its value is written without it."""
    count = len(part)
    while True:
        offsets = range(part.first_offset, part.first_offset + count)
        for copied in (values, NO_VALUES):
            records = [
                Record(number, now_ms, *copied.get(offset, NO_VALUE), headers=headers(offset))
                for number, offset in enumerate(offsets)
            ]
            batch = build_batch(records)
            if len(batch) <= max_bytes:
                return batch, offsets[-1]
            if count > 1:
                break
        if count == 1:
            return None, part.first_offset
        count = max(1, min(count - 1, count * max_bytes // len(batch)))


def _read(batches: Sequence[StoredBatch], part: Range) -> Values:
    """Return the keys and values of the part's records. Raise ProtocolError."""
    return {
        record.offset: (record.key, record.value)
        for batch in batches
        if not read_head(batch.records).is_control
        for record in iter_records(batch.records)
        if part.first_offset <= record.offset <= part.last_offset
    }
