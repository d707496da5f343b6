"""Fetch: batches from the tail in memory or from Postgres, and the long poll at the end of the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from gateway.apis.metadata import Led, Placement
from gateway.apis.partition_lookup import check_leader_epoch, end_of_epoch, resolve_topics, unknown_topic
from gateway.apis.services import (
    FindsTopics,
    HasCatalog,
    HasHistory,
    HasIdleOwners,
    HasInternalLogs,
    HasLog,
    HasMarks,
    HasMembership,
    HasMetrics,
    HasTail,
    HasThrottles,
)
from gateway.config.topic import requested_replication_factor
from gateway.log.tail import KnownOffsets, Watch
from gateway.net.collection import LEFTOVERS_S, full_collections
from gateway.net.context import RequestContext
from gateway.net.errors import REFUSAL_CODES
from gateway.net.holdings import Share
from gateway.net.pieces import PIECE, by_pieces, in_pieces
from gateway.net.refusals import DerivedRefusal
from gateway.security.authorizer import may, may_topic
from gateway.security.kinds import AclOperation, ResourceType
from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.errors import ErrorCode
from protocol.messages.fetch import (
    AbortedTransaction,
    EpochEndOffset,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionData,
)
from storage.errors import StorageError, StorageUnavailable
from storage.types import AbortedTransaction as Aborted
from storage.types import Partition, PartitionKey, ReadRequest, ReadResult, Refusal, Topic

logger = structlog.get_logger(__name__)

FIRST_VERSION_WITH_TOPIC_IDS = 13
FIRST_VERSION_WITH_LEADERS = 16
READ_COMMITTED = 1
COLD_PATIENCE_S = 2.0
"""Seconds that available records wait until other partitions are read from Postgres. After that they are sent without
the others.
"""

MOST_READ_BYTES = 16 * 1024 * 1024
"""Bytes that one answer may read from Postgres and files, not counting its first batch."""
LEAST_READ_BYTES = 1024 * 1024
"""Bytes for which a running read from Postgres counts, because the size of its batch is not known yet."""

AT_ONCE_PARTS = 500
"""Topics and partitions of a request that is planned without giving way; about a millisecond."""


NOT_DIVERGING = EpochEndOffset()
LED_HERE = LeaderIdAndEpoch()
LEADERS_TOLD = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)
"""Errors for which the answer names the leader (KIP-951)."""


class FetchServices(
    FindsTopics,
    HasHistory,
    HasIdleOwners,
    HasInternalLogs,
    HasLog,
    HasMarks,
    HasMembership,
    HasMetrics,
    HasTail,
    HasThrottles,
    Protocol,
): ...


@dataclass(slots=True)
class _Part:
    """One partition of the request, from lookup to answer."""

    asked: FetchPartition
    partition: Partition | None = None
    error: ErrorCode = ErrorCode.NONE
    known: KnownOffsets | None = None
    batches: Sequence[Buffer] = ()
    excess: Buffer | None = None
    """A batch that follows `batches` and is available, but exceeds a limit."""
    torn: Buffer = b""
    """The first bytes of the last batch, if only a part of this batch is sent."""
    size_bytes: int = 0
    """Size of the bytes that are sent."""
    aborted: Sequence[Aborted] = ()
    diverging: EpochEndOffset = NOT_DIVERGING
    nearest: int = -1
    """The node to which the client is redirected instead of receiving records; −1 if none."""
    leader: LeaderIdAndEpoch = LED_HERE

    @property
    def decided(self) -> bool:
        return self.known is not None or self.error is not ErrorCode.NONE


async def fetch(request: FetchRequest, context: RequestContext[FetchServices]) -> FetchResponse:
    """Return records of the requested partitions, or wait for them.

    Sizes follow KIP-74; sessions are declined by answering id 0 (KIP-227).

    If a batch is in memory, a part of it fills a partition's records up to the limits, as upstream does; clients skip
    the part. No batch is read from Postgres or a file only to be cut.

    With `read_committed` an answer ends at the last stable offset and names the aborted transactions whose records it
    holds; clients skip these records.

    An answer takes no more memory than the node has room for, except for its first batch.

    A partition that must be read from Postgres never makes another's records wait for a failed read: it alone carries
    the error.

    If this node leads a partition, a consumer that names its rack may be redirected to a replica there (KIP-392). Each
    node serves any partition: it asks Postgres for the log's end if necessary, so a consumer from another node finds
    what it saw there.
    """
    if request.session_epoch > 0 or request.session_epoch < -1:
        return FetchResponse(error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
    services = context.services
    tail = services.tail
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + max(request.max_wait_ms, 0) / 1000
    most_bytes = min(request.max_bytes, services.catalog.broker.fetch_max_bytes)
    asked_bytes = max(services.throttles.fetchable_bytes(most_bytes, context), 0)
    named = ((topic.topic, topic.topic_id) for topic in request.topics)
    missing_topic = await resolve_topics(named, context, by_id=_by_id(context))
    committed = request.isolation_level == READ_COMMITTED
    rack = request.rack_id if request.rack_id and services.catalog.broker.selects_nearest else ""
    watch: Watch | None = None
    holdings = context.connection.holdings
    share = Share(holdings)
    crowded = _has_many(request)
    parked = False
    try:
        if crowded:
            # Appends happen during planning, so the watch begins before the first look.
            watch = tail.watch((), committed=committed)
        while True:
            if not services.membership.is_registered:
                # Other nodes did not wait for this node before they used the name of a deleted topic again.
                await services.catalog.refresh_if_changed()
            # A node at its memory limit continues batch by batch.
            share.become(0)
            max_bytes = min(asked_bytes, holdings.room_bytes())
            min_bytes = min(request.min_bytes, asked_bytes, max(max_bytes, 1))
            planner = _Planner(
                context,
                missing_topic,
                max_bytes,
                watch,
                committed=committed,
                is_replica=request.replica_id >= 0 or request.replica_state.replica_id >= 0,
                rack=rack,
            )
            parts = await planner.plan_in_pieces(request) if crowded else planner.plan(request)
            cold = planner.undecided
            if crowded:
                await asyncio.sleep(0)
            if cold:
                # Register before the read, so that appends during the read count.
                watch = watch or tail.watch(_keys(parts), committed=committed)
                # One reader must not use the memory that is meant for many.
                read_bytes = min(max_bytes, MOST_READ_BYTES)
                min_bytes = min(min_bytes, MOST_READ_BYTES)
                share.become(_most_bytes(cold, read_bytes))
                await _read_cold(cold, parts, context, read_bytes, planner.overtaken, committed=committed)
            if planner.overtaken:
                watch = watch or tail.watch(_keys(parts), committed=committed)
                await _find_divergence(planner.overtaken, context)
            # If little memory is left, the node must not keep bytes that it cannot send.
            tears = max_bytes == asked_bytes
            if crowded:
                with_records = [part async for part in _in_pieces(parts) if part.size_bytes]
                available_bytes = _trim(with_records, max_bytes, tears=tears)
                await asyncio.sleep(0)
            else:
                available_bytes = _trim((p for row in parts for p in row if p.size_bytes), max_bytes, tears=tears)
            # Bytes from the tail are already counted there, and must not be counted twice.
            share.become(sum(part.size_bytes for part in cold))
            remaining_s = deadline_s - loop.time()
            enough = available_bytes >= min_bytes or remaining_s <= 0 or tail.draining or not any(parts)
            if enough or planner.must_answer(cold):
                return await _answer(request, parts, context, watch, crowded=crowded, refused=planner.refused)
            if watch is None:
                watch = tail.watch(_keys(parts), committed=committed)
            if not parked:
                # The fetch offset proves that everything before it was consumed. Record that now: the consumer may lose
                # the partition while it is parked.
                parked = True
                await _mark(request, parts, context, sent=False)
            await watch.wait(min_bytes - available_bytes, remaining_s)
            watch.rearm()
    finally:
        share.become(0)
        if watch is not None:
            watch.close()


refuse_fetch = DerivedRefusal(
    ApiKey.FETCH,
    values={"high_watermark": -1, "records": b""},
    answers={"responses": "topics", "partition_index": "partition"},
    elements=True,
)
"""librdkafka and Java read the code at the top level (version 7), older clients only those of the partitions."""


def _by_id(context: RequestContext[object]) -> bool:
    return context.version >= FIRST_VERSION_WITH_TOPIC_IDS


def _known_topic(asked: FetchTopic, context: RequestContext[HasCatalog]) -> Topic | None:
    catalog = context.services.catalog
    return catalog.get_by_id(asked.topic_id) if _by_id(context) else catalog.get(asked.topic)


def _has_many(request: FetchRequest) -> bool:
    count = len(request.topics)
    for topic in request.topics:
        count += len(topic.partitions)
        if count > AT_ONCE_PARTS:
            return True
    return False


class _Planner:
    """Decides everything about a request that needs no Postgres, in the order of the request. `missing_topic` is the
    code for unknown topics."""

    def __init__(
        self,
        context: RequestContext[FetchServices],
        missing_topic: ErrorCode,
        max_bytes: int,
        watch: Watch | None,
        *,
        committed: bool,
        is_replica: bool,
        rack: str = "",
    ) -> None:
        """`rack` is the client's rack, or empty if the node may not redirect the client to a replica there."""
        services = context.services
        self._context = context
        self._is_replica = is_replica
        self._authorizes = services.authorizer is not None
        self._tail = services.tail
        self._internal_logs = services.internal_logs
        self._missing_topic = missing_topic
        self._max_bytes = max_bytes
        self._watch = watch
        self._committed = committed
        self._rack = rack
        self._placement = Placement(context) if rack else None
        self._collected_bytes = 0
        self.undecided: list[_Part] = []
        """Parts for which Postgres must be queried."""
        self.refused = False
        """True if any requested part already has an error."""
        self.redirects = False
        """True if the client is redirected to another node for any requested part."""
        self.overtaken: list[_Part] = []
        """Parts that the client last fetched under an epoch that has since ended."""
        self._now_s = asyncio.get_running_loop().time()
        self._max_age_s = self._tail.max_age_s(self._now_s)

    def plan(self, request: FetchRequest) -> list[list[_Part]]:
        """Plan without an await, so that a watch registered behind it misses no append."""
        rows: list[list[_Part]] = []
        for asked_topic in request.topics:
            topic, missing = _known_topic(asked_topic, self._context), self._missing_topic
            if self._authorizes:
                topic, missing = self._readable(asked_topic, topic)
            rows.append([self._sorted(self._plan_part(topic, asked, missing)) for asked in asked_topic.partitions])
        return rows

    async def plan_in_pieces(self, request: FetchRequest) -> list[list[_Part]]:
        rows: list[list[_Part]] = []
        async for asked_topic in in_pieces(request.topics):
            topic, missing = _known_topic(asked_topic, self._context), self._missing_topic
            if self._authorizes:
                topic, missing = self._readable(asked_topic, topic)
            rows.append(
                [
                    self._sorted(self._plan_part(topic, asked, missing))
                    async for asked in in_pieces(asked_topic.partitions)
                ]
            )
        return rows

    def must_answer(self, cold: Sequence[_Part]) -> bool:
        """Return whether the answer cannot wait for records, because of a refusal, a redirect or an ended epoch. `cold`
        are the parts that were read from Postgres."""
        return (
            self.refused
            or self.redirects
            or any(part.error for part in cold)
            or any(part.error or part.diverging is not NOT_DIVERGING for part in self.overtaken)
        )

    def _sorted(self, part: _Part) -> _Part:
        if part.error is not ErrorCode.NONE:
            self.refused = True
        elif part.known is None:
            self.undecided.append(part)
        return part

    def _readable(self, asked: FetchTopic, topic: Topic | None) -> tuple[Topic | None, ErrorCode]:
        """Return the topic if it exists and the client may read it, and the error code otherwise."""
        if topic is None and _by_id(self._context):
            return topic, self._missing_topic
        name = asked.topic if topic is None else topic.name
        if self._is_replica:
            allowed = may(self._context, AclOperation.CLUSTER_ACTION, ResourceType.CLUSTER)
        else:
            allowed = may_topic(self._context, AclOperation.READ, name)
        return (topic, self._missing_topic) if allowed else (None, ErrorCode.TOPIC_AUTHORIZATION_FAILED)

    def _plan_part(self, topic: Topic | None, asked: FetchPartition, missing: ErrorCode) -> _Part:
        part = _Part(asked)
        if topic is None:
            part.error = missing
            return part
        if not 0 <= asked.partition < len(topic.partitions):
            part.error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return part
        part.partition = topic.partitions[asked.partition]
        if topic.internal and self._internal_logs is not None:
            self._internal_logs.seen(topic.name)
        part.error = check_leader_epoch(asked.current_leader_epoch, part.partition.leader_epoch)
        if part.error:
            return part
        if self._placement is not None:
            part.nearest = self._nearest(self._placement, topic, part.partition)
            self.redirects = self.redirects or part.nearest >= 0
        if self._watch is not None:
            # Registered before the look, so that later appends count. Repeated with each look, because the tail forgets
            # a deleted partition together with its watches, and a topic of the same name may exist by now.
            self._watch.add(part.partition.partition_key)
        read = self._tail.read(
            part.partition.partition_key,
            asked.fetch_offset,
            min(asked.partition_max_bytes, self._max_bytes - self._collected_bytes),
            at_least_one=not self._collected_bytes,
            now_s=self._now_s,
            max_age_s=self._max_age_s,
            committed=self._committed,
        )
        if read is not None:
            part.batches, part.size_bytes, part.aborted = read.batches, read.size_bytes, read.aborted
            part.excess = read.excess
            _refuse_out_of_range(part, read.known, self.overtaken)
            self._collected_bytes += part.size_bytes
        return part

    def _nearest(self, placement: Placement, topic: Topic, partition: Partition) -> int:
        """Return the replica to redirect to. Only the leader redirects, so that no client is sent in circles."""
        services = self._context.services
        if not services.membership.leads(partition):
            return -1
        factor = requested_replication_factor(topic.configs, services.catalog.broker)
        return placement.nearest(self._rack, partition, factor)


