"""The broker settings that change what a node does, under Kafka's names and with Kafka's defaults.

The one idea: a setting that the gateway obeys is a typed field of `BrokerConfig`. `broker_table.py` finds settings
by name, also those that a node only shows. `broker_parsing.py` makes a `BrokerConfig` of texts. None of these modules
knows where values come from (`gateway/config/settings.py`) nor who stores the dynamic ones (`storage/topics.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

from gateway.config.definition import (
    MAX_INT,
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
    some_of,
)
from gateway.config.mechanisms import LOGIN_MODULES

_INT, _LONG, _BOOLEAN = ConfigType.INT, ConfigType.LONG, ConfigType.BOOLEAN
_AT_START, _OF_ONE_NODE = Update.AT_START, Update.OF_ONE_NODE

LEADER_SELECTOR = "org.apache.kafka.common.replica.LeaderSelector"
RACK_AWARE_SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
NODE_ID_NAMES = ("node.id", "broker.id")
"""Names of the node's id; the first that is set wins."""
STANDARD_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"


def ip_overrides(text: str) -> dict[str, int]:
    """Parse `10.0.0.1:20,::1:5`. Raise ValueError. Host names are not resolved."""
    overrides: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        address, _, count = part.rpartition(":")
        if not count.isascii() or not count.isdigit():
            raise ValueError(f"expected ADDRESS:NUMBER, not {part}")
        overrides[str(ip_address(address))] = int(count)
    return overrides


def _ip_overrides(text: str) -> str | None:
    try:
        ip_overrides(text)
    except ValueError as error:
        return str(error)
    return None


def principals(text: str) -> frozenset[str]:
    """Parse `User:a;User:b`. Raise ValueError."""
    users = frozenset(user for part in text.split(";") if (user := part.strip()))
    for user in users:
        kind, _, name = user.partition(":")
        if not (kind and name):
            raise ValueError(f"expected a string in format principalType:principalName but got {user}")
    return users


def _principals(text: str) -> str | None:
    try:
        principals(text)
    except ValueError as error:
        return str(error)
    return None


def _address_or_empty(text: str) -> str | None:
    host, _, port = text.rpartition(":")
    if not text or (host and port.isascii() and port.isdigit() and int(port) <= 65535):
        return None
    return "must be HOST:PORT, or empty"


def _http_or_empty(url: str) -> str | None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return str(error)
    if not url or (parts.scheme in ("http", "https") and parts.hostname and parts.username is None):
        return None
    return "must be an http or https URL without a user, or empty"


def _key_url(url: str | None) -> str | None:
    try:
        parts = urlsplit(url or "")
    except ValueError as error:
        return str(error)
    if parts.scheme in ("http", "https") and parts.hostname:
        return None
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return None
    return "must be https://HOST/PATH, http://HOST/PATH or file:///PATH"


def _schema_name(text: str) -> str | None:
    if re.fullmatch(r"(?!pg_|sluice|public$|information_schema$)[a-z_][a-z0-9_]{0,62}", text) or not text:
        return None
    return "must be empty or the name of a schema of its own, in lower-case letters, digits and underscores"


def _not_blank(text: str) -> str | None:
    return None if text.strip() else "must not be empty"


