"""EndTxn: commit or abort a transaction.

Version 2 admits the code PRODUCER_FENCED, 4 TRANSACTION_ABORTABLE. Version 5, whose answer raises the producer's epoch
with every transaction (KIP-890), is absent here.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import boolean, int16, int32, int64, message, string


@message(ApiKey.END_TXN, versions="0-4", flexible="3+")
class EndTxnRequest:
    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    committed: bool = boolean()


@message(ApiKey.END_TXN, versions="0-4", flexible="3+")
class EndTxnResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
