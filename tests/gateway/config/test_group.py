"""Settings of groups: which values are refused, and with which messages."""

from __future__ import annotations

import pytest

from gateway.config.broker import BrokerConfig
from gateway.config.definition import ConfigError
from gateway.config.group import check_group_configs


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("consumer.session.timeout.ms", 44_999, "greater than or equal to group.consumer.min.session.timeout.ms"),
        ("share.heartbeat.interval.ms", 15_001, "less than or equal to group.share.max.heartbeat.interval.ms"),
        ("share.record.lock.duration.ms", 1, "greater than or equal to group.share.min.record.lock.duration.ms"),
        ("share.delivery.count.limit", 1, "greater than or equal to group.share.min.delivery.count.limit"),
        ("share.delivery.count.limit", 11, "less than or equal to group.share.max.delivery.count.limit"),
        (
            "share.partition.max.record.locks",
            4_001,
            "less than or equal to group.share.max.partition.max.record.locks",
        ),
        ("streams.num.standby.replicas", 3, "less than or equal to group.streams.max.standby.replicas"),
    ],
)
def test_group_setting_outside_the_brokers_bounds_is_refused_in_kafkas_words(name: str, value: int, said: str) -> None:
    """Tests of client libraries compare these messages (upstream: GroupConfig.validate)."""
    with pytest.raises(ConfigError) as refused:
        check_group_configs({name: str(value)}, BrokerConfig())
    assert str(refused.value) == f"{name} must be {said}"


def test_session_must_be_longer_than_the_heartbeat_interval() -> None:
    broker = BrokerConfig(group_consumer_min_session_timeout_ms=1, group_consumer_min_heartbeat_interval_ms=1)
    configs = {"consumer.session.timeout.ms": "10", "consumer.heartbeat.interval.ms": "10"}
    with pytest.raises(ConfigError) as refused:
        check_group_configs(configs, broker)
    assert str(refused.value) == "consumer.session.timeout.ms must be greater than consumer.heartbeat.interval.ms"


def test_dead_letters_may_not_go_to_an_internal_topic() -> None:
    with pytest.raises(ConfigError, match="DLQ topic name must not start with '__'"):
        check_group_configs({"errors.deadletterqueue.topic.name": "__consumer_offsets"}, BrokerConfig())
