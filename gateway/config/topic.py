"""The settings of a topic, under Kafka's names: which a client may set, what each means here, and where its default
comes from.

The one idea: a setting that a client gives works or is refused. A setting that decides about records is a typed field
of `TopicConfig`. A setting that only shapes a broker's files is accepted, shown, and documented as without effect.
Tiered storage cannot be honoured and is refused. Defaults follow from broker settings.

It does not store configs (`storage/topics.py`) nor cache them (`gateway/log/catalog.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from gateway.config.broker import BrokerConfig
from gateway.config.broker_table import broker_layers, find_broker_config
from gateway.config.definition import (
    MAX_LONG,
    MEBIBYTE,
    Check,
    ConfigError,
    ConfigKey,
    ConfigSource,
    ConfigType,
    ConfigValue,
    Synonym,
    Update,
    at_least,
    between,
    codec_choice,
    declared_settings,
    each_one_of,
    gzip_level,
    one_of,
    render,
    setting,
)
from gateway.config.java_order import in_java_order

__all__ = ["REPLICATION_FACTOR", "TOPIC_CONFIGS", "ConfigError", "TopicConfig", "effective", "validate_topic_configs"]

REPLICATION_FACTOR = "sluice.replication.factor"
"""Key in a topic's configs for the replication factor requested at its creation. It is not a setting: clients
neither see nor set it (a tool that clones a topic would send it back), and it stays when all settings are replaced."""

REMOTE_STORAGE = "remote.storage.enable"

_INT, _LONG, _BOOLEAN = ConfigType.INT, ConfigType.LONG, ConfigType.BOOLEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """The effective settings of one topic that decide what happens to its records."""

    max_message_bytes: int = setting(
        _INT, 1_048_588, "Largest record batch that is accepted.", at_least(0), synonyms=[Synonym("message.max.bytes")]
    )
    cleanup_policy: tuple[str, ...] = setting(
        ConfigType.LIST,
        ("delete",),
        "What happens to old records: delete removes them by time and size, compact keeps the last of each key. Both "
        "may be given; none keeps everything.",
        each_one_of("compact", "delete"),
        synonyms=[Synonym("log.cleanup.policy")],
        distinct=True,
    )
    retention_ms: int = setting(
        _LONG,
        604_800_000,
        "How long records are kept under the policy delete; -1 is for ever.",
        at_least(-1),
        synonyms=[
            Synonym("log.retention.ms"),
            Synonym("log.retention.minutes", 60_000),
            Synonym("log.retention.hours", 3_600_000),
        ],
    )
    retention_bytes: int = setting(
        _LONG,
        -1,
        "How much of each partition is kept under the policy delete; a negative size sets no limit.",
        synonyms=[Synonym("log.retention.bytes")],
    )
    message_timestamp_type: str = setting(
        ConfigType.STRING,
        "CreateTime",
        "Whether a record keeps its producer's timestamp or gets the broker's.",
        one_of("CreateTime", "LogAppendTime"),
        synonyms=[Synonym("log.message.timestamp.type")],
    )
    timestamp_before_max_ms: int = setting(
        _LONG,
        MAX_LONG,
        "How far a producer's timestamp may lie in the past (CreateTime only).",
        at_least(0),
        name="message.timestamp.before.max.ms",
        synonyms=[Synonym("log.message.timestamp.before.max.ms")],
    )
    timestamp_after_max_ms: int = setting(
        _LONG,
        3_600_000,
        "How far a producer's timestamp may lie in the future (CreateTime only).",
        at_least(0),
        name="message.timestamp.after.max.ms",
        synonyms=[Synonym("log.message.timestamp.after.max.ms")],
    )
    delete_retention_ms: int = setting(
        _LONG,
        86_400_000,
        "How long a tombstone outlives the compaction that could drop it.",
        at_least(0),
        synonyms=[Synonym("log.cleaner.delete.retention.ms")],
    )
    min_cleanable_dirty_ratio: float = setting(
        ConfigType.DOUBLE,
        0.5,
        "Share of uncompacted bytes from which a partition is compacted.",
        between(0, 1),
        synonyms=[Synonym("log.cleaner.min.cleanable.ratio")],
    )
    min_compaction_lag_ms: int = setting(
        _LONG,
        0,
        "How long a record is safe from compaction.",
        at_least(0),
        synonyms=[Synonym("log.cleaner.min.compaction.lag.ms")],
    )
    max_compaction_lag_ms: int = setting(
        _LONG,
        MAX_LONG,
        "How long a record may stay uncompacted at most.",
        at_least(1),
        synonyms=[Synonym("log.cleaner.max.compaction.lag.ms")],
    )
    segment_ms: int = setting(
        _LONG,
        604_800_000,
        "Age from which records may be compacted though newer ones follow: what a broker's closed segment is.",
        at_least(1),
        synonyms=[Synonym("log.roll.ms"), Synonym("log.roll.hours", 3_600_000)],
    )
    compression_type: str = setting(
        ConfigType.STRING,
        "producer",
        "The codec of record batches: producer keeps what their producer chose, any other recompresses the rest.",
        codec_choice,
        synonyms=[Synonym("compression.type")],
    )
    compression_gzip_level: int = setting(
        _INT,
        -1,
        "Level of recompression by gzip; -1 is the codec's own default.",
        gzip_level,
        synonyms=[Synonym("compression.gzip.level")],
    )
    compression_lz4_level: int = setting(
        _INT, 9, "Level of recompression by lz4.", between(1, 17), synonyms=[Synonym("compression.lz4.level")]
    )
    compression_zstd_level: int = setting(
        _INT, 3, "Level of recompression by zstd.", between(-131_072, 22), synonyms=[Synonym("compression.zstd.level")]
    )

    unclean_leader_election_enable: bool = setting(
        _BOOLEAN,
        False,
        "Whether a replica that is not in sync may lead if no replica in sync is alive. No effect: no replica lacks a "
        "record, so every live replica may lead.",
        synonyms=[Synonym("unclean.leader.election.enable")],
    )

    errors_deadletterqueue_group_enable: bool = setting(
        _BOOLEAN, False, "Whether share groups may write undeliverable records to this topic (KIP-1191)."
    )

    @property
    def log_append_time(self) -> bool:
        return self.message_timestamp_type == "LogAppendTime"

    @property
    def cleanup_compact(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def cleanup_delete(self) -> bool:
        return "delete" in self.cleanup_policy


def _no_effect(
    name: str, kind: ConfigType, default: ConfigValue, what: str, check: Check | None = None, synonym: str | None = None
) -> ConfigKey:
    synonyms = (Synonym(synonym),) if synonym is not None else ()
    documentation = f"{what} No effect: Postgres keeps the records."
    return ConfigKey(name, kind, default, documentation, check, synonyms=synonyms)


def _throttled(name: str) -> ConfigKey:
    def check(replicas: tuple[str, ...]) -> str | None:
        if replicas == ("*",) or all(_REPLICA.fullmatch(replica) for replica in replicas):
            return None
        return (
            f"{name} must be the literal '*' or a list of replicas in the following format: "
            "[partitionId]:[brokerId],[partitionId]:[brokerId],..."
        )

    return _no_effect(name, ConfigType.LIST, (), "Replicas whose replication is throttled.", check)


_REPLICA = re.compile(r"[0-9]+:[0-9]+")
_NO_TIERS = "There is no tiered storage."

_SHOWN = (
    ConfigKey(
        "internal.segment.bytes",
        _INT,
        None,
        "Size of a log segment in tests. No effect: Postgres keeps the records.",
        at_least(14),
        internal=True,
    ),
    _no_effect("segment.bytes", _INT, 1_073_741_824, "Size of a log segment.", at_least(MEBIBYTE), "log.segment.bytes"),
    _no_effect("segment.jitter.ms", _LONG, 0, "Spread of segment rolls.", at_least(0), "log.roll.jitter.ms"),
    _no_effect(
        "segment.index.bytes", _INT, 10_485_760, "Size of a segment's index.", at_least(4), "log.index.size.max.bytes"
    ),
    _no_effect(
        "index.interval.bytes", _INT, 4096, "Bytes between index entries.", at_least(0), "log.index.interval.bytes"
    ),
    _no_effect(
        "file.delete.delay.ms",
        _LONG,
        60_000,
        "Wait before a removed segment's file goes.",
        at_least(0),
        "log.segment.delete.delay.ms",
    ),
    _no_effect(
        "flush.messages",
        _LONG,
        MAX_LONG,
        "Records between syncs of a segment.",
        at_least(1),
        "log.flush.interval.messages",
    ),
    _no_effect("flush.ms", _LONG, MAX_LONG, "Time between syncs of a segment.", at_least(0), "log.flush.interval.ms"),
    _no_effect(
        "preallocate", _BOOLEAN, False, "Whether segment files are allocated in advance.", None, "log.preallocate"
    ),
    _no_effect(
        "min.insync.replicas", _INT, 1, "In-sync replicas that acks=all waits for.", at_least(1), "min.insync.replicas"
    ),
    _throttled("leader.replication.throttled.replicas"),
    _throttled("follower.replication.throttled.replicas"),
    _no_effect("remote.copy.lag.bytes", _LONG, -1, _NO_TIERS, at_least(-2), "log.remote.copy.lag.bytes"),
    _no_effect(REMOTE_STORAGE, _BOOLEAN, False, _NO_TIERS),
    _no_effect("remote.log.copy.disable", _BOOLEAN, False, _NO_TIERS),
    _no_effect("remote.log.delete.on.disable", _BOOLEAN, False, _NO_TIERS),
    _no_effect("remote.copy.lag.ms", _LONG, 0, _NO_TIERS, at_least(-2), "log.remote.copy.lag.ms"),
    ConfigKey(
        "max.decompressed.message.bytes",
        _INT,
        134_217_728,
        "What a batch may become when it is decompressed has this bound.",
        update=Update.FIXED,
    ),
    _no_effect("local.retention.ms", _LONG, -2, _NO_TIERS, at_least(-2), "log.local.retention.ms"),
    _no_effect("local.retention.bytes", _LONG, -2, _NO_TIERS, at_least(-2), "log.local.retention.bytes"),
)

_FIELDS: Mapping[str, ConfigKey] = MappingProxyType(declared_settings(TopicConfig))

_ALL = {key.name: key for key in (*_SHOWN, *_FIELDS.values())}
# The last of the settings whose hashes have the same position.
_ALL["file.delete.delay.ms"] = _ALL.pop("file.delete.delay.ms")

TOPIC_CONFIGS: Mapping[str, ConfigKey] = MappingProxyType({name: _ALL[name] for name in in_java_order(_ALL)})
"""Every topic setting by name, in the order in which Kafka lists them."""


def effective(configs: Mapping[str, str], broker: BrokerConfig) -> TopicConfig:
    """Return the settings that apply to a topic with these configs. ConfigError only if `configs` were never
    validated."""
    fields: dict[str, ConfigValue] = {
        field_name: effective_value(key, configs, broker) for field_name, key in _FIELDS.items()
    }
    make = cast("Callable[..., TopicConfig]", TopicConfig)
    return make(**fields)


def effective_value(key: ConfigKey, configs: Mapping[str, str], broker: BrokerConfig) -> ConfigValue:
    """Return the typed value of one topic setting: the topic's own, else its broker counterpart's, else the default."""
    layers = topic_layers(key, configs, broker)
    return _typed(key, layers[0]) if layers else key.default


@dataclass(frozen=True, slots=True)
class Layer:
    """One value that a topic setting has: DescribeConfigs calls it a synonym. `value` is in `name`'s own unit."""

    source: ConfigSource
    name: str
    value: str | None
    factor: int = 1


