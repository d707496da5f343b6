"""CreatePartitions.

`timeout_ms` has no effect: the partitions exist when the request is answered.
"""

from __future__ import annotations

import structlog

from gateway.apis.admin.new_topics import TopicServices, check_total, topic_refusal
from gateway.apis.admin.replica_assignment import Brokers
from gateway.apis.services import FindsTopics, HasCatalog
from gateway.config.topic import requested_replication_factor
from gateway.net.context import RequestContext
from gateway.net.errors import storage_refusal
from gateway.net.pieces import in_pieces, mapped, tally
from gateway.security.authorizer import may_topic, refusal_of
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from storage.errors import StorageError
from storage.types import Refusal, Topic

logger = structlog.get_logger(__name__)

STRICT_CREATE_PARTITIONS = 3
"""First version in which clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""


async def create_partitions(
    request: CreatePartitionsRequest, context: RequestContext[TopicServices]
) -> CreatePartitionsResponse:
    """Add partitions; each topic succeeds or fails alone. Mirrors ReplicationControlManager.createPartitions."""
    services = context.services
    await services.catalog.refresh_if_changed()
    named = await tally(topic.name for topic in request.topics)
    check_total(await mapped(lambda topic: _growth(topic, context), request.topics))
    brokers = await Brokers.read(services, asked=True)
    mutations = services.throttles.mutations(context, STRICT_CREATE_PARTITIONS)
    results: dict[str, CreatePartitionsTopicResult] = {}
    failure: KafkaError | None = None
    any_extended = False
    total = 0
    async for topic in in_pieces(request.topics):
        if topic.name in results:
            continue
        try:
            if failure is not None:
                raise failure
            if named[topic.name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
            if not may_topic(context, AclOperation.ALTER, topic.name):
                raise refusal_of(ResourceType.TOPIC)
            known = _find_growable(topic, services, brokers)
            growth = topic.count - len(known.partitions)
            # The topic may have been created since the total was checked.
            check_total((total, growth))
            total += growth
            if not request.validate_only:
                mutations.record(growth)
                replicas = await _replicas(topic, known, brokers)
                try:
                    grown = await services.topics.create_partitions(known.topic_id, topic.count, replicas)
                except StorageError as error:
                    if not any_extended:
                        raise
                    logger.warning("topic not extended, and none after it", topic=topic.name, reason=str(error))
                    failure = storage_refusal(context.storage_failed(context.api_key, error))
                    raise failure from error
                if isinstance(grown, Refusal):
                    raise topic_refusal(grown, topic.name)
                services.catalog.apply(grown)
                any_extended = True
                logger.info("partitions created", topic=topic.name, partitions=topic.count)
        except KafkaError as error:
            results[topic.name] = CreatePartitionsTopicResult(
                name=topic.name, error_code=error.code, error_message=error.message
            )
        else:
            results[topic.name] = CreatePartitionsTopicResult(name=topic.name)
    return CreatePartitionsResponse(throttle_time_ms=mutations.wait_ms, results=tuple(results.values()))


def _growth(topic: CreatePartitionsTopic, context: RequestContext[FindsTopics]) -> int:
    """Return how many partitions are added. A refusal of the total reveals a topic's partition count, so only topics
    that the client may alter count."""
    if not may_topic(context, AclOperation.ALTER, topic.name, told=False):
        return 0
    known = context.services.catalog.get(topic.name)
    return max(topic.count - len(known.partitions), 0) if known is not None else 0


def _find_growable(topic: CreatePartitionsTopic, services: HasCatalog, brokers: Brokers) -> Topic:
    known = services.catalog.get(topic.name)
    if known is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition.")
    if known.internal:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Topic '{topic.name}' is internal.")
    present = len(known.partitions)
    if topic.count == present:
        raise KafkaError(ErrorCode.INVALID_PARTITIONS, f"Topic already has {present} partition(s).")
    if topic.count < present:
        raise KafkaError(
            ErrorCode.INVALID_PARTITIONS,
            f"The topic {topic.name} currently has {present} partition(s); {topic.count} would not be an increase.",
        )
    first = known.partitions[0].assignment
    if topic.assignments is None:
        if first is not None:
            brokers.check_factor(len(first.replicas))
    else:
        if len(topic.assignments) != topic.count - present:
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"Attempted to add {topic.count - present} additional partition(s), but only "
                f"{len(topic.assignments)} assignment(s) were specified.",
            )
        # Compare with what Metadata shows, because clients know nothing else about the topic's replicas.
        broker = services.catalog.broker
        factor = min(requested_replication_factor(known.configs, broker), len(brokers.alive))
        for index, assignment in enumerate(topic.assignments, present):
            brokers.check(assignment.broker_ids, factor if first is None else len(first.replicas))
            brokers.check_alive(assignment.broker_ids, index)
    return known


async def _replicas(topic: CreatePartitionsTopic, known: Topic, brokers: Brokers) -> list[tuple[int, ...]] | None:
    """Return the replicas of each new partition. These are the nodes that the request names, or as many nodes as the
    topic's first partition has named replicas. Return None if neither names any.
    """
    if topic.assignments is not None:
        return await mapped(lambda assignment: assignment.broker_ids, topic.assignments)
    first = known.partitions[0].assignment
    if first is None:
        return None
    start, factor = brokers.spread.place_of(first.replicas[0]), len(first.replicas)
    added = range(len(known.partitions), topic.count)
    return await mapped(lambda index: brokers.spread.replicas(index, factor, start=start), added)
