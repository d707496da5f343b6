"""InitProducerId: a producer id and epoch for an idempotent or transactional producer.

Version 3 lets a producer bump its own epoch (KIP-360); 5 admits the code TRANSACTION_ABORTABLE; 6, which is unstable in
4.4, brings two-phase commit (KIP-939).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import boolean, int16, int32, int64, message, string


@message(ApiKey.INIT_PRODUCER_ID, versions="0-6", flexible="2+")
class InitProducerIdRequest:
    transactional_id: str | None = string(nullable="0+")
    transaction_timeout_ms: int = int32()
    producer_id: int = int64(versions="3+", default=-1)
    producer_epoch: int = int16(versions="3+", default=-1)
    enable2_pc: bool = boolean(versions="6+")
    keep_prepared_txn: bool = boolean(versions="6+")


@message(ApiKey.INIT_PRODUCER_ID, versions="0-6", flexible="2+")
class InitProducerIdResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64(default=-1)
    producer_epoch: int = int16()
    ongoing_txn_producer_id: int = int64(versions="6+", default=-1)
    ongoing_txn_producer_epoch: int = int16(versions="6+", default=-1)
