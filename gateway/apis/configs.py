"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs, ListConfigResources: show and change settings.

The one idea: everything derives from the two tables of settings. A topic's own settings are stored with the topic. A
broker's dynamic settings are stored for that node alone, or for all nodes under the empty name, which applies to every
node without its own value. Both take effect on this node before the answer, and on other nodes when they next follow
the catalog.

A group's settings are stored by its id, before the group exists. `broker_loggers.py` has the levels of loggers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import IntEnum
from functools import cache, partial
from typing import Protocol

import structlog

from gateway.apis.broker_loggers import Operation, alter_loggers, describe_loggers, read_broker_id
from gateway.apis.features import ChecksFeatures
from gateway.apis.services import (
    ChangesCatalog,
    FindsTopics,
    HasBrokerConfigs,
    HasCatalog,
    HasCertificates,
    HasMembership,
    HasSettings,
)
from gateway.cluster.reconciler import RENEWALS_PER_TTL
from gateway.config.broker import (
    BROKER_CONFIGS,
    COARSER,
    IDLE,
    LISTENER_PREFIX,
    MIN_INSYNC,
    NODE_CONFIGS,
    UNLISTED,
    BrokerConfig,
    find_broker_config,
    shown_value,
)
from gateway.config.broker_parsing import parse_broker_configs, parse_stored
from gateway.config.definition import ConfigKey, ConfigSource, ConfigType, Update, render
from gateway.config.group import GROUP_CONFIGS, check_group_configs, group_value
from gateway.config.java_order import in_java_order
from gateway.config.listeners import PROTOCOL_MAP, check_protocol_map, render_listeners, render_roles
from gateway.config.topic import (
    REPLICATION_FACTOR,
    TOPIC_CONFIGS,
    ConfigError,
    effective_text,
    topic_layers,
    validate_topic_configs,
)
from gateway.config.without_effect import WITHOUT_EFFECT
from gateway.log.topic_names import why_illegal
from gateway.net.context import RequestContext
from gateway.net.errors import REFUSAL_CODES
from gateway.net.ids import MAX_ID_BYTES
from gateway.net.pieces import first_of_each, in_pieces, tally
from gateway.security.authorizer import HasAuthorizer, require
from gateway.security.kinds import AclOperation
from gateway.security.kinds import ResourceType as ResourceTypes
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import alter_configs as legacy
from protocol.messages import incremental_alter_configs as incremental
from protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from protocol.messages.list_config_resources import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)
from storage.topics import ALL_BROKERS
from storage.types import Refusal, Topic

logger = structlog.get_logger(__name__)


MAX_GROUPS_WITH_CONFIGS = 10_000
"""Groups with settings. Every node reads the settings of all of them when one has changed."""


class DescribeConfigsServices(FindsTopics, HasMembership, HasSettings, Protocol): ...


class AlterConfigsServices(
    ChangesCatalog, HasAuthorizer, HasBrokerConfigs, HasCertificates, HasMembership, HasSettings, Protocol
): ...


