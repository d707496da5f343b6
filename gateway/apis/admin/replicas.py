"""ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments: leaders and replicas of partitions.

The one idea: no records lie on a replica, so a reassignment is complete when it has been stored. As upstream, a
reassigned partition keeps its leader if it is among the new replicas; an election lets the first replica lead.

Answers are those of ReplicationControlManager.electLeaders and alterPartitionReassignments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol
from uuid import UUID

import structlog

from gateway.apis.admin.replica_assignment import Brokers
from gateway.apis.metadata import Placement
from gateway.apis.services import ChangesCatalog, HasCatalog, HasMembership
from gateway.cluster.placement import Leaders
from gateway.config.topic import requested_replication_factor
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces
from gateway.net.refusals import DerivedRefusal
from protocol.api_keys import ApiKey
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
"""Let the first of the partition's present replicas lead, even if another request renames the replicas at the same
time."""

PREFERRED, UNCLEAN = 0, 1
"""Upstream's ElectionType."""

ASSIGNED_AT_ONCE = 100
"""Partitions that one transaction writes. It blocks other changes of the catalog, and an append to any of the
partitions blocks appends to all."""

Key = tuple[UUID, int]
"""Topic and index of a partition."""

NOT_NEEDED = "Leader election not needed for topic partition."


class ReplicaServices(ChangesCatalog, HasMembership, Protocol): ...


class Judged(NamedTuple):
    """The decision for one partition of a request."""

    partition_index: int
    key: Key | None
    """The partition to write, or None if it was refused."""
    refusal: KafkaError | None

    def said(self, unwritten: Mapping[Key, ErrorCode]) -> tuple[ErrorCode, str | None]:
        """Return the error code and the message for the client."""
        if self.refusal is not None:
            return self.refusal.code, self.refusal.message
        code = ErrorCode.NONE if self.key is None else unwritten.get(self.key, ErrorCode.NONE)
        return code, None


# --- ElectLeaders -------------------------------------------------------------------------------------------------


async def elect_leaders(request: ElectLeadersRequest, context: RequestContext[ReplicaServices]) -> ElectLeadersResponse:
    """Elect or refuse each partition alone.

    Null means all partitions; those that need no election are then left out. KafkaError INVALID_REQUEST for an unknown
    election type.
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
        no_topic = f"No such topic as {name}"  # Kafka's text, which it repeats for each partition
        async for index in in_pieces(indexes):
            try:
                known, partition = _existing(topic, index, no_topic, "No such partition.")
                elected[known.topic_id, index] = _elect(partition, request.election_type, leaders)
                found.append(Judged(index, (known.topic_id, index), None))
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


refuse_elect_leaders = DerivedRefusal(ApiKey.ELECT_LEADERS, elements=True)


def _candidates(
    asked: Sequence[TopicPartitions] | None, services: HasCatalog
) -> Iterator[tuple[str, Topic | None, Sequence[int]]]:
    """Yield the requested partitions. For all, yield those whose nodes were named by an administrator: no other needs
    an election."""
    if asked is not None:
        for named in asked:
            yield named.topic, services.catalog.get(named.topic), named.partitions
        return
    for topic in services.catalog.topics():
        yield topic.name, topic, [part.partition_index for part in topic.partitions if part.assignment is not None]


def _existing(topic: Topic | None, index: int, no_topic: str, no_partition: str) -> tuple[Topic, Partition]:
    """Return the partition and its topic. Raise KafkaError with one of the two texts if one does not exist."""
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, no_topic)
    partition = _partition(topic, index)
    if partition is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, no_partition)
    return topic, partition


def _elect(partition: Partition, election_type: int, leaders: Leaders) -> Assignment:
    """Return the assignment by which the first eligible replica leads. Raise KafkaError if there is no need for an
    election, or no eligible replica.
    """
    assignment = partition.assignment
    if assignment is None:
        # The partition's leader is already the first of its replicas.
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, NOT_NEEDED)
    leader, preferred = leaders.leader(partition), assignment.replicas[0]
    living = [node_id for node_id in assignment.replicas if node_id in leaders.node_ids]
    if election_type == PREFERRED:
        if leader == preferred:
            raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, NOT_NEEDED)
        if preferred not in living:
            raise KafkaError(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred leader was not available.")
        return FIRST_LEADS
    if living:
        # A live replica leads already, because none lacks a record.
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, NOT_NEEDED)
    raise KafkaError(ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, "Eligible topic partition leaders are not available.")


# --- AlterPartitionReassignments ----------------------------------------------------------------------------------


async def alter_partition_reassignments(
    request: AlterPartitionReassignmentsRequest, context: RequestContext[ReplicaServices]
) -> AlterPartitionReassignmentsResponse:
    """Reassign or refuse each partition alone. A reassignment completes at once, so there is never one to cancel."""
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
                known, partition = _existing(
                    topic, target.partition_index, "Unable to find the topic.", "Unable to find the partition."
                )
                if target.replicas is None:
                    raise KafkaError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "No partition reassignment is in progress.")
                leader = services.membership.leaders.leader(partition)
                factor = requested_replication_factor(known.configs, services.catalog.broker)
                current = placement.replicas(partition, leader, factor)
                if not request.allow_replication_factor_change and len(target.replicas) != len(current):
                    raise KafkaError(
                        ErrorCode.INVALID_REPLICATION_FACTOR,
                        f"The replication factor is changed from {len(current)} to {len(target.replicas)}",
                    )
                brokers.check(target.replicas)
                key = known.topic_id, target.partition_index
                assigned[key] = reassigned(target.replicas, leader)
                found.append(Judged(target.partition_index, key, None))
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


refuse_alter_partition_reassignments = DerivedRefusal(ApiKey.ALTER_PARTITION_REASSIGNMENTS, elements=True)


def reassigned(replicas: Sequence[int], leader: int) -> Assignment:
    """Return the assignment of a partition that `leader` leads: it stays the leader if it is among the new replicas,
    else the first of them leads."""
    stays = leader in replicas and leader != replicas[0]
    return Assignment(tuple(replicas), leader if stays else None)


def _partition(topic: Topic, index: int) -> Partition | None:
    return topic.partitions[index] if 0 <= index < len(topic.partitions) else None


async def _assign(
    assignments: Mapping[Key, Assignment], context: RequestContext[ChangesCatalog]
) -> Mapping[Key, ErrorCode]:
    """Store the assignments. When this returns, this node already follows them. If a failure occurs after some were
    stored, return errors for the others. Raise StorageError if nothing was stored.
    """
    services = context.services
    rest = list(assignments.items())
    for start in range(0, len(rest), ASSIGNED_AT_ONCE):
        try:
            topics = await services.topics.assign(dict(rest[start : start + ASSIGNED_AT_ONCE]))
        except StorageError as error:
            if not start:
                raise
            code = context.storage_failed(context.api_key, error)
            logger.warning(
                "assignment of replicas not stored", partitions=len(rest) - start, after=start, reason=str(error)
            )
            return {key: code async for key, _ in in_pieces(rest[start:])}
        async for topic in in_pieces(topics):
            services.catalog.apply(topic)
    if rest:
        logger.info("replicas assigned", partitions=len(rest))
    return {}


# --- ListPartitionReassignments -----------------------------------------------------------------------------------


async def list_partition_reassignments(
    _request: ListPartitionReassignmentsRequest, _context: RequestContext[object]
) -> ListPartitionReassignmentsResponse:
    """List nothing for any request: upstream lists only ongoing reassignments, and no topic without one."""
    return ListPartitionReassignmentsResponse(error_message=None)
