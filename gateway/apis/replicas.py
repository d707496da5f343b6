"""ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments: who is to lead, and who are the replicas.

The one idea: a replica holds nothing, so a reassignment is complete when it has been written down. A partition that has
been reassigned keeps its leader where that one is among the new replicas, as upstream's does; an election lets the
first of them lead.

Answers are those of ReplicationControlManager.electLeaders and alterPartitionReassignments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from uuid import UUID

import structlog

from gateway.apis.metadata import Placement
from gateway.apis.topics import Brokers
from gateway.cluster.placement import Leaders
from gateway.config.topic import requested_replication_factor
from gateway.net.context import RequestContext, Services
from gateway.net.pieces import in_pieces
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)
from protocol.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
    TopicPartitions,
)
from protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from storage.types import Assignment, Partition, Topic

log = structlog.get_logger(__name__)

PREFERRED, UNCLEAN = 0, 1
"""Upstream's ElectionType."""

ASSIGNED_AT_ONCE = 1_000
"""Partitions that are written by one transaction: it holds up changes of the catalog."""

NOT_NEEDED = "Leader election not needed for topic partition."


# --- ElectLeaders -------------------------------------------------------------------------------------------------


async def elect_leaders(request: ElectLeadersRequest, context: RequestContext) -> ElectLeadersResponse:
    """Each partition is elected or refused alone. Null means all, of which those are left out that need no election.

    KafkaError INVALID_REQUEST for an election type that nobody knows.
    """
    asked = request.topic_partitions
    if asked is not None and not asked:
        return ElectLeadersResponse()
    if request.election_type not in (PREFERRED, UNCLEAN):
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unknown election type {request.election_type}")
    services = context.services
    await services.catalog.refresh_if_changed()
    leaders = services.membership.leaders
    elected: dict[tuple[UUID, int], Assignment] = {}
    results: list[ReplicaElectionResult] = []
    async for name, topic, indexes in in_pieces(_candidates(asked, services)):
        found: list[PartitionResult] = []
        async for index in in_pieces(indexes):
            code, message = ErrorCode.NONE, None
            try:
                if topic is None:
                    raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"No such topic as {name}")
                partition = _partition(topic, index)
                if partition is None:
                    raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"No such partition as {name}-{index}")
                elected[topic.topic_id, index] = _elected(partition, request.election_type, leaders)
            except KafkaError as refusal:
                code, message = refusal.code, refusal.message
            if asked is not None or code is not ErrorCode.ELECTION_NOT_NEEDED:
                found.append(PartitionResult(partition_id=index, error_code=code, error_message=message))
        if asked is not None or found:
            results.append(ReplicaElectionResult(topic=name, partition_result=tuple(found)))
    await _assign(elected, services)
    return ElectLeadersResponse(replica_election_results=tuple(results))


def refuse_elect_leaders(
    request: ElectLeadersRequest, version: int, code: ErrorCode, message: str | None
) -> ElectLeadersResponse:
    """Before version 1 the partitions alone can say it."""
    return ElectLeadersResponse(
        error_code=code,
        replica_election_results=tuple(
            ReplicaElectionResult(
                topic=topic.topic,
                partition_result=tuple(
                    PartitionResult(partition_id=index, error_code=code, error_message=message)
                    for index in topic.partitions
                ),
            )
            for topic in request.topic_partitions or ()
        ),
    )


def _candidates(
    asked: Sequence[TopicPartitions] | None, services: Services
) -> Iterator[tuple[str, Topic | None, Sequence[int]]]:
    """What is asked for; of all partitions those for which somebody has named nodes: the others need no election."""
    if asked is not None:
        for named in asked:
            yield named.topic, services.catalog.get(named.topic), named.partitions
        return
    for topic in services.catalog.topics():
        yield topic.name, topic, [part.partition_index for part in topic.partitions if part.assignment is not None]