class ResourceType(IntEnum):
    """Upstream's ConfigResource.Type."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    """Known by its number so that tools get an empty list; its settings cannot be described or altered (KIP-714)."""
    GROUP = 32


_OF_CLUSTER = frozenset({ResourceType.BROKER, ResourceType.BROKER_LOGGER})
"""Resources whose settings need an ACL on the cluster."""


# --- DescribeConfigs ----------------------------------------------------------------------------------------------


DescribeEntry = Callable[
    [ConfigKey, Mapping[str, str], BrokerConfig, DescribeConfigsRequest], DescribeConfigsResourceResult
]

Inherited = dict[tuple[DescribeEntry, str], DescribeConfigsResourceResult]
"""Settings that come from the broker or are defaults, as one answer describes them: by kind of resource and name."""


async def describe_configs(
    request: DescribeConfigsRequest, context: RequestContext[DescribeConfigsServices]
) -> DescribeConfigsResponse:
    """Describe each resource; each succeeds or fails alone, and a resource that is named twice alike is described once.

    As upstream, a node describes itself and the settings of all brokers.
    """
    services = context.services
    await services.catalog.refresh_if_changed()
    broker, inherited = services.catalog.broker, Inherited()
    results: list[DescribeConfigsResult] = []
    async for resource in in_pieces(await first_of_each(request.resources)):
        try:
            _require(context, AclOperation.DESCRIBE_CONFIGS, resource.resource_type, resource.resource_name)
            configs = _describe(resource, request, services, broker, inherited)
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


def refuse_describe_configs(
    request: DescribeConfigsRequest, version: int, code: ErrorCode, message: str | None
) -> DescribeConfigsResponse:
    return DescribeConfigsResponse(
        results=tuple(
            DescribeConfigsResult(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource in request.resources
        )
    )


def _require(context: RequestContext[HasAuthorizer], operation: AclOperation, kind: int, name: str) -> None:
    """Raise KafkaError if the client lacks the permission. Unknown resource types pass; the caller rejects them."""
    if kind in _OF_CLUSTER:
        require(context, operation, ResourceTypes.CLUSTER)
    elif kind == ResourceType.TOPIC:
        require(context, operation, ResourceTypes.TOPIC, name)
    elif kind == ResourceType.GROUP:
        require(context, operation, ResourceTypes.GROUP, name)


def _describe(
    resource: DescribeConfigsResource,
    request: DescribeConfigsRequest,
    services: DescribeConfigsServices,
    broker: BrokerConfig,
    inherited: Inherited,
) -> Iterable[DescribeConfigsResourceResult]:
    match resource.resource_type:
        case ResourceType.TOPIC:
            topic = _find_topic(resource.resource_name, services)
            entries = [
                _layered_entry(_topic_entry, key, topic.configs, broker, request, inherited)
                for key in _chosen(TOPIC_CONFIGS, resource)
                if not key.internal or key.name in topic.configs
            ]
        case ResourceType.BROKER:
            entries = _describe_broker(resource, request, services)
        case ResourceType.BROKER_LOGGER:
            entries = describe_loggers(resource, services.membership.node_id)
        case ResourceType.GROUP:
            _check_group_name(resource.resource_name)
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
    resource: DescribeConfigsResource, request: DescribeConfigsRequest, services: DescribeConfigsServices
) -> list[DescribeConfigsResourceResult]:
    broker = services.catalog.broker
    keys = _chosen({**BROKER_CONFIGS, **_of_listeners(broker)}, resource)
    others: list[DescribeConfigsResourceResult] = []
    if resource.resource_name == ALL_BROKERS:
        keys = [key for key in (*keys, *_chosen(WITHOUT_EFFECT, resource)) if key.name in {*broker.dynamic, MIN_INSYNC}]
        broker = parse_broker_configs(broker.static, broker.dynamic)
    elif read_broker_id(resource.resource_name, "Broker") != services.membership.node_id:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST,
            f"Unexpected broker id, expected {services.membership.node_id} or empty string, but received"
            f" {resource.resource_name}",
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
            layers = broker.layers(key.name)
        source, value = layers[0] if layers else (ConfigSource.DEFAULT_CONFIG, None)
        synonyms = [DescribeConfigsSynonym(name=key.name, value=value, source=source) for source, value in layers]
        synonyms += [
            DescribeConfigsSynonym(name=name, value=value, source=source)
            for name in COARSER.get(key.name, ())
            for source, value in (broker.layers(name) if layers else ())
        ]
        read_only = key.update not in (Update.DYNAMIC, Update.OF_ONE_NODE)
        entries.append(_entry(key, value, source, synonyms, request, read_only=read_only))
    listed = [*entries, *others, *_unknown_entries(resource, broker)]
    order = _broker_order()
    return sorted(listed, key=lambda entry: order.get(entry.name, len(order)))


@cache
def _broker_order() -> Mapping[str, int]:
    """Return the place of each setting in Kafka's list."""
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
            layers = services.catalog.broker.layers(key.name)
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
    """Return settings that were given for one listener alone."""
    names = {**broker.static, **broker.own}
    given = {name: find_broker_config(name) for name in names if name not in BROKER_CONFIGS}
    return {name: key for name, key in given.items() if key is not None}


