"""ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments: who is to lead, and who are the replicas.

The one idea: a replica holds nothing, so a reassignment is complete when it has been written down. A partition that has
been reassigned keeps its leader where that one is among the new replicas, as upstream's does; an election lets the
first of them lead. Where `eligible.leader.replicas.version` is 0, only those in sync may, until an unclean election
takes any that is alive (`gateway/cluster/in_sync.py`).

Answers are those of ReplicationControlManager.electLeaders and alterPartitionReassignments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

import structlog

from gateway.apis.metadata import Placement
from gateway.apis.topics import Brokers
from gateway.cluster.placement import Leaders
from gateway.config.topic import requested_replication_factor
from gateway.net.context import RequestContext, Services
from gateway.net.errors import storage_code
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
from storage.errors import StorageError
from storage.types import Assignment, Partition, Topic

logger = structlog.get_logger(__name__)

FIRST_LEADS = Assignment(())
"""Of the replicas that a partition has, which others may name at the same time."""

PREFERRED, UNCLEAN = 0, 1
"""Upstream's ElectionType."""

ASSIGNED_AT_ONCE = 100
"""Partitions that are written by one transaction: it holds up changes of the catalog, and appends to all of them behind
one to any."""

Key = tuple[UUID, int]
"""Topic and index of a partition."""

NOT_NEEDED = "Leader election not needed for topic partition."


class Judged(NamedTuple):
    """What came of one partition of a request."""

    partition_index: int
    key: Key | None
    """None: it was refused."""
    refusal: KafkaError | None

    def said(self, unwritten: Mapping[Key, ErrorCode]) -> tuple[ErrorCode, str | None]:
        """Code and message for the client."""
        if self.refusal is not None:
            return self.refusal.code, self.refusal.message
        code = ErrorCode.NONE if self.key is None else unwritten.get(self.key, ErrorCode.NONE)
        return code, None


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
    await services.membership.look()
    leaders = services.membership.leaders
    elected: dict[Key, Assignment] = {}
    judged: list[tuple[str, list[Judged]]] = []
    async for name, topic, indexes in in_pieces(_candidates(asked, services)):
        found: list[Judged] = []
        async for index in in_pieces(indexes):
            try:
                if topic is None:
                    raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "No such topic.")
                partition = _partition(topic, index)
                if partition is None:
                    raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "No such partition.")
                elected[topic.topic_id, index] = _elect(partition, request.election_type, leaders)
                found.append(Judged(index, (topic.topic_id, index), None))
            except KafkaError as refusal:
                if asked is not None or refusal.code is not ErrorCode.ELECTION_NOT_NEEDED:
                    found.append(Judged(index, None, refusal))
        if asked is not None or found:
            judged.append((name, found))
    unwritten = await _assign(elected, context)
    results: list[ReplicaElectionResult] = []
    async for name, found in in_pieces(judged):
        parts: list[PartitionResult] = []
        async for each in in_pieces(found):
            code, message = each.said(unwritten)
            parts.append(PartitionResult(partition_id=each.partition_index, error_code=code, error_message=message))
        results.append(ReplicaElectionResult(topic=name, partition_result=tuple(parts)))
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


def _elect(partition: Partition, election_type: int, leaders: Leaders) -> Assignment:
    """What is to be written so that the first of the partition's replicas leads that may. KafkaError where there is
    nothing to elect, or nobody."""
    assignment = partition.assignment
    if assignment is None:
        # Its leader is the first of its replicas.
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, NOT_NEEDED)
    leader, preferred = leaders.leader(partition), assignment.replicas[0]
    living = [node_id for node_id in assignment.replicas if node_id in leaders.node_ids]
    if election_type == PREFERRED:
        if leader == preferred:
            raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, NOT_NEEDED)
        if preferred not in leaders.in_sync(assignment) or preferred not in living:
            raise KafkaError(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred leader was not available.")
        return FIRST_LEADS
    if leader in living:
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, NOT_NEEDED)
    if not living:
        raise KafkaError(
            ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "Eligible topic partition leaders are not available."
        )
    return Assignment((), living[0], (living[0],))


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
    assigned: dict[Key, Assignment] = {}
    judged: list[tuple[str, list[Judged]]] = []
    async for named in in_pieces(request.topics):
        topic = services.catalog.get(named.name)
        found: list[Judged] = []
        async for target in in_pieces(named.partitions):
            try:
                if topic is None:
                    raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "Unable to find the topic.")
                partition = _partition(topic, target.partition_index)
                if partition is None:
                    raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "Unable to find the partition.")
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
                found.append(Judged(target.partition_index, (topic.topic_id, target.partition_index), None))
            except KafkaError as refusal:
                found.append(Judged(target.partition_index, None, refusal))
        judged.append((named.name, found))
    unwritten = await _assign(assigned, context)
    responses: list[ReassignableTopicResponse] = []
    async for name, found in in_pieces(judged):
        parts: list[ReassignablePartitionResponse] = []
        async for each in in_pieces(found):
            code, message = each.said(unwritten)
            parts.append(
                ReassignablePartitionResponse(
                    partition_index=each.partition_index, error_code=code, error_message=message
                )
            )
        responses.append(ReassignableTopicResponse(name=name, partitions=tuple(parts)))
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


async def _assign(assignments: Mapping[Key, Assignment], context: RequestContext) -> Mapping[Key, ErrorCode]:
    """Writes them down; this node goes by them when this returns. Those that were not written behind others that were,
    and why. Raises StorageError where none was."""
    services = context.services
    rest = list(assignments.items())
    for start in range(0, len(rest), ASSIGNED_AT_ONCE):
        try:
            topics = await services.topics.assign(dict(rest[start : start + ASSIGNED_AT_ONCE]))
        except StorageError as error:
            if not start:
                raise
            code = storage_code(context.api_key, error)
            logger.warning("replicas not assigned", partitions=len(rest) - start, after=start, reason=str(error))
            return {key: code async for key, _ in in_pieces(rest[start:])}
        async for topic in in_pieces(topics):
            services.catalog.apply(topic)
    if rest:
        logger.info("replicas assigned", partitions=len(rest))
    return {}


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
