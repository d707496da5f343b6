"""CreateTopics, DeleteTopics, CreatePartitions, and the creation that a Metadata request asks for.

The one idea: requests are checked here, Postgres decides whether they succeed, and this node's catalog knows the change
before the client does. `timeout_ms` has no effect: a change is complete when it is answered.

No records lie on replicas. A replication factor is only remembered and shown. Of the nodes that a manual assignment
names, the first live one leads the partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import structlog

from gateway.apis.services import ChangesCatalog, FindsTopics, HasCatalog, HasMembership, HasThrottles
from gateway.apis.visibility import may_create_topic
from gateway.cluster.spreading import Rack, Spread
from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigSource
from gateway.config.topic import (
    REPLICATION_FACTOR,
    TOPIC_CONFIGS,
    ConfigError,
    effective_text,
    requested_replication_factor,
    topic_layers,
    validate_topic_configs,
)
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
from gateway.net.pieces import in_pieces, mapped, tally
from gateway.security.authorizer import HasAuthorizer, may, may_topic, refusal_of
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from protocol.messages.create_topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from protocol.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from protocol.schema import ZERO_UUID
from storage.types import NewTopic, Refusal, Topic

logger = structlog.get_logger(__name__)

MAX_PARTITIONS_PER_REQUEST = 10_000
"""Upstream's ReplicationControlManager.MAX_PARTITIONS_PER_BATCH."""

