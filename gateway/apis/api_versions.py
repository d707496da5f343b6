"""ApiVersions: the table of what is served, as clients choose their versions by it."""

from __future__ import annotations

import re

from gateway.net.context import RequestContext
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)
from storage import types

FIRST_VERSION_WITH_SOFTWARE = 3
FIRST_VERSION_WITH_LOWEST_LEVEL_0 = 4
TRANSACTION_VERSION = "transaction.version"
FINALIZED = {"group.version": 1}
"""What every release has served: the consumer protocol (KIP-848)."""
SUPPORTED = (
    SupportedFeatureKey(name="group.version", min_version=0, max_version=1),
    SupportedFeatureKey(name=TRANSACTION_VERSION, min_version=0, max_version=types.TRANSACTION_VERSION),
)
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?", re.ASCII)


async def api_versions(request: ApiVersionsRequest, context: RequestContext) -> ApiVersionsResponse:
    """Remembers the client's software on its connection (KIP-511).

    Features are finalized at what every live node serves: by a transaction.version of 2 clients name no partitions
    before they write, to whichever node (KIP-890). Which lie at 0 at the least is told from version 4 on: clients of
    earlier ones take no 0 (KAFKA-17011)."""
    if context.version >= FIRST_VERSION_WITH_SOFTWARE:
        for text in (request.client_software_name, request.client_software_version):
            if not _SOFTWARE.fullmatch(text):
                raise KafkaError(ErrorCode.INVALID_REQUEST)
        context.connection.client_software_name = request.client_software_name
        context.connection.client_software_version = request.client_software_version
    levels = {**FINALIZED, TRANSACTION_VERSION: context.services.membership.transaction_version}
    return ApiVersionsResponse(
        api_keys=context.served,
        supported_features=SUPPORTED if context.version >= FIRST_VERSION_WITH_LOWEST_LEVEL_0 else (),
        finalized_features_epoch=context.services.catalog.revision,
        finalized_features=tuple(
            FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            for name, level in levels.items()
            if level
        ),
    )


def refuse_api_versions(
    request: ApiVersionsRequest, version: int, code: ErrorCode, message: str | None
) -> ApiVersionsResponse:
    return ApiVersionsResponse(error_code=code)