def _with_classic(protocols: tuple[str, ...]) -> str | None:
    """Check that the protocols include classic (upstream: KafkaConfig.groupCoordinatorRebalanceProtocols)."""
    wrong = each_one_of("classic", "consumer", "streams", "share")(protocols)
    return wrong or (None if "classic" in protocols else "Disabling the 'classic' protocol is not supported.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """Every broker setting that changes what the gateway does, typed. Built by `broker_parsing.py`."""

    # groups
    group_initial_rebalance_delay_ms: int = setting(
        _INT,
        3000,
        "How long the first members of an empty group are waited for before its first generation.",
        at_least(0),
        update=_AT_START,
    )
    group_min_session_timeout_ms: int = setting(
        _INT, 6000, "Shortest session timeout that a classic member may ask for.", at_least(0), update=_AT_START
    )
    group_max_session_timeout_ms: int = setting(
        _INT, 1_800_000, "Longest session timeout that a classic member may ask for.", at_least(0), update=_AT_START
    )
    offsets_topic_num_partitions: int = setting(
        _INT,
        50,
        "Partitions that __consumer_offsets is made with. Groups are spread over the nodes without it.",
        between(1, 10_000),
        update=_AT_START,
    )
    group_coordinator_rebalance_protocols: tuple[str, ...] = setting(
        ConfigType.LIST,
        ("classic", "consumer", "streams"),
        "Group protocols that are served; classic always is, and share where share.version is not 0.",
        _with_classic,
        update=_AT_START,
    )
    group_consumer_session_timeout_ms: int = setting(
        _INT, 45_000, "How long a member of the consumer protocol may be silent.", at_least(1), update=_AT_START
    )
    group_consumer_min_session_timeout_ms: int = setting(
        _INT, 45_000, "Shortest session timeout that a consumer group may be given.", at_least(1), update=_AT_START
    )
    group_consumer_max_session_timeout_ms: int = setting(
        _INT, 60_000, "Longest session timeout that a consumer group may be given.", at_least(1), update=_AT_START
    )
    group_consumer_heartbeat_interval_ms: int = setting(
        _INT, 5_000, "How often members of the consumer protocol are to speak.", at_least(1), update=_AT_START
    )
    group_consumer_min_heartbeat_interval_ms: int = setting(
        _INT, 5_000, "Shortest heartbeat interval that a consumer group may be given.", at_least(1), update=_AT_START
    )
    group_consumer_max_heartbeat_interval_ms: int = setting(
        _INT, 15_000, "Longest heartbeat interval that a consumer group may be given.", at_least(1), update=_AT_START
    )
    group_consumer_max_size: int = setting(
        _INT, MAX_INT, "Most members that one consumer group may have.", at_least(1), update=_AT_START
    )
    group_consumer_assignors: tuple[str, ...] = setting(
        ConfigType.LIST,
        ("uniform", "range"),
        "Assignors that members of the consumer protocol may ask for; the first is used where none does.",
        some_of("uniform", "range"),
        update=_AT_START,
    )
    group_consumer_migration_policy: str = setting(
        ConfigType.STRING,
        "bidirectional",
        "Which way a group with members may change its protocol: upgrade (classic to consumer), downgrade, "
        "bidirectional or disabled.",
        one_of("bidirectional", "upgrade", "downgrade", "disabled"),
        update=_AT_START,
    )
    group_streams_session_timeout_ms: int = setting(
        _INT, 45_000, "How long a member of a streams group may be silent.", at_least(1), update=_AT_START
    )
    group_streams_min_session_timeout_ms: int = setting(
        _INT, 45_000, "Shortest session timeout that a streams group may be given.", at_least(1), update=_AT_START
    )
    group_streams_max_session_timeout_ms: int = setting(
        _INT, 60_000, "Longest session timeout that a streams group may be given.", at_least(1), update=_AT_START
    )
    group_streams_heartbeat_interval_ms: int = setting(
        _INT, 5_000, "How often members of a streams group are to speak.", at_least(1), update=_AT_START
    )
    group_streams_min_heartbeat_interval_ms: int = setting(
        _INT, 5_000, "Shortest heartbeat interval that a streams group may be given.", at_least(1), update=_AT_START
    )
    group_streams_max_heartbeat_interval_ms: int = setting(
        _INT, 15_000, "Longest heartbeat interval that a streams group may be given.", at_least(1), update=_AT_START
    )
    group_streams_max_size: int = setting(
        _INT, MAX_INT, "Most members that one streams group may have.", at_least(1), update=_AT_START
    )
    group_streams_num_standby_replicas: int = setting(
        _INT, 0, "How many members beside its owner keep a copy of a task's state.", at_least(0), update=_AT_START
    )
    group_streams_max_standby_replicas: int = setting(
        _INT, 2, "Most standby replicas that a streams group may be given.", at_least(0), update=_AT_START
    )
    group_streams_initial_rebalance_delay_ms: int = setting(
        _INT,
        3_000,
        "How long the first members of an empty streams group are waited for before tasks are given.",
        at_least(0),
        update=_AT_START,
    )
    group_share_session_timeout_ms: int = setting(
        _INT, 45_000, "How long a member of a share group may be silent.", at_least(1), update=_AT_START
    )
    group_share_min_session_timeout_ms: int = setting(
        _INT, 45_000, "Shortest session timeout that a share group may be given.", at_least(1), update=_AT_START
    )
    group_share_max_session_timeout_ms: int = setting(
        _INT, 60_000, "Longest session timeout that a share group may be given.", at_least(1), update=_AT_START
    )
    group_share_heartbeat_interval_ms: int = setting(
        _INT, 5_000, "How often members of a share group are to speak.", at_least(1), update=_AT_START
    )
    group_share_min_heartbeat_interval_ms: int = setting(
        _INT, 5_000, "Shortest heartbeat interval that a share group may be given.", at_least(1), update=_AT_START
    )
    group_share_max_heartbeat_interval_ms: int = setting(
        _INT, 15_000, "Longest heartbeat interval that a share group may be given.", at_least(1), update=_AT_START
    )
    group_share_max_size: int = setting(
        _INT, 200, "Most members that one share group may have.", between(1, 1_000), update=_AT_START
    )
    group_share_record_lock_duration_ms: int = setting(
        _INT,
        30_000,
        "How long a record is a member's of a share group that has neither acknowledged nor released it.",
        between(1_000, 3_600_000),
        update=_AT_START,
    )
    group_share_min_record_lock_duration_ms: int = setting(
        _INT, 15_000, "Shortest record lock that a share group may be given.", between(1_000, 30_000), update=_AT_START
    )
    group_share_max_record_lock_duration_ms: int = setting(
        _INT,
        60_000,
        "Longest record lock that a share group may be given.",
        between(30_000, 3_600_000),
        update=_AT_START,
    )
    group_share_partition_max_record_locks: int = setting(
        _INT,
        2_000,
        "Most records of a share partition that were delivered and are not settled.",
        between(100, 10_000),
        update=_AT_START,
    )
    group_share_min_partition_max_record_locks: int = setting(
        _INT,
        100,
        "Fewest records in flight that a share group may be given.",
        between(100, 2_000),
        update=_AT_START,
    )
    group_share_max_partition_max_record_locks: int = setting(
        _INT,
        4_000,
        "Most records in flight that a share group may be given.",
        between(2_000, 10_000),
        update=_AT_START,
    )
    group_share_delivery_count_limit: int = setting(
        _INT,
        5,
        "How often a share group delivers a record at most.",
        between(2, 10),
        update=_AT_START,
    )
    group_share_min_delivery_count_limit: int = setting(
        _INT, 2, "Fewest deliveries that a share group may be given.", between(2, 5), update=_AT_START
    )
    group_share_max_delivery_count_limit: int = setting(
        _INT, 10, "Most deliveries that a share group may be given.", between(5, 25), update=_AT_START
    )
    errors_deadletterqueue_auto_create_topics_enable: bool = setting(
        _BOOLEAN, False, "Whether a dead-letter topic that a share group names is created when it is first needed."
    )
    errors_deadletterqueue_topic_name_prefix: str = setting(
        ConfigType.STRING, "dlq.", "How the name of a dead-letter topic must begin; empty allows any."
    )
    group_share_max_share_sessions: int = setting(
        _INT, 2_000, "Most share sessions of one node.", at_least(1), update=_AT_START
    )
    group_max_size: int = setting(_INT, MAX_INT, "Most members that one group may have.", at_least(1), update=_AT_START)
    group_connection_grace_ms: int = setting(
        _INT,
        10_000,
        "How long a dynamic member outlives a connection its peer closed without leaving; -1 leaves it to the session "
        "timeout. Not a Kafka setting.",
        at_least(-1),
        update=_AT_START,
    )
    group_cooperative_guard: bool = setting(
        _BOOLEAN,
        False,
        "Whether a partition that one member of a cooperative group claims is withheld from another to whom the leader "
        "gives it, until it was let go. Such leaders are reported in any case. Not a Kafka setting.",
        update=_AT_START,
    )
    group_handoff_mode: str = setting(
        ConfigType.STRING,
        "ack",
        "What the new owner of a partition waits for: that the old one let go of it (ack), that it has also committed "
        "what it was served (drain), or nothing (off). Not a Kafka setting.",
        one_of("ack", "drain", "off"),
        update=_AT_START,
    )
    group_handoff_timeout_ms: int = setting(
        _INT,
        30_000,
        "How long the new owner of a partition waits for the old one at most. Not a Kafka setting.",
        between(1, 3_600_000),
        update=_AT_START,
    )
    group_journal_enable: bool = setting(
        _BOOLEAN,
        True,
        "Whether what happens to groups, and every offset commit, is written to the journal in Postgres. Not a Kafka "
        "setting.",
        update=_AT_START,
    )
    sql_schema: str = setting(
        ConfigType.STRING,
        "kafka",
        "Schema of the functions by which SQL clients produce, commit and read. Empty: no such functions. Not a Kafka "
        "setting.",
        _schema_name,
        update=_AT_START,
    )
    group_journal_retention_ms: int = setting(
        _LONG,
        604_800_000,
        "How long the journal's days are kept; -1 is for ever. Not a Kafka setting.",
        between(-1, 100_000_000_000_000),
        update=_AT_START,
    )
    group_journal_retention_bytes: int = setting(
        _LONG,
        10_737_418_240,
        "Size of the journal in Postgres above which its oldest days are dropped; -1 is no bound. Not a Kafka setting.",
        at_least(-1),
        update=_AT_START,
    )

    # console
    console_listen: str = setting(
        ConfigType.STRING,
        "127.0.0.1:8080",
        "Where the console is served, as HOST:PORT; empty for no console. If the default port is taken, the node "
        "starts without a console. Not a Kafka setting.",
        _address_or_empty,
        update=_AT_START,
    )
    console_read_only: bool = setting(
        _BOOLEAN,
        False,
        "Whether the console refuses to change anything. Not a Kafka setting.",
        update=_AT_START,
    )
    console_produce: str = setting(
        ConfigType.STRING,
        "auto",
        "Whether the console may append records: true, false, or auto, which is true without an authorizer. Not a "
        "Kafka setting.",
        one_of("auto", "true", "false"),
        update=_AT_START,
    )
    console_plaintext_allow: bool = setting(
        _BOOLEAN,
        False,
        "Whether the console may listen on a non-loopback address without TLS, for a proxy in front of it that has "
        "TLS. Not a Kafka setting.",
        update=_AT_START,
    )
    console_ssl_keystore_location: str = setting(
        ConfigType.STRING,
        "",
        "PEM file with the private key and the certificate chain of the console; empty for no TLS. Not a Kafka "
        "setting.",
        update=_AT_START,
    )

    console_schema_registry_url: str = setting(
        ConfigType.STRING,
        "",
        "URL of a Confluent-compatible schema registry by whose schemas the console decodes records; empty for none. "
        "Not a Kafka setting.",
        _http_or_empty,
        update=_AT_START,
    )
    console_schema_registry_login: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "User and password of the console for the schema registry, as USER:PASSWORD. Not a Kafka setting.",
        update=_AT_START,
    )

    console_oidc_issuer: str = setting(
        ConfigType.STRING,
        "",
        "Issuer of the OpenID Connect provider to which the console sends people who log in; empty for none. Not a "
        "Kafka setting.",
        _http_or_empty,
        update=_AT_START,
    )
    console_oidc_client_id: str = setting(
        ConfigType.STRING,
        "",
        "Client id of the console at the OpenID Connect provider. Not a Kafka setting.",
        update=_AT_START,
    )
    console_oidc_client_secret: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "Secret of the console at the OpenID Connect provider; none for a public client. Not a Kafka setting.",
        update=_AT_START,
    )
    console_oidc_redirect_uri: str = setting(
        ConfigType.STRING,
        "",
        "URL of the console for browsers, followed by /api/oidc/callback; empty on a loopback address. Not a Kafka "
        "setting.",
        _http_or_empty,
        update=_AT_START,
    )
    console_oidc_scopes: tuple[str, ...] = setting(
        ConfigType.LIST,
        ("openid",),
        "Scopes that the console requests from the OpenID Connect provider. Not a Kafka setting.",
        update=_AT_START,
    )
    console_oidc_session_ms: int = setting(
        _LONG,
        3_600_000,
        "Time after which a person who logged in by OpenID Connect must log in again. Not a Kafka setting.",
        between(60_000, 30 * 86_400_000),
        update=_AT_START,
    )

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
        "Whether levels of features are told that a release of Kafka may still change.",
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
        _BOOLEAN, False, "Whether a replica that is not in sync may lead if no replica in sync is alive. No effect."
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
        "Commits up to this size keep their bytes in Postgres, store or not. Not a Kafka setting.",
        at_least(0),
        update=_AT_START,
    )

    log_store_page_cache_bytes: int = setting(
        _LONG,
        1_073_741_824,
        "How much of the newest files of a log's directory stays in the operating system's page cache, so that the "
        "next ones go to the same memory; older ones are read from the disk; -1: as the system likes. Not a Kafka "
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

    # security
    authorizer_class_name: str = setting(
        ConfigType.STRING,
        "",
        "What decides who may do what: ACLs by Kafka's StandardAuthorizer, or nothing. The same on every node.",
        one_of("", STANDARD_AUTHORIZER),
        update=_AT_START,
    )
    super_users: str = setting(
        ConfigType.STRING,
        "",
        "Principals that may do everything, as User:alice;User:bob. The same on every node.",
        _principals,
        update=_AT_START,
    )
    allow_everyone_if_no_acl_found: bool = setting(
        _BOOLEAN,
        False,
        "Whether a resource without any ACL is everybody's. The same on every node.",
        update=_AT_START,
    )

    # connections
    fetch_max_bytes: int = setting(
        _INT, 57_671_680, "Most record bytes in one Fetch response.", at_least(1024), update=_AT_START
    )
    socket_request_max_bytes: int = setting(
        _INT, 104_857_600, "Largest request; a larger one closes its connection.", at_least(1), update=_AT_START
    )
    connections_max_idle_ms: int = setting(
        _LONG, 600_000, "How long an idle connection stays open; -1 is for ever.", at_least(-1), update=_AT_START
    )
    max_connections: int = setting(
        _INT, MAX_INT, "Most client connections at once on one node.", at_least(0), update=_AT_START
    )
    max_connections_per_ip: int = setting(
        _INT, MAX_INT, "Most connections at once from one address on one node.", at_least(0)
    )
    max_connections_per_ip_overrides: str = setting(
        ConfigType.STRING, "", "The same for single addresses, as 10.0.0.1:20,10.0.0.2:5.", _ip_overrides
    )

    # security
    sasl_enabled_mechanisms: tuple[str, ...] = setting(
        ConfigType.LIST,
        (),
        f"Mechanisms by which clients may authenticate: {', '.join(LOGIN_MODULES)}.",
        each_one_of(*LOGIN_MODULES),
        update=_AT_START,
    )
    sasl_server_max_receive_size: int = setting(
        _INT, 524_288, "Largest request of a client that has not authenticated yet.", at_least(1), update=_AT_START
    )
    sasl_oauthbearer_jwks_endpoint_url: str | None = setting(
        ConfigType.STRING,
        None,
        "Where the keys are that access tokens are signed by, as a JWK set: https://, http:// or file://.",
        _key_url,
        update=_AT_START,
    )
    sasl_oauthbearer_jwks_endpoint_refresh_ms: int = setting(
        _LONG, 3_600_000, "How old the keys of access tokens may be.", at_least(1), update=_AT_START
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_ms: int = setting(
        _LONG, 100, "Wait after the keys of access tokens could not be read.", at_least(1), update=_AT_START
    )
    sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms: int = setting(
        _LONG, 10_000, "Longest of these waits, which double.", at_least(1), update=_AT_START
    )
    sasl_oauthbearer_expected_audience: tuple[str, ...] = setting(
        ConfigType.LIST,
        (),
        "Audiences of which an access token must name one; none: it may name none.",
        update=_AT_START,
    )
    sasl_oauthbearer_expected_issuer: str | None = setting(
        ConfigType.STRING, None, "Who must have issued an access token.", update=_AT_START
    )
    sasl_oauthbearer_clock_skew_seconds: int = setting(
        _INT, 30, "How far the issuer's clock may be from the node's.", at_least(0), update=_AT_START
    )
    sasl_oauthbearer_scope_claim_name: str = setting(
        ConfigType.STRING, "scope", "The claim of an access token that has its scopes.", _not_blank, update=_AT_START
    )
    sasl_oauthbearer_sub_claim_name: str = setting(
        ConfigType.STRING, "sub", "The claim of an access token that names the user.", _not_blank, update=_AT_START
    )
    connections_max_reauth_ms: int = setting(
        _LONG,
        0,
        "How long an authenticated client may stay connected until it authenticates again; 0: for ever.",
        at_least(0),
        update=_AT_START,
    )
    delegation_token_secret_key: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "What the secrets of delegation tokens are made with; unset or empty: there are none. The same on every node.",
        update=_AT_START,
    )
    delegation_token_max_lifetime_ms: int = setting(
        _LONG,
        604_800_000,
        "How long a delegation token can hold, with all renewals.",
        at_least(1),
        update=_AT_START,
    )
    delegation_token_expiry_time_ms: int = setting(
        _LONG,
        86_400_000,
        "How long a delegation token holds until it must be renewed.",
        at_least(1),
        update=_AT_START,
    )
    delegation_token_expiry_check_interval_ms: int = setting(
        _LONG, 3_600_000, "How often expired delegation tokens are removed.", at_least(1), update=_AT_START
    )
    connection_failed_authentication_delay_ms: int = setting(
        _INT,
        100,
        "How long a client that failed to authenticate waits for the answer and the end of its connection.",
        between(0, 60_000),
        update=_AT_START,
    )
    ssl_keystore_type: str = setting(
        ConfigType.STRING, "PEM", "Format of the key and the certificates: PEM.", one_of("PEM"), update=_OF_ONE_NODE
    )
    ssl_keystore_location: str | None = setting(
        ConfigType.STRING, None, "A PEM file with the private key and the certificate chain.", update=_OF_ONE_NODE
    )
    ssl_keystore_certificate_chain: str | None = setting(
        ConfigType.PASSWORD, None, "The certificate chain as PEM text.", update=_OF_ONE_NODE
    )
    ssl_keystore_key: str | None = setting(
        ConfigType.PASSWORD, None, "The private key as PEM text (PKCS #8).", update=_OF_ONE_NODE
    )
    ssl_keystore_password: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "A PEM file has no password but its key's (ssl.key.password): refused where a listener speaks TLS.",
        update=_OF_ONE_NODE,
    )
    ssl_key_password: str | None = setting(
        ConfigType.PASSWORD, None, "The password of an encrypted private key.", update=_OF_ONE_NODE
    )
    ssl_truststore_type: str = setting(
        ConfigType.STRING, "PEM", "Format of the certificates of authorities: PEM.", one_of("PEM"), update=_OF_ONE_NODE
    )
    ssl_truststore_location: str | None = setting(
        ConfigType.STRING,
        None,
        "A PEM file with the certificates of authorities that clients' certificates are checked by.",
        update=_OF_ONE_NODE,
    )
    ssl_truststore_certificates: str | None = setting(
        ConfigType.PASSWORD, None, "The same as PEM text.", update=_OF_ONE_NODE
    )
    ssl_truststore_password: str | None = setting(
        ConfigType.PASSWORD,
        None,
        "A PEM file of certificates has no password: refused where a listener speaks TLS.",
        update=_OF_ONE_NODE,
    )
    ssl_client_auth: str = setting(
        ConfigType.STRING,
        "none",
        "Whether clients must show a certificate (required), may (requested), or are not asked (none).",
        one_of("required", "requested", "none"),
        update=_AT_START,
    )
    ssl_enabled_protocols: tuple[str, ...] = setting(
        ConfigType.LIST,
        ("TLSv1.2", "TLSv1.3"),
        "Versions of TLS that are spoken.",
        some_of("TLSv1.2", "TLSv1.3"),
        update=_AT_START,
    )
    ssl_principal_mapping_rules: str = setting(
        ConfigType.STRING,
        "DEFAULT",
        "How a certificate's distinguished name becomes a user: rules RULE:pattern/replacement/[LU] and DEFAULT, "
        "separated by commas; the first that matches counts.",
        update=_AT_START,
    )

    static: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts given at start, by Kafka's names. Never mutated."""
    dynamic: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts that AlterConfigs stored for all nodes, by Kafka's names. Never mutated."""
    own: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts that AlterConfigs stored for this node alone; they outrank the others. Never mutated."""

    @property
    def retention_ms(self) -> int:
        """Default retention of topics, from the finest of its three settings; -1 is for ever."""
        if self.log_retention_ms is not None:
            return self.log_retention_ms
        if self.log_retention_minutes is not None:
            return self.log_retention_minutes * 60_000 if self.log_retention_minutes >= 0 else -1
        return self.log_retention_hours * 3_600_000 if self.log_retention_hours >= 0 else -1

    @property
    def node_id(self) -> int | None:
        """The only id that the node may have; None: the cluster assigns one."""
        given = [self.static[name] for name in NODE_ID_NAMES if name in self.static]
        return int(given[0]) if given else None

    @property
    def selects_nearest(self) -> bool:
        """True if a consumer is redirected to a replica in its rack (KIP-392)."""
        return self.replica_selector_class == RACK_AWARE_SELECTOR

    def is_given(self, name: str) -> bool:
        """Return whether the setting was set, at start or by AlterConfigs."""
        return name in self.static or name in self.dynamic or name in self.own
