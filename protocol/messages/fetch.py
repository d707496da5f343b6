"""Fetch: read record batches from partitions, waiting for a minimum of bytes.

Version 4 brings isolation levels, 7 sessions (KIP-227), 9 leader epochs (KIP-320), 11 racks (KIP-392), 12 tagged
fields, 13 topic ids, 15 the follower's state (KIP-903), 16 leader hints (KIP-951), 17 and 18 fields between replicas.
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int8, int16, int32, int64, message, nested, records, string, struct, uuid


@struct
class ReplicaState:
    replica_id: int = int32(default=-1)
    replica_epoch: int = int64(default=-1)


@struct
class FetchPartition:
    partition: int = int32()
    current_leader_epoch: int = int32(versions="9+", default=-1)
    fetch_offset: int = int64()
    last_fetched_epoch: int = int32(versions="12+", default=-1)
    log_start_offset: int = int64(versions="5+", default=-1)
    partition_max_bytes: int = int32()
    replica_directory_id: UUID = uuid(versions="17+", tag=0)
    high_watermark: int = int64(versions="18+", tag=1, default=0x7FFFFFFFFFFFFFFF)


@struct
class FetchTopic:
    topic: str = string(versions="0-12")
    topic_id: UUID = uuid(versions="13+")
    partitions: tuple[FetchPartition, ...] = array(FetchPartition)


@struct
class ForgottenTopic:
    topic: str = string(versions="0-12")
    topic_id: UUID = uuid(versions="13+")
    partitions: tuple[int, ...] = array(int32)


@message(ApiKey.FETCH, versions="4-18", flexible="12+")
class FetchRequest:
    cluster_id: str | None = string(versions="12+", nullable="12+", tag=0, default=None)
    replica_id: int = int32(versions="0-14", default=-1)
    replica_state: ReplicaState = nested(ReplicaState, versions="15+", tag=1)
    max_wait_ms: int = int32()
    min_bytes: int = int32()
    max_bytes: int = int32(default=0x7FFFFFFF)
    isolation_level: int = int8()
    session_id: int = int32(versions="7+")
    session_epoch: int = int32(versions="7+", default=-1)
    topics: tuple[FetchTopic, ...] = array(FetchTopic)
    forgotten_topics_data: tuple[ForgottenTopic, ...] = array(ForgottenTopic, versions="7+")
    rack_id: str = string(versions="11+")


@struct
class EpochEndOffset:
    epoch: int = int32(default=-1)
    end_offset: int = int64(default=-1)


@struct
class LeaderIdAndEpoch:
    leader_id: int = int32(default=-1)
    leader_epoch: int = int32(default=-1)


@struct
class SnapshotId:
    end_offset: int = int64(default=-1)
    epoch: int = int32(default=-1)


@struct
class AbortedTransaction:
    producer_id: int = int64()
    first_offset: int = int64()


@struct
class PartitionData:
    partition_index: int = int32()
    error_code: int = int16()
    high_watermark: int = int64()
    last_stable_offset: int = int64(default=-1)
    log_start_offset: int = int64(versions="5+", default=-1)
    diverging_epoch: EpochEndOffset = nested(EpochEndOffset, versions="12+", tag=0)
    current_leader: LeaderIdAndEpoch = nested(LeaderIdAndEpoch, versions="12+", tag=1)
    snapshot_id: SnapshotId = nested(SnapshotId, versions="12+", tag=2)
    aborted_transactions: tuple[AbortedTransaction, ...] | None = array(AbortedTransaction, nullable="0+")
    preferred_read_replica: int = int32(versions="11+", default=-1)
    records: bytes | memoryview | tuple[bytes | bytearray | memoryview, ...] | None = records(nullable="0+")


@struct
class FetchableTopicResponse:
    topic: str = string(versions="0-12")
    topic_id: UUID = uuid(versions="13+")
    partitions: tuple[PartitionData, ...] = array(PartitionData)


@struct
class NodeEndpoint:
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable="0+", default=None)


@message(ApiKey.FETCH, versions="4-18", flexible="12+")
class FetchResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16(versions="7+")
    session_id: int = int32(versions="7+")
    responses: tuple[FetchableTopicResponse, ...] = array(FetchableTopicResponse)
    node_endpoints: tuple[NodeEndpoint, ...] = array(NodeEndpoint, versions="16+", tag=0)
