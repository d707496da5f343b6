"""Translate storage errors to Kafka's codes: one table for refusals, one for a database that is away.

The one idea: handlers pass on what storage decided, and the translation is in one place. The handler decides how a code
is laid out in an answer, and which element of a partly successful request fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from storage.errors import RecordsUnreadable, StorageConflict, StorageError, StorageUnavailable
from storage.types import Refusal

REFUSAL_CODES: Mapping[Refusal, ErrorCode] = {
    Refusal.UNKNOWN_PARTITION: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    Refusal.PARTITION_BUSY: ErrorCode.REQUEST_TIMED_OUT,
    Refusal.DAMAGED: ErrorCode.KAFKA_STORAGE_ERROR,
    Refusal.OUT_OF_ORDER_SEQUENCE: ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    Refusal.INVALID_PRODUCER_EPOCH: ErrorCode.INVALID_PRODUCER_EPOCH,
    Refusal.INVALID_PRODUCER_ID_MAPPING: ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    Refusal.NOT_IN_TRANSACTION: ErrorCode.INVALID_TXN_STATE,
    Refusal.TRANSACTION_TOO_LARGE: ErrorCode.POLICY_VIOLATION,
    Refusal.INVALID_TXN_STATE: ErrorCode.INVALID_TXN_STATE,
    Refusal.OFFSET_OUT_OF_RANGE: ErrorCode.OFFSET_OUT_OF_RANGE,
    Refusal.NOT_COORDINATOR: ErrorCode.NOT_COORDINATOR,
    Refusal.ILLEGAL_GENERATION: ErrorCode.ILLEGAL_GENERATION,
    Refusal.UNKNOWN_MEMBER: ErrorCode.UNKNOWN_MEMBER_ID,
    Refusal.STALE_MEMBER_EPOCH: ErrorCode.STALE_MEMBER_EPOCH,
    Refusal.UNKNOWN_TOPIC: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    Refusal.TOPIC_EXISTS: ErrorCode.TOPIC_ALREADY_EXISTS,
    Refusal.NAME_IN_USE: ErrorCode.REQUEST_TIMED_OUT,
    Refusal.INVALID_PARTITIONS: ErrorCode.INVALID_PARTITIONS,
}
"""Kafka's code for each refusal of Postgres."""

UNAVAILABLE_CODES: Mapping[ApiKey, ErrorCode] = {
    # The outcome of the append is unknown: the code with which every producer repeats the batch, and librdkafka
    # counts it as possibly persisted.
    ApiKey.PRODUCE: ErrorCode.REQUEST_TIMED_OUT,
    # aiokafka and kafka-python raise to the application on most other codes here.
    ApiKey.FETCH: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ApiKey.LIST_OFFSETS: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ApiKey.METADATA: ErrorCode.LEADER_NOT_AVAILABLE,
    # On COORDINATOR_NOT_AVAILABLE, Java's idempotent producer looks for the coordinator of a null transactional id.
    ApiKey.INIT_PRODUCER_ID: ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    # Upstream's conversion for this API: aiokafka and kafka-python raise on COORDINATOR_NOT_AVAILABLE.
    ApiKey.OFFSET_FETCH: ErrorCode.NOT_COORDINATOR,
    ApiKey.FIND_COORDINATOR: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.JOIN_GROUP: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.SYNC_GROUP: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.HEARTBEAT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.CONSUMER_GROUP_DESCRIBE: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.STREAMS_GROUP_HEARTBEAT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.STREAMS_GROUP_DESCRIBE: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.SHARE_GROUP_HEARTBEAT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.SHARE_GROUP_DESCRIBE: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.SHARE_FETCH: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ApiKey.SHARE_ACKNOWLEDGE: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ApiKey.LEAVE_GROUP: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.OFFSET_COMMIT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.OFFSET_DELETE: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.ADD_PARTITIONS_TO_TXN: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.ADD_OFFSETS_TO_TXN: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.END_TXN: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.TXN_OFFSET_COMMIT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    # Java's admin client retries on this code. It fails on all other codes that report something as unavailable.
    ApiKey.DESCRIBE_PRODUCERS: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ApiKey.WRITE_TXN_MARKERS: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ApiKey.DESCRIBE_TRANSACTIONS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.LIST_TRANSACTIONS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.DESCRIBE_GROUPS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.LIST_GROUPS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ApiKey.DELETE_GROUPS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
}
"""For each API, the retriable code that reports that Postgres is unreachable. All others use REQUEST_TIMED_OUT."""


def storage_code(api_key: ApiKey, error: StorageError) -> ErrorCode:
    """Return the code with which `api_key` answers a storage error."""
    if isinstance(error, StorageConflict):
        return ErrorCode.NOT_COORDINATOR
    if isinstance(error, StorageUnavailable):
        return UNAVAILABLE_CODES.get(api_key, ErrorCode.REQUEST_TIMED_OUT)
    if isinstance(error, RecordsUnreadable):
        return ErrorCode.KAFKA_STORAGE_ERROR
    return ErrorCode.UNKNOWN_SERVER_ERROR


def storage_refusal(code: ErrorCode) -> KafkaError:
    """Return the error for the elements of a request that storage failed to change after it had changed others."""
    return KafkaError(code, "storage is not available")