def _most_bytes(cold: list[_Part], max_bytes: int) -> int:
    """Return how many bytes reading these parts may yield. At least the first batch is read, at any size."""
    return max(min(sum(part.asked.partition_max_bytes for part in cold), max_bytes), LEAST_READ_BYTES)


def _refuse_out_of_range(part: _Part, known: KnownOffsets, overtaken: list[_Part]) -> None:
    """Refuse offsets outside the log, or last fetched under an epoch that the log never had (KIP-320), as out of
    range."""
    part.known = known
    in_range = known.log_start_offset <= part.asked.fetch_offset <= known.high_watermark
    if not in_range or part.asked.last_fetched_epoch > known.leader_epoch:
        part.error = ErrorCode.OFFSET_OUT_OF_RANGE
        part.batches, part.size_bytes = (), 0
    elif part.nearest >= 0:
        # We redirect the client, so we return no records. The preferred replica will detect divergence.
        part.batches, part.size_bytes, part.aborted = (), 0, ()
        return
    if 0 <= part.asked.last_fetched_epoch < known.leader_epoch:
        overtaken.append(part)


async def _find_divergence(overtaken: list[_Part], context: RequestContext[HasHistory]) -> None:
    """Report where the epoch ended to a client that has read beyond the end of its last epoch, and nothing else, as
    Partition.readRecords does (KIP-595). The records that the client read there are not in this history, so its
    offset has no meaning."""
    keys = {part.partition.partition_key for part in overtaken if part.partition is not None}
    try:
        epochs = await context.services.history.epochs(keys)
    except StorageError as error:
        for part in overtaken:
            part.error = context.storage_failed(context.api_key, error)
            part.batches, part.size_bytes = (), 0
        return
    async for part in in_pieces(overtaken):
        if part.partition is None or part.known is None:
            continue
        last = part.asked.last_fetched_epoch
        began = epochs.get(part.partition.partition_key, ())
        epoch, end_offset = end_of_epoch(last, began, part.known.high_watermark)
        if epoch < last or end_offset < part.asked.fetch_offset:
            part.error, part.diverging = ErrorCode.NONE, EpochEndOffset(epoch=epoch, end_offset=end_offset)
            part.batches, part.size_bytes, part.aborted = (), 0, ()