def topic_layers(key: ConfigKey, configs: Mapping[str, str], broker: BrokerConfig) -> list[Layer]:
    """Return the values of a topic setting, the effective one first: the topic's own value, then the dynamic values of
    the corresponding broker settings, the values given at start, and the defaults.
    """
    counterparts = [
        Layer(source, synonym.name, value, synonym.factor)
        for synonym in key.synonyms
        for source, value in broker_layers(broker, synonym.name)
    ]
    # The sort is stable: within one source the finer unit stays ahead (log.retention.ms before log.retention.hours).
    counterparts.sort(key=lambda layer: layer.source)
    if key.name in configs:
        return [Layer(ConfigSource.TOPIC_CONFIG, key.name, configs[key.name]), *counterparts]
    return counterparts


def _typed(key: ConfigKey, layer: Layer) -> ConfigValue:
    if layer.value is None:
        return key.default
    if layer.source is ConfigSource.TOPIC_CONFIG:
        return key.parse(layer.value)
    counterpart = find_broker_config(layer.name)
    assert counterpart is not None, layer.name
    value = counterpart.parse(layer.value)
    if layer.factor != 1 and isinstance(value, int):
        # -1 hours means "for ever", like -1 ms.
        return value * layer.factor if value >= 0 else value
    return value


def effective_text(key: ConfigKey, configs: Mapping[str, str], broker: BrokerConfig) -> str | None:
    """Return `effective_value` in Kafka's spelling."""
    return render(effective_value(key, configs, broker))


