"""The table of topic settings: Kafka's names and defaults, values that follow from the broker's, and refusals."""

from __future__ import annotations

import pytest

from gateway.config.broker import BrokerConfig
from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.broker_table import find_broker_config
from gateway.config.definition import ConfigSource, render
from gateway.config.topic import (
    REPLICATION_FACTOR,
    TOPIC_CONFIGS,
    ConfigError,
    TopicConfig,
    effective,
    effective_text,
    requested_replication_factor,
    topic_layers,
    validate_topic_configs,
)

KAFKA_DEFAULTS = {
    "cleanup.policy": "delete",
    "compression.gzip.level": "-1",
    "compression.lz4.level": "9",
    "compression.type": "producer",
    "compression.zstd.level": "3",
    "delete.retention.ms": "86400000",
    "errors.deadletterqueue.group.enable": "false",
    "file.delete.delay.ms": "60000",
    "flush.messages": "9223372036854775807",
    "flush.ms": "9223372036854775807",
    "follower.replication.throttled.replicas": "",
    "index.interval.bytes": "4096",
    "leader.replication.throttled.replicas": "",
    "local.retention.bytes": "-2",
    "local.retention.ms": "-2",
    "max.compaction.lag.ms": "9223372036854775807",
    "max.decompressed.message.bytes": "134217728",
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "remote.copy.lag.bytes": "-1",
    "remote.copy.lag.ms": "0",
    "remote.log.copy.disable": "false",
    "remote.log.delete.on.disable": "false",
    "remote.storage.enable": "false",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
"""Kafka's defaults, except `max.decompressed.message.bytes`, which is a bound of our own."""


def test_kafkas_names_and_defaults() -> None:
    public = {name: key for name, key in TOPIC_CONFIGS.items() if not key.internal}
    assert {key.name: render(key.default) for key in public.values()} == KAFKA_DEFAULTS
    shown = {name: effective_text(key, {}, BrokerConfig()) for name, key in public.items()}
    assert shown == KAFKA_DEFAULTS


def test_counterparts_exist_and_have_the_same_defaults() -> None:
    for key in TOPIC_CONFIGS.values():
        for synonym in key.synonyms:
            counterpart = find_broker_config(synonym.name)
            assert counterpart is not None, synonym.name
            default = counterpart.default
            if isinstance(default, int) and synonym.factor != 1:
                default *= synonym.factor
            assert default in (None, key.default), (key.name, synonym.name)


def test_every_default_may_be_given() -> None:
    validate_topic_configs(KAFKA_DEFAULTS)


def test_every_setting_is_documented() -> None:
    assert [key.name for key in TOPIC_CONFIGS.values() if not key.documentation.endswith(".")] == []


def test_effective_values_combine_topic_and_broker() -> None:
    assert effective({}, BrokerConfig()) == TopicConfig()
    config = effective(
        {
            "cleanup.policy": "compact,delete",
            "message.timestamp.type": "LogAppendTime",
            "retention.ms": "-1",
            "segment.ms": "500",
            "min.cleanable.dirty.ratio": "0.01",
            "segment.bytes": "1048576",
        },
        BrokerConfig(),
    )
    assert (config.cleanup_compact, config.cleanup_delete, config.log_append_time) == (True, True, True)
    assert (config.retention_ms, config.segment_ms, config.min_cleanable_dirty_ratio) == (-1, 500, 0.01)


@pytest.mark.parametrize(
    ("policy", "compact", "delete"), [("delete", False, True), ("compact", True, False), ("", False, False)]
)
def test_cleanup_policy_is_parsed(policy: str, compact: bool, delete: bool) -> None:
    validate_topic_configs({"cleanup.policy": policy})
    config = effective({"cleanup.policy": policy}, BrokerConfig())
    assert (config.cleanup_compact, config.cleanup_delete) == (compact, delete)


@pytest.mark.parametrize(
    ("static", "dynamic", "retention_ms"),
    [
        ({}, {}, 604_800_000),
        ({"log.retention.hours": "1"}, {}, 3_600_000),
        ({"log.retention.hours": "-1"}, {}, -1),
        ({"log.retention.hours": "1", "log.retention.minutes": "2"}, {}, 120_000),
        ({"log.retention.ms": "5"}, {"log.retention.ms": "6"}, 6),
        ({"log.retention.minutes": "2"}, {"log.retention.ms": "-1"}, -1),
    ],
)
def test_retention_follows_the_broker(static: dict[str, str], dynamic: dict[str, str], retention_ms: int) -> None:
    broker = parse_broker_configs(static, dynamic)
    assert effective({}, broker).retention_ms == retention_ms == broker.retention_ms
    assert effective({"retention.ms": "9"}, broker).retention_ms == 9


def test_every_counterpart_is_followed() -> None:
    broker = parse_broker_configs(
        {
            "message.max.bytes": "11",
            "log.cleanup.policy": "compact",
            "log.retention.bytes": "12",
            "log.message.timestamp.type": "LogAppendTime",
            "log.message.timestamp.before.max.ms": "13",
            "log.message.timestamp.after.max.ms": "14",
            "log.cleaner.delete.retention.ms": "15",
            "log.cleaner.min.cleanable.ratio": "0.25",
            "log.cleaner.min.compaction.lag.ms": "16",
            "log.cleaner.max.compaction.lag.ms": "17",
            "log.roll.hours": "1",
        }
    )
    assert effective({}, broker) == TopicConfig(
        max_message_bytes=11,
        cleanup_policy=("compact",),
        retention_bytes=12,
        message_timestamp_type="LogAppendTime",
        timestamp_before_max_ms=13,
        timestamp_after_max_ms=14,
        delete_retention_ms=15,
        min_cleanable_dirty_ratio=0.25,
        min_compaction_lag_ms=16,
        max_compaction_lag_ms=17,
        segment_ms=3_600_000,
    )


def test_layers_name_the_source() -> None:
    key = TOPIC_CONFIGS["segment.ms"]
    assert topic_layers(key, {"segment.ms": "1"}, BrokerConfig())[0].source is ConfigSource.TOPIC_CONFIG
    (layer,) = topic_layers(key, {}, BrokerConfig())
    assert (layer.source, layer.name, layer.value) == (ConfigSource.DEFAULT_CONFIG, "log.roll.hours", "168")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no.such", "1"),
        (REPLICATION_FACTOR, "2"),
        ("retention.ms", None),
        ("retention.ms", "-2"),
        ("retention.ms", "1e3"),
        ("retention.bytes", str(2**63)),
        ("max.message.bytes", str(2**31)),
        ("max.message.bytes", "-1"),
        ("cleanup.policy", "delete,shred"),
        ("message.timestamp.type", "LogAppend"),
        ("min.cleanable.dirty.ratio", "1.5"),
        ("min.cleanable.dirty.ratio", "nan"),
        ("segment.ms", "0"),
        ("segment.bytes", "1048575"),
        ("cleanup.policy", "compact,delete,"),
        ("leader.replication.throttled.replicas", "x"),
        ("leader.replication.throttled.replicas", "*,0:1"),
        ("follower.replication.throttled.replicas", "0:1:2"),
        ("follower.replication.throttled.replicas", "-1:2"),
        ("min.insync.replicas", "0"),
        ("preallocate", "1"),
        ("compression.type", "brotli"),
        ("compression.type", "none"),
        ("compression.type", "ZSTD"),
        ("compression.zstd.level", "23"),
        ("compression.lz4.level", "0"),
        ("compression.gzip.level", "0"),
        ("compression.gzip.level", "10"),
        ("local.retention.ms", "-3"),
    ],
)
def test_invalid_topic_setting_is_refused_by_name(name: str, value: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_topic_configs({"segment.ms": "5", name: value})
    assert refused.value.name == name
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("segment.bytes", "1048576", "1048576"),
        ("retention.bytes", "-2", "-2"),
        ("retention.bytes", "-3", "-3"),
        ("remote.log.copy.disable", "true", "true"),
        ("remote.log.delete.on.disable", "true", "true"),
        ("leader.replication.throttled.replicas", "0:1, 1:2", "0:1,1:2"),
        ("leader.replication.throttled.replicas", "*", "*"),
        ("follower.replication.throttled.replicas", "0:1,0:1", "0:1,0:1"),
        ("follower.replication.throttled.replicas", "", ""),
        ("cleanup.policy", "delete,delete", "delete"),
        ("cleanup.policy", "", ""),
    ],
)
def test_value_that_kafka_accepts_is_accepted_and_shown_alike(name: str, value: str, shown: str) -> None:
    configs = validate_topic_configs({name: value})
    assert effective_text(TOPIC_CONFIGS[name], configs, BrokerConfig()) == shown


