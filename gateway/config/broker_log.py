"""Broker settings of topics and their log: defaults of topic settings, the store, offsets, producers, transactions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.config.definition import (
    MAX_LONG,
    ConfigType,
    Update,
    at_least,
    between,
    codec_choice,
    each_one_of,
    gzip_level,
    one_of,
    setting,
)

_INT, _LONG, _BOOLEAN = ConfigType.INT, ConfigType.LONG, ConfigType.BOOLEAN
_AT_START = Update.AT_START

LEADER_SELECTOR = "org.apache.kafka.common.replica.LeaderSelector"
RACK_AWARE_SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"


def _schema_name(text: str) -> str | None:
    if re.fullmatch(r"(?!pg_|sluice|public$|information_schema$)[a-z_][a-z0-9_]{0,55}", text) or not text:
        return None
    return "must be empty or the name of a schema of its own, of at most 56 lower-case letters, digits and underscores"


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Settings of topics, records and transactions."""

    # cluster
    reconcile_periodic_interval_ms: int = setting(
        _INT,
        1000,
        "How often a node compares what it holds with the committed metadata when nothing wakes it. Not a Kafka "
        "setting.",
        between(1, 30_000),
        update=_AT_START,
    )
    unstable_feature_versions_enable: bool = setting(
        _BOOLEAN,
        False,
        "Whether the node lists levels of features that a release of Kafka may still change.",
        update=_AT_START,
        internal=True,
    )

    # topics
    num_partitions: int = setting(
        _INT, 1, "Partitions of a topic created without a number of them.", between(1, 10_000), update=_AT_START
    )
    default_replication_factor: int = setting(
        _INT,
        1,
        "Replication factor of a topic created without one: how many live nodes are named as its replicas. Durability "
        "is Postgres' and does not depend on it.",
        between(1, 2**15 - 1),
        update=_AT_START,
    )
    replica_selector_class: str | None = setting(
        ConfigType.STRING,
        None,
        "Which replica consumers that name their rack read from: the leader, or with RackAwareReplicaSelector one in "
        "that rack.",
        one_of(LEADER_SELECTOR, RACK_AWARE_SELECTOR),
        update=_AT_START,
    )
    auto_create_topics_enable: bool = setting(
        _BOOLEAN, True, "Whether asking for the metadata of a missing topic creates it.", update=_AT_START
    )
    delete_topic_enable: bool = setting(_BOOLEAN, True, "Whether DeleteTopics is allowed.", update=_AT_START)

    # log, defaults of topic settings
    message_max_bytes: int = setting(_INT, 1_048_588, "Largest record batch that is accepted.", at_least(0))
    log_retention_ms: int | None = setting(
        _LONG, None, "How long records are kept; -1 is for ever. Unset: log.retention.minutes decides.", at_least(-1)
    )
    log_retention_minutes: int | None = setting(
        _INT, None, "How long records are kept. Unset: log.retention.hours decides.", at_least(-1), update=_AT_START
    )
    log_retention_hours: int = setting(_INT, 168, "How long records are kept.", at_least(-1), update=_AT_START)
    log_retention_bytes: int = setting(_LONG, -1, "How much of a partition is kept; a negative size sets no limit.")
    log_retention_check_interval_ms: int = setting(
        _LONG, 300_000, "How often retention looks for records to remove.", at_least(1), update=_AT_START
    )
    log_cleanup_policy: tuple[str, ...] = setting(
        ConfigType.LIST,
        ("delete",),
        "What happens to old records: delete, compact, or both.",
        each_one_of("compact", "delete"),
        distinct=True,
    )
    log_message_timestamp_type: str = setting(
        ConfigType.STRING,
        "CreateTime",
        "Whether a record keeps its producer's timestamp or gets the broker's.",
        one_of("CreateTime", "LogAppendTime"),
    )
    log_message_timestamp_before_max_ms: int = setting(
        _LONG, MAX_LONG, "How far a producer's timestamp may lie in the past.", at_least(0)
    )
    log_message_timestamp_after_max_ms: int = setting(
        _LONG, 3_600_000, "How far a producer's timestamp may lie in the future.", at_least(0)
    )
    log_roll_ms: int | None = setting(
        _LONG,
        None,
        "Age from which records may be compacted though newer ones follow. Unset: log.roll.hours decides.",
        at_least(1),
    )
    log_roll_hours: int = setting(
        _INT, 168, "Age from which records may be compacted though newer ones follow.", at_least(1), update=_AT_START
    )
    log_cleaner_backoff_ms: int = setting(
        _LONG, 15_000, "How often compaction looks for partitions to clean.", at_least(0)
    )
    log_cleaner_delete_retention_ms: int = setting(
        _LONG, 86_400_000, "How long a tombstone outlives the compaction that could drop it.", at_least(0)
    )
    log_cleaner_min_cleanable_ratio: float = setting(
        ConfigType.DOUBLE, 0.5, "Share of uncompacted bytes from which a partition is compacted.", between(0, 1)
    )
    log_cleaner_min_compaction_lag_ms: int = setting(
        _LONG, 0, "How long a record is safe from compaction.", at_least(0)
    )
    log_cleaner_max_compaction_lag_ms: int = setting(
        _LONG, MAX_LONG, "How long a record may stay uncompacted at most.", at_least(1)
    )

    compression_type: str = setting(
        ConfigType.STRING,
        "producer",
        "The codec of record batches: producer keeps what their producer chose.",
        codec_choice,
    )
    compression_gzip_level: int = setting(
        _INT, -1, "Level of recompression by gzip; -1 is the codec's own default.", gzip_level
    )
    compression_lz4_level: int = setting(_INT, 9, "Level of recompression by lz4.", between(1, 17))
    compression_zstd_level: int = setting(_INT, 3, "Level of recompression by zstd.", between(-131_072, 22))

    unclean_leader_election_enable: bool = setting(
        _BOOLEAN, False, "Has no effect here: no replica lacks a record, so every live replica may lead."
    )

    log_commit_gather_ms: int = setting(
        _INT,
        2,
        "How long a commit waits at most for requests that met at the last one, so that they share it again; 0: not at "
        "all. A request that was alone there never waits. Not a Kafka setting.",
        between(0, 100),
        update=_AT_START,
    )

    log_store_inline_max_bytes: int = setting(
        _INT,
        65_536,
        "Commits up to this size keep their bytes in Postgres, with or without a store. Not a Kafka setting.",
        at_least(0),
        update=_AT_START,
    )

    log_store_page_cache_bytes: int = setting(
        _LONG,
        1_073_741_824,
        "How much of the newest files of a log's directory stays in the operating system's page cache, so that the "
        "next ones go to the same memory; older ones are read from the disk; -1: the system decides. Not a Kafka "
        "setting.",
        at_least(-1),
        update=_AT_START,
    )

    log_store_roll_bytes: int = setting(
        _LONG,
        67_108_864,
        "How much gathers in Postgres before it is moved to the log's directory or bucket. Not a Kafka setting.",
        at_least(1),
        update=_AT_START,
    )
    log_store_roll_ms: int = setting(
        _LONG,
        -1,
        "How long bytes stay in Postgres at most before they are moved; -1: a minute with a directory, five with a "
        "bucket. Not a Kafka setting.",
        at_least(-1),
        update=_AT_START,
    )

    # offsets and producers
    offsets_retention_minutes: int = setting(
        _INT, 10_080, "How long the offsets of a group without members are kept.", at_least(1), update=_AT_START
    )
    offsets_retention_check_interval_ms: int = setting(
        _LONG, 600_000, "How often expired offsets are looked for.", at_least(1), update=_AT_START
    )
    offset_metadata_max_bytes: int = setting(
        _INT, 4096, "Longest metadata text of an offset commit.", at_least(0), update=_AT_START
    )
    producer_id_expiration_ms: int = setting(
        _INT,
        86_400_000,
        "How long the sequence state of an idle idempotent producer is kept.",
        at_least(1),
    )
    producer_id_expiration_check_interval_ms: int = setting(
        _INT, 600_000, "How often idle idempotent producers are looked for.", at_least(1), update=_AT_START
    )

    # transactions
    transaction_state_log_num_partitions: int = setting(
        _INT,
        50,
        "Partitions that __transaction_state is made with. Transactions are coordinated without it.",
        between(1, 10_000),
        update=_AT_START,
    )
    transaction_max_timeout_ms: int = setting(
        _INT, 900_000, "Longest timeout that a transactional producer may ask for.", at_least(1), update=_AT_START
    )
    transactional_id_expiration_ms: int = setting(
        _INT,
        604_800_000,
        "How long a transactional id is remembered that begins no transaction.",
        at_least(1),
        update=_AT_START,
    )
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int = setting(
        _INT,
        1_000,
        "How often transactions are looked for that took longer than their timeout. Kafka's default is 10 s.",
        at_least(1),
        update=_AT_START,
    )
    transaction_remove_expired_transaction_cleanup_interval_ms: int = setting(
        _INT, 3_600_000, "How often transactional ids are looked for that have expired.", at_least(1), update=_AT_START
    )

    sql_schema: str = setting(
        ConfigType.STRING,
        "kafka",
        "Schema of the functions by which SQL clients produce, commit and read. Empty: no such functions. Not a Kafka "
        "setting.",
        _schema_name,
        update=_AT_START,
    )

    @property
    def retention_ms(self) -> int:
        """Default retention of topics, from the finest of its three settings; -1 is for ever."""
        if self.log_retention_ms is not None:
            return self.log_retention_ms
        if self.log_retention_minutes is not None:
            return self.log_retention_minutes * 60_000 if self.log_retention_minutes >= 0 else -1
        return self.log_retention_hours * 3_600_000 if self.log_retention_hours >= 0 else -1

    @property
    def selects_nearest(self) -> bool:
        """True if a consumer is redirected to a replica in its rack (KIP-392)."""
        return self.replica_selector_class == RACK_AWARE_SELECTOR
