"""Acquire records for a member: from its group's position in each partition to the batches that the member receives.

The one idea: the share partition says where to read, the log returns the batches there, and the share partition then
acquires records of them for the member. Other members may acquire some of them in between, so the response contains
only the records of the last step. One call reads all partitions whose records are in Postgres. Partitions are served in
the session's order. Records in memory do not go before records in Postgres. Otherwise a busy partition would keep the
group from another partition's backlog for as long as it is busy.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Protocol
from uuid import UUID

from gateway.cluster.clock import ClusterClock
from gateway.cluster.membership import Membership
from gateway.config.group import BY_DURATION, duration_ms
from gateway.coordinator.settings import ShareSettings
from gateway.coordinator.share.partition import Acquire, Acquired, LogStartMoved, PartitionSettings, SharePartition
from gateway.log.batch_search import first_of_log_since
from gateway.log.catalog import Catalog
from gateway.log.tail import KnownOffsets, Tail, TailRead, Watch
from gateway.net.context import RequestContext
from gateway.net.errors import REFUSAL_CODES, storage_code
from gateway.net.pieces import PIECE, in_pieces
from gateway.share.dead_letters import keeps_dead_letters
from gateway.share.partitions import SharePartitions, ShareWatch
from gateway.share.records import batches_of
from gateway.share.sessions import ShareSession
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageError
from storage.log import LogStore
from storage.share import ShareKey
from storage.types import AbortedTransaction, Partition, ReadRequest, ReadResult, Refusal

MOST_READ_BYTES = 16 * 1024 * 1024
"""Bytes that one answer may read from Postgres and files, not counting its first batch."""
MOST_PART_READ_BYTES = 1024 * 1024
"""Bytes of one partition per read. A member receives some hundred records at a time, and the rest is read again."""
MOST_BATCHES = 1_000
"""Batches of one partition that are examined at once, without giving way."""

OF_ALL = frozenset({ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.GROUP_ID_NOT_FOUND})
"""Errors that concern the whole request: Postgres does not answer, there are too many partitions, or the group is
gone."""
LOADED_AT_ONCE = 8
"""Share partitions that one request reads from Postgres at the same time. One after the other, the first request of a
session with a thousand partitions took seconds after each change of leaders."""

_first_offset = attrgetter("first_offset")


class ReaderServices(Protocol):
    @property
    def catalog(self) -> Catalog: ...

    @property
    def clock(self) -> ClusterClock: ...

    @property
    def log(self) -> LogStore: ...

    @property
    def membership(self) -> Membership: ...

    @property
    def share(self) -> SharePartitions: ...

    @property
    def tail(self) -> Tail: ...


@dataclass(slots=True)
class Part:
    """One partition of a ShareFetch request."""

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


def as_it_is(part: Part, context: RequestContext[ReaderServices]) -> Partition | None:
    """Return the partition as the catalog has it now, because its named nodes may have changed since the request
    came. Return a concurrently deleted partition unchanged."""
    topic = context.services.catalog.get_by_id(part.topic_id)
    return part.partition if part.partition is None or topic is None else topic.partitions[part.index]


@dataclass(slots=True)
class Want:
    """The part of a request that is not yet fulfilled."""

    max_bytes: int
    max_records: int
    is_limit: bool
    """True if the request may not receive a single record more (KIP-1206)."""
    range_records: int = 0
    """Records per range of acquired records; 0: as few ranges as possible."""
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


def partition_settings(settings: ShareSettings, levels: Mapping[str, int]) -> PartitionSettings:
    return PartitionSettings(
        max_record_locks=settings.max_record_locks,
        delivery_count_limit=settings.delivery_count_limit,
        record_lock_duration_ms=settings.record_lock_duration_ms,
        renews=settings.renews,
        keeps_dead_letters=keeps_dead_letters(settings, levels),
    )


async def start_of(partition: Partition, settings: ShareSettings, context: RequestContext[ReaderServices]) -> int:
    """Return the offset at which a group begins that has not read the partition yet. Raise StorageError."""
    log = context.services.log
    state = (await log.states([partition.partition_key])).get(partition.partition_key)
    if state is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the partition was deleted")
    end_offset = state.last_stable_offset if settings.read_committed else state.high_watermark
    reset = settings.auto_offset_reset
    if reset == "earliest":
        return state.log_start_offset
    age_ms = duration_ms(reset.removeprefix(BY_DURATION)) if reset.startswith(BY_DURATION) else None
    if age_ms is None:
        return end_offset
    since_ms = context.services.clock.now_ms() - age_ms
    first = await first_of_log_since(log, partition.partition_key, since_ms, state.log_start_offset)
    return end_offset if first is None else first[1]


class Reader:
    """The reader of one request."""

    def __init__(
        self,
        context: RequestContext[ReaderServices],
        session: ShareSession,
        settings: ShareSettings,
        serves: Callable[[Partition], bool],
    ) -> None:
        """`serves` returns whether this node serves a partition to the session."""
        self._serves = serves
        self._context = context
        self._session = session
        self._settings = settings
        self._limits = partition_settings(settings, context.services.membership.levels)
        self._partitions = context.services.share
        self._tail = context.services.tail

    def key(self, part: Part) -> ShareKey:
        return self._session.key(part.name)

    async def acquire(self, parts: Sequence[Part], want: Want, appends: Watch, watch: ShareWatch) -> bool:
        """Acquire available records for the parts without an error, in their order. Return whether any share
        partition has advanced, so that another look may find more. Both watches are woken by everything after this
        look."""
        moved = False
        cold: list[tuple[Part, SharePartition]] = []
        failed: KafkaError | None = None
        async for number, part in in_pieces(enumerate(parts)):
            if part.error or part.partition is None or want.is_met:
                continue
            try:
                if self._is_missing(part):
                    failed = failed or await self._load_some(parts[number : number + PIECE])
                    if failed is not None:
                        # The same read would fail for each of maybe thousands of parts.
                        part.refuse(failed)
                        continue
                look = await self._look(part, part.partition, want, appends, watch)
                at_hand = look is not None and look[1] is not None and bool(look[1].batches)
                if cold and at_hand and not want.taken_records:
                    # A session examines partitions that yielded records last the next time, so the others do not wait
                    # for long.
                    moved |= await self._take_cold(cold, want)
                    cold = []
                    if want.is_met:
                        continue
                    # Other members may have acquired the records in the meantime.
                    look = await self._look(part, part.partition, want, appends, watch)
                if look is None:
                    continue
                at, read = look
                if read is None:
                    cold.append((part, at))
                else:
                    moved |= await self._take(part, at, read.known, read.batches, read.aborted, want)
            except KafkaError as error:
                part.refuse(error)
        if cold and not want.is_met and not want.taken_records:
            moved |= await self._take_cold(cold, want)
        return moved

    def _is_served(self, part: Part) -> bool:
        partition = as_it_is(part, self._context)
        return partition is not None and self._serves(partition)

    def _require_served(self, part: Part) -> None:
        """Raise KafkaError if the leader has changed since the request came. The new leader gives the records to other
        members."""
        if not self._is_served(part):
            self._partitions.drop([self.key(part)])
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "another node leads the partition")

    def _is_missing(self, part: Part) -> bool:
        return self._is_served(part) and not self._partitions.holds(self.key(part))

    async def _load_some(self, parts: Sequence[Part]) -> KafkaError | None:
        """Load those of the first few parts that are not in memory. Return an error that concerns all parts, if there
        is one."""
        missing = (part for part in parts if not part.error and self._is_missing(part))
        loading = [
            self._load(part, part.partition) for part in islice(missing, LOADED_AT_ONCE) if part.partition is not None
        ]
        for outcome in await asyncio.gather(*loading, return_exceptions=True):
            if isinstance(outcome, KafkaError):
                if outcome.code in OF_ALL:
                    return outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return None

    async def _look(
        self, part: Part, partition: Partition, want: Want, appends: Watch, watch: ShareWatch
    ) -> tuple[SharePartition, TailRead | None] | None:
        """Return the share partition and the tail's batches from its position on. The batches are None if the tail does
        not know them. Return None if no records may be acquired. Raise KafkaError."""
        self._require_served(part)
        at = await self._load(part, partition)
        watch.add(self.key(part))
        # Repeated with each look, because the tail may forget a partition together with its watches.
        appends.add(partition.partition_key)
        if at.next_offset - at.start_offset >= self._limits.max_record_locks:
            return None
        now_s = asyncio.get_running_loop().time()
        return at, self._tail.read(
            partition.partition_key,
            at.next_offset,
            want.left_bytes,
            at_least_one=not want.taken_bytes,
            now_s=now_s,
            max_age_s=self._tail.max_age_s(now_s),
            committed=self._settings.read_committed,
            # Each batch yields a record or is skipped. In the window, other members may hold a batch's records.
            max_batches=min(want.left_records + at.end_offset - at.next_offset, MOST_BATCHES),
        )

    async def _load(self, part: Part, partition: Partition) -> SharePartition:
        async def start() -> int:
            return await start_of(partition, self._settings, self._context)

        return await self._partitions.load(self.key(part), start, self._limits)

    async def _take_cold(self, cold: Sequence[tuple[Part, SharePartition]], want: Want) -> bool:
        services = self._context.services
        max_bytes = min(want.left_bytes, MOST_READ_BYTES)
        part_bytes = min(max_bytes, MOST_PART_READ_BYTES)
        asked = [
            ReadRequest(part.partition.partition_key, at.next_offset, part_bytes, self._settings.read_committed)
            async for part, at in in_pieces(cold)
            if part.partition is not None
        ]
        started_s = asyncio.get_running_loop().time()
        try:
            results = await services.log.read(asked, max_bytes=max(max_bytes, 1))
        except StorageError as error:
            code = storage_code(self._context.api_key, error)
            async for part, _ in in_pieces(cold):
                part.refuse(KafkaError(code, "the records cannot be read"))
            return False
        moved = False
        async for (part, at), request, result in in_pieces(zip(cold, asked, results, strict=True)):
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
            batches = [batch.records for batch in result.batches[:MOST_BATCHES]]
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
        """Acquire from the batches. Return whether the share partition has advanced. Raise KafkaError."""
        self._require_served(part)
        key = self.key(part)
        if known.log_start_offset > at.start_offset:
            moved = await self._partitions.apply(key, LogStartMoved(known.log_start_offset))
            # A record that waits for its dead letter may keep the window's start below the log's.
            if moved.must_store:
                return True
        batches = batches_of(read, aborted)
        # There is no await from here to the session's update: otherwise the session could end in between, and would not
        # release these records.
        if not batches or want.is_met or self._session.ended:
            return False
        taken = await self._partitions.apply(
            key,
            Acquire(
                member_id=self._session.member_id,
                read_offset=at.next_offset,
                end_offset=batches[-1].last_offset + 1,
                batches=tuple((each.first_offset, each.last_offset) for each in batches if each.is_delivered),
                max_records=want.left_records,
                is_limit=want.is_limit,
            ),
        )
        given = list(merged(taken.acquired))
        if given:
            self._session.acquired_in[key] = None
        part.acquired += ranges(given, [each.first_offset for each in batches], want.range_records)
        for batch in batches:
            index = bisect_right(given, batch.last_offset, key=_first_offset) - 1
            if index >= 0 and given[index].last_offset >= batch.first_offset:
                part.records.append(batch.records)
                want.taken_bytes += len(batch.records)
        want.taken_records += sum(each.last_offset - each.first_offset + 1 for each in given)
        return taken.partition.next_offset != at.next_offset


def ranges(acquired: Iterable[Acquired], starts: Sequence[int], size: int) -> Iterator[Acquired]:
    """Return the ranges. Each begins where a batch does (`starts`, in order). Each has at least `size` records, except
    the last one of an acquired range."""
    for each in acquired:
        first = each.first_offset
        if 0 < size <= each.last_offset - first:
            index = bisect_right(starts, first)
            while index < len(starts) and (start := starts[index]) <= each.last_offset:
                if start - first >= size:
                    yield Acquired(first, start - 1, each.delivery_count)
                    first = start
                index += 1
        yield Acquired(first, each.last_offset, each.delivery_count)


def merged(acquired: Iterable[Acquired]) -> Iterator[Acquired]:
    """Merge adjacent ranges with the same delivery count."""
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
