"""Plan and create topics, for CreateTopics and for everything else that creates one.

The one idea: a plan is checked here, in upstream's order, Postgres decides whether it succeeds, and this node's catalog
knows the topic before the client does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import structlog

from gateway.apis.admin.replica_assignment import Brokers, read_assignments
from gateway.apis.services import ChangesCatalog, FindsTopics, HasMembership, HasThrottles
from gateway.config.broker import BrokerConfig
from gateway.config.topic import REPLICATION_FACTOR, ConfigError, validate_topic_configs
from gateway.coordinator.streams.topology import TopicInfo
from gateway.log.topic_names import (
    CLUSTER_METADATA,
    CONSUMER_OFFSETS,
    INTERNAL_TOPICS,
    TRANSACTION_STATE,
    RenderedNames,
    why_illegal,
)
from gateway.net.context import RequestContext
from gateway.net.errors import REFUSAL_CODES
from gateway.net.pieces import in_pieces
from gateway.security.authorizer import HasAuthorizer, may, may_topic
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig
from storage.types import NewTopic, Refusal, Topic

logger = structlog.get_logger(__name__)

MAX_PARTITIONS_PER_REQUEST = 10_000
"""Upstream's ReplicationControlManager.MAX_PARTITIONS_PER_BATCH."""

STRICT_FROM_THE_FIRST = 0
"""Clients of every version know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""

DEFAULT = -1


class TopicServices(ChangesCatalog, FindsTopics, HasMembership, HasThrottles, Protocol): ...


class MakesTopics(ChangesCatalog, HasMembership, Protocol): ...


def plan_internal(name: str, broker: BrokerConfig) -> NewTopic:
    """Plan CONSUMER_OFFSETS or TRANSACTION_STATE, which a look-up of a coordinator creates, as in Kafka.

    Tools expect the topic from then on. The number of its partitions changes nothing for groups and transactions, which
    live in tables of their own. It is a real topic and answers ListOffsets, Fetch and DescribeLogDirs as any other.
    """
    partitions = broker.transaction_state_log_num_partitions
    if name == CONSUMER_OFFSETS:
        partitions = broker.offsets_topic_num_partitions
    return NewTopic(name, partitions, {"cleanup.policy": "compact"}, internal=True)


def plan_automatic(name: str, broker: BrokerConfig, rendered: RenderedNames) -> NewTopic:
    """Plan a topic that a Metadata request creates, with all defaults.

    Raise KafkaError for its name: INVALID_TOPIC_EXCEPTION, or UNKNOWN_TOPIC_OR_PARTITION for a name that no client may
    create.
    """
    if name == CLUSTER_METADATA:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    _check_name(name, rendered)
    rendered.plan(name)
    if name in (CONSUMER_OFFSETS, TRANSACTION_STATE):
        return plan_internal(name, broker)
    return NewTopic(name, broker.num_partitions, {}, internal=name in INTERNAL_TOPICS)


def plan_topic(topic: CreatableTopic, broker: BrokerConfig, rendered: RenderedNames, brokers: Brokers) -> NewTopic:
    """Return the topic to create. Raise KafkaError for the first fault, in upstream's order."""
    _check_name(topic.name, rendered)
    partition_count = topic.num_partitions
    replication_factor = topic.replication_factor
    replicas: tuple[tuple[int, ...], ...] | None = None
    if topic.assignments:
        for given, what in ((replication_factor, "replication factor"), (partition_count, "numPartitions")):
            if given != DEFAULT:
                raise KafkaError(
                    ErrorCode.INVALID_REQUEST,
                    f"A manual partition assignment was specified, but {what} was not set to -1.",
                )
        replicas = read_assignments(topic.assignments, brokers)
        partition_count, replication_factor = len(replicas), len(replicas[0])
    if replication_factor != DEFAULT and replication_factor < 1:
        raise KafkaError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            "Replication factor must be larger than 0, or -1 to use the default value.",
        )
    if partition_count != DEFAULT and partition_count < 1:
        raise KafkaError(ErrorCode.INVALID_PARTITIONS, "Number of partitions was set to an invalid non-positive value.")
    configs = _read_configs(topic, broker)
    if replication_factor != DEFAULT:
        configs[REPLICATION_FACTOR] = str(replication_factor)
    count = broker.num_partitions if partition_count == DEFAULT else partition_count
    rendered.plan(topic.name)
    return NewTopic(topic.name, count, configs, internal=topic.name in INTERNAL_TOPICS, replicas=replicas)


async def make_topics(wanted: Sequence[NewTopic], services: ChangesCatalog) -> dict[str, Topic | KafkaError]:
    """Create the topics in Postgres and inform the catalog. Postgres decides TOPIC_ALREADY_EXISTS."""
    if not wanted:
        return {}
    made: dict[str, Topic | KafkaError] = {}
    async for plan, outcome in in_pieces(zip(wanted, await services.topics.create(wanted), strict=True)):
        if isinstance(outcome, Refusal):
            made[plan.name] = topic_refusal(outcome, plan.name)
        else:
            services.catalog.apply(outcome)
            made[plan.name] = outcome
            logger.info("topic created", topic=plan.name, partitions=plan.partition_count)
    return made