STRICT_CREATE_TOPICS, STRICT_DELETE_TOPICS, STRICT_CREATE_PARTITIONS = 6, 5, 3
STRICT_FROM_THE_FIRST = 0
"""First versions in which clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""

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


# --- CreateTopics -------------------------------------------------------------------------------------------------


async def create_topics(request: CreateTopicsRequest, context: RequestContext[TopicServices]) -> CreateTopicsResponse:
    """Create topics; each succeeds or fails alone. Mirrors ReplicationControlManager.createTopics."""
    services = context.services
    await services.catalog.refresh_if_changed()
    broker = services.catalog.broker
    _check_total(await mapped(lambda topic: _partitions_asked(topic, broker), request.topics))
    plans: dict[str, NewTopic | KafkaError] = {}
    named = await tally(topic.name for topic in request.topics)
    rendered = services.catalog.rendered_names()
    named_nodes = any(await mapped(lambda topic: topic.assignments, request.topics))
    brokers = await Brokers.read(services, asked=named_nodes)
    mutations = services.throttles.mutations(context, STRICT_CREATE_TOPICS)
    async for topic in in_pieces(request.topics):
        try:
            if named[topic.name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
            _check_creatable(topic.name)
            if not may_create_topic(context, topic.name):
                raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "Authorization failed.")
            if services.catalog.get(topic.name) is not None:
                raise KafkaError(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{topic.name}' already exists.")
            plan = _plan(topic, broker, rendered, brokers)
            if not request.validate_only:
                mutations.record(plan.partition_count)
            plans[topic.name] = plan
        except KafkaError as error:
            plans[topic.name] = error
    wanted = {name: plan for name, plan in plans.items() if isinstance(plan, NewTopic)}
    results: dict[str, CreatableTopicResult] = {}
    described = _Described(broker)
    if request.validate_only:
        async for name, plan in in_pieces(wanted.items()):
            results[name] = described.created(name, ZERO_UUID, plan.partition_count, plan.configs)
    else:
        async for name, made in in_pieces((await make_topics(list(wanted.values()), services)).items()):
            if isinstance(made, Topic):
                results[name] = described.created(name, made.topic_id, len(made.partitions), made.configs)
            else:
                plans[name] = made
    async for name, plan in in_pieces(plans.items()):
        if isinstance(plan, KafkaError):
            results[name] = CreatableTopicResult(name=name, error_code=plan.code, error_message=plan.message)
    shown = [_shown(results[name], context) async for name in in_pieces(plans)]
    return CreateTopicsResponse(throttle_time_ms=mutations.wait_ms, topics=tuple(shown))


def _shown(result: CreatableTopicResult, context: RequestContext[HasAuthorizer]) -> CreatableTopicResult:
    """Return the result without settings if the client may not describe them."""
    if result.error_code or may_topic(context, AclOperation.DESCRIBE_CONFIGS, result.name, told=False):
        return result
    return CreatableTopicResult(
        name=result.name,
        topic_id=result.topic_id,
        error_message=None,
        topic_config_error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    )


async def make_topics(wanted: Sequence[NewTopic], services: ChangesCatalog) -> dict[str, Topic | KafkaError]:
    """Create the topics in Postgres and inform the catalog. Postgres decides TOPIC_ALREADY_EXISTS."""
    if not wanted:
        return {}
    made: dict[str, Topic | KafkaError] = {}
    async for plan, outcome in in_pieces(zip(wanted, await services.topics.create(wanted), strict=True)):
        if isinstance(outcome, Refusal):
            made[plan.name] = _refused(outcome, plan.name)
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
            _check_creatable(topic.name)
            plan = _plan(_creatable(topic), broker, rendered, brokers)
            _check_total((total, plan.partition_count))
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
    """Create a topic that share groups may write dead letters to, as upstream does (KIP-1191). Raises KafkaError."""
    broker = services.catalog.broker
    brokers = await Brokers.read(services, asked=False)
    configs = (("errors.deadletterqueue.group.enable", "true"), ("message.timestamp.type", "CreateTime"))
    wanted = CreatableTopic(
        name=name,
        num_partitions=DEFAULT,
        replication_factor=DEFAULT,
        configs=tuple(CreatableTopicConfig(name=key, value=value) for key, value in configs),
    )
    plan = _plan(wanted, broker, services.catalog.rendered_names(), brokers)
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
    # Another client has created it in the meantime.
    return await services.catalog.resolve(name) or outcome.message or outcome.code.name


def _creatable(topic: TopicInfo) -> CreatableTopic:
    return CreatableTopic(
        name=topic.name,
        num_partitions=topic.partitions,
        replication_factor=topic.replication_factor or DEFAULT,
        configs=tuple(CreatableTopicConfig(name=name, value=value) for name, value in topic.topic_configs),
    )


def plan_automatic(name: str, broker: BrokerConfig, rendered: RenderedNames) -> NewTopic:
    """Plan a topic that a Metadata request creates, with all defaults.

    KafkaError for its name: INVALID_TOPIC_EXCEPTION, or UNKNOWN_TOPIC_OR_PARTITION for a name that no client may
    create.
    """
    if name == CLUSTER_METADATA:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    _check_name(name, rendered)
    if name in (CONSUMER_OFFSETS, TRANSACTION_STATE):
        return plan_internal(name, broker)
    return NewTopic(name, broker.num_partitions, {}, internal=name in INTERNAL_TOPICS)


def _plan(topic: CreatableTopic, broker: BrokerConfig, rendered: RenderedNames, brokers: Brokers) -> NewTopic:
    """Return the topic to create. KafkaError for the first fault, in upstream's order."""
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
        replicas = _read_assignments(topic.assignments, brokers)
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
    return NewTopic(topic.name, count, configs, internal=topic.name in INTERNAL_TOPICS, replicas=replicas)


def _check_creatable(name: str) -> None:
    if name == CLUSTER_METADATA:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Creation of internal topic {CLUSTER_METADATA} is prohibited.")


def _check_name(name: str, rendered: RenderedNames) -> None:
    reason = why_illegal(name)
    if reason is not None:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
    collision = rendered.find_collision(name)
    if collision is not None:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"Topic '{name}' collides with existing topic: {collision}")


