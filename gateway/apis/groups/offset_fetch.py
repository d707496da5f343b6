"""OffsetFetch: the committed offsets of groups, read from Postgres, so every answered commit is visible.

RequireStable asks two questions: whether a transaction is about to replace an offset, which is then not returned, and
whether the old owner of a partition is done with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import UUID

from gateway.apis.groups.group_views import ViewsGroups
from gateway.apis.groups.offset_topics import BY_ID_FROM, allowed_topic, has_partition, resolve, topic_of
from gateway.apis.services import FindsTopics, HasGroups, HasIdleOwners, HasOffsets
from gateway.coordinator.classic.handoff import awaited_by, member_on
from gateway.coordinator.classic.model import Group
from gateway.coordinator.consumer import unsettled
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.consumer.offsets import fetch_refusal
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import Value
from gateway.coordinator.requests import HandoffProgress
from gateway.coordinator.streams.model import StreamsGroup
from gateway.coordinator.streams.offsets import fetch_refusal as streams_fetch_refusal
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces, mapped
from gateway.security.authorizer import may, may_topic, refusal_of
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from protocol.schema import ZERO_UUID
from storage.types import CommittedOffset, Topic

MANY_GROUPS_FROM = 8
UNSTABLE_FROM = 7
"""The first version whose clients know UNSTABLE_OFFSET_COMMIT (KIP-447)."""
GROUPS_AT_ONCE = 100
"""Number of groups in one OffsetFetch whose offsets one statement reads."""
MAX_NAMED = 2_000
"""Maximal number of a group's partitions that a refusal names. Only administrators request more partitions at once."""
_ELSEWHERE = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
)


class OffsetFetchServices(FindsTopics, HasGroups, HasIdleOwners, HasOffsets, Protocol): ...


@dataclass(frozen=True, slots=True)
class _Fetched:
    """One partition of an answer; the defaults are those of a partition that was never committed."""

    partition_index: int
    offset: int = -1
    leader_epoch: int = -1
    metadata: str = ""
    error: ErrorCode = ErrorCode.NONE


@dataclass(frozen=True, slots=True)
class _FetchedTopic:
    name: str
    topic_id: UUID
    partitions: tuple[_Fetched, ...]


@dataclass(frozen=True, slots=True)
class _AskedTopic:
    name: str
    topic_id: UUID
    partition_indexes: Sequence[int]


@dataclass(frozen=True, slots=True)
class _AskedGroup:
    group_id: str
    topics: Sequence[_AskedTopic] | None
    """The requested topics, or None for everything that the group has committed."""
    member_id: str | None = None
    member_epoch: int = -1

    @property
    def names_a_member(self) -> bool:
        return bool(self.member_id) or self.member_epoch >= 0


async def offset_fetch(
    request: OffsetFetchRequest, context: RequestContext[OffsetFetchServices]
) -> OffsetFetchResponse:
    """Fetch offsets. For an offset never committed, an unknown partition or an unknown group, the answer is offset −1
    without an error. Null topics ask for everything. If a request asks for everything of a group twice, it is answered
    once, because the group may have very many offsets.

    A refusal stands on each partition in version 1, on the response in 2-7, on its group from 8 on.
    """
    if context.version >= MANY_GROUPS_FROM:
        groups = await _each_once(request.groups)
        asked = [await _asked_group(group) async for group in in_pieces(groups)]
        found = await _fetch(asked, request.require_stable, context)
        answers: list[OffsetFetchResponseGroup] = []
        async for group, fetched in in_pieces(zip(groups, found, strict=True)):
            if isinstance(fetched, KafkaError):
                answers.append(_refused_group(group, fetched.code))
            else:
                answered = [await _response_topics(topic) async for topic in in_pieces(fetched)]
                answers.append(OffsetFetchResponseGroup(group_id=group.group_id, topics=tuple(answered)))
        return OffsetFetchResponse(groups=tuple(answers))

    only = None
    if request.topics is not None:
        only = await mapped(lambda topic: _AskedTopic(topic.name, ZERO_UUID, topic.partition_indexes), request.topics)
    (fetched,) = await _fetch((_AskedGroup(request.group_id, only),), request.require_stable, context)
    if isinstance(fetched, KafkaError):
        raise fetched
    topics: list[OffsetFetchResponseTopic] = []
    async for topic in in_pieces(fetched):
        partitions = [
            OffsetFetchResponsePartition(
                partition_index=partition.partition_index,
                committed_offset=partition.offset,
                committed_leader_epoch=partition.leader_epoch,
                metadata=partition.metadata,
                error_code=partition.error,
            )
            async for partition in in_pieces(topic.partitions)
        ]
        topics.append(OffsetFetchResponseTopic(name=topic.name, partitions=tuple(partitions)))
    return OffsetFetchResponse(topics=tuple(topics))


