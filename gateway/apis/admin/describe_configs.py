"""DescribeConfigs: show settings.

The one idea: everything derives from the tables of settings. A topic's own settings are stored with the topic. A
broker's dynamic settings are stored for that node alone, or for all nodes under the empty name, which applies to every
node without its own value. `broker_loggers.py` has the levels of loggers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

import structlog

from gateway.apis.admin.broker_loggers import KnownLoggers, describe_loggers, read_broker_id
from gateway.apis.admin.config_resources import ResourceType, check_group_name, find_topic, require_on_resource
from gateway.apis.admin.features import ChecksFeatures
from gateway.apis.services import FindsTopics, HasMembership, HasSettings
from gateway.cluster.reconciler import RENEWALS_PER_TTL
from gateway.config.broker import BrokerConfig
from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.broker_table import (
    BROKER_CONFIGS,
    COARSER,
    MIN_INSYNC,
    NODE_CONFIGS,
    UNLISTED,
    broker_layers,
    find_broker_config,
)
from gateway.config.definition import ConfigKey, ConfigSource, ConfigType, Update, render
from gateway.config.group import GROUP_CONFIGS, group_value
from gateway.config.java_order import in_java_order
from gateway.config.listeners import INTER_BROKER, PROTOCOL_MAP, render_listeners, render_roles
from gateway.config.topic import TOPIC_CONFIGS, effective_text, topic_layers
from gateway.config.without_effect import WITHOUT_EFFECT
from gateway.net.context import RequestContext
from gateway.net.pieces import first_of_each, in_pieces
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from storage.topics import ALL_BROKERS

logger = structlog.get_logger(__name__)


class DescribeConfigsServices(FindsTopics, HasMembership, HasSettings, Protocol): ...


DescribeEntry = Callable[
    [ConfigKey, Mapping[str, str], BrokerConfig, DescribeConfigsRequest], DescribeConfigsResourceResult
]

Inherited = dict[tuple[DescribeEntry, str], DescribeConfigsResourceResult]
"""Settings that come from the broker or are defaults, as one answer describes them: by kind of resource and name."""


async def describe_configs(
    request: DescribeConfigsRequest, context: RequestContext[DescribeConfigsServices]
) -> DescribeConfigsResponse:
    """Describe each resource; each succeeds or fails alone, and a resource that the request repeats is described once.

    As upstream, a node describes itself and the settings of all brokers.
    """
    services = context.services
    await services.catalog.refresh_if_changed()
    broker, inherited, known = services.catalog.broker, Inherited(), KnownLoggers()
    results: list[DescribeConfigsResult] = []
    async for resource in in_pieces(await first_of_each(request.resources)):
        try:
            require_on_resource(context, AclOperation.DESCRIBE_CONFIGS, resource.resource_type, resource.resource_name)
            configs = _describe(resource, request, context, broker, inherited, known)
            code, message = ErrorCode.NONE, None
        except KafkaError as error:
            configs = ()
            code, message = error.code, error.message
        results.append(
            DescribeConfigsResult(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
                configs=tuple(configs),
            )
        )
    return DescribeConfigsResponse(results=tuple(results))


def _describe(
    resource: DescribeConfigsResource,
    request: DescribeConfigsRequest,
    context: RequestContext[DescribeConfigsServices],
    broker: BrokerConfig,
    inherited: Inherited,
    known: KnownLoggers,
) -> Iterable[DescribeConfigsResourceResult]:
    services = context.services
    match resource.resource_type:
        case ResourceType.TOPIC:
            topic = find_topic(resource.resource_name, services)
            entries = [
                _layered_entry(_topic_entry, key, topic.configs, broker, request, inherited)
                for key in _chosen(TOPIC_CONFIGS, resource)
                if not key.internal or key.name in topic.configs
            ]
        case ResourceType.BROKER:
            entries = _describe_broker(resource, request, context)
        case ResourceType.BROKER_LOGGER:
            entries = describe_loggers(resource, services.membership.node_id, known)
        case ResourceType.GROUP:
            check_group_name(resource.resource_name)
            configs = services.catalog.group_configs.get(resource.resource_name, {})
            entries = [
                _layered_entry(_group_entry, key, configs, broker, request, inherited)
                for key in _chosen(GROUP_CONFIGS, resource)
            ]
        case _:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unsupported resource type: {resource.resource_type}")
    return entries


def _chosen(table: Mapping[str, ConfigKey], resource: DescribeConfigsResource) -> list[ConfigKey]:
    """Return the requested settings. Null and empty both mean all; unknown names are ignored."""
    wanted = set(resource.configuration_keys or ())
    return [key for key in table.values() if not wanted or key.name in wanted]


def _layered_entry(
    describe: DescribeEntry,
    key: ConfigKey,
    configs: Mapping[str, str],
    broker: BrokerConfig,
    request: DescribeConfigsRequest,
    inherited: Inherited,
) -> DescribeConfigsResourceResult:
    """Describe one setting of a resource. Inherited values are described once for all resources of a kind: for five
    thousand topics they would be a million objects."""
    if key.name in configs:
        return describe(key, configs, broker, request)
    of = (describe, key.name)
    entry = inherited.get(of)
    if entry is None:
        entry = inherited[of] = describe(key, {}, broker, request)
    return entry


def _topic_entry(
    key: ConfigKey, configs: Mapping[str, str], broker: BrokerConfig, request: DescribeConfigsRequest
) -> DescribeConfigsResourceResult:
    layers = topic_layers(key, configs, broker)
    # Kafka shows only the broker's counterpart in the same unit: log.retention.ms, not log.retention.hours.
    synonyms = [
        DescribeConfigsSynonym(name=layer.name, value=layer.value, source=layer.source)
        for layer in layers
        if layer.factor == 1
    ]
    source = layers[0].source if layers else ConfigSource.DEFAULT_CONFIG
    return _entry(key, effective_text(key, configs, broker), source, synonyms, request, read_only=False)


def _group_entry(
    key: ConfigKey, configs: Mapping[str, str], broker: BrokerConfig, request: DescribeConfigsRequest
) -> DescribeConfigsResourceResult:
    source, value = group_value(key, configs, broker)
    synonyms = [DescribeConfigsSynonym(name=key.name, value=value, source=source)]
    return _entry(key, value, source, synonyms, request, read_only=False)


def _describe_broker(
    resource: DescribeConfigsResource,
    request: DescribeConfigsRequest,
    context: RequestContext[DescribeConfigsServices],
) -> list[DescribeConfigsResourceResult]:
    """Describe this node, or the settings of all brokers. At a shared listener this node stands for all nodes."""
    services = context.services
    here = context.connection.seen_id(services.membership.node_id)
    broker = services.catalog.broker
    keys = _chosen({**BROKER_CONFIGS, **_of_listeners(broker)}, resource)
    others: list[DescribeConfigsResourceResult] = []
    if resource.resource_name == ALL_BROKERS:
        keys = [key for key in (*keys, *_chosen(WITHOUT_EFFECT, resource)) if key.name in {*broker.dynamic, MIN_INSYNC}]
        broker = parse_broker_configs(broker.static, broker.dynamic)
    elif read_broker_id(resource.resource_name, "Broker") != here:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST,
            f"Unexpected broker id, expected {here} or empty string, but received {resource.resource_name}",
        )
    else:
        if not resource.configuration_keys:
            keys = [key for key in keys if key.name not in UNLISTED or broker.is_given(key.name)]
        others = _without_effect(resource, request, services)
    facts = _node_facts(services)
    entries: list[DescribeConfigsResourceResult] = []
    for key in keys:
        if key.name in NODE_CONFIGS:
            layers = [(ConfigSource.STATIC_BROKER_CONFIG, facts[key.name])]
            if key.name in broker.own:
                layers.insert(0, (ConfigSource.DYNAMIC_BROKER_CONFIG, broker.own[key.name]))
        else:
            layers = broker_layers(broker, key.name)
        source, value = layers[0] if layers else (ConfigSource.DEFAULT_CONFIG, None)
        synonyms = [DescribeConfigsSynonym(name=key.name, value=value, source=source) for source, value in layers]
        synonyms += [
            DescribeConfigsSynonym(name=name, value=value, source=source)
            for name in COARSER.get(key.name, ())
            for source, value in (broker_layers(broker, name) if layers else ())
        ]
        read_only = key.update not in (Update.DYNAMIC, Update.OF_ONE_NODE)
        entries.append(_entry(key, value, source, synonyms, request, read_only=read_only))
    listed = [*entries, *others, *_unknown_entries(resource, broker)]
    order = _broker_order()
    return sorted(listed, key=lambda entry: order.get(entry.name, len(order)))


@cache
def _broker_order() -> Mapping[str, int]:
    """Return the position of each setting in Kafka's list."""
    names = in_java_order({**BROKER_CONFIGS, **WITHOUT_EFFECT})
    return {name: place for place, name in enumerate(names)}


