"""The table of broker settings: Kafka's names and defaults, the layers of values, and refusals."""

from __future__ import annotations

import time

import pytest

from gateway.config.broker import BrokerConfig
from gateway.config.broker_clients import ip_overrides
from gateway.config.broker_parsing import parse_broker_configs, parse_stored
from gateway.config.broker_table import BROKER_CONFIGS, broker_layers
from gateway.config.definition import ConfigError, ConfigSource, Update, render

KAFKA_DEFAULTS = {
    "delegation.token.secret.key": None,
    "delegation.token.max.lifetime.ms": "604800000",
    "delegation.token.expiry.time.ms": "86400000",
    "delegation.token.expiry.check.interval.ms": "3600000",
    "group.initial.rebalance.delay.ms": "3000",
    "group.min.session.timeout.ms": "6000",
    "group.max.session.timeout.ms": "1800000",
    "group.max.size": "2147483647",
    "num.partitions": "1",
    "default.replication.factor": "1",
    "auto.create.topics.enable": "true",
    "delete.topic.enable": "true",
    "message.max.bytes": "1048588",
    "log.retention.ms": None,
    "log.retention.minutes": None,
    "log.retention.hours": "168",
    "log.retention.bytes": "-1",
    "log.retention.check.interval.ms": "300000",
    "log.cleanup.policy": "delete",
    "log.message.timestamp.type": "CreateTime",
    "log.message.timestamp.before.max.ms": "9223372036854775807",
    "log.message.timestamp.after.max.ms": "3600000",
    "log.segment.bytes": "1073741824",
    "log.cleaner.min.cleanable.ratio": "0.5",
    "log.cleaner.delete.retention.ms": "86400000",
    "offsets.retention.minutes": "10080",
    "offsets.retention.check.interval.ms": "600000",
    "offset.metadata.max.bytes": "4096",
    "offsets.topic.num.partitions": "50",
    "producer.id.expiration.ms": "86400000",
    "fetch.max.bytes": "57671680",
    "socket.request.max.bytes": "104857600",
    "connections.max.idle.ms": "600000",
    "max.connections": "2147483647",
    "compression.type": "producer",
    "min.insync.replicas": "1",
    "unclean.leader.election.enable": "false",
}


def test_kafkas_names_and_defaults() -> None:
    assert {name: render(BROKER_CONFIGS[name].default) for name in KAFKA_DEFAULTS} == KAFKA_DEFAULTS


def test_every_default_is_a_value_that_may_be_given() -> None:
    for key in BROKER_CONFIGS.values():
        text = render(key.default)
        if text is not None:
            assert key.parse(text) == key.default, key.name


def test_every_setting_is_documented() -> None:
    assert [key.name for key in BROKER_CONFIGS.values() if not key.documentation.endswith(".")] == []


def test_defaults_apply_to_an_empty_configuration() -> None:
    assert parse_broker_configs({}) == BrokerConfig()
    assert BrokerConfig().group_initial_rebalance_delay_ms == 3000


def test_values_are_parsed_by_type() -> None:
    config = parse_broker_configs(
        {
            "group.connection.grace.ms": "-1",
            "auto.create.topics.enable": "FALSE",
            "log.cleaner.min.cleanable.ratio": "0.01",
            "log.cleanup.policy": "compact, delete",
            "log.retention.ms": "-1",
        }
    )
    assert config.group_connection_grace_ms == -1
    assert config.auto_create_topics_enable is False
    assert config.log_cleaner_min_cleanable_ratio == 0.01
    assert config.log_cleanup_policy == ("compact", "delete")
    assert config.retention_ms == -1


