"""Topics as requests for a group's offsets name them: OffsetCommit and OffsetFetch by name and from version 10 by id.

The one idea: topic names become topic ids at the door, so an offset belongs to one incarnation of a topic and a
re-created topic starts without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar
from uuid import UUID

from gateway.apis.services import FindsTopics
from gateway.log.catalog import Catalog
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from gateway.security.authorizer import may_topic
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode
from storage.types import Topic

BY_ID_FROM = 10
"""The version of OffsetCommit and of OffsetFetch that names topics by their ids."""


class Named(Protocol):
    """One topic of a request, with either its name or its id."""

    @property
    def name(self) -> str: ...

    @property
    def topic_id(self) -> UUID: ...


AskedTopic = TypeVar("AskedTopic", bound=Named)


async def resolve(
    asked: Sequence[AskedTopic], by_id: bool, catalog: Catalog, partitions: Callable[[AskedTopic], Iterable[int]]
) -> None:
    """Look up which of these topics and of their partitions exist, so that the catalog knows. Raise StorageError.

    Another node may have added partitions a moment ago. Without a look, this node would answer that such a partition
    has no committed offset, and its owner would begin anew.
    """
    if by_id:
        ids = [one.topic_id async for one in in_pieces(asked) if catalog.get_by_id(one.topic_id) is None]
        await catalog.resolve_all_ids(ids)
    else:
        await catalog.resolve_all([one.name async for one in in_pieces(asked) if catalog.get(one.name) is None])
    async for one in in_pieces(asked):
        topic = topic_of(one, by_id, catalog)
        if topic is None:
            continue
        async for index in in_pieces(partitions(one)):
            if not has_partition(topic, index):
                await catalog.catch_up()
                return


def topic_of(asked: Named, by_id: bool, catalog: Catalog) -> Topic | None:
    return catalog.get_by_id(asked.topic_id) if by_id else catalog.get(asked.name)


def allowed_topic(
    asked: Named, by_id: bool, context: RequestContext[FindsTopics], operation: AclOperation
) -> tuple[Topic | None, ErrorCode]:
    """Return the topic if it exists and the client may use it, and the error code otherwise."""
    topic = topic_of(asked, by_id, context.services.catalog)
    if topic is None and by_id:
        return None, ErrorCode.UNKNOWN_TOPIC_ID
    if not may_topic(context, operation, asked.name if topic is None else topic.name):
        return None, ErrorCode.TOPIC_AUTHORIZATION_FAILED
    return topic, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def has_partition(topic: Topic, partition_index: int) -> bool:
    return 0 <= partition_index < len(topic.partitions)