def validate_topic_configs(configs: Mapping[str, str | None], broker: BrokerConfig | None = None) -> dict[str, str]:
    """Return the configs in Kafka's spelling, without nulls. Raise ConfigError (INVALID_CONFIG, naming the setting) for
    the first that is unknown, null, malformed, out of bounds or not honoured, or that contradicts another.

    SQL functions compare and cast these texts, so they must not keep the spaces that a client has added.
    """
    given: dict[str, str] = {}
    for name, value in configs.items():
        key = TOPIC_CONFIGS.get(name)
        if key is None:
            raise ConfigError(name, value, "unknown", f"Unknown topic config name: {name}")
        if value is None:
            raise ConfigError(name, value, "null", f"Null value not supported for topic configs: {name}")
        parsed = key.parse(value)
        if parsed is True and name == REMOTE_STORAGE:
            said = "Tiered Storage functionality is disabled in the broker."
            raise ConfigError(name, value, said, f"{said} Topic cannot be configured with remote log storage.")
        given[name] = render(parsed) or ""
    together = effective(given, broker or BrokerConfig())
    if together.min_compaction_lag_ms > together.max_compaction_lag_ms:
        raise ConfigError(
            "min.compaction.lag.ms",
            str(together.min_compaction_lag_ms),
            f"above max.compaction.lag.ms ({together.max_compaction_lag_ms})",
        )
    return given


def requested_replication_factor(configs: Mapping[str, str], broker: BrokerConfig) -> int:
    """Return how many live nodes are listed as a topic's replicas."""
    requested = configs.get(REPLICATION_FACTOR)
    return int(requested) if requested is not None else broker.default_replication_factor
