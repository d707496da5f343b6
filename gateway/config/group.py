"""The settings of a group (ConfigResource type GROUP), under Kafka's names, by the type of group that they apply to.
They include how a partition is handed from member to member.

The one idea: a group's own setting outranks the broker's, and the broker bounds it. A group need not exist to have
settings. They wait for it, and apply if it has their type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from gateway.config.broker import BrokerConfig
from gateway.config.broker_table import broker_layers
from gateway.config.definition import (
    ConfigError,
    ConfigKey,
    ConfigSource,
    ConfigType,
    Synonym,
    at_least,
    between,
    one_of,
    render,
)

TYPES = ("consumer", "streams", "share")
"""Types of groups that have a session timeout and a heartbeat interval of their own."""
RECORD_LOCK_DURATION = "share.record.lock.duration.ms"
DELIVERY_COUNT_LIMIT = "share.delivery.count.limit"
MAX_RECORD_LOCKS = "share.partition.max.record.locks"
RENEWS = "share.renew.acknowledge.enable"
DEAD_LETTER_TOPIC = "errors.deadletterqueue.topic.name"
DEAD_LETTER_COPY = "errors.deadletterqueue.copy.record.enable"
AUTO_OFFSET_RESET = "share.auto.offset.reset"
ISOLATION_LEVEL = "share.isolation.level"
STANDBY_REPLICAS = "streams.num.standby.replicas"
INITIAL_REBALANCE_DELAY = "streams.initial.rebalance.delay.ms"
HANDOFF_MODE = "group.handoff.mode"
HANDOFF_TIMEOUT = "group.handoff.timeout.ms"
COOPERATIVE_GUARD = "group.cooperative.guard"

_DEFAULT = ConfigSource.DEFAULT_CONFIG


class GroupIntervals(NamedTuple):
    """Session timeout and heartbeat interval of a group, in ms."""

    session_timeout_ms: int
    heartbeat_interval_ms: int


def session_timeout(group_type: str) -> str:
    return f"{group_type}.session.timeout.ms"


def heartbeat_interval(group_type: str) -> str:
    return f"{group_type}.heartbeat.interval.ms"


def _of_broker(name: str, kind: ConfigType, default: int, documentation: str) -> ConfigKey:
    """Declare a setting that the broker has for all groups of the type under the same name, behind `group.`; both
    have the same default."""
    return ConfigKey(name, kind, default, documentation, at_least(0), synonyms=(Synonym(f"group.{name}"),))


def _intervals(group_type: str) -> tuple[ConfigKey, ConfigKey]:
    members = f"members of the {group_type} protocol"
    return (
        _of_broker(session_timeout(group_type), ConfigType.INT, 45_000, f"How long {members} may be silent."),
        _of_broker(heartbeat_interval(group_type), ConfigType.INT, 5_000, f"How often {members} send heartbeats."),
    )


BY_DURATION = "by_duration:"
_DURATION = re.compile(
    r"P(?:(\d{1,6})D)?(?:T(?:(\d{1,8})H)?(?:(\d{1,9})M)?(?:(\d{1,10}(?:\.\d{1,9})?)S)?)?", re.ASCII | re.IGNORECASE
)


def duration_ms(text: str) -> int | None:
    """Return the length of an ISO 8601 duration of days, hours, minutes and seconds; None if the text is not one, or
    names no unit."""
    matched = _DURATION.fullmatch(text)
    if matched is None or not any(matched.groups()):
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in matched.groups())
    return int((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000)


def _offset_reset(value: str) -> str | None:
    is_known = value in ("latest", "earliest")
    if is_known or (value.startswith(BY_DURATION) and duration_ms(value.removeprefix(BY_DURATION)) is not None):
        return None
    return "must be latest, earliest or by_duration:<duration>, as by_duration:PT1H"


GROUP_CONFIGS: Mapping[str, ConfigKey] = MappingProxyType(
    {
        key.name: key
        for key in (
            *_intervals("consumer"),
            *_intervals("streams"),
            *_intervals("share"),
            _of_broker(
                RECORD_LOCK_DURATION,
                ConfigType.INT,
                30_000,
                "How long a member of a share group keeps a record that it has neither acknowledged nor released.",
            ),
            _of_broker(DELIVERY_COUNT_LIMIT, ConfigType.INT, 5, "How often a share group delivers a record at most."),
            _of_broker(
                MAX_RECORD_LOCKS,
                ConfigType.INT,
                2_000,
                "Most records of a share partition that were delivered and are not settled.",
            ),
            ConfigKey(RENEWS, ConfigType.BOOLEAN, True, "Whether members of a share group may extend their locks."),
            ConfigKey(
                DEAD_LETTER_TOPIC,
                ConfigType.STRING,
                "",
                "Where a share group writes records that it rejected or delivered too often; empty: nowhere.",
                lambda name: "DLQ topic name must not start with '__'" if name.startswith("__") else None,
            ),
            ConfigKey(
                DEAD_LETTER_COPY,
                ConfigType.BOOLEAN,
                False,
                "Whether a dead letter has the key and the value of its record, or only says which record it was.",
            ),
            ConfigKey(
                AUTO_OFFSET_RESET,
                ConfigType.STRING,
                "latest",
                "Where a share group begins in a partition: latest, earliest, or by_duration:<ISO 8601 duration>.",
                _offset_reset,
            ),
            ConfigKey(
                ISOLATION_LEVEL,
                ConfigType.STRING,
                "read_uncommitted",
                "Whether members of a share group receive records that transactions have not committed.",
                one_of("read_committed", "read_uncommitted"),
            ),
            _of_broker(
                STANDBY_REPLICAS,
                ConfigType.INT,
                0,
                "How many members beside its owner keep a copy of a task's state.",
            ),
            _of_broker(
                INITIAL_REBALANCE_DELAY,
                ConfigType.INT,
                3_000,
                "How long the first members of an empty streams group are waited for before tasks are given.",
            ),
            ConfigKey(
                HANDOFF_MODE,
                ConfigType.STRING,
                "ack",
                "What the new owner of a partition waits for: until the old owner has released it (ack), until the old "
                "owner has also committed what it was served (drain), or nothing (off). Not a Kafka setting.",
                one_of("ack", "drain", "off"),
                synonyms=(Synonym(HANDOFF_MODE),),
            ),
            ConfigKey(
                HANDOFF_TIMEOUT,
                ConfigType.INT,
                30_000,
                "Longest time for which the new owner of a partition waits for the old owner. Not a Kafka setting.",
                between(1, 3_600_000),
                synonyms=(Synonym(HANDOFF_TIMEOUT),),
            ),
            ConfigKey(
                COOPERATIVE_GUARD,
                ConfigType.BOOLEAN,
                False,
                "Whether a partition that a member of a cooperative group still claims is withheld from its new owner "
                "until that member has released it. Not a Kafka setting.",
                synonyms=(Synonym(COOPERATIVE_GUARD),),
            ),
        )
    }
)


def check_group_configs(configs: Mapping[str, str], broker: BrokerConfig) -> None:
    """Raise ConfigError for the first setting that is unknown, not a number, out of the broker's bounds, or
    contradicts another."""
    for name, text in configs.items():
        key = GROUP_CONFIGS.get(name)
        if key is None:
            raise ConfigError(name, text, "unknown config name")
        value = key.parse(text)
        for bound, limit in _bounds(name, broker).items():
            how = "less" if bound.split(".")[2] == "max" else "greater"
            if not isinstance(value, int) or (value > limit if how == "less" else value < limit):
                said = f"{how} than or equal to {bound}"
                raise ConfigError(name, text, f"must be {said}", f"{name} must be {said}")
    for group_type in TYPES:
        intervals = group_intervals(group_type, configs, broker)
        if intervals.heartbeat_interval_ms >= intervals.session_timeout_ms:
            session, interval = session_timeout(group_type), heartbeat_interval(group_type)
            said = f"must be greater than {interval}"
            raise ConfigError(session, str(intervals.session_timeout_ms), said, f"{session} {said}")


def _bounds(name: str, broker: BrokerConfig) -> dict[str, int]:
    """Return the broker's bounds for a group setting, by the names of its own settings."""
    if name == STANDBY_REPLICAS:
        return {"group.streams.max.standby.replicas": broker.group_streams_max_standby_replicas}
    group_type, _, setting = name.partition(".")
    of_shares = (RECORD_LOCK_DURATION, DELIVERY_COUNT_LIMIT, MAX_RECORD_LOCKS)
    bounded = (session_timeout(group_type), heartbeat_interval(group_type), *of_shares)
    if group_type not in TYPES or name not in bounded:
        return {}
    names = (f"group.{group_type}.{end}.{setting}" for end in ("min", "max"))
    return {bound: getattr(broker, bound.replace(".", "_")) for bound in names}


