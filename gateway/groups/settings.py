"""The coordinator's view of the settings of broker and groups."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigError
from gateway.config.group import (
    AUTO_OFFSET_RESET,
    INITIAL_REBALANCE_DELAY,
    ISOLATION_LEVEL,
    RECORD_LOCK_DURATION,
    STANDBY_REPLICAS,
    check_group_configs,
    group_handoff,
    group_intervals,
    group_number,
)
from gateway.coordinator.handoff import HandoffMode, HandoffSettings
from gateway.coordinator.model import ConsumerSettings, MigrationPolicy, Settings, ShareSettings, StreamsSettings

log = structlog.stdlib.get_logger(__name__)

Configs = Mapping[str, str]


def group_settings(broker: BrokerConfig, group_configs: Mapping[str, Configs]) -> Settings:
    """A group whose stored settings are not within the broker's bounds (any more) has the broker's."""
    valid: dict[str, Configs] = {}
    for group_id, configs in group_configs.items():
        try:
            check_group_configs(configs, broker)
        except ConfigError as error:
            log.error("stored group settings refused", group_id=group_id, error=str(error))
            continue
        valid[group_id] = configs
    of_group = {group_id: _consumer_settings(configs, broker) for group_id, configs in valid.items()}
    handoff = _handoff({}, broker)
    return Settings(
        group_initial_rebalance_delay_ms=broker.group_initial_rebalance_delay_ms,
        group_min_session_timeout_ms=broker.group_min_session_timeout_ms,
        group_max_session_timeout_ms=broker.group_max_session_timeout_ms,
        group_max_size=broker.group_max_size,
        group_connection_grace_ms=broker.group_connection_grace_ms,
        group_cooperative_guard=broker.group_cooperative_guard,
        handoff=handoff,
        drains=HandoffMode.DRAIN in (handoff.mode, *(each.handoff.mode for each in of_group.values())),
        consumer=_consumer_settings({}, broker),
        consumer_of=of_group,
        share=_share_settings({}, broker),
        share_of={group_id: _share_settings(configs, broker) for group_id, configs in valid.items()},
        streams=_streams_settings({}, broker),
        streams_of={group_id: _streams_settings(configs, broker) for group_id, configs in valid.items()},
    )


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
        max_record_locks=broker.group_share_partition_max_record_locks,
        delivery_count_limit=broker.group_share_delivery_count_limit,
        auto_offset_reset=configs.get(AUTO_OFFSET_RESET, "latest").strip(),
        read_committed=configs.get(ISOLATION_LEVEL, "").strip() == "read_committed",
    )