def test_tiered_storage_is_refused_in_kafkas_words() -> None:
    with pytest.raises(ConfigError) as refused:
        validate_topic_configs({"remote.storage.enable": "true"})
    said = "Tiered Storage functionality is disabled in the broker. Topic cannot be configured with remote log storage."
    assert (refused.value.name, str(refused.value)) == ("remote.storage.enable", said)


def test_settings_are_in_kafkas_order() -> None:
    """The order is that of Apache Kafka 4.4's answers."""
    assert [name for name, key in TOPIC_CONFIGS.items() if not key.internal] == [
        "compression.type",
        "errors.deadletterqueue.group.enable",
        "remote.copy.lag.bytes",
        "remote.log.delete.on.disable",
        "leader.replication.throttled.replicas",
        "remote.storage.enable",
        "min.insync.replicas",
        "segment.jitter.ms",
        "remote.log.copy.disable",
        "local.retention.ms",
        "cleanup.policy",
        "flush.ms",
        "follower.replication.throttled.replicas",
        "compression.lz4.level",
        "segment.bytes",
        "retention.ms",
        "compression.gzip.level",
        "remote.copy.lag.ms",
        "flush.messages",
        "compression.zstd.level",
        "max.compaction.lag.ms",
        "file.delete.delay.ms",
        "max.message.bytes",
        "min.compaction.lag.ms",
        "message.timestamp.type",
        "local.retention.bytes",
        "preallocate",
        "index.interval.bytes",
        "min.cleanable.dirty.ratio",
        "unclean.leader.election.enable",
        "retention.bytes",
        "delete.retention.ms",
        "message.timestamp.after.max.ms",
        "max.decompressed.message.bytes",
        "message.timestamp.before.max.ms",
        "segment.ms",
        "segment.index.bytes",
    ]


