"""Rebalances of each group. The group's events are split at each start of a rebalance, and each piece becomes a row.
Piece 0 has the events before the first rebalance.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from pipeline.analyze.journal import Journal

FIELDS = (
    "group_id",
    "group_type",
    "rebalance",
    "started_seq",
    "started_ms",
    "ended_ms",
    "duration_ms",
    "outcome",
    "generation_id",
    "protocol_name",
    "trigger_reason",
    "trigger_member_id",
    "prepare_ms",
    "sync_ms",
    "deliver_ms",
    "last_member_id",
    "last_join_wait_ms",
    "members_before",
    "members_after",
    "chain_started_ms",
)


def _at(kind: str, value: str = "at_ms") -> Column:
    return F.when(F.col("kind") == kind, F.col(value))


def numbered_events(event: DataFrame) -> DataFrame:
    """Add `rebalance`: the number of rebalances that have started in the group up to and including this row."""
    so_far = Window.partitionBy("group_id").orderBy("seq").rowsBetween(Window.unboundedPreceding, 0)
    started = F.when(F.col("kind") == "rebalance_started", 1).otherwise(0)
    return event.where(F.col("kind") != "rows_dropped").withColumn("rebalance", F.sum(started).over(so_far).cast("int"))


def rebalances(journal: Journal) -> DataFrame:
    """Return a row for each started rebalance, without the columns about ownership (see `ownership.with_moves`)."""
    before = Window.partitionBy("group_id").orderBy("seq").rowsBetween(Window.unboundedPreceding, -1)
    size = F.when(F.col("kind").isin("generation_created", "loaded"), F.col("member_count")).when(
        (F.col("state_after") == "Empty") | (F.col("kind") == "deleted"), F.lit(0)
    )
    events = numbered_events(journal.event).withColumn("size_before", F.last(size, ignorenulls=True).over(before))
    emptied = F.when((F.col("state_after") == "Empty") | (F.col("kind") == "deleted"), F.col("at_ms"))
    joined = F.when(
        (F.col("kind") == "member_joined") & F.col("wait_ms").isNotNull(),
        F.struct(F.col("wait_ms"), F.col("member_id")),
    )
    pieces = (
        events.where(F.col("rebalance") > 0)
        .groupBy("group_id", "rebalance")
        .agg(
            F.max("group_type").alias("group_type"),
            F.max(_at("rebalance_started", "seq")).alias("started_seq"),
            F.max(_at("rebalance_started")).alias("started_ms"),
            F.max(_at("rebalance_started", "reason")).alias("trigger_reason"),
            F.max(_at("rebalance_started", "member_id")).alias("trigger_member_id"),
            F.max(_at("rebalance_started", "size_before")).alias("members_before"),
            F.max(_at("generation_created", "generation_id")).alias("generation_id"),
            F.max(_at("generation_created", "protocol_name")).alias("protocol_name"),
            F.max(_at("generation_created", "member_count")).alias("members_after"),
            F.min(_at("generation_created")).alias("created_ms"),
            F.min(_at("assignment_stored")).alias("stored_ms"),
            F.min(_at("rebalance_completed")).alias("completed_ms"),
            F.min(_at("rebalance_completed", "wait_ms")).alias("measured_ms"),
            F.min(emptied).alias("emptied_ms"),
            F.max(joined).alias("last_joined"),
        )
    )
    by_group = Window.partitionBy("group_id").orderBy("rebalance")
    outcome = (
        F.when(F.col("completed_ms").isNotNull(), F.lit("completed"))
        .when(F.col("emptied_ms").isNotNull(), F.lit("emptied"))
        .when(F.col("next_started_ms").isNotNull(), F.lit("superseded"))
        .otherwise(F.lit("open"))
    )
    walked = (
        pieces.withColumn("next_started_ms", F.lead("started_ms").over(by_group))
        .withColumn("outcome", outcome)
        .withColumn("ended_ms", F.coalesce("completed_ms", "emptied_ms", "next_started_ms"))
        .withColumn(
            "duration_ms",
            F.when(
                F.col("outcome") == "completed", F.coalesce("measured_ms", F.col("ended_ms") - F.col("started_ms"))
            ).otherwise(F.col("ended_ms") - F.col("started_ms")),
        )
        .withColumn("prepare_ms", F.col("created_ms") - F.col("started_ms"))
        .withColumn("sync_ms", F.col("stored_ms") - F.col("created_ms"))
        .withColumn("deliver_ms", F.col("completed_ms") - F.col("stored_ms"))
        .withColumn("last_member_id", F.col("last_joined.member_id"))
        .withColumn("last_join_wait_ms", F.col("last_joined.wait_ms"))
    )
    # If another rebalance interrupts a rebalance, both are one interruption for the waiting members.
    chain_begins = F.when(F.lag("outcome").over(by_group) == "superseded", 0).otherwise(1)
    chained = walked.withColumn("chain", F.sum(chain_begins).over(by_group))
    chain = Window.partitionBy("group_id", "chain")
    return chained.withColumn("chain_started_ms", F.min("started_ms").over(chain)).select(*FIELDS)


def storms(rebalances: DataFrame, *, at_least: int = 5, within_ms: int = 60_000) -> DataFrame:
    """Return runs of rebalances of one group in which any `at_least` neighbours started within `within_ms`.

    Two neighbours belong to one storm if some such window holds both.
    """
    order = Window.partitionBy("group_id").orderBy("rebalance")
    closes = F.coalesce(
        F.col("started_ms") - F.lag("started_ms", at_least - 1).over(order) <= within_ms, F.lit(False)
    ).cast("int")
    windowed = rebalances.withColumn("closes", closes)
    # Row i is in a window that ends at one of the rows i .. i+k-1. Rows i-1 and i share a window that ends at one of
    # the rows i .. i+k-2.
    inside = F.max("closes").over(order.rowsBetween(0, at_least - 1)) == 1
    joined = (F.max("closes").over(order.rowsBetween(0, at_least - 2)) == 1) if at_least > 1 else F.lit(False)
    marked = windowed.withColumn("inside", inside).withColumn("breaks", F.when(joined, 0).otherwise(1))
    stormy = marked.where("inside").withColumn("storm", F.sum("breaks").over(order))
    return (
        stormy.groupBy("group_id", "storm")
        .agg(
            F.min("started_ms").alias("started_ms"),
            F.max(F.coalesce("ended_ms", "started_ms")).alias("ended_ms"),
            F.min("rebalance").alias("first_rebalance"),
            F.count("*").alias("rebalances"),
            F.count_distinct("trigger_member_id").alias("trigger_members"),
            F.mode("trigger_reason", deterministic=True).alias("usual_reason"),
            F.mode("trigger_member_id", deterministic=True).alias("usual_member_id"),
            F.sum(F.coalesce("unowned_partition_ms", F.lit(0))).alias("unowned_partition_ms"),
        )
        .drop("storm")
    )