def _without_effect(
    resource: DescribeConfigsResource, request: DescribeConfigsRequest, services: DescribeConfigsServices
) -> list[DescribeConfigsResourceResult]:
    prebuilt = _without_effect_entries(request.include_synonyms, request.include_documentation)
    node_ttl_ms = services.settings.node_ttl_ms
    facts = {
        "broker.session.timeout.ms": str(node_ttl_ms),
        "broker.heartbeat.interval.ms": str(node_ttl_ms // RENEWALS_PER_TTL),
    }
    entries: list[DescribeConfigsResourceResult] = []
    for key in _chosen(WITHOUT_EFFECT, resource):
        entry = prebuilt[key.name]
        if services.catalog.broker.is_given(key.name):
            layers = broker_layers(services.catalog.broker, key.name)
            synonyms = [DescribeConfigsSynonym(name=key.name, value=value, source=source) for source, value in layers]
            read_only = key.update not in (Update.DYNAMIC, Update.OF_ONE_NODE)
            entry = _entry(key, layers[0][1], layers[0][0], synonyms, request, read_only=read_only)
        elif key.name in facts:
            value, source = facts[key.name], ConfigSource.STATIC_BROKER_CONFIG
            synonyms = [DescribeConfigsSynonym(name=key.name, value=value, source=source)]
            entry = _entry(key, value, source, synonyms, request, read_only=True)
        entries.append(entry)
    return entries


@cache
def _without_effect_entries(
    include_synonyms: bool, include_documentation: bool
) -> dict[str, DescribeConfigsResourceResult]:
    """Return entries of unset settings without effect, built once for all answers."""
    request = DescribeConfigsRequest(include_synonyms=include_synonyms, include_documentation=include_documentation)
    entries: dict[str, DescribeConfigsResourceResult] = {}
    for name, key in WITHOUT_EFFECT.items():
        value, source = render(key.default), ConfigSource.DEFAULT_CONFIG
        synonyms = [] if value is None else [DescribeConfigsSynonym(name=name, value=value, source=source)]
        read_only = key.update not in (Update.DYNAMIC, Update.OF_ONE_NODE)
        entries[name] = _entry(key, value, source, synonyms, request, read_only=read_only)
    return entries


def _of_listeners(broker: BrokerConfig) -> dict[str, ConfigKey]:
    """Return the settings that were given for one listener (`listener.name.NAME.…`)."""
    names = {**broker.static, **broker.own}
    given = {name: find_broker_config(name) for name in names if name not in BROKER_CONFIGS}
    return {name: key for name, key in given.items() if key is not None}


def _unknown_entries(resource: DescribeConfigsResource, broker: BrokerConfig) -> list[DescribeConfigsResourceResult]:
    """Return settings that were stored under unknown names. Their values are hidden, as by upstream: they may be a
    plugin's secrets."""
    wanted = set(resource.configuration_keys or ())
    return [
        DescribeConfigsResourceResult(
            name=name, value=None, read_only=False, config_source=broker_layers(broker, name)[0][0], is_sensitive=True
        )
        for name in {**broker.dynamic, **broker.own}
        if find_broker_config(name) is None and name not in WITHOUT_EFFECT and (not wanted or name in wanted)
    ]


def _node_facts(services: ChecksFeatures) -> dict[str, str | None]:
    node = services.membership.self_node
    listeners = services.settings.listeners
    return {
        "broker.id": str(node.node_id),
        "node.id": str(node.node_id),
        "broker.rack": node.rack,
        "listeners": render_listeners({listener.name: listener.bind for listener in listeners}),
        "advertised.listeners": render_listeners(node.listeners),
        PROTOCOL_MAP: services.settings.broker.static.get(
            PROTOCOL_MAP, ",".join(f"{listener.name}:{listener.security_protocol}" for listener in listeners)
        ),
        "controller.listener.names": ",".join(listener.name for listener in listeners if listener.is_controller),
        INTER_BROKER: services.settings.broker.static.get(INTER_BROKER),
        "shared.listener.names": ",".join(listener.name for listener in listeners if listener.is_shared),
        "process.roles": render_roles(services.settings.roles),
    }


def _entry(
    key: ConfigKey,
    value: str | None,
    source: ConfigSource,
    synonyms: Sequence[DescribeConfigsSynonym],
    request: DescribeConfigsRequest,
    *,
    read_only: bool,
) -> DescribeConfigsResourceResult:
    secret = key.type is ConfigType.PASSWORD
    if secret:
        value, synonyms = None, [replace(synonym, value=None) for synonym in synonyms]
    return DescribeConfigsResourceResult(
        name=key.name,
        value=value,
        read_only=read_only,
        config_source=source,
        is_sensitive=secret,
        synonyms=tuple(synonyms) if request.include_synonyms else (),
        config_type=key.type,
        documentation=key.documentation if request.include_documentation else None,
    )
