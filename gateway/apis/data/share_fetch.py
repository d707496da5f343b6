"""ShareFetch and ShareAcknowledge: share sessions, acknowledgements, and records acquired for a member (KIP-932).

The one idea: first the session of a request is checked, then its acknowledgements are applied, and only then are
records acquired. Each partition succeeds or fails alone. As in Kafka, membership is not checked here, because only the
coordinator knows it. Records that a stranger acquires become available to all again when its locks end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol
from uuid import UUID

from gateway.apis.admin.features import SHARE, ChecksFeatures, require_protocol
from gateway.apis.metadata import Placement, leaders_seen
from gateway.apis.partition_lookup import resolve_topics
from gateway.apis.services import FindsTopics, HasGroups, HasMembership, HasMetrics, HasShareSessions, HasThrottles
from gateway.coordinator.facts import MemberId
from gateway.coordinator.share.heartbeat import INVALID_MEMBER_ID, is_member_id
from gateway.coordinator.share.partition import Acknowledge, AcknowledgedBatch, AcknowledgeType
from gateway.net.context import RequestContext
from gateway.net.holdings import Share
from gateway.net.pieces import in_pieces, mapped
from gateway.security.authorizer import may_topic
from gateway.security.kinds import AclOperation
from gateway.share.reader import (
    MOST_PART_READ_BYTES,
    MOST_READ_BYTES,
    Part,
    Reader,
    ReaderServices,
    Want,
    as_it_is,
)
from gateway.share.sessions import FINAL_EPOCH, INITIAL_EPOCH, ShareSession
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import share_acknowledge as acknowledging
from protocol.messages import share_fetch as fetching
from protocol.messages.share_acknowledge import ShareAcknowledgeRequest, ShareAcknowledgeResponse
from protocol.messages.share_fetch import ShareFetchRequest, ShareFetchResponse
from storage.errors import StorageError
from storage.share import ShareKey
from storage.types import Partition

RECORD_LIMIT = 1
"""ShareAcquireMode: never more records than requested (KIP-1206)."""

Batches = Sequence[fetching.AcknowledgementBatch]


class ShareFetchServices(
    ChecksFeatures, FindsTopics, ReaderServices, HasGroups, HasMetrics, HasShareSessions, HasThrottles, Protocol
): ...


async def share_fetch(request: ShareFetchRequest, context: RequestContext[ShareFetchServices]) -> ShareFetchResponse:
    """Acknowledge and acquire records. The first request of a session has no acknowledgements. The last request fetches
    nothing, and neither does a request that renews.
    """
    require_protocol(SHARE, context)
    named: dict[tuple[UUID, int], Batches] = {}
    acknowledges = False
    async for topic in in_pieces(request.topics):
        async for part in in_pieces(topic.partitions):
            named[topic.topic_id, part.partition_index] = part.acknowledgement_batches
            acknowledges = acknowledges or bool(part.acknowledgement_batches)
    if request.is_renew_ack and any((request.max_bytes, request.max_records, request.min_bytes, request.max_wait_ms)):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "a request that renews acquires nothing: its limits must be 0")
    if request.share_session_epoch == INITIAL_EPOCH and acknowledges:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "the first request of a share session acknowledges nothing")
    session = _session(request, context)
    is_final, is_first = request.share_session_epoch == FINAL_EPOCH, request.share_session_epoch == INITIAL_EPOCH
    if not is_final:
        forgotten = ((topic.topic_id, index) for topic in request.forgotten_topics_data for index in topic.partitions)
        context.services.share_sessions.read(session, named, forgotten)
    given = {name: batches async for name, batches in in_pieces(named.items()) if batches}
    wanted = dict.fromkeys(given) if is_final or request.is_renew_ack else dict.fromkeys((*given, *session.partitions))
    if is_first:
        await context.services.share.let_go(session.member_id)
    parts = await _parts(session.group_id, wanted, context)
    await _verify(session, parts, context)
    answerer = _Fetch(request, session, parts, context)
    await answerer.acknowledge(given, renews=request.is_renew_ack)
    if is_final:
        _end(session, context)
    elif not request.is_renew_ack:
        await answerer.acquire()
    return await answerer.response(whole=is_first)


async def share_acknowledge(
    request: ShareAcknowledgeRequest, context: RequestContext[ShareFetchServices]
) -> ShareAcknowledgeResponse:
    require_protocol(SHARE, context)
    if request.share_session_epoch == INITIAL_EPOCH:
        raise KafkaError(ErrorCode.INVALID_SHARE_SESSION_EPOCH, "a share session is begun by ShareFetch")
    session = _session(request, context)
    given: dict[tuple[UUID, int], Batches] = {}
    async for topic in in_pieces(request.topics):
        async for part in in_pieces(topic.partitions):
            given[topic.topic_id, part.partition_index] = part.acknowledgement_batches
    parts = await _parts(session.group_id, given, context)
    await _verify(session, parts, context)
    answerer = _Fetch(request, session, parts, context)
    await answerer.acknowledge(given, renews=request.is_renew_ack)
    if request.share_session_epoch == FINAL_EPOCH:
        _end(session, context)
    return await answerer.acknowledged()


# --- sessions -----------------------------------------------------------------------------------------------------


def _session(
    request: ShareFetchRequest | ShareAcknowledgeRequest, context: RequestContext[ShareFetchServices]
) -> ShareSession:
    """Return the session that the request begins or continues. Raise KafkaError."""
    group_id, member_id = request.group_id, request.member_id
    if not group_id:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "GroupId can't be empty.")
    if member_id is None or not is_member_id(member_id):
        raise KafkaError(ErrorCode.INVALID_REQUEST, INVALID_MEMBER_ID)
    sessions, connection_id = context.services.share_sessions, context.connection.connection_id
    epoch = request.share_session_epoch
    if epoch != INITIAL_EPOCH:
        return sessions.get(group_id, MemberId(member_id), epoch, connection_id)
    session, former = sessions.open(group_id, MemberId(member_id), connection_id)
    if former is not None:
        context.services.share.release(former.member_id, former.acquired_in)
    return session


def _end(session: ShareSession, context: RequestContext[ShareFetchServices]) -> None:
    context.services.share_sessions.end(session)
    context.services.share.release(session.member_id, session.acquired_in)


def _serves(group_id: str, context: RequestContext[ShareFetchServices]) -> Callable[[Partition], bool]:
    """Return a function that says whether this node serves a partition to the group: as the partition's leader, or to
    a client of a shared listener as the group's coordinator. Such a client sends the requests of its session to one
    node."""
    services = context.services
    if context.connection.shared is None:
        return lambda partition: services.membership.leads(partition)
    return lambda _partition: services.groups.lease_for(group_id) is not None


async def _parts(
    group_id: str, named: Iterable[tuple[UUID, int]], context: RequestContext[ShareFetchServices]
) -> list[Part]:
    """Return the parts of the request. Each has its partition, or the error code that says why this node does not serve
    the partition.
    """
    services, serves = context.services, _serves(group_id, context)
    parts = [Part(topic_id, index) async for topic_id, index in in_pieces(named)]
    missing = await resolve_topics((("", part.topic_id) for part in parts), context, by_id=True)
    async for part in in_pieces(parts):
        topic = services.catalog.get_by_id(part.topic_id)
        if topic is None:
            part.error = part.acknowledge_error = missing
        elif not may_topic(context, AclOperation.READ, topic.name):
            part.error = part.acknowledge_error = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        elif not 0 <= part.index < len(topic.partitions):
            part.error = part.acknowledge_error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        else:
            part.partition = topic.partitions[part.index]
            if not serves(part.partition):
                # The node that serves the partition now changes the state that this node remembers.
                services.share.drop([ShareKey(group_id, part.topic_id, part.index)])
                part.error = part.acknowledge_error = ErrorCode.NOT_LEADER_OR_FOLLOWER
    return parts


async def _verify(session: ShareSession, parts: Iterable[Part], context: RequestContext[ShareFetchServices]) -> None:
    """Check remembered state again. Since this node last checked, another node may have led a partition, or the
    partition may have been reset or deleted. If nodes have come or gone, or the session was silent, check the whole
    session.
    """
    leaders: object = context.services.membership.leaders
    if context.connection.shared is not None:
        leaders = context.services.groups.lease_for(session.group_id)
    session.led_by(asyncio.get_running_loop().time(), leaders, context.services.catalog.assigned)
    begun = dict(session.unverified)
    if not begun:
        return
    try:
        await context.services.share.verify(session.key(partition) for partition in begun)
    except StorageError:
        async for part in in_pieces(parts):
            if part.name in begun and not part.error:
                part.refuse(KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the share partition cannot be read"))
        return
    async for partition in in_pieces(begun):
        session.unverified.pop(partition, None)


# --- one request --------------------------------------------------------------------------------------------------


class _Fetch:
    """The processing of one request's partitions."""

    def __init__(
        self,
        request: ShareFetchRequest | ShareAcknowledgeRequest,
        session: ShareSession,
        parts: list[Part],
        context: RequestContext[ShareFetchServices],
    ) -> None:
        self._request = request
        self._session = session
        self._parts = parts
        self._context = context
        settings = context.services.groups.settings
        self._settings = settings.share_for(session.group_id)
        self._reader = Reader(context, session, self._settings, _serves(session.group_id, context))

    async def acknowledge(self, given: Mapping[tuple[UUID, int], Batches], *, renews: bool) -> None:
        """Acknowledge in all partitions first, so that their states are stored together."""
        storing: list[tuple[Part, asyncio.Future[None]]] = []
        async for part in in_pieces(self._parts):
            if part.name not in given:
                continue
            part.is_acknowledged = True
            stored = None if part.acknowledge_error else self._acknowledge(part, given[part.name], renews=renews)
            if stored is not None:
                storing.append((part, stored))
        outcomes = await asyncio.gather(*(stored for _, stored in storing), return_exceptions=True)
        for (part, _), outcome in zip(storing, outcomes, strict=True):
            if isinstance(outcome, KafkaError):
                part.acknowledge_error = outcome.code
            elif outcome is not None:
                raise outcome

    def _acknowledge(self, part: Part, batches: Batches, *, renews: bool) -> asyncio.Future[None] | None:
        """Apply acknowledgements, and return what to await before the member is answered."""
        if not renews and any(AcknowledgeType.RENEW in batch.acknowledge_types for batch in batches):
            part.acknowledge_error = ErrorCode.INVALID_REQUEST
            return None
        event = Acknowledge(
            self._session.member_id,
            tuple(
                AcknowledgedBatch(batch.first_offset, batch.last_offset, batch.acknowledge_types) for batch in batches
            ),
        )
        try:
            taken, stored = self._context.services.share.submit(self._reader.key(part), event)
        except KafkaError as error:
            part.acknowledge_error = error.code
            return None
        part.acknowledge_error = taken.error
        return stored

    async def acquire(self) -> None:
        """Wait, as long as the request allows, until there are records for the member."""
        request, services = self._request, self._context.services
        assert isinstance(request, ShareFetchRequest)
        if request.max_records <= 0 or request.max_bytes <= 0:
            return
        tail, loop = services.tail, asyncio.get_running_loop()
        deadline_s = loop.time() + max(request.max_wait_ms, 0) / 1000
        most_bytes = min(request.max_bytes, services.catalog.broker.fetch_max_bytes)
        max_bytes = max(services.throttles.fetchable_bytes(most_bytes, self._context), 1)
        parts = [part for part in self._parts if part.name in self._session.partitions and part.partition is not None]
        holdings = self._context.connection.holdings
        share = Share(holdings)
        is_limit = request.share_acquire_mode == RECORD_LIMIT
        watch = tail.watch((), committed=self._settings.read_committed)
        share_watch = services.share.watch(watch.wake)
        try:
            self._session.let_wait(share_watch)
            while self._session.waiting is share_watch and not self._session.ended:
                want = Want(
                    min(max_bytes, max(holdings.room_bytes(), 1)),
                    request.max_records,
                    is_limit,
                    0 if is_limit else request.batch_size,
                )
                share.become(min(want.max_bytes, MOST_READ_BYTES, MOST_PART_READ_BYTES * len(parts)))
                await _verify(self._session, parts, self._context)
                moved = await self._reader.acquire(parts, want, watch, share_watch)
                share.become(want.taken_bytes)
                refused = False
                async for part in in_pieces(parts):
                    refused = refused or part.error is not ErrorCode.NONE
                    if part.acquired or part.error:
                        self._session.put_last(part.name)
                if want.taken_records or refused or not parts or tail.draining:
                    break
                if moved:
                    # The read passed markers and similar batches, of which there may be many.
                    await asyncio.sleep(0)
                elif (remaining_s := deadline_s - loop.time()) > 0:
                    await watch.wait(1, remaining_s)
                else:
                    break
                watch.rearm()
            await share_watch.leave()
            await watch.leave()
        finally:
            if self._session.waiting is share_watch:
                self._session.waiting = None
            share.become(0)
            share_watch.close()
            watch.close()

    async def response(self, *, whole: bool) -> ShareFetchResponse:
        """Build the response. In a continued session, partitions without news are left out."""
        by_topic: dict[UUID, list[fetching.PartitionData]] = {}
        async for part in in_pieces(self._parts):
            if not (whole or part.acquired or part.error or part.is_acknowledged):
                continue
            data = fetching.PartitionData(
                partition_index=part.index,
                error_code=part.error,
                error_message=part.message,
                acknowledge_error_code=part.acknowledge_error if part.is_acknowledged else ErrorCode.NONE,
                current_leader=_leader(part, self._context),
                records=tuple(part.records) or b"",
                acquired_records=tuple(
                    fetching.AcquiredRecords(
                        first_offset=each.first_offset,
                        last_offset=each.last_offset,
                        delivery_count=each.delivery_count,
                    )
                    for each in part.acquired
                ),
            )
            by_topic.setdefault(part.topic_id, []).append(data)
            if part.records and (topic := self._context.services.catalog.get_by_id(part.topic_id)) is not None:
                size_bytes = sum(len(records) for records in part.records)
                self._context.services.metrics.count_topic_bytes_out(topic.name, size_bytes)
        return ShareFetchResponse(
            acquisition_lock_timeout_ms=self._settings.record_lock_duration_ms,
            responses=tuple(
                fetching.ShareFetchableTopicResponse(topic_id=topic_id, partitions=tuple(partitions))
                for topic_id, partitions in by_topic.items()
            ),
            node_endpoints=await _endpoints(self._parts, self._context),
        )

    async def acknowledged(self) -> ShareAcknowledgeResponse:
        by_topic: dict[UUID, list[acknowledging.PartitionData]] = {}
        async for part in in_pieces(self._parts):
            data = acknowledging.PartitionData(
                partition_index=part.index,
                error_code=part.acknowledge_error,
                current_leader=_leader(part, self._context),
            )
            by_topic.setdefault(part.topic_id, []).append(data)
        return ShareAcknowledgeResponse(
            acquisition_lock_timeout_ms=self._settings.record_lock_duration_ms,
            responses=tuple(
                acknowledging.ShareAcknowledgeTopicResponse(topic_id=topic_id, partitions=tuple(partitions))
                for topic_id, partitions in by_topic.items()
            ),
            node_endpoints=await _endpoints(self._parts, self._context),
        )


def _is_led_elsewhere(part: Part) -> bool:
    return ErrorCode.NOT_LEADER_OR_FOLLOWER in (part.error, part.acknowledge_error)


def _leader(part: Part, context: RequestContext[ShareFetchServices]) -> fetching.LeaderIdAndEpoch:
    """Return the leader of a refused partition, and its leader epoch."""
    partition = as_it_is(part, context)
    if partition is None or not _is_led_elsewhere(part):
        return fetching.LeaderIdAndEpoch(leader_id=-1, leader_epoch=-1)
    leader = leaders_seen(context).leader(partition)
    return fetching.LeaderIdAndEpoch(leader_id=leader, leader_epoch=partition.leader_epoch)


async def _endpoints(
    parts: Iterable[Part], context: RequestContext[HasMembership]
) -> tuple[fetching.NodeEndpoint, ...]:
    """Return the addresses of all nodes if another node leads any of the partitions."""
    if not any(await mapped(_is_led_elsewhere, parts)):
        return ()
    brokers = Placement(context).brokers
    return tuple(
        fetching.NodeEndpoint(node_id=int(node.node_id), host=host, port=port, rack=node.rack)
        for node, host, port in brokers
    )
