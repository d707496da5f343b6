"""The groups and topics that an answer may show to a client, as several handlers ask.

The one idea: several handlers ask the same questions about a client's permissions, so one place answers them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol
from uuid import UUID

from gateway.apis.services import HasGroups
from gateway.coordinator.machine import Value
from gateway.log.catalog import Catalog
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from gateway.security.authorizer import HasAuthorizer, may, may_topic, refusal_of
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import KafkaError


class ViewsGroups(HasAuthorizer, HasGroups, Protocol): ...


async def shows_all(context: RequestContext[HasAuthorizer], topics: Iterable[str]) -> bool:
    """Return whether the client may describe all of the topics: a group that reads other topics is not shown."""
    if context.services.authorizer is None:
        return True
    async for name in in_pieces(topics):
        if not may_topic(context, AclOperation.DESCRIBE, name):
            return False
    return True


HIDDEN = "The group has described topic(s) that the client is not authorized to describe."


def topic_names(topic_ids: Iterable[UUID], catalog: Catalog) -> Iterable[str]:
    """Return the names of those topics that exist."""
    for topic_id in topic_ids:
        topic = catalog.get_by_id(topic_id)
        if topic is not None:
            yield topic.name


def may_create_topic(context: RequestContext[HasAuthorizer], topic: str) -> bool:
    """Return whether the client may create on the cluster, or the topic itself."""
    return may(context, AclOperation.CREATE, ResourceType.CLUSTER, told=False) or may_topic(
        context, AclOperation.CREATE, topic
    )


def group_views(
    context: RequestContext[ViewsGroups], group_ids: Sequence[str]
) -> AsyncIterator[tuple[str, Value | KafkaError]]:
    """Yield `Groups.views`, with a refusal for groups that the client may not describe."""
    if context.services.authorizer is None:
        return context.services.groups.views(group_ids)
    return _views(context, group_ids)


async def _views(
    context: RequestContext[ViewsGroups], group_ids: Sequence[str]
) -> AsyncIterator[tuple[str, Value | KafkaError]]:
    allowed: list[str] = []
    async for group_id in in_pieces(group_ids):
        if may(context, AclOperation.DESCRIBE, ResourceType.GROUP, group_id):
            allowed.append(group_id)
        else:
            yield group_id, refusal_of(ResourceType.GROUP)
    async for viewed in context.services.groups.views(allowed):
        yield viewed
