"""ApiVersions: the table of what is served, as clients choose their versions by it."""

from __future__ import annotations

import re

from gateway.net.context import RequestContext
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse

FIRST_VERSION_WITH_SOFTWARE = 3
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?", re.ASCII)


async def api_versions(request: ApiVersionsRequest, context: RequestContext) -> ApiVersionsResponse:
    """Remembers the client's software on its connection (KIP-511). No features: none of them is served, and a
    finalized transaction.version of 2 would make clients skip AddPartitionsToTxn."""
    if context.version >= FIRST_VERSION_WITH_SOFTWARE:
        for text in (request.client_software_name, request.client_software_version):
            if not _SOFTWARE.fullmatch(text):
                raise KafkaError(ErrorCode.INVALID_REQUEST)
        context.connection.client_software_name = request.client_software_name
        context.connection.client_software_version = request.client_software_version
    return ApiVersionsResponse(api_keys=context.served)


def refuse_api_versions(
    request: ApiVersionsRequest, version: int, code: ErrorCode, message: str | None
) -> ApiVersionsResponse:
    return ApiVersionsResponse(error_code=code)
