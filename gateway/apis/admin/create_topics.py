"""CreateTopics.

`timeout_ms` has no effect: a topic is complete when it is answered. See `new_topics.py` for what decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

from gateway.apis.admin.new_topics import (
    DEFAULT,
    TopicServices,
    check_creatable,
    check_total,
    make_topics,
    may_create_topic,
    plan_topic,
)
from gateway.apis.admin.replica_assignment import Brokers
from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigSource
from gateway.config.topic import TOPIC_CONFIGS, effective_text, requested_replication_factor, topic_layers
from gateway.net.context import RequestContext
from gateway.net.pieces import in_pieces, mapped, tally
from gateway.security.authorizer import HasAuthorizer, may_topic
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from protocol.schema import ZERO_UUID
from storage.types import NewTopic, Topic

STRICT_CREATE_TOPICS = 6
"""First version in which clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""


async def create_topics(request: CreateTopicsRequest, context: RequestContext[TopicServices]) -> CreateTopicsResponse:
    """Create topics; each succeeds or fails alone. Mirrors ReplicationControlManager.createTopics."""
    services = context.services
    await services.catalog.refresh_if_changed()
    broker = services.catalog.broker
    check_total(await mapped(lambda topic: _partitions_asked(topic, broker), request.topics))
    plans: dict[str, NewTopic | KafkaError] = {}
    named = await tally(topic.name for topic in request.topics)
    rendered = services.catalog.rendered_names()
    named_nodes = any(await mapped(lambda topic: topic.assignments, request.topics))
    brokers = await Brokers.read(services, asked=named_nodes)
    mutations = services.throttles.mutations(context, STRICT_CREATE_TOPICS)
    async for topic in in_pieces(request.topics):
        try:
            _check_new(topic.name, named, context)
            plan = plan_topic(topic, broker, rendered, brokers)
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


def _check_new(name: str, named: Mapping[str, int], context: RequestContext[TopicServices]) -> None:
    """Raise KafkaError unless the client may create a topic of this name. `named` counts the request's names."""
    if named[name] > 1:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
    check_creatable(name)
    if not may_create_topic(context, name):
        raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "Authorization failed.")
    if context.services.catalog.get(name) is not None:
        raise KafkaError(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")


def _shown(result: CreatableTopicResult, context: RequestContext[HasAuthorizer]) -> CreatableTopicResult:
    """Return the result, without settings if the client may not describe the topic's configs."""
    if result.error_code or may_topic(context, AclOperation.DESCRIBE_CONFIGS, result.name, told=False):
        return result
    return CreatableTopicResult(
        name=result.name,
        topic_id=result.topic_id,
        error_message=None,
        topic_config_error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    )


def _partitions_asked(topic: CreatableTopic, broker: BrokerConfig) -> int:
    if topic.assignments:
        return len(topic.assignments)
    return broker.num_partitions if topic.num_partitions == DEFAULT else max(topic.num_partitions, 1)


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