@dataclass(frozen=True, slots=True)
class Brokers:
    """Nodes that a request may name as replicas: the registered ones, alive or not."""

    registered: Mapping[int, Rack]
    alive: Mapping[int, Rack]
    spread: Spread

    @classmethod
    async def read(cls, services: HasMembership, *, asked: bool) -> Brokers:
        """Read the live nodes, and the others only if they are `asked` for. Raise StorageError."""
        alive = {int(node.node_id): node.rack for node in services.membership.brokers()}
        others = await services.membership.fenced() if asked else ()
        fenced = {int(node.node_id): node.rack for node in others if node.node_id not in alive}
        return cls({**alive, **fenced}, alive, Spread(alive, fenced))

    def check(self, broker_ids: Sequence[int], factor: int | None = None) -> None:
        """Refuse what ReplicationControlManager.validateManualPartitionAssignment refuses, in its order and words.
        KafkaError INVALID_REPLICA_ASSIGNMENT."""
        reason: str | None = None
        if not broker_ids:
            reason = "an empty replica list."
        before: int | None = None
        for broker_id in sorted(broker_ids):
            if broker_id not in self.registered:
                reason = f"broker {broker_id}, but no such broker is registered."
            elif broker_id == before:
                reason = f"the broker {broker_id} more than once."
            if reason is not None:
                break
            before = broker_id
        if reason is None and factor is not None and len(broker_ids) != factor:
            reason = (
                f"a partition with {len(broker_ids)} replica(s), but this is not consistent with previous partitions, "
                f"which have {factor} replica(s)."
            )
        if reason is not None:
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"The manual partition assignment includes {reason}")

    def check_factor(self, factor: int) -> None:
        """Refuse what upstream's StripedReplicaPlacer refuses. KafkaError INVALID_REPLICATION_FACTOR."""
        if not self.alive:
            raise KafkaError(ErrorCode.INVALID_REPLICATION_FACTOR, "All brokers are currently fenced.")
        if factor > len(self.registered):
            raise KafkaError(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"The target replication factor of {factor} cannot be reached because only {len(self.registered)} "
                "broker(s) are registered.",
            )

    def check_alive(self, broker_ids: Sequence[int], partition_index: int) -> None:
        """Refuse a new partition without a live replica to lead it. KafkaError INVALID_REPLICA_ASSIGNMENT."""
        if self.alive.keys().isdisjoint(broker_ids):
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"All brokers specified in the manual partition assignment for partition {partition_index} are fenced "
                "or in controlled shutdown.",
            )


def _read_assignments(
    assignments: Sequence[CreatableReplicaAssignment], brokers: Brokers
) -> tuple[tuple[int, ...], ...]:
    """Return the named nodes of each partition: the same number for each, and at least one. KafkaError
    INVALID_REPLICA_ASSIGNMENT."""
    named: dict[int, tuple[int, ...]] = {}
    factor: int | None = None
    for part in assignments:
        if part.partition_index in named:
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"Found multiple manual partition assignments for partition {part.partition_index}",
            )
        brokers.check(part.broker_ids, factor)
        brokers.check_alive(part.broker_ids, part.partition_index)
        named[part.partition_index] = part.broker_ids
        factor = len(part.broker_ids)
    if named.keys() != set(range(len(named))):
        raise KafkaError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partitions should be a consecutive 0-based integer sequence"
        )
    return tuple(named[index] for index in range(len(named)))


def _read_configs(topic: CreatableTopic, broker: BrokerConfig) -> dict[str, str]:
    names = [config.name for config in topic.configs]
    if len(set(names)) < len(names):
        raise KafkaError(ErrorCode.INVALID_CONFIG, "A config is named twice.")
    try:
        return validate_topic_configs({config.name: config.value for config in topic.configs}, broker)
    except ConfigError as error:
        raise KafkaError(ErrorCode.INVALID_CONFIG, str(error)) from error


def _partitions_asked(topic: CreatableTopic, broker: BrokerConfig) -> int:
    if topic.assignments:
        return len(topic.assignments)
    return broker.num_partitions if topic.num_partitions == DEFAULT else max(topic.num_partitions, 1)


def _check_total(counts: Iterable[int]) -> None:
    total = sum(counts)
    if total > MAX_PARTITIONS_PER_REQUEST:
        raise KafkaError(
            ErrorCode.POLICY_VIOLATION,
            f"The request makes {total} partitions, {MAX_PARTITIONS_PER_REQUEST} are allowed at once.",
        )


