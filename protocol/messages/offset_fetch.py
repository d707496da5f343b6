"""OffsetFetch: read how far a group has read.

Version 2 separates "all topics" (null), 5 brings leader epochs, 7 waits for transactions (KIP-447), 8 many groups
(KIP-709), 9 member epochs (KIP-848), 10 topic ids.
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int16, int32, int64, message, string, struct, uuid


@struct
class OffsetFetchRequestTopic:
    name: str = string()
    partition_indexes: tuple[int, ...] = array(int32)


@struct
class OffsetFetchRequestTopics:
    name: str = string(versions="0-9")
    topic_id: UUID = uuid(versions="10+")
    partition_indexes: tuple[int, ...] = array(int32)


@struct
class OffsetFetchRequestGroup:
    group_id: str = string()
    member_id: str | None = string(versions="9+", nullable="9+", default=None)
    member_epoch: int = int32(versions="9+", default=-1)
    topics: tuple[OffsetFetchRequestTopics, ...] | None = array(OffsetFetchRequestTopics, nullable="0+")


@message(ApiKey.OFFSET_FETCH, versions="1-10", flexible="6+")
class OffsetFetchRequest:
    group_id: str = string(versions="0-7")
    topics: tuple[OffsetFetchRequestTopic, ...] | None = array(OffsetFetchRequestTopic, versions="0-7", nullable="2-7")
    groups: tuple[OffsetFetchRequestGroup, ...] = array(OffsetFetchRequestGroup, versions="8+")
    require_stable: bool = boolean(versions="7+")


@struct
class OffsetFetchResponsePartition:
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(versions="5+", default=-1)
    metadata: str | None = string(nullable="0+")
    error_code: int = int16()


@struct
class OffsetFetchResponseTopic:
    name: str = string()
    partitions: tuple[OffsetFetchResponsePartition, ...] = array(OffsetFetchResponsePartition)


@struct
class OffsetFetchResponsePartitions:
    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(default=-1)
    metadata: str | None = string(nullable="0+")
    error_code: int = int16()


@struct
class OffsetFetchResponseTopics:
    name: str = string(versions="0-9")
    topic_id: UUID = uuid(versions="10+")
    partitions: tuple[OffsetFetchResponsePartitions, ...] = array(OffsetFetchResponsePartitions)


@struct
class OffsetFetchResponseGroup:
    group_id: str = string()
    topics: tuple[OffsetFetchResponseTopics, ...] = array(OffsetFetchResponseTopics)
    error_code: int = int16()


@message(ApiKey.OFFSET_FETCH, versions="1-10", flexible="6+")
class OffsetFetchResponse:
    throttle_time_ms: int = int32(versions="3+")
    topics: tuple[OffsetFetchResponseTopic, ...] = array(OffsetFetchResponseTopic, versions="0-7")
    error_code: int = int16(versions="2-7")
    groups: tuple[OffsetFetchResponseGroup, ...] = array(OffsetFetchResponseGroup, versions="8+")