def _elected(partition: Partition, election_type: int, leaders: Leaders) -> Assignment:
    """The partition's assignment once the first of its replicas leads it. KafkaError where there is nothing to elect,
    or nobody."""
    assignment = partition.assignment
    if assignment is None:
        # Its leader is the first of its replicas.
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, NOT_NEEDED)
    if election_type == UNCLEAN:
        if not set(assignment.replicas).isdisjoint(leaders.node_ids):
            raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, NOT_NEEDED)
        raise KafkaError(
            ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "Eligible topic partition leaders are not available."
        )
    preferred = assignment.replicas[0]
    if leaders.leader(partition.partition_key, assignment) == preferred:
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, NOT_NEEDED)
    if preferred not in leaders.node_ids:
        raise KafkaError(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred leader was not available.")
    return Assignment(assignment.replicas)


# --- AlterPartitionReassignments ----------------------------------------------------------------------------------


async def alter_partition_reassignments(
    request: AlterPartitionReassignmentsRequest, context: RequestContext
) -> AlterPartitionReassignmentsResponse:
    """Each partition is reassigned or refused alone. None is ever on its way, so there is none to cancel."""
    if not request.topics:
        return AlterPartitionReassignmentsResponse()
    services = context.services
    await services.catalog.refresh_if_changed()
    brokers = await Brokers.read(services, asked=True)
    placement = Placement(context)
    assigned: dict[tuple[UUID, int], Assignment] = {}
    responses: list[ReassignableTopicResponse] = []
    async for named in in_pieces(request.topics):
        topic = services.catalog.get(named.name)
        results: list[ReassignablePartitionResponse] = []
        async for target in in_pieces(named.partitions):
            code, message = ErrorCode.NONE, None
            try:
                if topic is None:
                    raise KafkaError(
                        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"Unable to find a topic named {named.name}."
                    )
                partition = _partition(topic, target.partition_index)
                if partition is None:
                    raise KafkaError(
                        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                        f"Unable to find partition {named.name}:{target.partition_index}.",
                    )
                if target.replicas is None:
                    raise KafkaError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "No partition reassignment is in progress.")
                leader = placement.leader(partition)
                factor = requested_replication_factor(topic.configs, services.catalog.broker)
                current = placement.replicas(partition, leader, factor)
                if not request.allow_replication_factor_change and len(target.replicas) != len(current):
                    raise KafkaError(
                        ErrorCode.INVALID_REPLICATION_FACTOR,
                        f"The replication factor is changed from {len(current)} to {len(target.replicas)}",
                    )
                brokers.check(target.replicas)
                assigned[topic.topic_id, target.partition_index] = reassigned(target.replicas, leader)
            except KafkaError as refusal:
                code, message = refusal.code, refusal.message
            results.append(
                ReassignablePartitionResponse(
                    partition_index=target.partition_index, error_code=code, error_message=message
                )
            )
        responses.append(ReassignableTopicResponse(name=named.name, partitions=tuple(results)))
    await _assign(assigned, services)
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_message=None,
        responses=tuple(responses),
    )


def refuse_alter_partition_reassignments(
    request: AlterPartitionReassignmentsRequest, version: int, code: ErrorCode, message: str | None
) -> AlterPartitionReassignmentsResponse:
    return AlterPartitionReassignmentsResponse(
        error_code=code,
        error_message=message,
        responses=tuple(
            ReassignableTopicResponse(
                name=topic.name,
                partitions=tuple(
                    ReassignablePartitionResponse(
                        partition_index=partition.partition_index, error_code=code, error_message=message
                    )
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        ),
    )


def reassigned(replicas: Sequence[int], leader: int) -> Assignment:
    """Of a partition that `leader` leads: it goes on where it is among the new replicas, else the first of them."""
    stays = leader in replicas and leader != replicas[0]
    return Assignment(tuple(replicas), leader if stays else None)


def _partition(topic: Topic, index: int) -> Partition | None:
    return topic.partitions[index] if 0 <= index < len(topic.partitions) else None


async def _assign(assignments: Mapping[tuple[UUID, int], Assignment], services: Services) -> None:
    """Writes them down; this node goes by them when this returns. Raises StorageError."""
    rest = list(assignments.items())
    for start in range(0, len(rest), ASSIGNED_AT_ONCE):
        async for topic in in_pieces(await services.topics.assign(dict(rest[start : start + ASSIGNED_AT_ONCE]))):
            services.catalog.apply(topic)
    if rest:
        log.info("replicas assigned", partitions=len(rest))


# --- ListPartitionReassignments -----------------------------------------------------------------------------------


async def list_partition_reassignments(
    request: ListPartitionReassignmentsRequest, context: RequestContext
) -> ListPartitionReassignmentsResponse:
    """None, whatever is asked for: upstream names ongoing reassignments alone, and no topic that has none."""
    return ListPartitionReassignmentsResponse(error_message=None)


def refuse_list_partition_reassignments(
    request: ListPartitionReassignmentsRequest, version: int, code: ErrorCode, message: str | None
) -> ListPartitionReassignmentsResponse:
    return ListPartitionReassignmentsResponse(error_code=code, error_message=message)
