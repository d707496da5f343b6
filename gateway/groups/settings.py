"""The settings of broker and groups as the coordinator sees them.

The one idea: each change of a setting makes a new object. With ten thousand groups that have their own settings, the
settings of a group are computed only when they are first requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, overload

import structlog

from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigError
from gateway.config.group import (
    AUTO_OFFSET_RESET,
    DEAD_LETTER_COPY,
    DEAD_LETTER_TOPIC,
    DELIVERY_COUNT_LIMIT,
    HANDOFF_MODE,
    INITIAL_REBALANCE_DELAY,
    ISOLATION_LEVEL,
    MAX_RECORD_LOCKS,
    RECORD_LOCK_DURATION,
    RENEWS,
    STANDBY_REPLICAS,
    check_group_configs,
    group_guard,
    group_handoff,
    group_intervals,
    group_number,
)
from gateway.coordinator.handoff import HandoffMode, HandoffSettings
from gateway.coordinator.settings import ConsumerSettings, MigrationPolicy, Settings, ShareSettings, StreamsSettings

logger = structlog.stdlib.get_logger(__name__)

Configs = Mapping[str, str]


T = TypeVar("T")
D = TypeVar("D")


class _Valid:
    """The settings of single groups that are valid."""

    def __init__(self, broker: BrokerConfig, group_configs: Mapping[str, Configs]) -> None:
        self.broker = broker
        self.group_configs = group_configs
        self._refused: dict[str, bool] = {}

    def of(self, group_id: str) -> Configs | None:
        configs = self.group_configs.get(group_id)
        if configs is None:
            return None
        refused = self._refused.get(group_id)
        if refused is None:
            refused = False
            try:
                check_group_configs(configs, self.broker)
            except ConfigError as error:
                logger.error(
                    "stored group settings refused: change them by kafka-configs", group_id=group_id, error=str(error)
                )
                refused = True
            self._refused[group_id] = refused
        return None if refused else configs


class _OfGroups(Mapping[str, T]):
    """Settings by group id. Each is computed when it is first requested."""

    def __init__(self, valid: _Valid, make: Callable[[Configs, BrokerConfig], T]) -> None:
        self._valid = valid
        self._make = make
        self._made: dict[str, T] = {}

    @overload
    def get(self, key: str, /) -> T | None: ...
    @overload
    def get(self, key: str, /, default: T) -> T: ...
    @overload
    def get(self, key: str, /, default: D) -> T | D: ...
    def get(self, key: str, /, default: T | D | None = None) -> T | D | None:
        made = self._made.get(key)
        if made is not None:
            return made
        configs = self._valid.of(key)
        if configs is None:
            return default
        made = self._made[key] = self._make(configs, self._valid.broker)
        return made

    def __getitem__(self, key: str) -> T:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[str]:
        return (group_id for group_id in self._valid.group_configs if self._valid.of(group_id) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def group_settings(broker: BrokerConfig, group_configs: Mapping[str, Configs]) -> Settings:
    """Return the coordinator's settings. A group whose stored settings exceed the broker's bounds gets the broker's
    settings. `group_configs` must never be mutated."""
    valid = _Valid(broker, group_configs)
    handoff = _handoff({}, broker)
    return Settings(
        group_initial_rebalance_delay_ms=broker.group_initial_rebalance_delay_ms,
        group_min_session_timeout_ms=broker.group_min_session_timeout_ms,
        group_max_session_timeout_ms=broker.group_max_session_timeout_ms,
        group_max_size=broker.group_max_size,
        group_connection_grace_ms=broker.group_connection_grace_ms,
        group_cooperative_guard=broker.group_cooperative_guard,
        handoff=handoff,
        drains=handoff.mode is HandoffMode.DRAIN or any(_drains(configs) for configs in group_configs.values()),
        consumer=_consumer_settings({}, broker),
        consumer_of=_OfGroups(valid, _consumer_settings),
        share=_share_settings({}, broker),
        share_of=_OfGroups(valid, _share_settings),
        streams=_streams_settings({}, broker),
        streams_of=_OfGroups(valid, _streams_settings),
    )


def _drains(configs: Configs) -> bool:
    return configs.get(HANDOFF_MODE, "").strip() == HandoffMode.DRAIN.value


def _handoff(configs: Configs, broker: BrokerConfig) -> HandoffSettings:
    mode, timeout_ms = group_handoff(configs, broker)
    return HandoffSettings(HandoffMode(mode), timeout_ms)


def _consumer_settings(configs: Configs, broker: BrokerConfig) -> ConsumerSettings:
    intervals = group_intervals("consumer", configs, broker)
    return ConsumerSettings(
        session_timeout_ms=intervals.session_timeout_ms,
        heartbeat_interval_ms=intervals.heartbeat_interval_ms,
        max_size=broker.group_consumer_max_size,
        assignors=broker.group_consumer_assignors,
        handoff=_handoff(configs, broker),
        cooperative_guard=group_guard(configs, broker),
        migration_policy=MigrationPolicy(broker.group_consumer_migration_policy),
    )


def _streams_settings(configs: Configs, broker: BrokerConfig) -> StreamsSettings:
    intervals = group_intervals("streams", configs, broker)
    return StreamsSettings(
        session_timeout_ms=intervals.session_timeout_ms,
        heartbeat_interval_ms=intervals.heartbeat_interval_ms,
        max_size=broker.group_streams_max_size,
        num_standby_replicas=group_number(STANDBY_REPLICAS, configs, broker),
        initial_rebalance_delay_ms=group_number(INITIAL_REBALANCE_DELAY, configs, broker),
    )


def _share_settings(configs: Configs, broker: BrokerConfig) -> ShareSettings:
    intervals = group_intervals("share", configs, broker)
    return ShareSettings(
        session_timeout_ms=intervals.session_timeout_ms,
        heartbeat_interval_ms=intervals.heartbeat_interval_ms,
        max_size=broker.group_share_max_size,
        record_lock_duration_ms=group_number(RECORD_LOCK_DURATION, configs, broker),
        max_record_locks=group_number(MAX_RECORD_LOCKS, configs, broker),
        delivery_count_limit=group_number(DELIVERY_COUNT_LIMIT, configs, broker),
        renews=configs.get(RENEWS, "true").strip().lower() == "true",
        dead_letter_topic=configs.get(DEAD_LETTER_TOPIC, "").strip(),
        copies_dead_letters=configs.get(DEAD_LETTER_COPY, "").strip().lower() == "true",
        auto_offset_reset=configs.get(AUTO_OFFSET_RESET, "latest").strip(),
        read_committed=configs.get(ISOLATION_LEVEL, "").strip() == "read_committed",
    )