def refuse_offset_fetch(
    request: OffsetFetchRequest, version: int, code: ErrorCode, _message: str | None
) -> OffsetFetchResponse:
    """Refuse on each partition in version 1, at the top level in 2-7, on each group from 8 on.

    Kafka names no partition from version 2 on. But below version 7 each partition has the error, too, because aiokafka
    (0.14, version 3) ignores the one at the top level. It would take the partitions for never committed, and read them
    again from the beginning. From version 7 on, each partition has UNSTABLE_OFFSET_COMMIT if another node coordinates
    the group, because librdkafka (2.16) asks again only for partitions that the answer names, and never reads the
    others.
    """
    if version >= MANY_GROUPS_FROM:
        return OffsetFetchResponse(groups=tuple(_refused_group(group, code) for group in request.groups))
    named: tuple[OffsetFetchResponseTopic, ...] = ()
    if version < UNSTABLE_FROM or _asks_again(request.topics or (), code):
        error = code if version < UNSTABLE_FROM else ErrorCode.UNSTABLE_OFFSET_COMMIT
        named = tuple(
            OffsetFetchResponseTopic(
                name=topic.name,
                partitions=tuple(
                    OffsetFetchResponsePartition(
                        partition_index=index, committed_offset=-1, metadata="", error_code=error
                    )
                    for index in topic.partition_indexes
                ),
            )
            for topic in request.topics or ()
        )
    return OffsetFetchResponse(error_code=code, topics=named)


def _refused_group(group: OffsetFetchRequestGroup, code: ErrorCode) -> OffsetFetchResponseGroup:
    topics = group.topics or ()
    if not _asks_again(topics, code):
        return OffsetFetchResponseGroup(group_id=group.group_id, error_code=code)
    named = tuple(
        OffsetFetchResponseTopics(
            name=topic.name,
            topic_id=topic.topic_id,
            partitions=tuple(
                OffsetFetchResponsePartitions(
                    partition_index=index,
                    committed_offset=-1,
                    metadata="",
                    error_code=ErrorCode.UNSTABLE_OFFSET_COMMIT,
                )
                for index in topic.partition_indexes
            ),
        )
        for topic in topics
    )
    return OffsetFetchResponseGroup(group_id=group.group_id, error_code=code, topics=named)


def _asks_again(topics: Sequence[OffsetFetchRequestTopic | OffsetFetchRequestTopics], code: ErrorCode) -> bool:
    """Return True if the client requests as many partitions as a consumer owns, and should send the request to another
    node.
    """
    return code in _ELSEWHERE and sum(len(topic.partition_indexes) for topic in topics) <= MAX_NAMED


async def _response_topics(topic: _FetchedTopic) -> OffsetFetchResponseTopics:
    partitions = [
        OffsetFetchResponsePartitions(
            partition_index=partition.partition_index,
            committed_offset=partition.offset,
            committed_leader_epoch=partition.leader_epoch,
            metadata=partition.metadata,
            error_code=partition.error,
        )
        async for partition in in_pieces(topic.partitions)
    ]
    return OffsetFetchResponseTopics(name=topic.name, topic_id=topic.topic_id, partitions=tuple(partitions))


