"""OffsetCommit: store how far a group has read.

Version 2 is the oldest left; 5 drops the retention time, 6 brings leader epochs (KIP-320), 7 static members, 9 member
epochs of KIP-848 in the generation's place, 10 topic ids.
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct, uuid


@struct
class OffsetCommitRequestPartition:
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(versions="6+", default=-1)
    committed_metadata: str | None = string(nullable="0+")


@struct
class OffsetCommitRequestTopic:
    name: str = string(versions="0-9")
    topic_id: UUID = uuid(versions="10+")
    partitions: tuple[OffsetCommitRequestPartition, ...] = array(OffsetCommitRequestPartition)


@message(ApiKey.OFFSET_COMMIT, versions="2-10", flexible="8+")
class OffsetCommitRequest:
    group_id: str = string()
    generation_id_or_member_epoch: int = int32(default=-1)
    member_id: str = string()
    group_instance_id: str | None = string(versions="7+", nullable="7+", default=None)
    retention_time_ms: int = int64(versions="0-4", default=-1)
    topics: tuple[OffsetCommitRequestTopic, ...] = array(OffsetCommitRequestTopic)


@struct
class OffsetCommitResponsePartition:
    partition_index: int = int32()
    error_code: int = int16()


@struct
class OffsetCommitResponseTopic:
    name: str = string(versions="0-9")
    topic_id: UUID = uuid(versions="10+")
    partitions: tuple[OffsetCommitResponsePartition, ...] = array(OffsetCommitResponsePartition)


@message(ApiKey.OFFSET_COMMIT, versions="2-10", flexible="8+")
class OffsetCommitResponse:
    throttle_time_ms: int = int32(versions="3+")
    topics: tuple[OffsetCommitResponseTopic, ...] = array(OffsetCommitResponseTopic)
