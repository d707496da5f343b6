"""The parts that heartbeats and descriptions of consumer, share and streams groups have in common.

The one idea: the members of these groups have epochs and speak by heartbeats alone (KIP-848, KIP-932, KIP-1071). So the
handlers of the three types check, wait and refuse in the same way. Each module beside this one says only how the
messages of its type become an event, and how its group becomes messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar
from uuid import UUID

from gateway.apis.admin.features import ChecksFeatures, require_protocol
from gateway.apis.groups.group_views import ViewsGroups, group_views
from gateway.apis.groups.leave_delay import delay_leave
from gateway.apis.services import HasGroups
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.consumer.partitions import Partitions
from gateway.coordinator.machine import ReplyT, Request, Value
from gateway.coordinator.share.model import ShareGroup
from gateway.coordinator.streams.model import StreamsGroup
from gateway.log.catalog import Catalog
from gateway.net.context import RequestContext
from gateway.net.pieces import first_of_each, in_pieces
from gateway.security.authorized_operations import NOT_ASKED
from gateway.security.authorizer import HasAuthorizer, may_topic
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import consumer_group_describe as described
from protocol.messages.consumer_group_heartbeat import Assignment, TopicPartitions
from protocol.shown import MAX_NAME_CHARS

MAX_SUBSCRIBED_TOPICS = 5_000
"""Maximal number of subscribed topics. The group compares them in one uninterrupted step, which takes some twenty
milliseconds if all of them exist."""
MAX_SUBSCRIBED_CHARACTERS = MAX_SUBSCRIBED_TOPICS * MAX_NAME_CHARS
"""Characters of all these names. The group keeps and stores them, also those that no topic can have."""

HIDDEN = "The group has described topic(s) that the client is not authorized to describe."

GroupT = TypeVar("GroupT", ConsumerGroup, ShareGroup, StreamsGroup)
DescribedT_co = TypeVar("DescribedT_co", covariant=True)

_NAMES = {ConsumerGroup: "consumer", ShareGroup: "share", StreamsGroup: "streams"}


class DescribesGroups(ChecksFeatures, ViewsGroups, Protocol): ...


class DescribeRequest(Protocol):
    @property
    def group_ids(self) -> Sequence[str]: ...


class Refused(Protocol[DescribedT_co]):
    """Class of a described group. It is called with the fields of a refusal."""

    def __call__(
        self, *, group_id: str, error_code: int, error_message: str | None, authorized_operations: int
    ) -> DescribedT_co: ...


# --- heartbeats ---------------------------------------------------------------------------------------------------


def require_group_id(group_id: str) -> None:
    """Raise KafkaError INVALID_REQUEST if the heartbeat names no group."""
    if not group_id:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "GroupId can't be empty.")


async def look_up_subscribed(names: Sequence[str] | None, catalog: Catalog) -> None:
    """Look up topics that this node does not know, so that a member can receive a topic that another node created a
    moment ago.

    KafkaError POLICY_VIOLATION if there are too many, or if they are too long; StorageError.
    """
    if not names:
        return
    if len(names) > MAX_SUBSCRIBED_TOPICS or sum(map(len, names)) > MAX_SUBSCRIBED_CHARACTERS:
        raise KafkaError(
            ErrorCode.POLICY_VIOLATION,
            f"A member may name {MAX_SUBSCRIBED_TOPICS} topics, with {MAX_SUBSCRIBED_CHARACTERS} characters.",
        )
    await catalog.resolve_all(names)


async def play_heartbeat(
    group_id: str, event: Request[ReplyT], member_epoch: int, context: RequestContext[HasGroups]
) -> ReplyT:
    """Let the group play the heartbeat and return its reply. A negative epoch leaves the group, after a delay."""
    if member_epoch < 0:
        await delay_leave()
    reply = context.services.groups.submit(group_id, event)
    return await reply if isinstance(reply, asyncio.Future) else reply


def assignment(held: Partitions) -> Assignment:
    """Return the assignment of a consumer's or share consumer's heartbeat."""
    return Assignment(
        topic_partitions=tuple(
            TopicPartitions(topic_id=topic_id, partitions=tuple(sorted(indexes))) for topic_id, indexes in held.items()
        )
    )


# --- descriptions -------------------------------------------------------------------------------------------------


async def describe_groups(
    kind: type[GroupT],
    feature: str,
    request: DescribeRequest,
    context: RequestContext[DescribesGroups],
    describe: Callable[[GroupT], Awaitable[DescribedT_co]],
    refused: Refused[DescribedT_co],
) -> tuple[DescribedT_co, ...]:
    """Describe each group by `describe`, or give the KafkaError that it raises to `refused`.

    A missing group, or one of another type, is GROUP_ID_NOT_FOUND: Java's admin then asks DescribeGroups. Raise
    KafkaError if the protocol is switched off.
    """
    require_protocol(feature, context)
    groups: list[DescribedT_co] = []
    async for group_id, viewed in group_views(context, await first_of_each(request.group_ids)):
        try:
            groups.append(await describe(of_type(kind, group_id, viewed)))
        except KafkaError as error:
            groups.append(
                refused(
                    group_id=group_id,
                    error_code=error.code,
                    error_message=error.message,
                    authorized_operations=NOT_ASKED,
                )
            )
    return tuple(groups)


def of_type(kind: type[GroupT], group_id: str, group: Value | KafkaError) -> GroupT:
    """Return the group that a view found. To the APIs of one type a group of another type does not exist.

    Raise the view's KafkaError, INVALID_GROUP_ID for an empty name, or GROUP_ID_NOT_FOUND.
    """
    if not group_id:
        raise KafkaError(ErrorCode.INVALID_GROUP_ID, "the group has no name")
    if isinstance(group, KafkaError):
        raise group
    if not group.exists:
        raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} not found.")
    if not isinstance(group, kind):
        raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} is not a {_NAMES[kind]} group.")
    return group


async def require_shown(context: RequestContext[HasAuthorizer], topics: Iterable[str], message: str = HIDDEN) -> None:
    """Raise KafkaError TOPIC_AUTHORIZATION_FAILED unless the client may describe all topics that the group reads."""
    if context.services.authorizer is None:
        return
    async for name in in_pieces(topics):
        if not may_topic(context, AclOperation.DESCRIBE, name):
            raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, message)


def topic_names(topic_ids: Iterable[UUID], catalog: Catalog) -> Iterable[str]:
    """Yield the names of those topics that exist."""
    for topic_id in topic_ids:
        topic = catalog.get_by_id(topic_id)
        if topic is not None:
            yield topic.name


def described_assignment(held: Partitions, catalog: Catalog) -> described.Assignment:
    """Return an assignment with topic names. Topics deleted a moment ago have no name and are left out."""
    return described.Assignment(
        topic_partitions=tuple(
            described.TopicPartitions(topic_id=topic_id, topic_name=topic.name, partitions=tuple(sorted(indexes)))
            for topic_id, indexes in held.items()
            if (topic := catalog.get_by_id(topic_id)) is not None
        )
    )
