"""ApiVersions: the table of served APIs, by which clients choose their versions."""

from __future__ import annotations

import re
from typing import Protocol

from gateway.apis.admin.features import finalized, supported
from gateway.apis.services import HasClusterId, HasMembership, HasSettings
from gateway.net.context import RequestContext, Role
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)

FIRST_VERSION_WITH_SOFTWARE = 3
FIRST_VERSION_WITH_LOWEST_LEVEL_0 = 4
MAX_SOFTWARE_CHARS = 100
"""Number of characters of each name that are kept while the connection is open."""
FIRST_VERSION_WITH_NODE = 5
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?", re.ASCII)


class ApiVersionsServices(HasClusterId, HasMembership, HasSettings, Protocol): ...


async def api_versions(
    request: ApiVersionsRequest, context: RequestContext[ApiVersionsServices]
) -> ApiVersionsResponse:
    """Remember the client's software on its connection (KIP-511).

    Features whose lowest level is 0 are listed from version 4 on, because earlier clients reject a 0 (KAFKA-17011).
    Clients believe the finalized features with the greatest epoch that they have seen, from any node. A client whose
    address leads to another node or cluster than it believes must bootstrap again.
    """
    if context.version >= FIRST_VERSION_WITH_SOFTWARE:
        for text in (request.client_software_name, request.client_software_version):
            if not _SOFTWARE.fullmatch(text):
                raise KafkaError(ErrorCode.INVALID_REQUEST)
        if _is_misrouted(request, context):
            raise KafkaError(ErrorCode.REBOOTSTRAP_REQUIRED)
        context.connection.client_software_name = request.client_software_name[:MAX_SOFTWARE_CHARS]
        context.connection.client_software_version = request.client_software_version[:MAX_SOFTWARE_CHARS]
    membership, broker = context.services.membership, context.services.settings.broker
    takes_0 = context.version >= FIRST_VERSION_WITH_LOWEST_LEVEL_0
    return ApiVersionsResponse(
        api_keys=context.served,
        supported_features=tuple(
            SupportedFeatureKey(name=name, min_version=lowest, max_version=highest)
            for name, (lowest, highest) in supported(broker).items()
            if lowest or takes_0
        ),
        finalized_features_epoch=membership.read_ms,
        finalized_features=tuple(
            FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            for name, level in finalized(membership, broker).items()
            if level
        ),
    )


def _is_misrouted(request: ApiVersionsRequest, context: RequestContext[ApiVersionsServices]) -> bool:
    """Return whether the client names another cluster or another broker than this one (KIP-1242). A client that has
    just started names neither. Like upstream, a controller does not check this.
    """
    if context.version < FIRST_VERSION_WITH_NODE or request.cluster_id is None or context.role is not Role.BROKER:
        return False
    services = context.services
    here = context.connection.seen_id(services.membership.node_id)
    return (request.cluster_id, request.node_id) != (services.cluster_id, here)
