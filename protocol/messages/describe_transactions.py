"""DescribeTransactions: the states of transactional ids, and the partitions of their open transactions (KIP-664)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct


@message(ApiKey.DESCRIBE_TRANSACTIONS, versions="0", flexible="0+")
class DescribeTransactionsRequest:
    transactional_ids: tuple[str, ...] = array(string)


@struct
class TopicData:
    topic: str = string()
    partitions: tuple[int, ...] = array(int32)


@struct
class TransactionState:
    error_code: int = int16()
    transactional_id: str = string()
    transaction_state: str = string()
    transaction_timeout_ms: int = int32()
    transaction_start_time_ms: int = int64()
    producer_id: int = int64()
    producer_epoch: int = int16()
    topics: tuple[TopicData, ...] = array(TopicData)


@message(ApiKey.DESCRIBE_TRANSACTIONS, versions="0", flexible="0+")
class DescribeTransactionsResponse:
    throttle_time_ms: int = int32()
    transaction_states: tuple[TransactionState, ...] = array(TransactionState)
