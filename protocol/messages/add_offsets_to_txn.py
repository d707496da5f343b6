"""AddOffsetsToTxn: a group whose offsets a transaction is about to commit.

Version 2 admits the code PRODUCER_FENCED, 4 TRANSACTION_ABORTABLE.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import int16, int32, int64, message, string


@message(ApiKey.ADD_OFFSETS_TO_TXN, versions="0-4", flexible="3+")
class AddOffsetsToTxnRequest:
    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    group_id: str = string()


@message(ApiKey.ADD_OFFSETS_TO_TXN, versions="0-4", flexible="3+")
class AddOffsetsToTxnResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
