"""The list of broker settings, compared with Kafka's list in `kafka_broker_settings.tsv`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.broker_table import BROKER_CONFIGS, NODE_CONFIGS, UNLISTED, broker_layers
from gateway.config.definition import ConfigError, ConfigKey, ConfigSource, ConfigType, Update, render
from gateway.config.settings import load
from gateway.config.without_effect import WITHOUT_EFFECT
from gateway.net.server import BACKLOG
from protocol.compression import MAX_DECOMPRESSED_BYTES

REFERENCE = Path(__file__).parent / "kafka_broker_settings.tsv"
KAFKA = {
    name: (kind, default, internal == "internal", mode)
    for name, kind, default, internal, mode in (
        line.split("\t") for line in REFERENCE.read_text().splitlines() if not line.startswith("#")
    )
}
LISTED: dict[str, ConfigKey] = {name: key for name, key in BROKER_CONFIGS.items() if name not in UNLISTED}
LISTED.update(WITHOUT_EFFECT)

OTHER_DEFAULTS = {
    "group.consumer.assignment.interval.ms": ("1000", "0"),
    "group.share.assignment.interval.ms": ("1000", "0"),
    "group.streams.assignment.interval.ms": ("1000", "0"),
    "log.dir": ("/tmp/kafka-logs", "postgres"),
    "log.dirs": ("<null>", "postgres"),
    "max.decompressed.message.bytes": ("2147483639", str(MAX_DECOMPRESSED_BYTES)),
    "max.incremental.fetch.session.cache.slots": ("1000", "0"),
    "metric.reporters": ("org.apache.kafka.common.metrics.JmxReporter", ""),
    "num.io.threads": ("8", "1"),
    "num.network.threads": ("3", "1"),
    "num.replica.fetchers": ("1", "0"),
    "offsets.topic.replication.factor": ("3", "1"),
    "sasl.enabled.mechanisms": ("GSSAPI", ""),
    "sasl.oauthbearer.allow.unverified.audience": ("false", "true"),
    "sasl.oauthbearer.allow.unverified.issuer": ("false", "true"),
    "socket.listen.backlog.size": ("50", str(BACKLOG)),
    "socket.receive.buffer.bytes": ("102400", "-1"),
    "socket.send.buffer.bytes": ("102400", "-1"),
    "ssl.allow.dn.changes": ("false", "true"),
    "ssl.allow.san.changes": ("false", "true"),
    "ssl.keystore.type": ("JKS", "PEM"),
    "ssl.truststore.type": ("JKS", "PEM"),
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": ("10000", "1000"),
}
"""Settings with another default than Kafka's, because Kafka's is not true of a node. Each has
Kafka's default and ours.
"""


def test_all_of_kafkas_settings_are_listed_and_no_others() -> None:
    assert LISTED.keys() == {name for name, (_, _, internal, _) in KAFKA.items() if not internal}
    assert BROKER_CONFIGS.keys() >= UNLISTED
    assert not WITHOUT_EFFECT.keys() & BROKER_CONFIGS.keys()


def test_types_are_kafkas() -> None:
    known = {**BROKER_CONFIGS, **WITHOUT_EFFECT}
    assert {name: key.type.name for name, key in known.items() if name in KAFKA} == {
        name: kind for name, (kind, *_) in KAFKA.items() if name in known
    }


def test_defaults_are_kafkas_unless_another_is_listed() -> None:
    """A setting that states a fact about the node has no default."""
    differing: dict[str, tuple[str, str]] = {}
    for name, key in LISTED.items():
        kafka, ours = KAFKA[name][1], render(key.default)
        absent = ours is None and kafka in ("<null>", "<none>")
        if name not in NODE_CONFIGS and not absent and kafka != ours:
            differing[name] = kafka, ours or ""
    assert differing == OTHER_DEFAULTS


def test_dynamic_settings_are_dynamic_in_kafka_too() -> None:
    dynamic = {name for name, key in LISTED.items() if key.update is Update.DYNAMIC}
    assert dynamic <= {name for name, (*_, mode) in KAFKA.items() if mode == "cluster-wide"}
    of_one_node = {name for name, key in LISTED.items() if key.update is Update.OF_ONE_NODE}
    assert of_one_node <= {name for name, (*_, mode) in KAFKA.items() if mode == "per-broker"}
    assert {"listener.security.protocol.map", "ssl.truststore.password"} <= of_one_node


def test_documentation_says_that_a_setting_has_no_effect_and_why() -> None:
    for key in WITHOUT_EFFECT.values():
        assert key.documentation.startswith("Has no effect here: "), key.name
        assert key.documentation.endswith("."), key.name


def test_setting_without_effect_is_accepted_at_start_with_a_warning() -> None:
    given = ["num.io.threads=8", "log.dirs=/var/kafka", "offsets.topic.replication.factor=3", "num.partitions=2"]
    configuration = load({}, given, {})
    assert [warning.partition(":")[0] for warning in configuration.warnings] == [
        "log.dirs (from flag --set) has no effect here",
        "num.io.threads (from flag --set) has no effect here",
        "offsets.topic.replication.factor (from flag --set) has no effect here",
    ]
    layers = broker_layers(configuration.settings.broker, "num.io.threads")
    assert layers == [(ConfigSource.STATIC_BROKER_CONFIG, "8"), (ConfigSource.DEFAULT_CONFIG, "1")]


def test_setting_without_effect_may_be_a_variable() -> None:
    environment = {"SLUICE_BROKER_NUM_IO_THREADS": "8", "SLUICE_BROKER_MIN_INSYNC_REPLICAS": "2"}
    configuration = load({}, (), environment)
    assert [warning.partition(":")[0] for warning in configuration.warnings] == [
        "min.insync.replicas (from environment SLUICE_BROKER_MIN_INSYNC_REPLICAS) has no effect here",
        "num.io.threads (from environment SLUICE_BROKER_NUM_IO_THREADS) has no effect here",
    ]


def test_each_setting_whose_documentation_says_that_it_has_no_effect_gives_a_warning() -> None:
    for key in BROKER_CONFIGS.values():
        if key.internal or "effect" not in key.documentation:
            continue
        (warning,) = load({}, [f"{key.name}={render(key.default) or 1}"], {}).warnings
        assert warning.startswith(f"{key.name} (from flag --set) has no effect here: "), warning


def test_setting_without_effect_is_validated_and_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="Not a number of type INT"):
        parse_broker_configs({"num.io.threads": "many"})
    configuration = load({}, ["sasl.oauthbearer.client.credentials.client.secret=hush"], {})
    assert "hush" not in f"{configuration.warnings} {configuration.values}"
    assert WITHOUT_EFFECT["sasl.oauthbearer.client.credentials.client.secret"].type is ConfigType.PASSWORD
