"""Whether a streams group's heartbeat may be looked at: what no group could take (KIP-1071).

The one idea: a request is refused before anything is looked at that it could change. Follows upstream's
GroupCoordinatorService, with its order of checks.
"""

from __future__ import annotations

from gateway.coordinator.streams.model import JOIN_EPOCH, LEAVE_EPOCH, StreamsGroupHeartbeat
from protocol.errors import ErrorCode, KafkaError

MAX_ID_BYTES = 1_024
"""In UTF-8: ids are parts of keys in Postgres, and it is clients who make them."""


def check_request(event: StreamsGroupHeartbeat) -> None:
    """Raises KafkaError, in Kafka's words where it has some."""
    if not event.member_id:
        raise _invalid("MemberId can't be empty.")
    if event.instance_id == "":
        raise _invalid("InstanceId can't be empty.")
    if event.rack_id == "":
        raise _invalid("RackId can't be empty.")
    ids = (event.member_id, event.instance_id or "", event.rack_id or "", event.process_id or "")
    if any(len(id_.encode()) > MAX_ID_BYTES for id_ in ids):
        raise _invalid(f"an id is longer than {MAX_ID_BYTES} bytes")
    if event.member_epoch < LEAVE_EPOCH:
        # −2 is a static member's, and there are none.
        raise _invalid("MemberEpoch is invalid.")
    if event.member_epoch == LEAVE_EPOCH:
        return
    if event.instance_id is not None:
        raise _invalid("Static members are not supported in streams groups.")
    if event.reports_offsets:
        raise _invalid("TaskOffsets are not supported.")
    if event.rebalance_timeout_ms == 0 or event.rebalance_timeout_ms < -1:
        raise _invalid("RebalanceTimeoutMs must be positive.")
    _check_tasks(event)
    if event.member_epoch == JOIN_EPOCH:
        _check_join(event)
    elif event.topology is not None:
        raise _invalid("Topology can only be provided when (re-)joining.")
    _check_topology(event)


def _check_tasks(event: StreamsGroupHeartbeat) -> None:
    told = [tasks is not None for tasks in (event.active, event.standby, event.warmup)]
    if any(told) and not all(told):
        raise _invalid("ActiveTasks, StandbyTasks and WarmupTasks must be given together.")
    if event.warmup:
        raise _invalid("WarmupTasks are not supported.")


def _check_join(event: StreamsGroupHeartbeat) -> None:
    if event.rebalance_timeout_ms == -1:
        raise _invalid("RebalanceTimeoutMs must be provided in first request.")
    for tasks, name in ((event.active, "ActiveTasks"), (event.standby, "StandbyTasks")):
        if tasks:
            raise _invalid(f"{name} must be empty when (re-)joining.")
    if event.topology is None:
        raise _invalid("Topology must be non-null when (re-)joining.")
    if event.process_id is None:
        raise _invalid("ProcessId must be provided when (re-)joining.")


def _check_topology(event: StreamsGroupHeartbeat) -> None:
    if event.has_source_patterns:
        raise _invalid("Regular expressions for source topics are not supported.")
    if event.topology is None:
        return
    for subtopology in event.topology.subtopologies:
        for topic in subtopology.state_changelog_topics:
            if topic.partitions != 0:
                raise KafkaError(
                    ErrorCode.STREAMS_INVALID_TOPOLOGY,
                    f"Changelog topic {topic.name} must have an undefined partition count, "
                    f"but it is set to {topic.partitions}.",
                )


def _invalid(reason: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_REQUEST, reason)
