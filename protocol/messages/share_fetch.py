"""ShareFetch: acquire records of share partitions (KIP-932), and acknowledge others with the same request.

Version 0 was early access and is gone. Version 2 brings the acquire mode (KIP-1206) and renewals (KIP-1222).
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, int64, message, nested, records, string, struct, uuid


@struct
class AcknowledgementBatch:
    first_offset: int = int64()
    last_offset: int = int64()
    acknowledge_types: tuple[int, ...] = array(int8)


@struct
class FetchPartition:
    partition_index: int = int32()
    acknowledgement_batches: tuple[AcknowledgementBatch, ...] = array(AcknowledgementBatch)


@struct
class FetchTopic:
    topic_id: UUID = uuid()
    partitions: tuple[FetchPartition, ...] = array(FetchPartition)


@struct
class ForgottenTopic:
    topic_id: UUID = uuid()
    partitions: tuple[int, ...] = array(int32)


@message(ApiKey.SHARE_FETCH, versions="1-2", flexible="0+")
class ShareFetchRequest:
    group_id: str | None = string(nullable="0+", default=None)
    member_id: str | None = string(nullable="0+")
    share_session_epoch: int = int32()
    max_wait_ms: int = int32()
    min_bytes: int = int32()
    max_bytes: int = int32(default=0x7FFFFFFF)
    max_records: int = int32(versions="1+")
    batch_size: int = int32(versions="1+")
    share_acquire_mode: int = int8(versions="2+", default=0)
    is_renew_ack: bool = boolean(versions="2+", default=False)
    topics: tuple[FetchTopic, ...] = array(FetchTopic)
    forgotten_topics_data: tuple[ForgottenTopic, ...] = array(ForgottenTopic)


@struct
class LeaderIdAndEpoch:
    leader_id: int = int32()
    leader_epoch: int = int32()


@struct
class AcquiredRecords:
    first_offset: int = int64()
    last_offset: int = int64()
    delivery_count: int = int16()


@struct
class PartitionData:
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    acknowledge_error_code: int = int16()
    acknowledge_error_message: str | None = string(nullable="0+", default=None)
    current_leader: LeaderIdAndEpoch = nested(LeaderIdAndEpoch)
    records: bytes | memoryview | tuple[bytes | bytearray | memoryview, ...] | None = records(nullable="0")
    acquired_records: tuple[AcquiredRecords, ...] = array(AcquiredRecords)


@struct
class ShareFetchableTopicResponse:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionData, ...] = array(PartitionData)


@struct
class NodeEndpoint:
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable="0+", default=None)


@message(ApiKey.SHARE_FETCH, versions="1-2", flexible="0+")
class ShareFetchResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    acquisition_lock_timeout_ms: int = int32(versions="1+")
    responses: tuple[ShareFetchableTopicResponse, ...] = array(ShareFetchableTopicResponse)
    node_endpoints: tuple[NodeEndpoint, ...] = array(NodeEndpoint)
