"""Broker settings of groups: their members, sessions, assignors, handoff and journal."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config.definition import (
    MAX_INT,
    ConfigType,
    Update,
    at_least,
    between,
    each_one_of,
    one_of,
    setting,
    some_of,
)

_INT, _LONG, _BOOLEAN = ConfigType.INT, ConfigType.LONG, ConfigType.BOOLEAN
_AT_START = Update.AT_START


def _with_classic(protocols: tuple[str, ...]) -> str | None:
    """Check that the protocols include classic (upstream: KafkaConfig.groupCoordinatorRebalanceProtocols)."""
    wrong = each_one_of("classic", "consumer", "streams", "share")(protocols)
    return wrong or (None if "classic" in protocols else "Disabling the 'classic' protocol is not supported.")


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings of groups of every type."""

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
        "Group protocols that are served; classic always is, and share is if share.version is not 0.",
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
        _INT,
        5_000,
        "Interval at which members of the consumer protocol send heartbeats.",
        at_least(1),
        update=_AT_START,
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
        "Assignors that members of the consumer protocol may ask for; the first is used if no member asks for one.",
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
        _INT, 5_000, "Interval at which members of a streams group send heartbeats.", at_least(1), update=_AT_START
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
        _INT, 5_000, "Interval at which members of a share group send heartbeats.", at_least(1), update=_AT_START
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
        "How long a member of a share group keeps a record that it has neither acknowledged nor released.",
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
        "Time after which a dynamic member whose client closed the connection without leaving is removed, unless the "
        "client returns; -1: only the session timeout counts. Not a Kafka setting.",
        at_least(-1),
        update=_AT_START,
    )
    group_cooperative_guard: bool = setting(
        _BOOLEAN,
        False,
        "Whether a partition that a member of a cooperative group still claims is withheld from its new owner until "
        "that member has released it. A leader that assigns such a partition is always reported. Not a Kafka setting.",
        update=_AT_START,
    )
    group_handoff_mode: str = setting(
        ConfigType.STRING,
        "ack",
        "What the new owner of a partition waits for: until the old owner has released it (ack), until the old owner "
        "has also committed what it was served (drain), or nothing (off). Not a Kafka setting.",
        one_of("ack", "drain", "off"),
        update=_AT_START,
    )
    group_handoff_timeout_ms: int = setting(
        _INT,
        30_000,
        "Longest time for which the new owner of a partition waits for the old owner. Not a Kafka setting.",
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
