"""The coordinator's view of the settings of broker and groups."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigError
from gateway.config.group import group_handoff, group_intervals
from gateway.coordinator.handoff import HandoffMode, HandoffSettings
from gateway.coordinator.model import ConsumerSettings, MigrationPolicy, Settings

log = structlog.stdlib.get_logger(__name__)


def group_settings(broker: BrokerConfig, group_configs: Mapping[str, Mapping[str, str]]) -> Settings:
    """A group whose stored settings are not within the broker's bounds (any more) has the broker's."""
    of_group: dict[str, ConsumerSettings] = {}
    for group_id, configs in group_configs.items():
        try:
            session_timeout_ms, heartbeat_interval_ms = group_intervals(configs, broker)
        except ConfigError as error:
            log.error("stored group settings refused", group_id=group_id, error=str(error))
            continue
        of_group[group_id] = _consumer_settings(
            broker, session_timeout_ms, heartbeat_interval_ms, _handoff(group_handoff(configs, broker))
        )
    handoff = _handoff((broker.group_handoff_mode, broker.group_handoff_timeout_ms))
    return Settings(
        group_initial_rebalance_delay_ms=broker.group_initial_rebalance_delay_ms,
        group_min_session_timeout_ms=broker.group_min_session_timeout_ms,
        group_max_session_timeout_ms=broker.group_max_session_timeout_ms,
        group_max_size=broker.group_max_size,
        group_connection_grace_ms=broker.group_connection_grace_ms,
        group_cooperative_guard=broker.group_cooperative_guard,
        handoff=handoff,
        drains=HandoffMode.DRAIN in (handoff.mode, *(each.handoff.mode for each in of_group.values())),
        consumer=_consumer_settings(
            broker, broker.group_consumer_session_timeout_ms, broker.group_consumer_heartbeat_interval_ms, handoff
        ),
        consumer_of=of_group,
    )


def _handoff(given: tuple[str, int]) -> HandoffSettings:
    mode, timeout_ms = given
    return HandoffSettings(HandoffMode(mode), timeout_ms)


def _consumer_settings(
    broker: BrokerConfig, session_timeout_ms: int, heartbeat_interval_ms: int, handoff: HandoffSettings
) -> ConsumerSettings:
    return ConsumerSettings(
        session_timeout_ms=session_timeout_ms,
        heartbeat_interval_ms=heartbeat_interval_ms,
        max_size=broker.group_consumer_max_size,
        assignors=broker.group_consumer_assignors,
        handoff=handoff,
        migration_policy=MigrationPolicy(broker.group_consumer_migration_policy),
    )
