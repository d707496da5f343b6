"""DescribeQuorum: the leader of the metadata log, and how far each node follows it (KIP-595).

Version 1 adds the time at which a node was last heard from (KIP-836), version 2 directories and the addresses of voters
(KIP-853).
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import ZERO_UUID, array, int16, int32, int64, message, string, struct, uint16, uuid


@struct
class DescribedPartition:
    partition_index: int = int32()


@struct
class DescribedTopic:
    topic_name: str = string()
    partitions: tuple[DescribedPartition, ...] = array(DescribedPartition)


@message(ApiKey.DESCRIBE_QUORUM, versions="0-2", flexible="0+")
class DescribeQuorumRequest:
    topics: tuple[DescribedTopic, ...] = array(DescribedTopic)


@struct
class ReplicaState:
    replica_id: int = int32()
    replica_directory_id: UUID = uuid(versions="2+", default=ZERO_UUID)
    log_end_offset: int = int64()
    last_fetch_timestamp: int = int64(versions="1+", default=-1)
    last_caught_up_timestamp: int = int64(versions="1+", default=-1)


@struct
class PartitionData:
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(versions="2+", nullable="2+", default="")
    leader_id: int = int32()
    leader_epoch: int = int32()
    high_watermark: int = int64()
    current_voters: tuple[ReplicaState, ...] = array(ReplicaState)
    observers: tuple[ReplicaState, ...] = array(ReplicaState)


@struct
class TopicData:
    topic_name: str = string()
    partitions: tuple[PartitionData, ...] = array(PartitionData)


@struct
class Listener:
    name: str = string(versions="2+")
    host: str = string(versions="2+")
    port: int = uint16(versions="2+")


@struct
class Node:
    node_id: int = int32(versions="2+")
    listeners: tuple[Listener, ...] = array(Listener, versions="2+")


@message(ApiKey.DESCRIBE_QUORUM, versions="0-2", flexible="0+")
class DescribeQuorumResponse:
    error_code: int = int16()
    error_message: str | None = string(versions="2+", nullable="2+", default="")
    topics: tuple[TopicData, ...] = array(TopicData)
    nodes: tuple[Node, ...] = array(Node, versions="2+")
