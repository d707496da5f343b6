"""OffsetCommit, OffsetFetch and OffsetDelete: what a group has consumed, in Postgres.

The one idea: topic names become topic ids at the door, so an offset belongs to one incarnation of a topic and a
re-created topic starts without any. The coordinator is asked whether a commit may stand, and Postgres fences it again
in the transaction that stores it; fetches read Postgres, so they see every commit that was answered.

There are no transactions: RequireStable asks only whether the old owner of a partition is done with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from gateway.coordinator.classic_handoff import awaited_by, member_on
from gateway.coordinator.consumer import unsettled
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.consumer.offsets import fetch_refusal
from gateway.coordinator.facts import OffsetsCommitted
from gateway.coordinator.machine import Value
from gateway.coordinator.model import ConnectionId, Group, HandoffProgress, MemberId, OffsetCommitReply
from gateway.coordinator.model import OffsetCommit as OffsetCommitEvent
from gateway.coordinator.views import offset_delete_refusal, subscribes_to
from gateway.groups.journal import JournaledCommit
from gateway.log.catalog import Catalog
from gateway.net.context import RequestContext, Services
from gateway.net.errors import REFUSAL_CODES, storage_code
from gateway.net.pieces import in_pieces, mapped
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)
from protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from storage.errors import StorageConflict, StorageUnavailable
from storage.types import CommittedOffset, OffsetCommit, Refusal, Topic

COMMIT_BY_TOPIC_ID = 10
FETCH_BY_TOPIC_ID = 10
FETCH_MANY_GROUPS = 8
FETCH_WITH_TOP_LEVEL_ERROR = 2
GROUPS_AT_ONCE = 100
"""Of one OffsetFetch, whose offsets are asked for in one question."""
FENCED = frozenset({Refusal.ILLEGAL_GENERATION, Refusal.UNKNOWN_MEMBER, Refusal.STALE_MEMBER_EPOCH})


async def _resolve(asked: Sequence[OffsetCommitRequestTopic | _AskedTopic], by_id: bool, catalog: Catalog) -> None:
    """Makes known to the catalog which of these topics there are."""
    if by_id:
        ids = [one.topic_id async for one in in_pieces(asked) if catalog.get_by_id(one.topic_id) is None]
        await catalog.resolve_all_ids(ids)
    else:
        await catalog.resolve_all([one.name async for one in in_pieces(asked) if catalog.get(one.name) is None])


def _has_partition(topic: Topic, partition_index: int) -> bool:
    return 0 <= partition_index < len(topic.partitions)


# --- OffsetCommit ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Commit:
    """One partition of a commit on its way to an answer; `error` None while it may still be stored."""

    partition: OffsetCommitRequestPartition
    topic_id: UUID | None
    error: ErrorCode | None


async def offset_commit(request: OffsetCommitRequest, context: RequestContext) -> OffsetCommitResponse:
    """Unknown topics and partitions are refused one by one, without the group being asked; a refusal by the group is
    repeated on every other partition. Metadata over `offset.metadata.max.bytes` costs its own partition alone.

    Negative offsets are stored and come back as committed, as upstream's classic groups do.
    """
    by_id = context.version >= COMMIT_BY_TOPIC_ID
    unknown = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    catalog = context.services.catalog
    await _resolve(request.topics, by_id, catalog)
    topics: list[tuple[str, UUID, list[_Commit]]] = []
    async for asked in in_pieces(request.topics):
        topic = catalog.get_by_id(asked.topic_id) if by_id else catalog.get(asked.name)
        if topic is None:
            commits = [_Commit(partition, None, unknown) async for partition in in_pieces(asked.partitions)]
        else:
            commits = [
                _Commit(
                    partition,
                    topic.topic_id,
                    None if _has_partition(topic, partition.partition_index) else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                )
                async for partition in in_pieces(asked.partitions)
            ]
        topics.append((asked.name, asked.topic_id, commits))
    surviving: list[_Commit] = []
    async for _, _, commits in in_pieces(topics):
        surviving += [commit async for commit in in_pieces(commits) if commit.error is None]
    if surviving:
        await _commit(surviving, request, unknown, context)
    await _journal(request, topics, context.services)
    answered: list[OffsetCommitResponseTopic] = []
    async for name, topic_id, commits in in_pieces(topics):
        partitions = await mapped(_committed, commits)
        answered.append(OffsetCommitResponseTopic(name=name, topic_id=topic_id, partitions=tuple(partitions)))
    return OffsetCommitResponse(topics=tuple(answered))


async def _journal(
    request: OffsetCommitRequest, topics: Iterable[tuple[str, UUID, list[_Commit]]], services: Services
) -> None:
    """Writes down what was asked for and what became of it, with the log's bounds as this node knows them."""
    journal = services.groups.journal
    if journal is None:
        return
    now_s = asyncio.get_running_loop().time()
    journaled: list[JournaledCommit] = []
    async for name, asked_id, commits in in_pieces(topics):
        topic = None if not commits or commits[0].topic_id is None else services.catalog.get_by_id(commits[0].topic_id)
        shown = name or (str(asked_id) if topic is None else topic.name)
        async for commit in in_pieces(commits):
            partition = commit.partition
            known = None
            if topic is not None and _has_partition(topic, partition.partition_index):
                known = services.tail.known(topic.partitions[partition.partition_index].partition_key, now_s)
            journaled.append(
                JournaledCommit(
                    commit.topic_id,
                    shown,
                    partition.partition_index,
                    partition.committed_offset,
                    None if known is None else known.log_start_offset,
                    None if known is None else known.high_watermark,
                    int(commit.error or ErrorCode.NONE),
                )
            )
    journal.committed(request.group_id, request.generation_id_or_member_epoch, request.member_id, journaled)