def _unknown_entries(resource: DescribeConfigsResource, broker: BrokerConfig) -> list[DescribeConfigsResourceResult]:
    """Return settings that were stored under unknown names. Their values are hidden, as by upstream: they may be a
    plugin's secrets."""
    wanted = set(resource.configuration_keys or ())
    return [
        DescribeConfigsResourceResult(
            name=name, value=None, read_only=False, config_source=broker.layers(name)[0][0], is_sensitive=True
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


def _check_topic_name(name: str) -> None:
    reason = why_illegal(name)
    if reason is not None:
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)


def _find_topic(name: str, services: HasCatalog) -> Topic:
    _check_topic_name(name)
    topic = services.catalog.get(name)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")
    return topic


def _check_group_name(name: str) -> None:
    if not name:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Group name must not be empty")


# --- AlterConfigs, IncrementalAlterConfigs ------------------------------------------------------------------------


Effective = Callable[[str], tuple[ConfigKey, str | None] | None]
"""Return the setting of a name and its effective text, or None for an unknown name."""

Change = Callable[[Mapping[str, str], Effective], dict[str, str]]
"""Compute the new settings of a resource from its present ones."""

Identity = tuple[int, str]
"""Type and name of a resource."""


async def alter_configs(
    request: legacy.AlterConfigsRequest, context: RequestContext[AlterConfigsServices]
) -> legacy.AlterConfigsResponse:
    """Replace all settings of each resource. Settings without a value in the request return to their defaults."""
    changes: list[tuple[Identity, Change]] = [
        ((resource.resource_type, resource.resource_name), partial(_replace, resource.configs))
        async for resource in in_pieces(request.resources)
    ]
    errors = await _alter_all(changes, context, {}, validate_only=request.validate_only)
    responses = [
        legacy.AlterConfigsResourceResponse(
            error_code=error.code, error_message=error.message, resource_type=kind, resource_name=name
        )
        async for (kind, name), error in in_pieces(errors.items())
    ]
    return legacy.AlterConfigsResponse(responses=tuple(responses))


def refuse_alter_configs(
    request: legacy.AlterConfigsRequest, version: int, code: ErrorCode, message: str | None
) -> legacy.AlterConfigsResponse:
    return legacy.AlterConfigsResponse(
        responses=tuple(
            legacy.AlterConfigsResourceResponse(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource in request.resources
        )
    )


async def incremental_alter_configs(
    request: incremental.IncrementalAlterConfigsRequest, context: RequestContext[AlterConfigsServices]
) -> incremental.IncrementalAlterConfigsResponse:
    """Set or delete settings, or change entries of lists; others stay. If two nodes append to one list at the same
    moment, one of the entries may be lost."""
    changes: list[tuple[Identity, Change]] = []
    loggers: dict[Identity, Sequence[incremental.AlterableConfig]] = {}
    async for resource in in_pieces(request.resources):
        identity = (resource.resource_type, resource.resource_name)
        changes.append((identity, partial(_apply, resource.configs)))
        if resource.resource_type == ResourceType.BROKER_LOGGER:
            loggers[identity] = resource.configs
    errors = await _alter_all(changes, context, loggers, validate_only=request.validate_only)
    responses = [
        incremental.AlterConfigsResourceResponse(
            error_code=error.code, error_message=error.message, resource_type=kind, resource_name=name
        )
        async for (kind, name), error in in_pieces(errors.items())
    ]
    return incremental.IncrementalAlterConfigsResponse(responses=tuple(responses))


def refuse_incremental_alter_configs(
    request: incremental.IncrementalAlterConfigsRequest, version: int, code: ErrorCode, message: str | None
) -> incremental.IncrementalAlterConfigsResponse:
    return incremental.IncrementalAlterConfigsResponse(
        responses=tuple(
            incremental.AlterConfigsResourceResponse(
                error_code=code,
                error_message=message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource in request.resources
        )
    )


async def _alter_all(
    changes: Sequence[tuple[Identity, Change]],
    context: RequestContext[AlterConfigsServices],
    loggers: Mapping[Identity, Sequence[incremental.AlterableConfig]],
    *,
    validate_only: bool,
) -> dict[Identity, KafkaError]:
    """Change each resource alone, and return its error or NONE. `loggers` are resources of that type, which have no
    settings to compute from."""
    services = context.services
    named = await tally(identity for identity, _ in changes)
    await services.catalog.refresh_if_changed()
    errors: dict[Identity, KafkaError] = {}
    async for identity, change in in_pieces(changes):
        try:
            if named[identity] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Each resource must appear at most once.")
            kind, name = identity
            _require(context, AclOperation.ALTER_CONFIGS, kind, name)
            match kind:
                case ResourceType.TOPIC:
                    await _alter_topic(name, change, services, validate_only=validate_only)
                case ResourceType.BROKER:
                    await _alter_brokers(name, change, services, validate_only=validate_only)
                case ResourceType.BROKER_LOGGER if identity in loggers:
                    _check_configs(loggers[identity])
                    alter_loggers(name, loggers[identity], services.membership.node_id, validate_only=validate_only)
                case ResourceType.GROUP:
                    _check_group_name(name)
                    await _alter_group(name, change, services, validate_only=validate_only)
                case _:
                    raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unknown resource type {kind}")
            errors[identity] = KafkaError(ErrorCode.NONE)
        except ConfigError as error:
            # Upstream's word for brokers, which it keeps for the sake of clients (KAFKA-13609).
            is_broker = identity[0] == ResourceType.BROKER
            code = ErrorCode.INVALID_REQUEST if is_broker else ErrorCode.INVALID_CONFIG
            errors[identity] = KafkaError(code, str(error))
        except KafkaError as error:
            errors[identity] = error
    return errors


async def _alter_topic(topic_name: str, change: Change, services: ChangesCatalog, *, validate_only: bool) -> None:
    """Alter a topic's settings. They are checked before the topic's existence, as in
    ControllerConfigurationValidator."""
    _check_topic_name(topic_name)
    broker = services.catalog.broker
    known = services.catalog.get(topic_name)
    configs: Mapping[str, str] = {} if known is None else known.configs
    current = {name: value for name, value in configs.items() if name != REPLICATION_FACTOR}

    def effective(name: str) -> tuple[ConfigKey, str | None] | None:
        key = TOPIC_CONFIGS.get(name)
        return None if key is None else (key, effective_text(key, configs, broker))

    wanted = validate_topic_configs(change(current, effective), broker)
    topic = known or _find_topic(topic_name, services)
    if validate_only:
        return
    altered = await services.topics.set_configs(
        topic.topic_id, _differing(wanted, current), current.keys() - wanted.keys()
    )
    if isinstance(altered, Refusal):
        raise KafkaError(REFUSAL_CODES[altered], f"There is no topic '{topic.name}'.")
    services.catalog.apply(altered)
    logger.info("topic configs altered", topic=topic.name, configs=wanted)


async def _alter_brokers(
    resource_name: str, change: Change, services: AlterConfigsServices, *, validate_only: bool
) -> None:
    """Alter broker settings. Changes of this node run one after the other: otherwise certificates that were read
    before another change would be installed after it."""
    own = resource_name == str(services.membership.node_id)
    async with services.broker_configs if own else nullcontext():
        await _alter_brokers_alone(resource_name, change, services, validate_only=validate_only)


async def _alter_brokers_alone(
    resource_name: str, change: Change, services: AlterConfigsServices, *, validate_only: bool
) -> None:
    known = {ALL_BROKERS, *(str(node.node_id) for node in services.membership.alive())}
    own_name = str(services.membership.node_id)
    if resource_name not in known:
        read_broker_id(resource_name, "Node")
        raise KafkaError(
            ErrorCode.INVALID_REQUEST, f"Unexpected broker id, expected {own_name}, but received {resource_name}"
        )
    # Another node may have changed them since this one last looked.
    of_all = await services.topics.load_broker_configs()
    current = of_all
    if resource_name != ALL_BROKERS:
        current = await services.topics.load_broker_configs(resource_name)
    given = services.catalog.broker

    def with_configs(configs: Mapping[str, str]) -> tuple[BrokerConfig, dict[str, ConfigError]]:
        """Parse the settings as `parse_stored` does, with `configs` as those of the resource."""
        layers = (configs, given.own) if resource_name == ALL_BROKERS else (of_all, configs)
        return parse_stored(given.static, *layers)

    broker, before = with_configs(current)

    def effective(name: str) -> tuple[ConfigKey, str | None] | None:
        key = find_broker_config(name)
        if key is None:
            return None
        # Values of this node alone do not apply to all nodes.
        hidden = ConfigSource.DYNAMIC_BROKER_CONFIG if resource_name == ALL_BROKERS else None
        return key, next((value for source, value in broker.layers(name) if source is not hidden), None)

    wanted = change(current, effective)
    altered, refused = with_configs(wanted)
    for name, error in refused.items():
        # A value that another release has stored and this one refuses may stay or be removed.
        if name in _differing(wanted, current) or name not in before:
            raise error
    use_certificates: Callable[[], None] | None = None
    if resource_name == own_name:
        if PROTOCOL_MAP in _differing(wanted, current):
            check_protocol_map(wanted[PROTOCOL_MAP], services.settings.listeners)
        named = {*change({}, effective), *(current.keys() - wanted.keys())}
        if services.certificates is not None and any(name.startswith(LISTENER_PREFIX) for name in named):
            # Read certificates even if a name keeps its value, because another certificate may lie in the same file.
            use_certificates = await services.certificates.read(altered)
    elif resource_name != ALL_BROKERS:
        _refuse_for_another(current, wanted, resource_name)
    if validate_only:
        return
    await services.topics.set_broker_configs(
        _differing(wanted, current), current.keys() - wanted.keys(), broker=resource_name
    )
    if resource_name in (ALL_BROKERS, own_name):
        services.catalog.set_broker(altered)
    if use_certificates is not None:
        use_certificates()
    shown = {name: shown_value(name, value) for name, value in wanted.items()}
    logger.info("broker configs altered", broker=resource_name or "all", configs=shown)
    for name in _differing(wanted, current).keys() & IDLE.keys():
        logger.warning("broker config without effect", config=name, reason=IDLE[name].documentation)


def _refuse_for_another(current: Mapping[str, str], wanted: Mapping[str, str], broker_id: str) -> None:
    """Raise KafkaError for settings that only the node itself can check: its listeners, and files on its disk."""
    for name in (*_differing(wanted, current), *(current.keys() - wanted.keys())):
        key = find_broker_config(name)
        if key is not None and key.update is Update.OF_ONE_NODE:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"{name} of broker {broker_id} is altered by that broker alone")


async def _alter_group(group_id: str, change: Change, services: ChangesCatalog, *, validate_only: bool) -> None:
    if len(group_id.encode()) > MAX_ID_BYTES:
        raise KafkaError(ErrorCode.INVALID_CONFIG, f"A group id has at most {MAX_ID_BYTES} bytes.")
    broker = services.catalog.broker
    current = services.catalog.group_configs.get(group_id, {})

    def effective(name: str) -> tuple[ConfigKey, str | None] | None:
        key = GROUP_CONFIGS.get(name)
        return None if key is None else (key, group_value(key, current, broker)[1])

    wanted = change(current, effective)
    check_group_configs(wanted, broker)
    if wanted and not current and len(services.catalog.group_configs) >= MAX_GROUPS_WITH_CONFIGS:
        raise KafkaError(
            ErrorCode.POLICY_VIOLATION, f"No more than {MAX_GROUPS_WITH_CONFIGS} groups may have settings of their own."
        )
    if validate_only:
        return
    await services.topics.set_group_configs(group_id, _differing(wanted, current), current.keys() - wanted.keys())
    await services.catalog.refresh_if_changed()
    logger.info("group configs altered", group_id=group_id, configs=wanted)


def _differing(wanted: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """Return the settings to write. Unchanged ones are omitted, because another request may have changed them in the
    meantime."""
    return {name: value for name, value in wanted.items() if current.get(name) != value}


def _replace(
    configs: Sequence[legacy.AlterableConfig], _current: Mapping[str, str], _effective: Effective
) -> dict[str, str]:
    _check_names([config.name for config in configs], [config.name for config in configs if config.value is None])
    return {config.name: config.value for config in configs if config.value is not None}


def _apply(
    configs: Sequence[incremental.AlterableConfig], current: Mapping[str, str], effective: Effective
) -> dict[str, str]:
    _check_configs(configs)
    wanted = dict(current)
    for config in configs:
        if config.config_operation == Operation.DELETE:
            wanted.pop(config.name, None)
        elif config.config_operation == Operation.SET:
            wanted[config.name] = config.value or ""
        elif config.config_operation in (Operation.APPEND, Operation.SUBTRACT):
            append = config.config_operation == Operation.APPEND
            wanted[config.name] = _changed_list(config.name, config.value or "", effective, append=append)
        else:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unknown operations type {config.config_operation}")
    return wanted


def _check_configs(configs: Sequence[incremental.AlterableConfig]) -> None:
    _check_names(
        [config.name for config in configs],
        [config.name for config in configs if config.value is None and config.config_operation != Operation.DELETE],
    )


def _changed_list(name: str, value: str, effective: Effective, *, append: bool) -> str:
    """Return the effective list with entries added or removed. Appending to an unset list keeps its default."""
    found = effective(name)
    if found is None:
        raise ConfigError(name, value, "unknown config name")
    key, text = found
    if key.type is not ConfigType.LIST:
        operation = "APPEND" if append else "SUBTRACT"
        raise KafkaError(ErrorCode.INVALID_CONFIG, f"Can't {operation} to key {name} because its type is not LIST.")
    entries = text.split(",") if text else []
    changes = [entry.strip() for entry in value.split(",")] if value else []
    if append:
        return render((*entries, *(entry for entry in changes if entry not in entries))) or ""
    return render(tuple(entry for entry in entries if entry not in changes)) or ""


def _check_names(names: Sequence[str], nulls: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Error due to duplicate config keys")
    if nulls:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Null value not supported for : {', '.join(nulls)}")


# --- ListConfigResources ------------------------------------------------------------------------------------------


async def list_config_resources(
    request: ListConfigResourcesRequest, context: RequestContext[DescribeConfigsServices]
) -> ListConfigResourcesResponse:
    """List topics, brokers, their loggers, and groups that have settings of their own.

    Version 0 asks for subscriptions to client metrics only (KIP-714), and none exist here.
    """
    services = context.services
    known = {int(kind) for kind in ResourceType}
    unknown = [kind for kind in request.resource_types if kind not in known]
    if unknown:
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"There is no resource type {unknown[0]}.")
    wanted = set(request.resource_types) or known
    if context.version == 0:
        wanted = {int(ResourceType.CLIENT_METRICS)}
    resources: list[ConfigResource] = []
    if ResourceType.TOPIC in wanted:
        await services.catalog.refresh_if_changed()
        resources.extend(
            ConfigResource(resource_name=topic.name, resource_type=ResourceType.TOPIC)
            for topic in services.catalog.topics()
        )
    if ResourceType.GROUP in wanted:
        await services.catalog.refresh_if_changed()
        resources.extend(
            ConfigResource(resource_name=group_id, resource_type=ResourceType.GROUP)
            for group_id in sorted(services.catalog.group_configs)
        )
    for kind in (ResourceType.BROKER, ResourceType.BROKER_LOGGER):
        if kind in wanted:
            resources.extend(
                ConfigResource(resource_name=str(node.node_id), resource_type=kind)
                for node in services.membership.brokers()
            )
    return ListConfigResourcesResponse(config_resources=tuple(resources))


def refuse_list_config_resources(
    request: ListConfigResourcesRequest, version: int, code: ErrorCode, message: str | None
) -> ListConfigResourcesResponse:
    return ListConfigResourcesResponse(error_code=code)
