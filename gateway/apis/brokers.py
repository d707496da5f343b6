"""UnregisterBroker: forget a node that is gone for good.

The one idea: a node is no place where records lie. One that has gone takes nothing with it but its name and id.
"""

from __future__ import annotations

import structlog

from gateway.net.context import RequestContext
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.unregister_broker import UnregisterBrokerRequest, UnregisterBrokerResponse
from storage.nodes import Unregistered
from storage.types import NodeId

logger = structlog.get_logger(__name__)


async def unregister_broker(request: UnregisterBrokerRequest, context: RequestContext) -> UnregisterBrokerResponse:
    """Forgets a node that is not alive. One that is has to be stopped first: upstream takes it out of the cluster and
    lets it run on, fenced, where here it would register again at once."""
    node_id = request.broker_id
    match await context.services.membership.unregister(NodeId(node_id)):
        case Unregistered.UNKNOWN:
            raise KafkaError(ErrorCode.BROKER_ID_NOT_REGISTERED, f"Broker ID {node_id} is not currently registered.")
        case Unregistered.ALIVE:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Broker {node_id} is alive: stop it, then unregister it.")
        case Unregistered.DONE:
            logger.info("node unregistered", node_id=node_id)
    return UnregisterBrokerResponse(error_message=None)


def refuse_unregister_broker(
    request: UnregisterBrokerRequest, version: int, code: ErrorCode, message: str | None
) -> UnregisterBrokerResponse:
    return UnregisterBrokerResponse(error_code=code, error_message=message)