async def _each_once(groups: Sequence[OffsetFetchRequestGroup]) -> list[OffsetFetchRequestGroup]:
    """Return the groups without repeated requests for all offsets of one group. Other requests name each partition of
    their answer."""
    whole, kept = set[str](), list[OffsetFetchRequestGroup]()
    async for group in in_pieces(groups):
        if group.topics is None:
            if group.group_id in whole:
                continue
            whole.add(group.group_id)
        kept.append(group)
    return kept


async def _asked_group(group: OffsetFetchRequestGroup) -> _AskedGroup:
    asked = None
    if group.topics is not None:
        asked = await mapped(
            lambda topic: _AskedTopic(topic.name, topic.topic_id, topic.partition_indexes), group.topics
        )
    return _AskedGroup(group.group_id, asked, group.member_id, group.member_epoch)


async def _fetch(
    asked: Sequence[_AskedGroup], require_stable: bool, context: RequestContext[OffsetFetchServices]
) -> list[list[_FetchedTopic] | KafkaError]:
    """Return the committed offsets of each group, or the error. Query the catalog once for all groups, because looking
    for a topic that does not exist takes time.
    """
    topics = [topic async for group in in_pieces(asked) async for topic in in_pieces(group.topics or ())]
    by_id, catalog = context.version >= BY_ID_FROM, context.services.catalog
    await resolve(topics, by_id, catalog, lambda topic: topic.partition_indexes)
    found: list[list[_FetchedTopic] | KafkaError] = []
    for first in range(0, len(asked), GROUPS_AT_ONCE):
        found += await _fetch_together(asked[first : first + GROUPS_AT_ONCE], require_stable, context)
    return found


async def _fetch_together(
    asked: Sequence[_AskedGroup], require_stable: bool, context: RequestContext[OffsetFetchServices]
) -> list[list[_FetchedTopic] | KafkaError]:
    """Do the same as `_fetch` with one question to Postgres for all of these groups. Their topics have been
    resolved."""
    services, by_id = context.services, context.version >= BY_ID_FROM
    refusals = await _refusals(asked, require_stable, context)
    told = [group for group, refusal in zip(asked, refusals, strict=True) if refusal is None]
    if services.idle_owners is not None and services.idle_owners.watching:
        client_id, connection = context.client_id or "", context.connection
        for group in told:
            services.idle_owners.asked_offsets(
                group.group_id, connection.connection_id, client_id, connection.client_host
            )
    awaited = {group.group_id: await _awaited(group, require_stable, context) for group in told}
    wanted = [
        (group.group_id, topic.topic_id, index)
        async for group in in_pieces(told)
        async for one in in_pieces(group.topics or ())
        if (topic := topic_of(one, by_id, services.catalog)) is not None
        async for index in in_pieces(one.partition_indexes)
        if has_partition(topic, index)
    ]
    whole = [group.group_id for group in told if group.topics is None]
    stored: dict[str, dict[tuple[UUID, int], CommittedOffset]] = {}
    answer = await services.offsets.fetch_together(wanted, whole, require_stable=require_stable)
    async for group_id, committed in in_pieces(answer):
        # Pending offsets come last, and so replace the committed ones.
        stored.setdefault(group_id, {})[committed.topic_id, committed.partition_index] = committed
    await services.catalog.resolve_all_ids(topic_id for group_id in whole for topic_id, _ in stored.get(group_id, ()))
    found: list[list[_FetchedTopic] | KafkaError] = []
    async for group, refusal in in_pieces(zip(asked, refusals, strict=True)):
        if refusal is not None:
            found.append(refusal)
            continue
        of_group = stored.get(group.group_id, {})
        if group.topics is None:
            fetched = await _all_topics(of_group, context)
        else:
            fetched = await _asked_topics(group.topics, of_group, by_id, context)
        found.append(await _unstable(fetched, awaited[group.group_id]))
    return found


