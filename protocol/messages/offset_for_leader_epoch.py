"""OffsetForLeaderEpoch: where a leader epoch ended, so that a reader can tell whether the log was cut (KIP-320).

Version 3 says which replica asks.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct


@struct
class OffsetForLeaderPartition:
    partition: int = int32()
    current_leader_epoch: int = int32(default=-1)
    leader_epoch: int = int32()


@struct
class OffsetForLeaderTopic:
    topic: str = string()
    partitions: tuple[OffsetForLeaderPartition, ...] = array(OffsetForLeaderPartition)


@message(ApiKey.OFFSET_FOR_LEADER_EPOCH, versions="2-4", flexible="4+")
class OffsetForLeaderEpochRequest:
    replica_id: int = int32(versions="3+", default=-2)
    topics: tuple[OffsetForLeaderTopic, ...] = array(OffsetForLeaderTopic)


@struct
class EpochEndOffset:
    error_code: int = int16()
    partition: int = int32()
    leader_epoch: int = int32(default=-1)
    end_offset: int = int64(default=-1)


@struct
class OffsetForLeaderTopicResult:
    topic: str = string()
    partitions: tuple[EpochEndOffset, ...] = array(EpochEndOffset)


@message(ApiKey.OFFSET_FOR_LEADER_EPOCH, versions="2-4", flexible="4+")
class OffsetForLeaderEpochResponse:
    throttle_time_ms: int = int32()
    topics: tuple[OffsetForLeaderTopicResult, ...] = array(OffsetForLeaderTopicResult)
