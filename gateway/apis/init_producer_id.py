"""InitProducerId: a producer id for an idempotent producer."""

from __future__ import annotations

import structlog

from gateway.net.context import RequestContext
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

log = structlog.get_logger(__name__)


async def init_producer_id(request: InitProducerIdRequest, context: RequestContext) -> InitProducerIdResponse:
    """Idempotence only: transactions are not served, and a transactional id is refused.

    A producer that names its own id and epoch (KIP-360) gets a fresh id too, as upstream gives one without a
    transactional id: its sequences start anew under an id that no partition has seen.
    """
    if request.transactional_id is not None:
        if not request.transactional_id:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "an empty transactional id")
        log.warning(
            "transactional producer refused",
            transactional_id=request.transactional_id,
            reason="transactions are not served; idempotent producers are",
        )
        raise KafkaError(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "transactions are not served")
    if (request.producer_id == -1) != (request.producer_epoch == -1):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "producer id and epoch must be given together")
    producer_id = await context.services.producers.allocate_producer_id()
    return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)


def refuse_init_producer_id(
    request: InitProducerIdRequest, version: int, code: ErrorCode, message: str | None
) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=code, producer_id=-1, producer_epoch=-1)
