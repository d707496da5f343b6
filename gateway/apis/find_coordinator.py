"""FindCoordinator: which node holds the lease of a group's shard.

The one idea: the answer is a hint read from the leases; the node it names decides again whether it coordinates.
Transactions and share groups are not served: see `find_coordinator`.
"""

from __future__ import annotations

from gateway.context import RequestContext, Services
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse

GROUP, TRANSACTION = 0, 1
FIRST_VERSION_WITH_KEYS = 4


async def find_coordinator(request: FindCoordinatorRequest, context: RequestContext) -> FindCoordinatorResponse:
    """One coordinator per key from version 4, one in the response itself before.

    A transactional id answers TRANSACTIONAL_ID_AUTHORIZATION_FAILED: of the codes a client may get here it is the one
    that Java, librdkafka and franz-go all raise at once instead of looking for a coordinator until they time out.
    Share keys (type 2) and unknown types answer INVALID_REQUEST.
    """
    if context.version >= FIRST_VERSION_WITH_KEYS:
        return FindCoordinatorResponse(
            coordinators=tuple(
                _coordinator(key, request.key_type, context.services) for key in request.coordinator_keys
            )
        )
    found = _coordinator(request.key, request.key_type, context.services)
    return FindCoordinatorResponse(
        error_code=found.error_code,
        error_message=found.error_message,
        node_id=found.node_id,
        host=found.host,
        port=found.port,
    )


def _coordinator(key: str, key_type: int, services: Services) -> Coordinator:
    try:
        if key_type == TRANSACTION:
            raise KafkaError(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "transactions are not served")
        if key_type != GROUP:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"coordinator key type {key_type} is not served")
        node = services.groups.coordinator_of(key)
    except KafkaError as refused:
        return Coordinator(
            key=key, node_id=-1, host="", port=-1, error_code=refused.code, error_message=refused.message
        )
    return Coordinator(key=key, node_id=node.node_id, host=node.host, port=node.port)