async def _read_cold(
    cold: list[_Part],
    parts: list[list[_Part]],
    context: RequestContext[FetchServices],
    max_bytes: int,
    overtaken: list[_Part],
    *,
    committed: bool,
) -> None:
    """Read with one call all partitions for which the tail is not sufficient."""
    services = context.services
    started_s = asyncio.get_running_loop().time()
    before_bytes = 0
    at_hand, cold_yet = False, False
    async for part in _in_pieces(parts):
        cold_yet = cold_yet or not part.decided
        if not cold_yet:
            before_bytes += part.size_bytes
        at_hand = at_hand or part.size_bytes > 0
    asked = [
        ReadRequest(
            part.partition.partition_key,
            part.asked.fetch_offset,
            # The client is redirected for this part, so only the offsets are needed.
            max(min(part.asked.partition_max_bytes, max_bytes), 1) if part.nearest < 0 else 1,
            committed,
        )
        async for part in in_pieces(cold)
        if part.partition is not None
    ]
    results: list[ReadResult | Refusal] = []
    resume = full_collections.pause()
    try:
        async with _patience(COLD_PATIENCE_S if at_hand else None):
            results = await services.log.read(asked, max_bytes=max(max_bytes - before_bytes, 1))
    except StorageError as error:
        logger.warning("a cold read failed", partitions=len(cold), error=str(error))
        async for part, read in in_pieces(zip(cold, asked, strict=True)):
            # A reader at the end of the log that this node knows continues to wait. An outage of Postgres is no error
            # for it.
            known = services.tail.known(read.partition_key, started_s)
            if known is not None and known.high_watermark == read.offset:
                part.known = known
            else:
                part.error = context.storage_failed(context.api_key, error)
        return
    finally:
        if _is_long(result.aborted for result in results if isinstance(result, ReadResult)):
            asyncio.get_running_loop().call_later(LEFTOVERS_S, resume)
        else:
            resume()
    async for part, request, result in in_pieces(zip(cold, asked, results, strict=True)):
        if isinstance(result, ReadResult):
            state = result.state
            services.tail.observe(request.partition_key, state, started_s)
            part.batches = [batch.records for batch in result.batches]
            part.size_bytes = sum(len(batch.records) for batch in result.batches)
            part.aborted = result.aborted
            known = KnownOffsets(
                state.log_start_offset, state.high_watermark, state.last_stable_offset, state.leader_epoch
            )
            _refuse_out_of_range(part, known, overtaken)
        else:
            part.error = REFUSAL_CODES[result]
            if result is Refusal.UNKNOWN_PARTITION:
                part.error = unknown_topic(by_id=_by_id(context))