def _committed(commit: _Commit) -> OffsetCommitResponsePartition:
    return OffsetCommitResponsePartition(
        partition_index=commit.partition.partition_index, error_code=commit.error or ErrorCode.NONE
    )


def refuse_offset_commit(
    request: OffsetCommitRequest, version: int, code: ErrorCode, message: str | None
) -> OffsetCommitResponse:
    return OffsetCommitResponse(
        topics=tuple(
            OffsetCommitResponseTopic(
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=tuple(
                    OffsetCommitResponsePartition(partition_index=partition.partition_index, error_code=code)
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        )
    )


async def _commit(
    surviving: list[_Commit], request: OffsetCommitRequest, unknown: ErrorCode, context: RequestContext
) -> None:
    """Gives every commit in `surviving` its error or ErrorCode.NONE."""
    reply = await _ask(surviving, request, context)
    fenced = await _store(surviving, reply, request, unknown, context)
    if not fenced:
        return
    # The group may have changed its protocol since it was asked: its members' generations became epochs, or epochs
    # generations, and the commit that it let through was fenced by the wrong one.
    again = await _ask(fenced, request, context)
    if again.error is ErrorCode.NONE and again.by_member_epoch is not reply.by_member_epoch:
        await _store(fenced, again, request, unknown, context)


async def _ask(surviving: list[_Commit], request: OffsetCommitRequest, context: RequestContext) -> OffsetCommitReply:
    groups = context.services.groups
    reply = groups.submit(
        request.group_id,
        OffsetCommitEvent(
            request_id=groups.next_request_id(),
            connection_id=ConnectionId(context.connection.connection_id),
            version=context.version,
            member_id=MemberId(request.member_id),
            group_instance_id=request.group_instance_id,
            generation_id=request.generation_id_or_member_epoch,
            partitions=tuple(
                [
                    (commit.topic_id, commit.partition.partition_index)
                    async for commit in in_pieces(surviving)
                    if commit.topic_id is not None
                ]
            ),
        ),
    )
    return await reply if isinstance(reply, asyncio.Future) else reply


async def _store(
    surviving: list[_Commit],
    reply: OffsetCommitReply,
    request: OffsetCommitRequest,
    unknown: ErrorCode,
    context: RequestContext,
) -> list[_Commit]:
    """Gives every commit its error or ErrorCode.NONE. Those that are given back were refused for who they come from."""
    groups = context.services.groups
    error = reply.error
    lease = groups.lease_for(request.group_id)
    if error is ErrorCode.NONE and lease is None:
        error = ErrorCode.NOT_COORDINATOR
    if error is not ErrorCode.NONE or lease is None:
        await _set_all(surviving, error)
        return []

    max_metadata = context.services.settings.broker.offset_metadata_max_bytes
    retention_ms = request.retention_time_ms if request.retention_time_ms >= 0 else None
    storing: list[_Commit] = []
    rows: list[OffsetCommit] = []
    async for commit in in_pieces(surviving):
        metadata = commit.partition.committed_metadata or ""
        if len(metadata) > max_metadata:
            commit.error = ErrorCode.OFFSET_METADATA_TOO_LARGE
        elif commit.topic_id is not None:
            storing.append(commit)
            rows.append(
                OffsetCommit(
                    lease=lease,
                    group_id=request.group_id,
                    generation_id=max(request.generation_id_or_member_epoch, -1),
                    topic_id=commit.topic_id,
                    partition_index=commit.partition.partition_index,
                    committed_offset=commit.partition.committed_offset,
                    leader_epoch=commit.partition.committed_leader_epoch,
                    metadata=metadata,
                    retention_ms=retention_ms,
                    member_id=request.member_id if reply.by_member_epoch else None,
                )
            )
    if not rows:
        return []
    try:
        results = await groups.offset_committer.submit(rows)
    except (StorageUnavailable, StorageConflict) as error:
        await _set_all(storing, storage_code(context.api_key, error))
    except KafkaError as full:
        await _set_all(storing, full.code)
    else:
        async for commit, refusal in in_pieces(zip(storing, results, strict=True)):
            commit.error = _commit_error(refusal, request.generation_id_or_member_epoch, unknown, reply.stale)
        committed = tuple(
            [
                (row.topic_id, row.partition_index, row.committed_offset)
                async for row, refusal in in_pieces(zip(rows, results, strict=True))
                if refusal is None
            ]
        )
        if committed and groups.readers:
            epoch = request.generation_id_or_member_epoch
            groups.told(request.group_id, (OffsetsCommitted(MemberId(request.member_id), epoch, committed),))
        refused = in_pieces(zip(storing, results, strict=True))
        return [commit async for commit, refusal in refused if refusal in FENCED]
    return []


async def _set_all(commits: Iterable[_Commit], error: ErrorCode) -> None:
    async for commit in in_pieces(commits):
        commit.error = error


def _commit_error(refusal: Refusal | None, generation_id: int, unknown: ErrorCode, stale: ErrorCode) -> ErrorCode:
    """What the fence in Postgres said of a commit that the coordinator had let through a moment before."""
    if refusal is None:
        return ErrorCode.NONE
    if refusal is Refusal.UNKNOWN_TOPIC:
        return unknown
    if refusal is Refusal.STALE_MEMBER_EPOCH:
        return stale
    if refusal is Refusal.ILLEGAL_GENERATION and generation_id < 0:
        # The group has gained members since: a commit from outside lacks an identity, not a generation.
        return ErrorCode.UNKNOWN_MEMBER_ID
    return REFUSAL_CODES[refusal]


# --- OffsetFetch ----------------------------------------------------------------------------------------------------


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
    """None: everything that the group has committed."""
    member_id: str | None = None
    member_epoch: int = -1

    @property
    def names_a_member(self) -> bool:
        return bool(self.member_id) or self.member_epoch >= 0


async def offset_fetch(request: OffsetFetchRequest, context: RequestContext) -> OffsetFetchResponse:
    """Never committed, unknown partition, unknown group: offset −1 and no error; null topics ask for everything.

    A refusal stands on each partition in version 1, on the response in 2-7, on its group from 8.
    """
    if context.version >= FETCH_MANY_GROUPS:
        asked = [await _asked_group(group) async for group in in_pieces(request.groups)]
        found = await _fetch(asked, request.require_stable, context)
        answers: list[OffsetFetchResponseGroup] = []
        async for group, fetched in in_pieces(zip(asked, found, strict=True)):
            if isinstance(fetched, KafkaError):
                answers.append(OffsetFetchResponseGroup(group_id=group.group_id, error_code=fetched.code))
            else:
                answered = [await _response_topics(topic) async for topic in in_pieces(fetched)]
                answers.append(OffsetFetchResponseGroup(group_id=group.group_id, topics=tuple(answered)))
        return OffsetFetchResponse(groups=tuple(answers))

    nothing = UUID(int=0)
    only = None
    if request.topics is not None:
        only = await mapped(lambda topic: _AskedTopic(topic.name, nothing, topic.partition_indexes), request.topics)
    (fetched,) = await _fetch((_AskedGroup(request.group_id, only),), request.require_stable, context)
    if isinstance(fetched, KafkaError):
        failed = fetched.code
        if context.version >= FETCH_WITH_TOP_LEVEL_ERROR:
            return OffsetFetchResponse(error_code=failed)
        fetched = [
            _FetchedTopic(
                topic.name,
                nothing,
                tuple(await mapped(lambda index: _Fetched(index, error=failed), topic.partition_indexes)),
            )
            async for topic in in_pieces(only or ())
        ]
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
    request: OffsetFetchRequest, version: int, code: ErrorCode, message: str | None
) -> OffsetFetchResponse:
    """v1 on each partition, v2-7 at the top level, v8+ on each group."""
    if version >= 8:
        return OffsetFetchResponse(
            groups=tuple(OffsetFetchResponseGroup(group_id=group.group_id, error_code=code) for group in request.groups)
        )
    topics: tuple[OffsetFetchResponseTopic, ...] = ()
    if version < 2:
        topics = tuple(
            OffsetFetchResponseTopic(
                name=topic.name,
                partitions=tuple(
                    OffsetFetchResponsePartition(
                        partition_index=partition_index, committed_offset=-1, metadata="", error_code=code
                    )
                    for partition_index in topic.partition_indexes
                ),
            )
            for topic in request.topics or ()
        )
    return OffsetFetchResponse(error_code=code, topics=topics)


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


async def _asked_group(group: OffsetFetchRequestGroup) -> _AskedGroup:
    asked = None
    if group.topics is not None:
        asked = await mapped(
            lambda topic: _AskedTopic(topic.name, topic.topic_id, topic.partition_indexes), group.topics
        )
    return _AskedGroup(group.group_id, asked, group.member_id, group.member_epoch)


async def _fetch(
    asked: Sequence[_AskedGroup], require_stable: bool, context: RequestContext
) -> list[list[_FetchedTopic] | KafkaError]:
    """What each group has committed, or why that is not told. However many groups there are, the catalog is asked once:
    to look for a topic that does not exist takes time, which must not be spent once per group."""
    topics = [topic async for group in in_pieces(asked) async for topic in in_pieces(group.topics or ())]
    await _resolve(topics, context.version >= FETCH_BY_TOPIC_ID, context.services.catalog)
    found: list[list[_FetchedTopic] | KafkaError] = []
    for first in range(0, len(asked), GROUPS_AT_ONCE):
        found += await _fetch_together(asked[first : first + GROUPS_AT_ONCE], require_stable, context)
    return found


async def _fetch_together(
    asked: Sequence[_AskedGroup], require_stable: bool, context: RequestContext
) -> list[list[_FetchedTopic] | KafkaError]:
    """As `_fetch`, with one question to Postgres for all of these groups; their topics have been resolved."""
    services, by_id = context.services, context.version >= FETCH_BY_TOPIC_ID
    refusals = await _refusals(asked, services)
    told = [group for group, refusal in zip(asked, refusals, strict=True) if refusal is None]
    awaited = {group.group_id: _awaited(group.group_id, require_stable, context) for group in told}
    wanted = [
        (group.group_id, topic.topic_id, index)
        async for group in in_pieces(told)
        async for one in in_pieces(group.topics or ())
        if (topic := _topic_of(one, by_id, services.catalog)) is not None
        async for index in in_pieces(one.partition_indexes)
        if _has_partition(topic, index)
    ]
    whole = [group.group_id for group in told if group.topics is None]
    stored: dict[str, dict[tuple[UUID, int], CommittedOffset]] = {}
    async for group_id, committed in in_pieces(await services.offsets.fetch_together(wanted, whole)):
        stored.setdefault(group_id, {})[committed.topic_id, committed.partition_index] = committed
    await services.catalog.resolve_all_ids(topic_id for group_id in whole for topic_id, _ in stored.get(group_id, ()))
    found: list[list[_FetchedTopic] | KafkaError] = []
    async for group, refusal in in_pieces(zip(asked, refusals, strict=True)):
        if refusal is not None:
            found.append(refusal)
            continue
        of_group = stored.get(group.group_id, {})
        if group.topics is None:
            fetched = await _all_topics(of_group, services.catalog)
        else:
            fetched = await _asked_topics(group.topics, of_group, by_id, services.catalog)
        found.append(await _unstable(fetched, awaited[group.group_id]))
    return found


async def _refusals(asked: Sequence[_AskedGroup], services: Services) -> list[KafkaError | None]:
    """Why a group is not told of. Without the lease: Postgres would know, but one group has one coordinator.

    Whoever names itself to a consumer group (version 9) must be a member, at its epoch: a fenced one would read on
    from what another has committed since. Classic groups ask nobody who it is, as upstream's ClassicGroup; a client
    of theirs may name itself with epoch −1 (@platformatic/kafka).
    """
    naming = [group.group_id for group in asked if group.names_a_member]
    views = {group_id: view async for group_id, view in services.groups.views(naming)}
    return [_refusal(group, views, services) for group in asked]


def _refusal(group: _AskedGroup, views: Mapping[str, Value | KafkaError], services: Services) -> KafkaError | None:
    if services.groups.lease_for(group.group_id) is None:
        return KafkaError(ErrorCode.NOT_COORDINATOR)
    view = views.get(group.group_id) if group.names_a_member else None
    if isinstance(view, KafkaError):
        return view
    if isinstance(view, ConsumerGroup):
        code = fetch_refusal(view, MemberId(group.member_id or ""), group.member_epoch)
        return None if code is None else KafkaError(code)
    return None


def _awaited(group_id: str, require_stable: bool, context: RequestContext) -> frozenset[tuple[str, int]]:
    """Partitions that the asker is to own, and whose old owner is not done with them. Looked at before the offsets are
    read: what is settled now is in them. A target that cannot be told to ask again goes on from what it is told, and
    the group hears of it."""
    groups, connection = context.services.groups, context.connection
    group = groups.settled(group_id)
    if isinstance(group, ConsumerGroup) and group.unsettled:
        return _awaited_since_classic(group, require_stable, context)
    if not isinstance(group, Group) or not group.handoffs:
        return frozenset()
    if require_stable:
        return awaited_by(group, connection.connection_id, context.client_id or "", connection.client_host)
    target = member_on(group, connection.connection_id)
    passed = awaited_by(group, connection.connection_id, "", "") if target is not None else frozenset[tuple[str, int]]()
    if target is not None and passed:
        groups.tell_group(group_id, HandoffProgress(passed=tuple((target, *partition) for partition in passed)))
    return frozenset()


def _awaited_since_classic(
    group: ConsumerGroup, require_stable: bool, context: RequestContext
) -> frozenset[tuple[str, int]]:
    """As above, of what owners were told of before their group became a consumer group."""
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
    if asker is not None and named:
        passed = tuple((asker, *partition) for partition in named)
        services.groups.tell_group(group.group_id, HandoffProgress(passed=passed))
    return frozenset()


async def _unstable(fetched: list[_FetchedTopic], awaited: frozenset[tuple[str, int]]) -> list[_FetchedTopic]:
    """UNSTABLE_OFFSET_COMMIT where the offset may still move. The offset itself is told, too: librdkafka keeps it where
    its assignment has changed meanwhile."""
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


def _topic_of(asked: _AskedTopic, by_id: bool, catalog: Catalog) -> Topic | None:
    return catalog.get_by_id(asked.topic_id) if by_id else catalog.get(asked.name)


async def _all_topics(stored: Mapping[tuple[UUID, int], CommittedOffset], catalog: Catalog) -> list[_FetchedTopic]:
    by_topic: dict[UUID, list[_Fetched]] = {}
    async for committed in in_pieces(stored.values()):
        by_topic.setdefault(committed.topic_id, []).append(_fetched(committed))
    fetched: list[_FetchedTopic] = []
    async for topic_id, partitions in in_pieces(by_topic.items()):
        topic = catalog.get_by_id(topic_id)
        if topic is not None:
            fetched.append(_FetchedTopic(topic.name, topic_id, tuple(partitions)))
    return fetched


async def _asked_topics(
    asked: Sequence[_AskedTopic],
    stored: Mapping[tuple[UUID, int], CommittedOffset],
    by_id: bool,
    catalog: Catalog,
) -> list[_FetchedTopic]:
    def answer(topic: Topic | None, index: int) -> _Fetched:
        if topic is None:
            return _Fetched(index, error=ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.NONE)
        found = stored.get((topic.topic_id, index))
        return _Fetched(index) if found is None else _fetched(found)

    topics = await mapped(lambda one: (one, _topic_of(one, by_id, catalog)), asked)
    if by_id:  # unknown ids come after all others, as in Kafka
        known = [each async for each in in_pieces(topics) if each[1] is not None]
        topics = known + [each async for each in in_pieces(topics) if each[1] is None]
    return [
        _FetchedTopic(
            one.name,
            one.topic_id,
            tuple(await mapped(lambda index, of=topic: answer(of, index), one.partition_indexes)),
        )
        async for one, topic in in_pieces(topics)
    ]


def _fetched(committed: CommittedOffset) -> _Fetched:
    return _Fetched(committed.partition_index, committed.committed_offset, committed.leader_epoch, committed.metadata)


# --- OffsetDelete ---------------------------------------------------------------------------------------------------


async def offset_delete(request: OffsetDeleteRequest, context: RequestContext) -> OffsetDeleteResponse:
    """Deletes under the group's own queue: a member that joins meanwhile waits, so no subscribed topic loses offsets.

    A partition that was never committed is deleted without complaint.
    """
    services = context.services
    if not request.group_id:
        return OffsetDeleteResponse(error_code=ErrorCode.INVALID_GROUP_ID)
    await services.catalog.resolve_all(asked.name for asked in request.topics)
    topics = await mapped(lambda asked: (asked, services.catalog.get(asked.name)), request.topics)
    async with services.groups.holding(request.group_id) as (held, lease):
        group = services.groups.summary(held)
        refusal = offset_delete_refusal(group)
        if refusal is not None:
            return OffsetDeleteResponse(error_code=refusal)
        doomed: list[tuple[UUID, int]] = []
        answers: list[OffsetDeleteResponseTopic] = []
        async for asked, topic in in_pieces(topics):
            subscribed = subscribes_to(group, asked.name)
            partitions: list[OffsetDeleteResponsePartition] = []
            async for partition in in_pieces(asked.partitions):
                index, error = partition.partition_index, ErrorCode.NONE
                if topic is None or not _has_partition(topic, index):
                    error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                elif subscribed:
                    error = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
                else:
                    doomed.append((topic.topic_id, index))
                partitions.append(OffsetDeleteResponsePartition(partition_index=index, error_code=error))
            answers.append(OffsetDeleteResponseTopic(name=asked.name, partitions=tuple(partitions)))
        if doomed:
            await services.offsets.delete(request.group_id, doomed, lease)
    return OffsetDeleteResponse(topics=tuple(answers))


def refuse_offset_delete(
    request: OffsetDeleteRequest, version: int, code: ErrorCode, message: str | None
) -> OffsetDeleteResponse:
    return OffsetDeleteResponse(error_code=code)
