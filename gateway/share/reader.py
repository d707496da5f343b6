"""Acquires records for a member: from where its group stands in each partition to batches that it may be given.

The one idea: a share partition says where to read, the log what lies there, and the share partition again what of that
is the member's. In between others may have taken it, so only what the second step gave is answered. Partitions whose
records are in the tail come first; all others are read from Postgres with one call, and only where the tail gave too
little.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from gateway.apis.list_offsets import place_at
from gateway.config.group import BY_DURATION, duration_ms
from gateway.coordinator.facts import MemberId
from gateway.coordinator.model import ShareSettings
from gateway.coordinator.share.partition import (
    Acquire,
    Acquired,
    LogStartMoved,
    PartitionSettings,
    SharePartition,
)
from gateway.log.tail import Buffer, KnownOffsets
from gateway.net.context import RequestContext
from gateway.net.errors import REFUSAL_CODES, storage_code
from gateway.net.pieces import in_pieces
from gateway.share.partitions import ShareWatch
from gateway.share.records import batches_of
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageError
from storage.share import ShareKey
from storage.types import AbortedTransaction, Partition, ReadRequest, ReadResult, Refusal

MOST_READ_BYTES = 16 * 1024 * 1024
"""What one answer may bring from Postgres and files, but for its first batch."""


@dataclass(slots=True)
class Part:
    """One partition of a share fetch on its way to an answer."""

    topic_id: UUID
    index: int
    partition: Partition | None = None
    error: ErrorCode = ErrorCode.NONE
    message: str | None = None
    acknowledge_error: ErrorCode = ErrorCode.NONE
    is_acknowledged: bool = False
    acquired: list[Acquired] = field(default_factory=list[Acquired])
    records: list[Buffer] = field(default_factory=list[Buffer])

    @property
    def name(self) -> tuple[UUID, int]:
        return self.topic_id, self.index

    def refuse(self, error: KafkaError) -> None:
        self.error, self.message = error.code, error.message


@dataclass(slots=True)
class Want:
    """What is left of what a request asks for."""

    max_bytes: int
    max_records: int
    is_limit: bool
    """KIP-1206: not one record more."""
    range_records: int = 0
    """How many records a range of what is acquired should have; 0: it is told in as few ranges as can be."""
    taken_bytes: int = 0
    taken_records: int = 0

    @property
    def left_bytes(self) -> int:
        return self.max_bytes - self.taken_bytes

    @property
    def left_records(self) -> int:
        return self.max_records - self.taken_records

    @property
    def is_met(self) -> bool:
        return self.left_bytes <= 0 or self.left_records <= 0


def partition_settings(settings: ShareSettings) -> PartitionSettings:
    return PartitionSettings(
        max_record_locks=settings.max_record_locks,
        delivery_count_limit=settings.delivery_count_limit,
        record_lock_duration_ms=settings.record_lock_duration_ms,
    )


class Reader:
    """Of one request."""

    def __init__(self, context: RequestContext, group_id: str, member_id: MemberId, settings: ShareSettings) -> None:
        self._context = context
        self._group_id = group_id
        self._member_id = member_id
        self._settings = settings
        self._limits = partition_settings(settings)
        self._partitions = context.services.share
        self._tail = context.services.tail

    def key(self, part: Part) -> ShareKey:
        return ShareKey(self._group_id, part.topic_id, part.index)

    async def acquire(self, parts: Sequence[Part], want: Want, watch: ShareWatch) -> bool:
        """Gives what there is for the member to the parts without an error, in their order. Whether any of the share
        partitions has moved on, so that another look may find more. `watch` is woken by whatever comes after this
        look."""
        moved = False
        cold: list[tuple[Part, SharePartition]] = []
        now_s = asyncio.get_running_loop().time()
        max_age_s = self._tail.max_age_s(now_s)
        async for part in in_pieces(parts):
            if part.error or part.partition is None or want.is_met:
                continue
            try:
                at = await self._load(part, part.partition)
                watch.add(self.key(part))
                if at.next_offset - at.start_offset >= self._limits.max_record_locks:
                    continue
                read = self._tail.read(
                    part.partition.partition_key,
                    at.next_offset,
                    want.left_bytes,
                    at_least_one=not want.taken_bytes,
                    now_s=now_s,
                    max_age_s=max_age_s,
                    committed=self._settings.read_committed,
                )
                if read is None:
                    cold.append((part, at))
                else:
                    moved |= await self._take(part, at, read.known, read.batches, read.aborted, want)
            except KafkaError as error:
                part.refuse(error)
        if cold and not want.is_met and not want.taken_records:
            moved |= await self._take_cold(cold, want)
        return moved

    async def _load(self, part: Part, partition: Partition) -> SharePartition:
        async def start() -> int:
            return await self._start(partition)

        return await self._partitions.load(self.key(part), start, self._limits)

    async def _start(self, partition: Partition) -> int:
        """Where a group begins that nobody has read from yet. Raises StorageError."""
        log = self._context.services.log
        state = (await log.states([partition.partition_key])).get(partition.partition_key)
        if state is None:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the partition is gone")
        end_offset = state.last_stable_offset if self._settings.read_committed else state.high_watermark
        reset = self._settings.auto_offset_reset
        if reset == "earliest":
            return state.log_start_offset
        age_ms = duration_ms(reset.removeprefix(BY_DURATION)) if reset.startswith(BY_DURATION) else None
        if age_ms is None:
            return end_offset
        since_ms = int(time.time() * 1000) - age_ms
        _, offset = await place_at(since_ms, partition.partition_key, state, end_offset, self._context)
        return end_offset if offset < 0 else offset

    async def _take_cold(self, cold: Sequence[tuple[Part, SharePartition]], want: Want) -> bool:
        services = self._context.services
        max_bytes = min(want.left_bytes, MOST_READ_BYTES)
        asked = [
            ReadRequest(part.partition.partition_key, at.next_offset, max_bytes, self._settings.read_committed)
            for part, at in cold
            if part.partition is not None
        ]
        started_s = asyncio.get_running_loop().time()
        try:
            results = await services.log.read(asked, max_bytes=max(max_bytes, 1))
        except StorageError as error:
            code = storage_code(self._context.api_key, error)
            for part, _ in cold:
                part.refuse(KafkaError(code, "the records cannot be read"))
            return False
        moved = False
        for (part, at), request, result in zip(cold, asked, results, strict=True):
            if isinstance(result, Refusal):
                part.refuse(KafkaError(REFUSAL_CODES[result]))
                continue
            moved |= await self._take_read(part, at, request, result, want, started_s)
        return moved

    async def _take_read(
        self, part: Part, at: SharePartition, request: ReadRequest, result: ReadResult, want: Want, started_s: float
    ) -> bool:
        state = result.state
        self._tail.observe(request.partition_key, state, started_s)
        known = KnownOffsets(state.log_start_offset, state.high_watermark, state.last_stable_offset, state.leader_epoch)
        try:
            batches = [batch.records for batch in result.batches]
            return await self._take(part, at, known, batches, result.aborted, want)
        except KafkaError as error:
            part.refuse(error)
            return False

    async def _take(
        self,
        part: Part,
        at: SharePartition,
        known: KnownOffsets,
        read: Sequence[Buffer],
        aborted: Sequence[AbortedTransaction],
        want: Want,
    ) -> bool:
        """Whether the share partition has moved on."""
        key = self.key(part)
        if known.log_start_offset > at.start_offset:
            await self._partitions.apply(key, LogStartMoved(known.log_start_offset))
            return True
        batches = batches_of(read, aborted)
        if not batches or want.is_met:
            return False
        taken = await self._partitions.apply(
            key,
            Acquire(
                member_id=self._member_id,
                read_offset=at.next_offset,
                end_offset=batches[-1].last_offset + 1,
                batches=tuple((each.first_offset, each.last_offset) for each in batches if each.is_delivered),
                max_records=want.left_records,
                is_limit=want.is_limit,
            ),
        )
        part.acquired += ranges(taken.acquired, [each.first_offset for each in batches], want.range_records)
        for batch in batches:
            if any(
                each.first_offset <= batch.last_offset and batch.first_offset <= each.last_offset
                for each in taken.acquired
            ):
                part.records.append(batch.records)
                want.taken_bytes += len(batch.records)
        want.taken_records += sum(each.last_offset - each.first_offset + 1 for each in taken.acquired)
        return taken.partition.next_offset != at.next_offset


def ranges(acquired: Iterable[Acquired], starts: Sequence[int], size: int) -> Iterator[Acquired]:
    """Of neighbours that were delivered as often, each range begins where a batch does (`starts`, in order) and has no
    fewer than `size` records, but for the last."""
    for each in merged(acquired):
        first = each.first_offset
        if 0 < size <= each.last_offset - first:
            for start in starts[bisect_right(starts, first) :]:
                if start > each.last_offset:
                    break
                if start - first >= size:
                    yield Acquired(first, start - 1, each.delivery_count)
                    first = start
        yield Acquired(first, each.last_offset, each.delivery_count)


def merged(acquired: Iterable[Acquired]) -> Iterator[Acquired]:
    """Neighbours that were delivered as often are one."""
    last: Acquired | None = None
    for each in acquired:
        if last is not None and (last.last_offset + 1, last.delivery_count) == (each.first_offset, each.delivery_count):
            last = Acquired(last.first_offset, each.last_offset, last.delivery_count)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last