async def make_internal_topics(
    wanted: Sequence[TopicInfo], context: RequestContext[TopicServices]
) -> dict[str, KafkaError]:
    """Create the internal topics that a streams group lacks, on the client's behalf. Return the errors by topic.

    A topic that another node has created in the meantime counts as created. If there are more than one request may
    create, the rest waits for the next heartbeat.
    """
    services = context.services
    broker = services.catalog.broker
    brokers = await Brokers.read(services, asked=False)
    rendered = services.catalog.rendered_names()
    mutations = services.throttles.mutations(context, STRICT_FROM_THE_FIRST)
    plans: list[NewTopic] = []
    failures: dict[str, KafkaError] = {}
    total = 0
    async for topic in in_pieces(wanted):
        try:
            check_creatable(topic.name)
            plan = plan_topic(_creatable(topic), broker, rendered, brokers)
            check_total((total, plan.partition_count))
            mutations.record(plan.partition_count)
            plans.append(plan)
            total += plan.partition_count
        except KafkaError as error:
            failures[topic.name] = error
    made = await make_topics(plans, services)
    return failures | {
        name: outcome
        for name, outcome in made.items()
        if isinstance(outcome, KafkaError) and outcome.code is not ErrorCode.TOPIC_ALREADY_EXISTS
    }


async def make_dead_letter_topic(name: str, services: MakesTopics) -> Topic:
    """Create a topic to which share groups may write dead letters, as upstream does (KIP-1191). Raise KafkaError."""
    broker = services.catalog.broker
    brokers = await Brokers.read(services, asked=False)
    configs = (("errors.deadletterqueue.group.enable", "true"), ("message.timestamp.type", "CreateTime"))
    wanted = CreatableTopic(
        name=name,
        num_partitions=DEFAULT,
        replication_factor=DEFAULT,
        configs=tuple(CreatableTopicConfig(name=key, value=value) for key, value in configs),
    )
    plan = plan_topic(wanted, broker, services.catalog.rendered_names(), brokers)
    outcome = (await make_topics([plan], services))[name]
    if isinstance(outcome, KafkaError):
        raise outcome
    return outcome


async def make_automatic_topic(name: str, services: ChangesCatalog) -> Topic | str:
    """Create a topic with the broker's defaults for records that SQL has staged. Return it, or the reason why it cannot
    be created."""
    try:
        plan = plan_automatic(name, services.catalog.broker, services.catalog.rendered_names())
        outcome = (await make_topics([plan], services))[name]
    except KafkaError as error:
        return error.message or error.code.name
    if isinstance(outcome, Topic):
        return outcome
    # Another client has created the topic in the meantime.
    return await services.catalog.resolve(name) or outcome.message or outcome.code.name


def _creatable(topic: TopicInfo) -> CreatableTopic:
    return CreatableTopic(
        name=topic.name,
        num_partitions=topic.partitions,
        replication_factor=topic.replication_factor or DEFAULT,
        configs=tuple(CreatableTopicConfig(name=name, value=value) for name, value in topic.topic_configs),
    )


def check_creatable(name: str) -> None:
    """Raise KafkaError INVALID_REQUEST for the topic that no client may create."""
    if name == CLUSTER_METADATA:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Creation of internal topic {CLUSTER_METADATA} is prohibited.")


def _check_name(name: str, rendered: RenderedNames) -> None:
    reason = why_illegal(name)
    if reason is not None:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
    collision = rendered.find_collision(name)
    if collision is not None:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"Topic '{name}' collides with existing topic: {collision}")


def _read_configs(topic: CreatableTopic, broker: BrokerConfig) -> dict[str, str]:
    names = [config.name for config in topic.configs]
    if len(set(names)) < len(names):
        raise KafkaError(ErrorCode.INVALID_CONFIG, "A config is named twice.")
    try:
        return validate_topic_configs({config.name: config.value for config in topic.configs}, broker)
    except ConfigError as error:
        raise KafkaError(ErrorCode.INVALID_CONFIG, str(error)) from error


def may_create_topic(context: RequestContext[HasAuthorizer], topic: str) -> bool:
    """Return whether the client may create topics on the cluster, or this topic."""
    return may(context, AclOperation.CREATE, ResourceType.CLUSTER, told=False) or may_topic(
        context, AclOperation.CREATE, topic
    )


def check_total(counts: Iterable[int]) -> None:
    """Raise KafkaError POLICY_VIOLATION if one request makes more than MAX_PARTITIONS_PER_REQUEST partitions."""
    total = sum(counts)
    if total > MAX_PARTITIONS_PER_REQUEST:
        raise KafkaError(
            ErrorCode.POLICY_VIOLATION,
            f"The request makes {total} partitions, {MAX_PARTITIONS_PER_REQUEST} are allowed at once.",
        )


def topic_refusal(refusal: Refusal, name: str) -> KafkaError:
    """Return the error for a change that Postgres has refused."""
    reasons = {
        Refusal.TOPIC_EXISTS: f"Topic '{name}' already exists.",
        Refusal.NAME_IN_USE: f"Topic '{name}' was deleted, and another node may still serve its records.",
        Refusal.UNKNOWN_TOPIC: f"There is no topic '{name}'.",
        Refusal.INVALID_PARTITIONS: f"Topic '{name}' has as many partitions already.",
    }
    return KafkaError(REFUSAL_CODES[refusal], reasons.get(refusal))