class _Described:
    """Describe created topics to their creator. Equal settings are rendered once per request, because rendering takes
    as long as creating a topic."""

    def __init__(self, broker: BrokerConfig) -> None:
        self._broker = broker
        self._effective: dict[frozenset[tuple[str, str]], tuple[CreatableTopicConfigs, ...]] = {}

    def created(
        self, name: str, topic_id: UUID, partition_count: int, configs: Mapping[str, str]
    ) -> CreatableTopicResult:
        own = frozenset(configs.items())
        effective = self._effective.get(own)
        if effective is None:
            effective = self._effective[own] = tuple(_effective_configs(configs, self._broker))
        return CreatableTopicResult(
            name=name,
            topic_id=topic_id,
            error_message=None,
            num_partitions=partition_count,
            replication_factor=requested_replication_factor(configs, self._broker),
            configs=effective,
        )


def _effective_configs(configs: Mapping[str, str], broker: BrokerConfig) -> Iterable[CreatableTopicConfigs]:
    for key in TOPIC_CONFIGS.values():
        if key.internal and key.name not in configs:
            continue
        layers = topic_layers(key, configs, broker)
        yield CreatableTopicConfigs(
            name=key.name,
            value=effective_text(key, configs, broker),
            config_source=layers[0].source if layers else ConfigSource.DEFAULT_CONFIG,
        )


# --- DeleteTopics -------------------------------------------------------------------------------------------------


async def delete_topics(request: DeleteTopicsRequest, context: RequestContext[TopicServices]) -> DeleteTopicsResponse:
    """Delete topics by name, from version 6 also by id; a name is free at once.

    As ControllerApis.deleteTopics, this deletes internal topics, too. Deleting `__consumer_offsets` only removes its
    name from listings, until a client looks for a group's coordinator.
    """
    services = context.services
    if not services.catalog.broker.delete_topic_enable:
        code = ErrorCode.TOPIC_DELETION_DISABLED if context.version >= 3 else ErrorCode.INVALID_REQUEST
        raise KafkaError(code, "delete.topic.enable is false.")
    asked = request.topics or await mapped(lambda name: DeleteTopicState(name=name), request.topic_names)
    named = await tally(state.topic_id if state.name is None else state.name for state in asked)
    await services.catalog.refresh_if_changed()
    mutations = services.throttles.mutations(context, STRICT_DELETE_TOPICS)
    responses: dict[DeleteTopicState, DeletableTopicResult] = {}
    async for state in in_pieces(asked):
        if state in responses:
            continue
        try:
            topic = _find_deletable(state, named, context)
            mutations.record(len(topic.partitions))
            if not await services.topics.delete(topic.topic_id):
                raise _unknown(state)
        except KafkaError as error:
            responses[state] = DeletableTopicResult(
                name=_shown_name(state, error, context),
                topic_id=state.topic_id,
                error_code=error.code,
                error_message=error.message,
            )
        else:
            services.catalog.remove(topic.topic_id)
            logger.info("topic deleted", topic=topic.name)
            responses[state] = DeletableTopicResult(name=topic.name, topic_id=topic.topic_id)
    return DeleteTopicsResponse(throttle_time_ms=mutations.wait_ms, responses=tuple(responses.values()))


def _find_deletable(state: DeleteTopicState, named: Counter[str | UUID], context: RequestContext[FindsTopics]) -> Topic:
    services = context.services
    if state.name is not None and state.topic_id != ZERO_UUID:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Give either the name or the id of a topic.")
    if state.name is None and state.topic_id == ZERO_UUID:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Neither the name nor the id of a topic is given.")
    if state.name is not None:
        if named[state.name] > 1:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
        topic = services.catalog.get(state.name)
        if not _may_delete_any(context) and not may_topic(context, AclOperation.DESCRIBE, state.name):
            raise refusal_of(ResourceType.TOPIC)
    else:
        if named[state.topic_id] > 1:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic id.")
        topic = services.catalog.get_by_id(state.topic_id)
    if topic is None:
        raise _unknown(state)
    if not _may_delete_any(context) and not may_topic(context, AclOperation.DELETE, topic.name):
        raise refusal_of(ResourceType.TOPIC)
    return topic