@asynccontextmanager
async def _patience(timeout_s: float | None) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise StorageUnavailable("the read took longer than records at hand may wait") from error


def _trim(parts: Iterable[_Part], max_bytes: int, *, tears: bool) -> int:
    """Apply the size rules to parts with records, in the order of the request. Return the remaining bytes.

    The first partition with records returns at least one batch of any size; later ones return what still fits. If
    `tears` is set, a part of one more batch may follow the whole ones (upstream: LogSegment.read, and
    ReplicaManager.readFromLog for a first batch that does not fit).
    """
    total_bytes = 0
    for part in parts:
        limit_bytes = min(part.asked.partition_max_bytes, max_bytes - total_bytes)
        if part.size_bytes > limit_bytes:
            kept: list[Buffer] = []
            kept_bytes = 0
            for batch in part.batches:
                if kept_bytes + len(batch) > limit_bytes and (kept or total_bytes):
                    break
                kept.append(batch)
                kept_bytes += len(batch)
            if part.excess is not None and len(kept) < len(part.batches):
                part.excess = part.batches[len(kept)]
            part.batches, part.size_bytes = kept, kept_bytes
        if tears and part.excess is not None and part.batches and part.size_bytes < limit_bytes:
            part.torn = memoryview(part.excess)[: limit_bytes - part.size_bytes]
            part.size_bytes += len(part.torn)
        total_bytes += part.size_bytes
    return total_bytes