@pytest.mark.parametrize(
    ("given", "retention_ms"),
    [
        ({}, 168 * 3_600_000),
        ({"log.retention.hours": "2"}, 7_200_000),
        ({"log.retention.hours": "-1"}, -1),
        ({"log.retention.hours": "2", "log.retention.minutes": "3"}, 180_000),
        ({"log.retention.hours": "2", "log.retention.minutes": "-1"}, -1),
        ({"log.retention.minutes": "3", "log.retention.ms": "4"}, 4),
    ],
)
def test_the_finest_retention_wins(given: dict[str, str], retention_ms: int) -> None:
    assert parse_broker_configs(given).retention_ms == retention_ms


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num.partitions", "0"),
        ("num.partitions", ""),
        ("num.partitions", "1.5"),
        ("num.partitions", "1_0"),
        ("num.partitions", "²"),
        ("num.partitions", "9" * 5000),
        ("group.max.size", str(2**31)),
        ("log.retention.bytes", str(2**63)),
        ("group.connection.grace.ms", "-2"),
        ("auto.create.topics.enable", "yes"),
        ("sql.schema", "s" * 57),  # Postgres would cut off the ends of the names of its roles
        ("log.cleaner.min.cleanable.ratio", "1.1"),
        ("log.cleaner.min.cleanable.ratio", "nan"),
        ("log.segment.bytes", "1048575"),
        ("log.cleanup.policy", "delete,"),
        ("log.message.timestamp.type", "createtime"),
        ("compression.type", "brotli"),
        ("compression.gzip.level", "0"),
        ("log.cleaner.enable", "false"),
        ("offsets.topic.num.partitions", "0"),
        ("node.id", "-1"),
        ("replica.selector.class", "org.example.Selector"),
        ("group.min.session.timeout.ms", "1800001"),
        ("log.cleaner.max.compaction.lag.ms", "0"),
        # Without periodic reconciliation, a node would miss changes whose announcements are lost.
        ("reconcile.periodic.interval.ms", "0"),
        ("reconcile.periodic.interval.ms", "30001"),
        ("console.listen", "::1:8080"),
        ("console.listen", "console..example:8080"),
    ],
)
def test_refusal_has_name_value_and_reason(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_broker_configs({name: value})
    assert refused.value.name == name
    assert refused.value.value == value
    assert refused.value.reason
    assert name in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "listener.name.one.sasl.plian.sasl.jaas.config",
        "listener.name.one.ssl.key.pasword",
        "ssl.keystore.keey",
        "plugin.secret",
    ],
)
def test_value_that_may_be_secret_is_not_shown(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown broker setting|Has no effect") as refused:
        parse_broker_configs({name: "a secret"})
    assert name in str(refused.value)
    assert "a secret" not in f"{refused.value} {refused.value.value}"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num.partition", "; did you mean num.partitions?"),
        ("listener.name.one.ssl.client.aut", "; did you mean listener.name.one.ssl.client.auth?"),
        ("no.such", ""),
    ],
)
def test_unknown_setting_is_reported_with_its_value_and_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_broker_configs({name: "7"})
    assert str(refused.value) == f"Invalid value 7 for configuration {name}: unknown broker setting{hint}"


def test_password_that_cannot_be_changed_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="only per-listener") as refused:
        parse_broker_configs({}, {"ssl.key.password": "a secret"})
    assert "a secret" not in f"{refused.value} {refused.value.value}"


def test_a_fixed_setting_may_be_given_its_value() -> None:
    assert parse_broker_configs({"log.cleaner.enable": "true", "log.dirs": "postgres"}).static


def test_finer_layer_overrides_a_coarser_one() -> None:
    config = parse_broker_configs({"message.max.bytes": "10"}, {"message.max.bytes": "20"})
    assert config.message_max_bytes == 20
    assert broker_layers(config, "message.max.bytes") == [
        (ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG, "20"),
        (ConfigSource.STATIC_BROKER_CONFIG, "10"),
        (ConfigSource.DEFAULT_CONFIG, "1048588"),
    ]
    assert broker_layers(config, "log.retention.ms") == []
    assert parse_broker_configs(config.static, {}).message_max_bytes == 10


def test_dynamic_settings_are_those_that_may_change_at_run_time() -> None:
    for key in BROKER_CONFIGS.values():
        if key.update is not Update.DYNAMIC:
            with pytest.raises(ConfigError):
                parse_broker_configs({}, {key.name: render(key.default) or "1"})


def test_expiry_of_idle_producers_changes_on_a_running_node() -> None:
    config = parse_broker_configs({}, {"producer.id.expiration.ms": "1000"})
    assert config.producer_id_expiration_ms == 1000


def test_a_node_has_one_number_by_two_names() -> None:
    assert parse_broker_configs({}).node_id is None
    assert parse_broker_configs({"broker.id": "0"}).node_id == 0
    assert parse_broker_configs({"broker.id": "3", "node.id": "3"}).node_id == 3
    with pytest.raises(ConfigError, match=r"node\.id is set too, to 4"):
        parse_broker_configs({"broker.id": "3", "node.id": "4"})


def test_overrides_of_connections_per_address() -> None:
    assert ip_overrides(" 10.0.0.1:20, ::1:5 ,") == {"10.0.0.1": 20, "::1": 5}
    for wrong in ("10.0.0.1", "localhost:5", "10.0.0.1:-1", "10.0.0.1:many"):
        with pytest.raises(ConfigError):
            parse_broker_configs({"max.connections.per.ip.overrides": wrong})


def test_a_stored_setting_that_contradicts_an_earlier_one_is_left_out() -> None:
    lowest, highest = "log.cleaner.min.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms"
    config, refused = parse_stored({}, {lowest: "10"}, {"plugin.a": "1", highest: "5", "plugin.b": "2"})
    assert list(refused) == [highest]
    assert (dict(config.dynamic), dict(config.own)) == ({lowest: "10"}, {"plugin.a": "1", "plugin.b": "2"})


def test_a_wrong_setting_among_very_many_is_found_in_time() -> None:
    """A client may name thousands of unknown settings in one request, and the event loop waits until they are read."""
    others = {f"listener.name.plugin.{number}": "" for number in range(2_000)}
    started_s = time.process_time()
    config, refused = parse_stored({}, {**others, "log.retention.ms": "soon"})
    assert time.process_time() - started_s < 2
    assert (list(refused), config.dynamic) == (["log.retention.ms"], others)