def _shown_name(state: DeleteTopicState, error: KafkaError, context: RequestContext[FindsTopics]) -> str | None:
    """Return the name for a refusal. A client that named a topic by id and may not delete it sees the name if it may
    describe the topic."""
    topic = context.services.catalog.get_by_id(state.topic_id)
    refused = error.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    if refused and topic is not None and may_topic(context, AclOperation.DESCRIBE, topic.name, told=False):
        return topic.name
    return state.name


def _may_delete_any(context: RequestContext[HasAuthorizer]) -> bool:
    return may(context, AclOperation.DELETE, ResourceType.CLUSTER, told=False)


def _unknown(state: DeleteTopicState) -> KafkaError:
    if state.name is None:
        return KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, "This server does not host this topic ID.")
    return KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition.")


# --- CreatePartitions ---------------------------------------------------------------------------------------------


async def create_partitions(
    request: CreatePartitionsRequest, context: RequestContext[TopicServices]
) -> CreatePartitionsResponse:
    """Add partitions; each topic succeeds or fails alone. Mirrors ReplicationControlManager.createPartitions."""
    services = context.services
    await services.catalog.refresh_if_changed()
    named = await tally(topic.name for topic in request.topics)
    _check_total(await mapped(lambda topic: _growth(topic, context), request.topics))
    brokers = await Brokers.read(services, asked=True)
    mutations = services.throttles.mutations(context, STRICT_CREATE_PARTITIONS)
    results: dict[str, CreatePartitionsTopicResult] = {}
    async for topic in in_pieces(request.topics):
        if topic.name in results:
            continue
        try:
            if named[topic.name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
            if not may_topic(context, AclOperation.ALTER, topic.name):
                raise refusal_of(ResourceType.TOPIC)
            known = _find_growable(topic, services, brokers)
            if not request.validate_only:
                mutations.record(topic.count - len(known.partitions))
                replicas = await _replicas(topic, known, brokers)
                grown = await services.topics.create_partitions(known.topic_id, topic.count, replicas)
                if isinstance(grown, Refusal):
                    raise _refused(grown, topic.name)
                services.catalog.apply(grown)
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
        # Compared with what Metadata shows, because clients know nothing else of the topic's replicas.
        broker = services.catalog.broker
        factor = min(requested_replication_factor(known.configs, broker), len(brokers.alive))
        for index, assignment in enumerate(topic.assignments, present):
            brokers.check(assignment.broker_ids, factor if first is None else len(first.replicas))
            brokers.check_alive(assignment.broker_ids, index)
    return known


async def _replicas(topic: CreatePartitionsTopic, known: Topic, brokers: Brokers) -> list[tuple[int, ...]] | None:
    """Return the replicas of each new partition: the named ones, or as many as were named for the topic's first
    partition. None if neither were named."""
    if topic.assignments is not None:
        return await mapped(lambda assignment: assignment.broker_ids, topic.assignments)
    first = known.partitions[0].assignment
    if first is None:
        return None
    start, factor = brokers.spread.place_of(first.replicas[0]), len(first.replicas)
    added = range(len(known.partitions), topic.count)
    return await mapped(lambda index: brokers.spread.replicas(index, factor, start=start), added)


def _refused(refusal: Refusal, name: str) -> KafkaError:
    reasons = {
        Refusal.TOPIC_EXISTS: f"Topic '{name}' already exists.",
        Refusal.UNKNOWN_TOPIC: f"There is no topic '{name}'.",
        Refusal.INVALID_PARTITIONS: f"Topic '{name}' has as many partitions already.",
    }
    return KafkaError(REFUSAL_CODES[refusal], reasons.get(refusal))