async def _refusals(
    asked: Sequence[_AskedGroup], require_stable: bool, context: RequestContext[ViewsGroups]
) -> list[KafkaError | None]:
    """Return the error for each group whose offsets may not be read here. The lease is required although Postgres knows
    the offsets, because a group has one coordinator.

    A client that names itself to a consumer or streams group (version 9) must be a member at its epoch: a fenced member
    would read on from another's commits. Classic groups check no member, as upstream's ClassicGroup; a client of theirs
    may name itself with epoch −1 (@platformatic/kafka).

    A request for stable offsets may be the first one for a group here, from a new owner that already waits for the old
    owner. So the group must be in memory, because only its value says who waits (see `_awaited`).
    """
    groups = context.services.groups
    viewed = [
        group.group_id
        for group in asked
        if group.names_a_member or (require_stable and not groups.is_loaded(group.group_id))
    ]
    views = {group_id: view async for group_id, view in groups.views(viewed)}
    return [_refusal(group, views, context) for group in asked]


def _refusal(
    group: _AskedGroup, views: Mapping[str, Value | KafkaError], context: RequestContext[ViewsGroups]
) -> KafkaError | None:
    services = context.services
    if not may(context, AclOperation.DESCRIBE, ResourceType.GROUP, group.group_id):
        return refusal_of(ResourceType.GROUP)
    if services.groups.lease_for(group.group_id) is None:
        return KafkaError(ErrorCode.NOT_COORDINATOR)
    view = views.get(group.group_id)
    if isinstance(view, KafkaError):
        return view
    if not group.names_a_member:
        return None
    member_id, code = MemberId(group.member_id or ""), None
    if isinstance(view, ConsumerGroup):
        code = fetch_refusal(view, member_id, group.member_epoch)
    elif isinstance(view, StreamsGroup):
        code = streams_fetch_refusal(view, member_id, group.member_epoch)
    return None if code is None else KafkaError(code)


async def _awaited(
    asked: _AskedGroup, require_stable: bool, context: RequestContext[OffsetFetchServices]
) -> frozenset[tuple[str, int]]:
    """Return the partitions that the asking member will own and whose old owner is not done. This runs before the
    offsets are read, so an offset that is settled now is among them. A new owner that cannot be asked to retry
    continues from the answer, and the group is informed."""
    groups, connection = context.services.groups, context.connection
    group = groups.settled(asked.group_id)
    if isinstance(group, ConsumerGroup) and group.unsettled:
        return await _awaited_since_classic(group, asked, require_stable, context)
    if not isinstance(group, Group) or not group.handoffs:
        return frozenset()
    if require_stable:
        client_id, client_host = context.client_id or "", connection.client_host
        named = asked.member_id or ""
        return awaited_by(group, connection.connection_id, client_id, client_host, named)
    target = member_on(group, connection.connection_id)
    if target is not None:
        await _tell_passed(asked, target, awaited_by(group, connection.connection_id, "", ""), context)
    return frozenset()


async def _awaited_since_classic(
    group: ConsumerGroup, asked: _AskedGroup, require_stable: bool, context: RequestContext[OffsetFetchServices]
) -> frozenset[tuple[str, int]]:
    """Do the same for waits that began before the group became a consumer group."""
    services, connection = context.services, context.connection
    asker = unsettled.member_on(group, connection.number)
    if not require_stable and asker is None:
        return frozenset()
    awaited = unsettled.awaited_by(group, connection.number, context.client_id or "", connection.client_host)
    named = frozenset(
        (topic.name, index)
        for topic_id, index in awaited
        if (topic := services.catalog.get_by_id(topic_id)) is not None
    )
    if require_stable:
        return named
    if asker is not None:
        await _tell_passed(asked, asker, named, context)
    return frozenset()