def test_contradicting_compaction_lags_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"min\.compaction\.lag\.ms"):
        validate_topic_configs({"min.compaction.lag.ms": "2", "max.compaction.lag.ms": "1"})
    broker = parse_broker_configs({"log.cleaner.max.compaction.lag.ms": "1"})
    with pytest.raises(ConfigError, match=r"max\.compaction\.lag\.ms"):
        validate_topic_configs({"min.compaction.lag.ms": "2"}, broker)


def test_replication_factor() -> None:
    broker = parse_broker_configs({"default.replication.factor": "2"})
    assert requested_replication_factor({}, broker) == 2
    assert requested_replication_factor({REPLICATION_FACTOR: "3"}, broker) == 3


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max.message.bytes", " 1000\u00a0", "1000"),
        ("retention.ms", "+05", "5"),
        ("preallocate", "TRUE", "true"),
        ("message.timestamp.type", " LogAppendTime", "LogAppendTime"),
        ("cleanup.policy", " compact , delete,compact", "compact,delete"),
        ("min.cleanable.dirty.ratio", "0.2500", "0.25"),
        ("cleanup.policy", "", ""),
    ],
)
def test_value_is_stored_in_kafkas_spelling(name: str, value: str, text: str) -> None:
    """SQL functions compare and cast these values: with the spaces, SQL clients could not produce to the topic."""
    assert validate_topic_configs({name: value}) == {name: text}
