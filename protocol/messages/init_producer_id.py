"""InitProducerId: a producer id and epoch for an idempotent or transactional producer.

Version 3 lets a producer bump its own epoch (KIP-360); 5 admits the code TRANSACTION_ABORTABLE. Version 6 is unstable
in 4.2 and therefore absent.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import int16, int32, int64, message, string


@message(ApiKey.INIT_PRODUCER_ID, versions="0-5", flexible="2+")
class InitProducerIdRequest:
    transactional_id: str | None = string(nullable="0+")
    transaction_timeout_ms: int = int32()
    producer_id: int = int64(versions="3+", default=-1)
    producer_epoch: int = int16(versions="3+", default=-1)


@message(ApiKey.INIT_PRODUCER_ID, versions="0-5", flexible="2+")
class InitProducerIdResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64(default=-1)
    producer_epoch: int = int16()
