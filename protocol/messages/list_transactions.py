"""ListTransactions: the transactional ids that a node coordinates, filtered by state and producer (KIP-664).

Version 1 also filters by how long a transaction has been open (KIP-994), 2 by a pattern of the id (KIP-1152).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct


@message(ApiKey.LIST_TRANSACTIONS, versions="0-2", flexible="0+")
class ListTransactionsRequest:
    state_filters: tuple[str, ...] = array(string)
    producer_id_filters: tuple[int, ...] = array(int64)
    duration_filter: int = int64(versions="1+", default=-1)
    transactional_id_pattern: str | None = string(versions="2+", nullable="2+", default=None)


@struct
class TransactionState:
    transactional_id: str = string()
    producer_id: int = int64()
    transaction_state: str = string()


@message(ApiKey.LIST_TRANSACTIONS, versions="0-2", flexible="0+")
class ListTransactionsResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    unknown_state_filters: tuple[str, ...] = array(string)
    transaction_states: tuple[TransactionState, ...] = array(TransactionState)
