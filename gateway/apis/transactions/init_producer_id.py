"""InitProducerId: a producer id for an idempotent producer, and a new epoch for a transactional one."""

from __future__ import annotations

from typing import Protocol

from gateway.apis.services import HasCatalog, HasProducers, HasTransactions
from gateway.coordinator.transactions import NO_EPOCH, NO_ID, InitProducer
from gateway.net.context import RequestContext
from gateway.net.refusals import DerivedRefusal
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

FIRST_VERSION_WITH_FENCED = 4


class InitProducerIdServices(HasCatalog, HasProducers, HasTransactions, Protocol): ...


async def init_producer_id(
    request: InitProducerIdRequest, context: RequestContext[InitProducerIdServices]
) -> InitProducerIdResponse:
    """Assign a producer id and epoch.

    With a transactional id, the previous producer is fenced, and its open transaction is aborted before the answer.

    Without a transactional id, a producer that names its own id and epoch (KIP-360) also gets a fresh id, as from
    upstream: its sequences start anew under an id that no partition has seen.
    """
    services = context.services
    if (request.producer_id == NO_ID) != (request.producer_epoch == NO_EPOCH):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "producer id and epoch must be given together")
    if request.transactional_id is None:
        producer_id = await services.producers.allocate_producer_id()
        return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)
    if not request.transactional_id:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "the transactional id is empty")
    broker = services.catalog.broker
    longest_ms = broker.transaction_max_timeout_ms
    if not 0 < request.transaction_timeout_ms <= longest_ms:
        raise KafkaError(
            ErrorCode.INVALID_TRANSACTION_TIMEOUT,
            f"a transaction may take 1 to {longest_ms} ms, not {request.transaction_timeout_ms}",
        )
    asked = InitProducer(request.transaction_timeout_ms, request.producer_id, request.producer_epoch)
    producer = await services.transactions.initialize(
        request.transactional_id, asked, is_awaited=context.connection.is_awaiting
    )
    return InitProducerIdResponse(producer_id=producer.producer_id, producer_epoch=producer.producer_epoch)


def _code_at(version: int, code: ErrorCode) -> ErrorCode:
    old = code is ErrorCode.PRODUCER_FENCED and version < FIRST_VERSION_WITH_FENCED
    return ErrorCode.INVALID_PRODUCER_EPOCH if old else code


refuse_init_producer_id = DerivedRefusal(
    ApiKey.INIT_PRODUCER_ID, values={"producer_id": -1, "producer_epoch": -1}, code_at=_code_at
)
