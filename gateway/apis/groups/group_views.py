"""The groups that an answer may show to a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from gateway.apis.services import HasGroups
from gateway.coordinator.machine import Value
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from gateway.security.authorizer import HasAuthorizer, may, refusal_of
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import KafkaError


class ViewsGroups(HasAuthorizer, HasGroups, Protocol): ...


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
