"""AlterReplicaLogDirs: move replicas to other directories of a broker (KIP-113)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int16, int32, message, string, struct


@struct
class AlterReplicaLogDirTopic:
    name: str = string()
    partitions: tuple[int, ...] = array(int32)


@struct
class AlterReplicaLogDir:
    path: str = string()
    topics: tuple[AlterReplicaLogDirTopic, ...] = array(AlterReplicaLogDirTopic)


@message(ApiKey.ALTER_REPLICA_LOG_DIRS, versions="1-2", flexible="2+")
class AlterReplicaLogDirsRequest:
    dirs: tuple[AlterReplicaLogDir, ...] = array(AlterReplicaLogDir)


@struct
class AlterReplicaLogDirPartitionResult:
    partition_index: int = int32()
    error_code: int = int16()


@struct
class AlterReplicaLogDirTopicResult:
    topic_name: str = string()
    partitions: tuple[AlterReplicaLogDirPartitionResult, ...] = array(AlterReplicaLogDirPartitionResult)


@message(ApiKey.ALTER_REPLICA_LOG_DIRS, versions="1-2", flexible="2+")
class AlterReplicaLogDirsResponse:
    throttle_time_ms: int = int32()
    results: tuple[AlterReplicaLogDirTopicResult, ...] = array(AlterReplicaLogDirTopicResult)
