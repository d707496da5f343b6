"""Health of each member: its joins, its silences, and its refused commits."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.analyze.journal import Journal

_KEY = ("group_id", "member_id")


def member_health(journal: Journal, rebalances: DataFrame, ownership: DataFrame) -> DataFrame:
    """Return the table `member_health`, with a row per member id."""
    kind = F.col("kind")
    events = journal.event.where(F.col("member_id").isNotNull())
    joined = kind == "member_joined"
    told = events.groupBy(*_KEY).agg(
        F.max("group_instance_id").alias("group_instance_id"),
        F.max("client_id").alias("client_id"),
        F.max("client_host").alias("client_host"),
        F.min("at_ms").alias("first_ms"),
        F.max("at_ms").alias("last_ms"),
        F.count_if(joined).alias("joins"),
        F.percentile(F.when(joined, F.col("wait_ms")), 0.5).alias("join_wait_p50_ms"),
        F.percentile(F.when(joined, F.col("wait_ms")), 0.99).alias("join_wait_p99_ms"),
        F.max(F.when(joined, F.col("wait_ms"))).alias("join_wait_max_ms"),
        F.count_if(joined & (F.col("reason") != "rejoined")).alias("comings"),
        F.count_if(kind == "member_expired").alias("expiries"),
        F.count_if(kind == "member_fenced").alias("fenced"),
        F.count_if(kind == "heartbeat_gap").alias("heartbeat_gaps"),
        F.max(F.when(kind == "heartbeat_gap", F.col("wait_ms"))).alias("heartbeat_gap_max_ms"),
        F.count_if(kind == "observed").alias("broken_rules"),
        F.count_if(kind == "rebalance_started").alias("rebalances_caused"),
    )
    described = journal.member.groupBy(*_KEY).agg(
        F.max("group_instance_id").alias("known_instance_id"),
        F.max("client_id").alias("known_client_id"),
        F.max("client_host").alias("known_client_host"),
        F.count("*").alias("generations"),
    )
    committed = (
        journal.offset.where((kind == "commit") & F.col("member_id").isNotNull())
        .groupBy(*_KEY)
        .agg(
            F.count_if(F.col("error_code") == 0).alias("commits"),
            F.count_if(F.col("error_code") != 0).alias("refused_commits"),
            F.min("at_ms").alias("first_commit_ms"),
            F.max("at_ms").alias("last_commit_ms"),
        )
    )
    last = (
        rebalances.where(F.col("last_member_id").isNotNull() & (F.col("members_after") > 1))
        .groupBy("group_id", F.col("last_member_id").alias("member_id"))
        .agg(F.count("*").alias("times_last"), F.percentile("last_join_wait_ms", 0.5).alias("last_join_wait_p50_ms"))
    )
    held = (
        ownership.where(F.col("from_ms").isNotNull() & F.col("to_ms").isNotNull())
        .groupBy(*_KEY)
        .agg(F.sum(F.greatest(F.lit(0), F.col("to_ms") - F.col("from_ms"))).alias("owned_partition_ms"))
    )
    counts = (
        "joins",
        "comings",
        "expiries",
        "fenced",
        "heartbeat_gaps",
        "broken_rules",
        "rebalances_caused",
        "generations",
        "commits",
        "refused_commits",
        "times_last",
        "owned_partition_ms",
    )
    whole = told.join(described, list(_KEY), "full")
    for table in (committed, last, held):
        whole = whole.join(table, list(_KEY), "left")
    alive_ms = F.greatest(F.lit(1), F.col("last_ms") - F.col("first_ms"))
    commit_ms = F.col("last_commit_ms") - F.col("first_commit_ms")
    return (
        whole.fillna(0, list(counts))
        .withColumn("group_instance_id", F.coalesce("group_instance_id", "known_instance_id"))
        .withColumn("client_id", F.coalesce("client_id", "known_client_id"))
        .withColumn("client_host", F.coalesce("client_host", "known_client_host"))
        .withColumn("commits_per_s", F.when(commit_ms > 0, F.col("commits") * 1000.0 / commit_ms))
        # How often per hour a member joins as a new one or is removed. Rejoins do not count, because other members
        # cause them. A member's lifetime counts as a minute at least.
        .withColumn(
            "flapping_per_h",
            (F.greatest(F.lit(0), F.col("comings") - 1) + F.col("expiries") + F.col("fenced"))
            * 3_600_000.0
            / F.greatest(F.lit(60_000), alive_ms),
        )
        .drop("known_instance_id", "known_client_id", "known_client_host", "first_commit_ms", "last_commit_ms")
    )
