"""The settings of a group (ConfigResource type GROUP): those of the consumer protocol, under Kafka's names, and how
partitions are handed from member to member.

The one idea: a group's own setting outranks the broker's, and the broker bounds it. A group need not exist to have
settings; they wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigError, ConfigKey, ConfigSource, ConfigType, Synonym, between, one_of

SESSION_TIMEOUT = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL = "consumer.heartbeat.interval.ms"
HANDOFF_MODE = "group.handoff.mode"
HANDOFF_TIMEOUT = "group.handoff.timeout.ms"

GROUP_CONFIGS: Mapping[str, ConfigKey] = MappingProxyType(
    {
        key.name: key
        for key in (
            ConfigKey(
                SESSION_TIMEOUT,
                ConfigType.INT,
                45_000,
                "How long a member of the consumer protocol may be silent.",
                synonyms=(Synonym("group.consumer.session.timeout.ms"),),
            ),
            ConfigKey(
                HEARTBEAT_INTERVAL,
                ConfigType.INT,
                5_000,
                "How often members of the consumer protocol are to speak.",
                synonyms=(Synonym("group.consumer.heartbeat.interval.ms"),),
            ),
            ConfigKey(
                HANDOFF_MODE,
                ConfigType.STRING,
                "ack",
                "What the new owner of a partition waits for: that the old one let go of it (ack), that it has also "
                "committed what it was served (drain), or nothing (off). Not a Kafka setting.",
                one_of("ack", "drain", "off"),
                synonyms=(Synonym(HANDOFF_MODE),),
            ),
            ConfigKey(
                HANDOFF_TIMEOUT,
                ConfigType.INT,
                30_000,
                "How long the new owner of a partition waits for the old one at most. Not a Kafka setting.",
                between(1, 3_600_000),
                synonyms=(Synonym(HANDOFF_TIMEOUT),),
            ),
        )
    }
)


def group_intervals(configs: Mapping[str, str], broker: BrokerConfig) -> tuple[int, int]:
    """Session timeout and heartbeat interval of a group with these settings, in ms.

    ConfigError names the first that is unknown, no number, out of the broker's bounds, or contradicts the other.
    """
    values = {
        SESSION_TIMEOUT: broker.group_consumer_session_timeout_ms,
        HEARTBEAT_INTERVAL: broker.group_consumer_heartbeat_interval_ms,
    }
    bounds = {
        SESSION_TIMEOUT: (broker.group_consumer_min_session_timeout_ms, broker.group_consumer_max_session_timeout_ms),
        HEARTBEAT_INTERVAL: (
            broker.group_consumer_min_heartbeat_interval_ms,
            broker.group_consumer_max_heartbeat_interval_ms,
        ),
    }
    for name, text in configs.items():
        key = GROUP_CONFIGS.get(name)
        if key is None:
            raise ConfigError(name, text, "unknown config name")
        value = key.parse(text)
        if name not in bounds:
            continue
        lowest, highest = bounds[name]
        if not isinstance(value, int) or not lowest <= value <= highest:
            raise ConfigError(name, text, f"not between {lowest} and {highest}, the broker's bounds")
        values[name] = value
    if values[HEARTBEAT_INTERVAL] >= values[SESSION_TIMEOUT]:
        raise ConfigError(
            HEARTBEAT_INTERVAL,
            str(values[HEARTBEAT_INTERVAL]),
            f"not below {SESSION_TIMEOUT} ({values[SESSION_TIMEOUT]})",
        )
    return values[SESSION_TIMEOUT], values[HEARTBEAT_INTERVAL]


def group_handoff(configs: Mapping[str, str], broker: BrokerConfig) -> tuple[str, int]:
    """`group.handoff.mode` and `group.handoff.timeout.ms` of a group with these settings, which `group_intervals` has
    let through."""
    mode = configs.get(HANDOFF_MODE, broker.group_handoff_mode).strip()
    return mode, int(configs.get(HANDOFF_TIMEOUT, broker.group_handoff_timeout_ms))


def group_layers(
    key: ConfigKey, configs: Mapping[str, str], broker: BrokerConfig
) -> list[tuple[ConfigSource, str, str | None]]:
    """(source, name, value) of everything that gives this setting a value, the strongest (effective) first."""
    layers: list[tuple[ConfigSource, str, str | None]] = []
    if key.name in configs:
        layers.append((ConfigSource.GROUP_CONFIG, key.name, configs[key.name]))
    for synonym in key.synonyms:
        layers.extend((source, synonym.name, value) for source, value in broker.layers(synonym.name))
    return layers