async def _mark(
    request: FetchRequest, parts: list[list[_Part]], context: RequestContext[FetchServices], *, sent: bool
) -> None:
    """Record up to which offset the consumer is served, before the answer is sent. If `sent` is empty, record up to
    which offset it was served before.
    """
    idle_owners = context.services.idle_owners
    if idle_owners is not None and idle_owners.watching and request.replica_id < 0:
        async for asked in in_pieces(request.topics):
            topic = _known_topic(asked, context)
            if topic is not None:
                idle_owners.fetched((topic.topic_id, part.partition) for part in asked.partitions)
    marks = context.services.marks
    if marks is None or request.replica_id >= 0 or not marks.wanted:
        return
    client_id = context.client_id or ""
    async for asked, row in in_pieces(zip(request.topics, parts, strict=True)):
        topic = _known_topic(asked, context)
        async for part in in_pieces(row if topic is not None else ()):
            if topic is not None and part.error is ErrorCode.NONE:
                partition = topic.topic_id, part.asked.partition
                batches = part.batches if sent else ()
                marks.served(context.connection, client_id, partition, part.asked.fetch_offset, batches)


def _count_bytes(asked: FetchTopic, row: list[_Part], context: RequestContext[FetchServices]) -> None:
    size_bytes = sum(part.size_bytes for part in row)
    topic = _known_topic(asked, context) if size_bytes else None
    if topic is not None:
        context.services.metrics.count_topic_bytes_out(topic.name, size_bytes)