def group_intervals(group_type: str, configs: Mapping[str, str], broker: BrokerConfig) -> GroupIntervals:
    """Return the intervals of a group with these settings, which `check_group_configs` has accepted."""
    return GroupIntervals(
        group_number(session_timeout(group_type), configs, broker),
        group_number(heartbeat_interval(group_type), configs, broker),
    )


def group_number(name: str, configs: Mapping[str, str], broker: BrokerConfig) -> int:
    """Return a setting's value for a group with these settings, which `check_group_configs` has accepted; the
    broker's if the group has none."""
    if name in configs:
        return int(configs[name])
    value: int = getattr(broker, f"group_{name.replace('.', '_')}")
    return value


def group_handoff(configs: Mapping[str, str], broker: BrokerConfig) -> tuple[str, int]:
    """Return `group.handoff.mode` and `group.handoff.timeout.ms` of a group with these settings, which
    `check_group_configs` has accepted."""
    mode = configs.get(HANDOFF_MODE, broker.group_handoff_mode).strip()
    return mode, int(configs.get(HANDOFF_TIMEOUT, broker.group_handoff_timeout_ms))


def group_guard(configs: Mapping[str, str], broker: BrokerConfig) -> bool:
    """Return `group.cooperative.guard` of a group with these settings, which `check_group_configs` has accepted."""
    own = configs.get(COOPERATIVE_GUARD)
    return broker.group_cooperative_guard if own is None else bool(GROUP_CONFIGS[COOPERATIVE_GUARD].parse(own))


def group_value(key: ConfigKey, configs: Mapping[str, str], broker: BrokerConfig) -> tuple[ConfigSource, str | None]:
    """Return the value of a setting and its source. A value from the broker is reported as a default, without the
    layers behind it (upstream: ConfigHelper.createGroupConfigEntry)."""
    if key.name in configs:
        return ConfigSource.GROUP_CONFIG, configs[key.name]
    given = (broker_layers(broker, synonym.name) for synonym in key.synonyms)
    return _DEFAULT, next((layers[0][1] for layers in given if layers), render(key.default))