async def _tell_passed(
    asked: _AskedGroup,
    target: MemberId,
    awaited: frozenset[tuple[str, int]],
    context: RequestContext[OffsetFetchServices],
) -> None:
    """Inform the group that the target continues from the offsets of the awaited partitions that it requests."""
    if awaited and asked.topics is not None:
        by_id, catalog = context.version >= BY_ID_FROM, context.services.catalog
        awaited &= {
            (topic.name, index)
            async for one in in_pieces(asked.topics)
            if (topic := topic_of(one, by_id, catalog)) is not None
            async for index in in_pieces(one.partition_indexes)
        }
    if awaited:
        progress = HandoffProgress(passed=tuple((target, *partition) for partition in awaited))
        context.services.groups.tell_group(asked.group_id, progress)


async def _unstable(fetched: list[_FetchedTopic], awaited: frozenset[tuple[str, int]]) -> list[_FetchedTopic]:
    """Set UNSTABLE_OFFSET_COMMIT if the offset may still change. The offset itself is returned too: librdkafka keeps
    it if its assignment has changed in the meantime."""
    if not awaited:
        return fetched

    def marked(topic: _FetchedTopic, partition: _Fetched) -> _Fetched:
        if (topic.name, partition.partition_index) in awaited and partition.error is ErrorCode.NONE:
            return replace(partition, error=ErrorCode.UNSTABLE_OFFSET_COMMIT)
        return partition

    return [
        replace(topic, partitions=tuple(await mapped(lambda each, of=topic: marked(of, each), topic.partitions)))
        async for topic in in_pieces(fetched)
    ]


async def _all_topics(
    stored: Mapping[tuple[UUID, int], CommittedOffset], context: RequestContext[FindsTopics]
) -> list[_FetchedTopic]:
    """Return all committed topics that the client may see."""
    catalog = context.services.catalog
    by_topic: dict[UUID, list[_Fetched]] = {}
    async for committed in in_pieces(stored.values()):
        by_topic.setdefault(committed.topic_id, []).append(_fetched(committed))
    fetched: list[_FetchedTopic] = []
    async for topic_id, partitions in in_pieces(by_topic.items()):
        topic = catalog.get_by_id(topic_id)
        if topic is not None and may_topic(context, AclOperation.DESCRIBE, topic.name, told=False):
            fetched.append(_FetchedTopic(topic.name, topic_id, tuple(partitions)))
    return fetched


async def _asked_topics(
    asked: Sequence[_AskedTopic],
    stored: Mapping[tuple[UUID, int], CommittedOffset],
    by_id: bool,
    context: RequestContext[FindsTopics],
) -> list[_FetchedTopic]:
    def answer(topic: Topic | None, unknown: ErrorCode, index: int) -> _Fetched:
        if topic is None:
            return _Fetched(index, error=unknown)
        found = stored.get((topic.topic_id, index))
        return _Fetched(index) if found is None else _fetched(found)

    def allowed(one: _AskedTopic) -> tuple[_AskedTopic, Topic | None, ErrorCode]:
        topic, missing = allowed_topic(one, by_id, context, AclOperation.DESCRIBE)
        # For an unknown name the answer says that nothing was committed.
        return one, topic, ErrorCode.NONE if missing is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION else missing

    topics = await mapped(allowed, asked)
    if by_id:  # Unknown ids come after all others, as in Kafka.
        known = [each async for each in in_pieces(topics) if each[1] is not None]
        topics = known + [each async for each in in_pieces(topics) if each[1] is None]
    return [
        _FetchedTopic(
            # A request that names its topics by their ids has no names, but handoffs do.
            one.name if topic is None else topic.name,
            one.topic_id,
            tuple(await mapped(lambda index, of=topic, said=unknown: answer(of, said, index), one.partition_indexes)),
        )
        async for one, topic, unknown in in_pieces(topics)
    ]


def _fetched(committed: CommittedOffset) -> _Fetched:
    if committed.is_pending:
        return _Fetched(committed.partition_index, error=ErrorCode.UNSTABLE_OFFSET_COMMIT)
    return _Fetched(committed.partition_index, committed.committed_offset, committed.leader_epoch, committed.metadata)
