"""ListConfigResources, and the resources that have settings: topics, brokers, their loggers, and groups.

The one idea: `describe_configs.py` and `alter_configs.py` find a resource and check a client's permission for it in
the same way.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import structlog

from gateway.apis.services import HasCatalog, HasMembership
from gateway.log.topic_names import why_illegal
from gateway.net.context import RequestContext
from gateway.security.authorizer import HasAuthorizer, require
from gateway.security.kinds import AclOperation
from gateway.security.kinds import ResourceType as ResourceTypes
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.list_config_resources import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)
from storage.types import Topic

logger = structlog.get_logger(__name__)


class ResourceType(IntEnum):
    """Upstream's ConfigResource.Type."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    """Known by its number so that tools get an empty list; its settings cannot be described or altered (KIP-714)."""
    GROUP = 32


_OF_CLUSTER = frozenset({ResourceType.BROKER, ResourceType.BROKER_LOGGER})
"""Resources whose settings require an ACL on the cluster."""


def require_on_resource(context: RequestContext[HasAuthorizer], operation: AclOperation, kind: int, name: str) -> None:
    """Raise KafkaError if the client lacks the permission. Unknown resource types pass; the caller rejects them."""
    if kind in _OF_CLUSTER:
        require(context, operation, ResourceTypes.CLUSTER)
    elif kind == ResourceType.TOPIC:
        require(context, operation, ResourceTypes.TOPIC, name)
    elif kind == ResourceType.GROUP:
        require(context, operation, ResourceTypes.GROUP, name)


def check_topic_name(name: str) -> None:
    reason = why_illegal(name)
    if reason is not None:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)


def find_topic(name: str, services: HasCatalog) -> Topic:
    check_topic_name(name)
    topic = services.catalog.get(name)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")
    return topic


def check_group_name(name: str) -> None:
    if not name:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Group name must not be empty")


class ListConfigResourcesServices(HasCatalog, HasMembership, Protocol): ...


async def list_config_resources(
    request: ListConfigResourcesRequest, context: RequestContext[ListConfigResourcesServices]
) -> ListConfigResourcesResponse:
    """List topics, brokers, their loggers, and groups that have settings of their own.

    Version 0 asks for subscriptions to client metrics only (KIP-714), and none exist here.
    """
    services = context.services
    known = {int(kind) for kind in ResourceType}
    unknown = [kind for kind in request.resource_types if kind not in known]
    if unknown:
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"There is no resource type {unknown[0]}.")
    wanted = set(request.resource_types) or known
    if context.version == 0:
        wanted = {int(ResourceType.CLIENT_METRICS)}
    resources: list[ConfigResource] = []
    if ResourceType.TOPIC in wanted:
        await services.catalog.refresh_if_changed()
        resources.extend(
            ConfigResource(resource_name=topic.name, resource_type=ResourceType.TOPIC)
            for topic in services.catalog.topics()
        )
    if ResourceType.GROUP in wanted:
        await services.catalog.refresh_if_changed()
        resources.extend(
            ConfigResource(resource_name=group_id, resource_type=ResourceType.GROUP)
            for group_id in sorted(services.catalog.group_configs)
        )
    for kind in (ResourceType.BROKER, ResourceType.BROKER_LOGGER):
        if kind in wanted:
            resources.extend(
                ConfigResource(resource_name=str(node.node_id), resource_type=kind)
                for node in services.membership.brokers()
            )
    return ListConfigResourcesResponse(config_resources=tuple(resources))
