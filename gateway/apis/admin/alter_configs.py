"""AlterConfigs, IncrementalAlterConfigs: change settings.

The one idea: a request becomes a function from a resource's present settings to the new ones, and both APIs share the
rest. A change takes effect on this node before the answer, and on other nodes when they next follow the catalog.
A group's settings are stored by its id, before the group exists. `broker_loggers.py` has the levels of loggers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import structlog

from gateway.apis.admin.broker_loggers import Operation, alter_loggers, read_broker_id
from gateway.apis.admin.config_resources import (
    ResourceType,
    check_group_name,
    check_topic_name,
    find_topic,
    require_on_resource,
)
from gateway.apis.services import ChangesCatalog, HasBrokerConfigs, HasCertificates, HasMembership, HasSettings
from gateway.config.broker import BrokerConfig
from gateway.config.broker_parsing import parse_stored
from gateway.config.broker_table import IDLE, LISTENER_PREFIX, broker_layers, find_broker_config, shown_value
from gateway.config.definition import ConfigKey, ConfigSource, ConfigType, Update, render
from gateway.config.group import GROUP_CONFIGS, check_group_configs, group_value
from gateway.config.listeners import PROTOCOL_MAP, check_protocol_map
from gateway.config.topic import REPLICATION_FACTOR, TOPIC_CONFIGS, ConfigError, effective_text, validate_topic_configs
from gateway.net.context import RequestContext
from gateway.net.errors import REFUSAL_CODES
from gateway.net.ids import MAX_ID_BYTES
from gateway.net.pieces import in_pieces, tally
from gateway.security.authorizer import HasAuthorizer
from gateway.security.kinds import AclOperation
from protocol.errors import ErrorCode, KafkaError
from protocol.grammar import MAX_STRING_BYTES
from protocol.messages import alter_configs as legacy
from protocol.messages import incremental_alter_configs as incremental
from storage.text import stored
from storage.topics import ALL_BROKERS
from storage.types import Refusal

logger = structlog.get_logger(__name__)


MAX_GROUPS_WITH_CONFIGS = 10_000
"""Maximal number of groups with settings of their own. If one of them changes, every node reads the settings of all of
them."""
MAX_GROUP_CONFIGS_BYTES = 8 * 1024
"""Largest size of one group's settings, each with the group's id. Nodes read the settings of all groups as one value,
which has at most 256 MiB in Postgres."""
MAX_BROKER_CONFIGS_BYTES = 1024 * 1024
"""The same for the settings of one broker, or of all brokers."""


class AlterConfigsServices(
    ChangesCatalog, HasAuthorizer, HasBrokerConfigs, HasCertificates, HasMembership, HasSettings, Protocol
): ...


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
            require_on_resource(context, AclOperation.ALTER_CONFIGS, kind, name)
            match kind:
                case ResourceType.TOPIC:
                    await _alter_topic(name, change, services, validate_only=validate_only)
                case ResourceType.BROKER:
                    await _alter_brokers(name, change, services, validate_only=validate_only)
                case ResourceType.BROKER_LOGGER if identity in loggers:
                    _check_configs(loggers[identity])
                    alter_loggers(name, loggers[identity], services.membership.node_id, validate_only=validate_only)
                case ResourceType.GROUP:
                    check_group_name(name)
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
    check_topic_name(topic_name)
    broker = services.catalog.broker
    known = services.catalog.get(topic_name)
    configs: Mapping[str, str] = {} if known is None else known.configs
    current = {name: value for name, value in configs.items() if name != REPLICATION_FACTOR}

    def effective(name: str) -> tuple[ConfigKey, str | None] | None:
        key = TOPIC_CONFIGS.get(name)
        return None if key is None else (key, effective_text(key, configs, broker))

    wanted = validate_topic_configs(change(current, effective), broker)
    topic = known or find_topic(topic_name, services)
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
    # Another node may have changed the settings since this node last read them.
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
        # Settings that apply to this node alone do not apply to all nodes.
        hidden = ConfigSource.DYNAMIC_BROKER_CONFIG if resource_name == ALL_BROKERS else None
        return key, next((value for source, value in broker_layers(broker, name) if source is not hidden), None)

    wanted = change(current, effective)
    altered, refused = with_configs(wanted)
    for name, error in refused.items():
        # A value that another release has stored and this one refuses may stay or be removed.
        if name in _differing(wanted, current) or name not in before:
            raise error
    _check_size(resource_name, wanted, current, MAX_BROKER_CONFIGS_BYTES)
    use_certificates: Callable[[], None] | None = None
    if resource_name == own_name:
        if PROTOCOL_MAP in _differing(wanted, current):
            check_protocol_map(wanted[PROTOCOL_MAP], services.settings.listeners)
        named = {*change({}, effective), *(current.keys() - wanted.keys())}
        use_certificates = await _read_certificates(named, altered, services)
    elif resource_name != ALL_BROKERS:
        _refuse_for_another(current, wanted, resource_name)
    if validate_only:
        return
    await services.topics.set_broker_configs(
        _differing(wanted, current), current.keys() - wanted.keys(), broker=resource_name
    )
    # `altered` may be older than what Postgres now has: another request may have changed other settings concurrently.
    await services.catalog.refresh_if_changed()
    if use_certificates is not None:
        use_certificates()
    shown = {name: shown_value(name, value) for name, value in wanted.items()}
    logger.info("broker configs altered", broker=resource_name or "all", configs=shown)
    for name in _differing(wanted, current).keys() & IDLE.keys():
        logger.warning("broker config without effect", config=name, reason=IDLE[name].documentation)


async def _read_certificates(
    named: Set[str], altered: BrokerConfig, services: AlterConfigsServices
) -> Callable[[], None] | None:
    """Read the certificates again if the request names settings of a listener. Return the call that installs them.

    This happens even if a name keeps its value, because another certificate may lie in the same file.
    """
    if services.certificates is None or not any(name.startswith(LISTENER_PREFIX) for name in named):
        return None
    return await services.certificates.read(altered)


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
    _check_size(group_id, wanted, current, MAX_GROUP_CONFIGS_BYTES)
    if wanted and not current and len(services.catalog.group_configs) >= MAX_GROUPS_WITH_CONFIGS:
        raise KafkaError(
            ErrorCode.POLICY_VIOLATION, f"No more than {MAX_GROUPS_WITH_CONFIGS} groups may have settings of their own."
        )
    if validate_only:
        return
    await services.topics.set_group_configs(group_id, _differing(wanted, current), current.keys() - wanted.keys())
    await services.catalog.refresh_if_changed()
    logger.info("group configs altered", group_id=group_id, configs=wanted)


def _check_size(name: str, wanted: Mapping[str, str], current: Mapping[str, str], most_bytes: int) -> None:
    """Raise KafkaError if the request sets something, and the resource's settings would take too many bytes."""
    texts = (text for config in wanted.items() for text in (name, *config))
    if _differing(wanted, current) and sum(len(stored(text).encode()) for text in texts) > most_bytes:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, f"The settings may have {most_bytes} bytes together.")


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
    key, text = effective(name) or (None, None)
    if key is None or key.type is not ConfigType.LIST:
        operation = "APPEND" if append else "SUBTRACT"
        raise KafkaError(ErrorCode.INVALID_CONFIG, f"Can't {operation} to key {name} because its type is not LIST.")
    entries = text.split(",") if text else []
    changes = [entry.strip() for entry in value.split(",")] if value else []
    # Each of these lists may have sixteen thousand entries.
    present, changed = frozenset(entries), dict.fromkeys(changes)
    if append:
        made = render((*entries, *(entry for entry in changed if entry not in present))) or ""
    else:
        made = render(tuple(entry for entry in entries if entry not in changed)) or ""
    if len(made.encode()) > MAX_STRING_BYTES:
        raise KafkaError(ErrorCode.INVALID_CONFIG, f"The value of {name} may have {MAX_STRING_BYTES} bytes.")
    return made


def _check_names(names: Sequence[str], nulls: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Error due to duplicate config keys")
    if nulls:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Null value not supported for : {', '.join(nulls)}")
