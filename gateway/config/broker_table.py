"""Every broker setting by name: those that a node obeys, those that it only shows, and facts of the node.

The one idea: a setting that a node only shows (because Postgres, not a broker's disk, decides) is listed beside those
that it obeys (`broker.py`) as fixed or without effect, so that DescribeConfigs never makes a false claim. Kafka's other
settings are shown and never obeyed (`without_effect.py`). Four layers make a value: the default, the text given at
start, and the texts that AlterConfigs stored for all nodes and for one node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from gateway.config.broker import BrokerConfig
from gateway.config.definition import (
    HIDDEN,
    MAX_LONG,
    MEBIBYTE,
    Check,
    ConfigKey,
    ConfigSource,
    ConfigType,
    ConfigValue,
    Update,
    at_least,
    declared_settings,
    render,
)
from gateway.config.mechanisms import LOGIN_MODULES
from gateway.config.without_effect import NO_EFFECT, WITHOUT_EFFECT

MIN_INSYNC = "min.insync.replicas"
_INT, _LONG, _BOOLEAN = ConfigType.INT, ConfigType.LONG, ConfigType.BOOLEAN
_AT_START, _OF_ONE_NODE = Update.AT_START, Update.OF_ONE_NODE


def _no_effect(name: str, kind: ConfigType, default: ConfigValue, what: str, check: Check | None = None) -> ConfigKey:
    return ConfigKey(name, kind, default, f"{NO_EFFECT}: Postgres keeps the records. In Kafka: {what}", check)


def _fixed(name: str, kind: ConfigType, value: ConfigValue, documentation: str) -> ConfigKey:
    return ConfigKey(name, kind, value, documentation, update=Update.FIXED)


def _idle(name: str, kind: ConfigType, value: ConfigValue, why: str, check: Check | None = None) -> ConfigKey:
    return ConfigKey(name, kind, value, f"{NO_EFFECT}: {why}", check, update=Update.AT_START)


def _internal(name: str, kind: ConfigType, default: ConfigValue, what: str) -> ConfigKey:
    return ConfigKey(name, kind, default, f"{what} No effect.", update=Update.AT_START, internal=True)


def _of_node(name: str, documentation: str) -> ConfigKey:
    return ConfigKey(name, ConfigType.LIST, None, documentation, update=Update.AT_START)


def _number(name: str, documentation: str) -> ConfigKey:
    return ConfigKey(name, _INT, None, documentation, at_least(0), update=Update.AT_START)


_SHOWN = (
    _no_effect("log.segment.bytes", _INT, 1_073_741_824, "Size of a log segment.", at_least(MEBIBYTE)),
    _no_effect("log.index.size.max.bytes", _INT, 10_485_760, "Size of a segment's index.", at_least(4)),
    _no_effect("log.index.interval.bytes", _INT, 4096, "Bytes between index entries.", at_least(0)),
    _no_effect("log.segment.delete.delay.ms", _LONG, 60_000, "Wait before a removed segment's file goes.", at_least(0)),
    _no_effect("log.roll.jitter.ms", _LONG, None, "Spread of segment rolls.", at_least(0)),
    _no_effect("log.flush.interval.messages", _LONG, MAX_LONG, "Records between syncs of a segment.", at_least(1)),
    _no_effect("log.flush.interval.ms", _LONG, None, "Time between syncs of a segment.", at_least(0)),
    _no_effect("log.preallocate", _BOOLEAN, False, "Whether segment files are allocated in advance."),
    _no_effect(MIN_INSYNC, _INT, 1, "In-sync replicas that acks=all waits for.", at_least(1)),
    _fixed("log.cleaner.enable", _BOOLEAN, True, "Topics that ask for compaction are compacted."),
    _idle("offsets.topic.replication.factor", ConfigType.SHORT, 1, "Committed offsets live in Postgres.", at_least(1)),
    _idle("offsets.commit.required.acks", ConfigType.SHORT, -1, "A commit is answered once it is durable."),
    _fixed("remote.log.storage.system.enable", _BOOLEAN, False, "There is no tiered storage."),
    _idle("log.dirs", ConfigType.LIST, ("postgres",), "DescribeLogDirs names the one place of records postgres."),
    _idle("security.inter.broker.protocol", ConfigType.STRING, "PLAINTEXT", "Nodes meet in Postgres only."),
)

_NODE = (
    _number("broker.id", "An older name of node.id."),
    _number(
        "node.id", "The node's id, which no other may have; if it is unset, Postgres assigns one to the node's address."
    ),
    ConfigKey("broker.rack", ConfigType.STRING, None, "The node's rack; --rack is short for it.", update=_AT_START),
    _of_node("listeners", "Where the node listens, as NAME://HOST:PORT; --listen is short for one."),
    _of_node("advertised.listeners", "Where clients of each listener find the node; --advertise is short for one."),
    ConfigKey(
        "listener.security.protocol.map",
        ConfigType.STRING,
        None,
        "Which security protocol each listener speaks, as NAME:PROTOCOL. A listener that is there keeps its own.",
        update=_OF_ONE_NODE,
    ),
    _of_node("controller.listener.names", "Listeners through which clients use the node as a controller (KIP-919)."),
    ConfigKey(
        "inter.broker.listener.name",
        ConfigType.STRING,
        None,
        "The listener to which other nodes forward requests. It is used only with shared.listener.names.",
        update=_AT_START,
    ),
    _of_node("shared.listener.names", "Listeners whose advertised address stands for all nodes."),
    _of_node("process.roles", "broker: serves clients; controller: does background work. Both if unset."),
)
"""Facts of one node; DescribeConfigs reads their values from the node itself. `gateway/config/listeners.py` reads
its listeners."""

COARSER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "log.retention.ms": ("log.retention.minutes", "log.retention.hours"),
        "log.roll.ms": ("log.roll.hours",),
        "log.roll.jitter.ms": ("log.roll.jitter.hours",),
        "log.flush.interval.ms": ("log.flush.scheduler.interval.ms",),
    }
)
"""A broker setting → settings that decide if it is not set. Kafka lists them behind it if it is set."""

NODE_CONFIGS: frozenset[str] = frozenset(key.name for key in _NODE)

_INTERNAL = (
    _internal("server.max.startup.time.ms", _LONG, MAX_LONG, "How long a start may take."),
    _internal("log.initial.task.delay.ms", _LONG, 30_000, "How soon after a start logs are first looked after."),
)

FIELDS: Mapping[str, ConfigKey] = MappingProxyType(declared_settings(BrokerConfig))
"""Maps a field of `BrokerConfig` to its setting."""

BROKER_CONFIGS: Mapping[str, ConfigKey] = MappingProxyType(
    {key.name: key for key in (*FIELDS.values(), *_SHOWN, *_NODE, *_INTERNAL)}
)
"""Every broker setting by name: typed settings, settings that are only shown, facts about the node, and internal
settings.
"""

UNLISTED: frozenset[str] = frozenset(key.name for key in BROKER_CONFIGS.values() if key.internal) | {
    *("group.connection.grace.ms", "group.cooperative.guard", "group.handoff.mode", "group.handoff.timeout.ms"),
    *("group.journal.enable", "group.journal.retention.ms", "group.journal.retention.bytes", "sql.schema"),
    *("reconcile.periodic.interval.ms", "log.commit.gather.ms"),
    *("log.store.inline.max.bytes", "log.store.page.cache.bytes", "log.store.roll.bytes", "log.store.roll.ms"),
    *("allow.everyone.if.no.acl.found", "super.users"),
    *("offsets.commit.required.acks", "producer.id.expiration.check.interval.ms"),
    *("console.listen", "console.read.only", "console.produce", "console.plaintext.allow"),
    *("console.ssl.keystore.location", "console.schema.registry.url", "console.schema.registry.login"),
    *("console.oidc.issuer", "console.oidc.client.id", "console.oidc.client.secret", "console.oidc.redirect.uri"),
    *("console.oidc.scopes", "console.oidc.session.ms", "shared.listener.names"),
}
"""Settings that a list of all of a Kafka broker's settings omits: those of its own plugins, those that Kafka calls
internal or has removed, and this gateway's own. One that was set, or is requested by name, is described like any
other."""


IDLE: Mapping[str, ConfigKey] = MappingProxyType(
    {
        **WITHOUT_EFFECT,
        **{name: key for name, key in BROKER_CONFIGS.items() if key.documentation.startswith(NO_EFFECT)},
    }
)
"""Settings that are accepted but have no effect. The documentation of each says why."""

_OF_LISTENERS = frozenset(
    name
    for name in FIELDS
    if name.startswith(("ssl_", "sasl_oauthbearer_"))
    or name in ("sasl_enabled_mechanisms", "sasl_server_max_receive_size")
) | {"connections_max_reauth_ms"}
LISTENER_PREFIX = "listener.name."
_OF_MECHANISM = tuple(f".{mechanism.lower()}." for mechanism in LOGIN_MODULES)
JAAS_CONFIG = "sasl.jaas.config"


def find_broker_config(name: str) -> ConfigKey | None:
    """Return the setting of this name; None if the name is unknown.

    A setting of one listener has the listener's name, in lower case, before its own: `listener.name.NAME.SETTING`. A
    setting of one mechanism is `listener.name.NAME.MECHANISM.SETTING`.
    """
    found = BROKER_CONFIGS.get(name) or WITHOUT_EFFECT.get(name)
    if found is not None or not name.startswith(LISTENER_PREFIX):
        return found
    for field_name in _OF_LISTENERS:
        key = FIELDS[field_name]
        if name.endswith(f".{key.name}") and len(name) > len(LISTENER_PREFIX) + len(key.name) + 1:
            return dataclasses.replace(key, name=name)
    if name.endswith(tuple(f"{mechanism}{JAAS_CONFIG}" for mechanism in _OF_MECHANISM)):
        documentation = "Who may authenticate by a mechanism at a listener, in Kafka's syntax for login modules."
        return ConfigKey(name, ConfigType.PASSWORD, None, documentation, update=_AT_START)
    return None


def broker_config_names(like: str) -> Iterator[str]:
    """Return the names of all broker settings, and the names for the listener of the listener setting `like`."""
    yield from BROKER_CONFIGS
    yield from WITHOUT_EFFECT
    if like.startswith(LISTENER_PREFIX):
        listener = like.removeprefix(LISTENER_PREFIX).partition(".")[0]
        yield from (f"{LISTENER_PREFIX}{listener}.{FIELDS[field_name].name}" for field_name in _OF_LISTENERS)
        yield from (f"{LISTENER_PREFIX}{listener}{mechanism}{JAAS_CONFIG}" for mechanism in _OF_MECHANISM)


def broker_layers(config: BrokerConfig, name: str) -> list[tuple[ConfigSource, str | None]]:
    """Return the values of the setting `name` as texts. The effective value comes first."""
    found: list[tuple[ConfigSource, str | None]] = []
    if name in config.own:
        found.append((ConfigSource.DYNAMIC_BROKER_CONFIG, config.own[name]))
    if name in config.dynamic:
        found.append((ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG, config.dynamic[name]))
    elif name == MIN_INSYNC and name not in config.static:
        # In a cluster with eligible leader replicas, this setting always has a value for all brokers (KIP-966).
        found.append((ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG, "1"))
    if name in config.static:
        found.append((ConfigSource.STATIC_BROKER_CONFIG, config.static[name]))
    key = find_broker_config(name)
    if key is not None and key.default is not None:
        found.append((ConfigSource.DEFAULT_CONFIG, render(key.default)))
    return found


def shown_value(name: str, value: str) -> str:
    """Return the value as logs and refusals may show it. Passwords are hidden, and so are the values of unknown
    settings, because any of them may be a password."""
    key = find_broker_config(name)
    return HIDDEN if key is None or key.type is ConfigType.PASSWORD else value
