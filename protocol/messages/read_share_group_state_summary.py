"""ReadShareGroupStateSummary: where a share group stands in its partitions, without each record (KIP-932).

Version 1 counts what behind the start offset is settled (KIP-1226).
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, int64, message, string, struct, uuid


@struct
class PartitionData:
    partition: int = int32()
    leader_epoch: int = int32()


@struct
class ReadStateSummaryData:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionData, ...] = array(PartitionData)


@message(ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, versions="0-1", flexible="0+")
class ReadShareGroupStateSummaryRequest:
    group_id: str = string()
    topics: tuple[ReadStateSummaryData, ...] = array(ReadStateSummaryData)


@struct
class PartitionResult:
    partition: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    state_epoch: int = int32()
    leader_epoch: int = int32()
    start_offset: int = int64()
    delivery_complete_count: int = int32(versions="1+", default=-1)


@struct
class ReadStateSummaryResult:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionResult, ...] = array(PartitionResult)


@message(ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, versions="0-1", flexible="0+")
class ReadShareGroupStateSummaryResponse:
    results: tuple[ReadStateSummaryResult, ...] = array(ReadStateSummaryResult)
