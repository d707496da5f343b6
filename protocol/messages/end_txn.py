"""EndTxn: commit or abort a transaction.

Version 2 admits the code PRODUCER_FENCED, 4 TRANSACTION_ABORTABLE. From version 5 on every transaction raises the
epoch, and the response contains the id and epoch with which the producer continues (KIP-890).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import boolean, int16, int32, int64, message, string


@message(ApiKey.END_TXN, versions="0-5", flexible="3+")
class EndTxnRequest:
    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    committed: bool = boolean()


@message(ApiKey.END_TXN, versions="0-5", flexible="3+")
class EndTxnResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64(versions="5+", default=-1)
    producer_epoch: int = int16(versions="5+", default=-1)
