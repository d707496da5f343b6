"""UnregisterBroker, UnregisterController: forget a node that is gone for good.

The one idea: no records lie on a node. When it is forgotten, only its name and id go.
"""

from __future__ import annotations

import structlog

from gateway.apis.services import HasMembership
from gateway.net.context import RequestContext
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.unregister_broker import UnregisterBrokerRequest, UnregisterBrokerResponse
from protocol.messages.unregister_controller import UnregisterControllerRequest, UnregisterControllerResponse
from storage.nodes import Unregistered
from storage.types import NodeId

logger = structlog.get_logger(__name__)


async def unregister_broker(
    request: UnregisterBrokerRequest, context: RequestContext[HasMembership]
) -> UnregisterBrokerResponse:
    """Forget a node that is not alive.

    A live node must be stopped first. Upstream removes it from the cluster while it runs on, fenced; here it would
    register again at once.
    """
    await _unregister(request.broker_id, "Broker", ErrorCode.BROKER_ID_NOT_REGISTERED, context)
    return UnregisterBrokerResponse(error_message=None)


async def unregister_controller(
    request: UnregisterControllerRequest, context: RequestContext[HasMembership]
) -> UnregisterControllerResponse:
    """Unregister a controller as UnregisterBroker does: brokers and controllers both register as nodes."""
    await _unregister(request.controller_id, "Controller", ErrorCode.CONTROLLER_ID_NOT_REGISTERED, context)
    return UnregisterControllerResponse(error_message=None)


async def _unregister(node_id: int, role: str, unknown: ErrorCode, context: RequestContext[HasMembership]) -> None:
    match await context.services.membership.unregister(NodeId(node_id)):
        case Unregistered.UNKNOWN:
            raise KafkaError(unknown, f"{role} ID {node_id} is not currently registered.")
        case Unregistered.ALIVE:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"{role} {node_id} is alive: stop it, then unregister it.")
        case Unregistered.DONE:
            logger.info("node unregistered", node_id=node_id)