async def _in_pieces(rows: list[list[_Part]]) -> AsyncGenerator[_Part]:
    async for row in in_pieces(rows):
        async for part in in_pieces(row):
            yield part


def _is_long(aborted: Iterable[Sequence[Aborted]]) -> bool:
    return any(len(some) > PIECE for some in aborted)


def _keys(parts: list[list[_Part]]) -> set[PartitionKey]:
    return {part.partition.partition_key for row in parts for part in row if part.partition is not None}


async def _name_leaders(parts: list[list[_Part]], context: RequestContext[HasMembership]) -> tuple[NodeEndpoint, ...]:
    """Name the leaders of the partitions that this node refuses, and return the leaders' addresses. Clients before
    version 16 ask Metadata."""
    if context.version < FIRST_VERSION_WITH_LEADERS:
        return ()
    leaders = Led(context)
    async for part in _in_pieces(parts):
        if part.partition is not None and part.error in LEADERS_TOLD:
            leader_id, leader_epoch = leaders.of(part.partition)
            part.leader = LeaderIdAndEpoch(leader_id=leader_id, leader_epoch=leader_epoch)
    return leaders.endpoints(NodeEndpoint)


async def _answer(
    request: FetchRequest,
    parts: list[list[_Part]],
    context: RequestContext[FetchServices],
    watch: Watch | None,
    *,
    crowded: bool,
    refused: bool,
) -> FetchResponse:
    """Record and count the served records, then build the response."""
    await _mark(request, parts, context, sent=True)
    if crowded:
        async for asked, row in in_pieces(zip(request.topics, parts, strict=True)):
            _count_bytes(asked, row, context)
        if watch is not None:
            await watch.leave()
    else:
        for asked, row in zip(request.topics, parts, strict=True):
            _count_bytes(asked, row, context)
    endpoints = await _name_leaders(parts, context) if refused else ()
    if crowded or _is_long(part.aborted for row in parts for part in row):
        return await _respond_in_pieces(request, parts, endpoints)
    return _respond(request, parts, endpoints)


def _respond(request: FetchRequest, parts: list[list[_Part]], endpoints: tuple[NodeEndpoint, ...]) -> FetchResponse:
    return FetchResponse(
        node_endpoints=endpoints,
        responses=tuple(
            FetchableTopicResponse(
                topic=asked.topic,
                topic_id=asked.topic_id,
                partitions=tuple(
                    _partition_data(part, request.isolation_level, _messages(part.aborted)) for part in row
                ),
            )
            for asked, row in zip(request.topics, parts, strict=True)
        ),
    )


async def _respond_in_pieces(
    request: FetchRequest, parts: list[list[_Part]], endpoints: tuple[NodeEndpoint, ...]
) -> FetchResponse:
    responses: list[FetchableTopicResponse] = []
    async for asked, row in in_pieces(zip(request.topics, parts, strict=True)):
        partitions = [
            _partition_data(part, request.isolation_level, await by_pieces(_messages, part.aborted))
            async for part in in_pieces(row)
        ]
        responses.append(
            FetchableTopicResponse(topic=asked.topic, topic_id=asked.topic_id, partitions=tuple(partitions))
        )
    return FetchResponse(responses=tuple(responses), node_endpoints=endpoints)


def _partition_data(part: _Part, isolation_level: int, aborted: list[AbortedTransaction]) -> PartitionData:
    known = part.known or KnownOffsets(-1, -1, -1, -1)
    return PartitionData(
        partition_index=part.asked.partition,
        error_code=part.error,
        high_watermark=known.high_watermark,
        last_stable_offset=known.last_stable_offset,
        log_start_offset=known.log_start_offset,
        diverging_epoch=part.diverging,
        current_leader=part.leader,
        preferred_read_replica=-1 if part.error else part.nearest,
        aborted_transactions=None if isolation_level != READ_COMMITTED else tuple(aborted),
        # An empty part is not null: Sarama and older Java clients treat null as a torn response.
        records=(*part.batches, part.torn) if part.torn else tuple(part.batches) or b"",
    )


def _messages(aborted: Sequence[Aborted]) -> list[AbortedTransaction]:
    return [AbortedTransaction(producer_id=each.producer_id, first_offset=each.first_offset) for each in aborted]
