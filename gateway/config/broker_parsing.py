"""Make a `BrokerConfig` of the texts of broker settings, or name the setting that is wrong and why.

The one idea: a configuration is made whole, from all of its layers at once, because settings in different layers may
contradict each other. A configuration that was made has no contradictions. `broker.py` declares the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from gateway.config.broker import NODE_ID_NAMES, BrokerConfig
from gateway.config.broker_table import FIELDS, broker_config_names, find_broker_config, shown_value
from gateway.config.definition import HIDDEN, ConfigError, ConfigKey, Update
from gateway.config.suggestions import did_you_mean, may_be_secret, nearest

MAX_NAME_BYTES = 1_024
"""Largest name of a setting: a client may choose a name. Postgres refuses index entries above 2.7 KB."""


def parse_broker_configs(
    given: Mapping[str, str], dynamic: Mapping[str, str] | None = None, own: Mapping[str, str] | None = None
) -> BrokerConfig:
    """Return the configuration that these settings make; `dynamic` ones outrank those given at start, and the node's
    `own` outrank both.

    ConfigError names the first setting that is unknown, malformed, out of bounds or not to be set, or that contradicts
    another.
    """
    dynamic, own = dynamic or {}, own or {}
    for name in given:
        _known(name, given[name]).parse(given[name])
    validate_dynamic(dynamic)
    validate_dynamic(own, of_one_node=True)
    merged = {**given, **dynamic, **own}
    fields: dict[str, object] = {
        field_name: key.parse(merged[key.name]) for field_name, key in FIELDS.items() if key.name in merged
    }
    make = cast("Callable[..., BrokerConfig]", BrokerConfig)
    config = make(**fields, static=dict(given), dynamic=dict(dynamic), own=dict(own))
    if config.group_min_session_timeout_ms > config.group_max_session_timeout_ms:
        raise ConfigError(
            "group.min.session.timeout.ms",
            str(config.group_min_session_timeout_ms),
            f"above group.max.session.timeout.ms ({config.group_max_session_timeout_ms})",
        )
    numbers = {int(given[name]) for name in NODE_ID_NAMES if name in given}
    if len(numbers) > 1:
        raise ConfigError("broker.id", given["broker.id"], f"node.id is set too, to {given['node.id']}")
    for group_type in ("consumer", "streams", "share"):
        _check_intervals(group_type, config)
    lowest, highest = config.group_share_min_record_lock_duration_ms, config.group_share_max_record_lock_duration_ms
    if not lowest <= config.group_share_record_lock_duration_ms <= highest:
        raise ConfigError(
            "group.share.record.lock.duration.ms",
            str(config.group_share_record_lock_duration_ms),
            f"not between {lowest} and {highest}, its bounds",
        )
    if config.group_streams_num_standby_replicas > config.group_streams_max_standby_replicas:
        raise ConfigError(
            "group.streams.num.standby.replicas",
            str(config.group_streams_num_standby_replicas),
            f"above group.streams.max.standby.replicas ({config.group_streams_max_standby_replicas})",
        )
    if config.log_cleaner_min_compaction_lag_ms > config.log_cleaner_max_compaction_lag_ms:
        raise ConfigError(
            "log.cleaner.min.compaction.lag.ms",
            str(config.log_cleaner_min_compaction_lag_ms),
            f"above log.cleaner.max.compaction.lag.ms ({config.log_cleaner_max_compaction_lag_ms})",
        )
    return config


def parse_stored(
    given: Mapping[str, str], dynamic: Mapping[str, str], own: Mapping[str, str] | None = None
) -> tuple[BrokerConfig, dict[str, ConfigError]]:
    """Parse stored settings like `parse_broker_configs`, but leave out those that this release refuses although
    another accepted them. Return the errors of these by name."""
    try:
        return parse_broker_configs(given, dynamic, own), {}
    except ConfigError:
        kept: tuple[dict[str, str], dict[str, str]] = {}, {}
    # Only typed settings can contradict each other. A client may store very many others, so these are not parsed again
    # with each further setting.
    typed: tuple[dict[str, str], dict[str, str]] = {}, {}
    names = {key.name for key in FIELDS.values()}
    refused: dict[str, ConfigError] = {}
    for place, stored in enumerate((dynamic, own or {})):
        for name, value in stored.items():
            try:
                validate_dynamic({name: value}, of_one_node=place == 1)
                if name in names:
                    typed[place][name] = value
                    parse_broker_configs(given, *typed)
            except ConfigError as error:
                refused[name] = error
                typed[place].pop(name, None)
            else:
                kept[place][name] = value
    return parse_broker_configs(given, *kept), refused


def _check_intervals(group_type: str, config: BrokerConfig) -> None:
    for name in ("session.timeout", "heartbeat.interval"):
        field = name.replace(".", "_")
        lowest: int = getattr(config, f"group_{group_type}_min_{field}_ms")
        highest: int = getattr(config, f"group_{group_type}_max_{field}_ms")
        value: int = getattr(config, f"group_{group_type}_{field}_ms")
        if not lowest <= value <= highest:
            bounds = f"group.{group_type}.min.{name}.ms ({lowest}) and group.{group_type}.max.{name}.ms ({highest})"
            raise ConfigError(f"group.{group_type}.{name}.ms", str(value), f"not between {bounds}")
    session_timeout_ms: int = getattr(config, f"group_{group_type}_session_timeout_ms")
    heartbeat_interval_ms: int = getattr(config, f"group_{group_type}_heartbeat_interval_ms")
    if heartbeat_interval_ms >= session_timeout_ms:
        raise ConfigError(
            f"group.{group_type}.heartbeat.interval.ms",
            str(heartbeat_interval_ms),
            f"not below group.{group_type}.session.timeout.ms ({session_timeout_ms})",
        )


def validate_dynamic(dynamic: Mapping[str, str], *, of_one_node: bool = False) -> None:
    """Raise ConfigError for a setting that may not be changed at runtime, at this level (`of_one_node`) or to this
    value. An unknown name is kept, as upstream does, because it may belong to a plugin."""
    for name, value in dynamic.items():
        if len(name.encode()) > MAX_NAME_BYTES:
            raise ConfigError(name, HIDDEN, f"the name has more than {MAX_NAME_BYTES} bytes")
        key = find_broker_config(name)
        if key is None:
            continue
        shown = shown_value(name, value)
        if key.update is Update.OF_ONE_NODE:
            # Both texts are upstream's.
            if name.startswith("ssl."):
                only = "These security configs can be dynamically updated only per-listener using the listener prefix"
                raise ConfigError(name, shown, only, f"{only}: Set({name})")
            if not of_one_node:
                only = "Cannot update these configs at default cluster level, broker id must be specified"
                raise ConfigError(name, shown, only, f"{only}: Set({name})")
        elif key.update is not Update.DYNAMIC:
            raise ConfigError(name, shown, "cannot be changed while the gateway runs")
        key.parse(value)


def _known(name: str, value: str) -> ConfigKey:
    key = find_broker_config(name)
    if key is None:
        known = list(broker_config_names(name))
        meant_a_password = any(shown_value(each, "") == HIDDEN for each in nearest(name, known))
        shown = HIDDEN if meant_a_password or may_be_secret(name) else value
        raise ConfigError(name, shown, f"unknown broker setting{did_you_mean(name, known)}")
    return key
