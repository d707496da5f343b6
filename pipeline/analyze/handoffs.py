"""One row per partition that moved to another member, and the cost of the move: records processed twice or never.

A Fetch does not name the member. So the gateway alone cannot know exactly which member read which records. Separate
columns hold three results. duplicates_min is a lower bound: a refused commit proves that the old owner processed these
records, and the new owner began before them. duplicates_max is an upper bound: the old owner was served these records.
duplicates and gap_records are exact, but need the members' own logs, which a test harness has.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from pipeline.analyze.journal import Journal

FORCED = ("timeout", "client_cap")
_KEY = ("group_id", "topic", "partition")


def handoffs(journal: Journal, moves: DataFrame, takeovers: DataFrame, ownership: DataFrame) -> DataFrame:
    """Return the table `handoff`."""
    held = ownership.where(F.col("assigned_seq").isNotNull()).select(
        "era", *_KEY, F.col("assigned_seq").alias("move_seq"), F.col("from_ms").alias("taken_ms")
    )
    let_go = (
        ownership.groupBy("era", *_KEY, "member_id")
        .agg(F.sort_array(F.collect_list(F.struct("to_seq", "to_ms"))).alias("releases"))
        .withColumnRenamed("member_id", "source_member_id")
    )
    order = Window.partitionBy("era", *_KEY).orderBy("move_seq")
    stretches = (
        takeovers.withColumn("owner_refused", F.lag("own_refused").over(order))
        .withColumn("owner_read_to", F.lag("last_position").over(order))
        .where(F.col("move_seq").isNotNull())
    )
    waits = _waits(journal)
    last_release = F.element_at(F.filter("releases", lambda release: release.to_seq < F.col("move_seq")), -1)
    moved = (
        moves.join(held, ["era", *_KEY, "move_seq"], "left")
        .join(let_go, ["era", *_KEY, "source_member_id"], "left")
        .withColumn(
            "let_go_ms",
            F.when(
                F.size(F.filter("releases", lambda release: release.to_seq < F.col("move_seq"))) > 0, last_release.to_ms
            ),
        )
        .join(stretches, ["era", *_KEY, "move_seq"], "left")
        .join(waits, ["era", *_KEY, "target_member_id", "generation_id"], "left")
    )
    start = F.col("start_offset")
    proven = F.greatest(F.coalesce("source_refused", F.lit(-1)), F.coalesce("owner_refused", F.lit(-1)))
    # Offset -1 means that nothing was committed. The new owner then begins where the client's reset policy decides: at
    # the log's start at the earliest.
    begins_at = F.when(start >= 0, start).otherwise(F.col("log_start_offset"))
    reached = F.greatest(F.coalesce("mark_offset", F.lit(-1)), F.coalesce("owner_read_to", F.lit(-1)))
    return moved.select(
        *_KEY,
        "rebalance",
        "generation_id",
        "move_seq",
        "source_member_id",
        "target_member_id",
        "assigned_ms",
        "let_go_ms",
        "taken_ms",
        F.greatest(F.lit(0), F.col("taken_ms") - F.col("let_go_ms")).alias("unowned_ms"),
        "mode",
        F.col("ended_reason"),
        F.coalesce(F.col("ended_reason").isin(*FORCED), F.lit(False)).alias("forced"),
        "wait_ms",
        "start_offset",
        F.when(start.isNotNull(), F.greatest(F.lit(0), F.when(proven >= 0, proven - begins_at).otherwise(F.lit(0))))
        .cast("long")
        .alias("duplicates_min"),
        F.when(start.isNotNull() & (reached >= 0), F.greatest(F.lit(0), reached - begins_at))
        .cast("long")
        .alias("duplicates_max"),
        F.greatest(F.lit(0), F.when(F.col("first_position").isNotNull(), F.col("first_position") - begins_at)).alias(
            "skipped"
        ),
    )


def _waits(journal: Journal) -> DataFrame:
    """Return the handoffs that the coordinator reported: one row per partition, target and generation."""
    return journal.handoff.groupBy("era", *_KEY, "target_member_id", "generation_id").agg(
        F.max("mode").alias("mode"),
        F.max("mark_offset").alias("mark_offset"),
        F.max_by("reason", "seq").alias("ended_reason"),
        F.max("wait_ms").alias("wait_ms"),
    )


def delivered(delivery: DataFrame) -> DataFrame:
    """Return, for each partition and each of its owners in turn, the records that an earlier owner had already
    processed, and the records that no member processed.

    `delivery` holds the members' own logs (journal.DELIVERY): runs of offsets in the order of time.
    """
    order = Window.partitionBy(*_KEY).orderBy("at_ms", "first_offset")
    before = order.rowsBetween(Window.unboundedPreceding, -1)
    so_far = order.rowsBetween(Window.unboundedPreceding, 0)
    # `least` and `greatest` ignore nulls. So the first run of a partition, which has no run before it, repeats no
    # records.
    again = F.when(
        F.col("reached").isNotNull() & (F.col("reached") >= F.col("first_offset")),
        F.least("reached", "last_offset") - F.col("first_offset") + 1,
    ).otherwise(0)
    missed = F.when(
        F.col("first_offset") > F.col("reached") + 1, F.col("first_offset") - F.col("reached") - 1
    ).otherwise(0)
    changed = F.when(F.col("member_id") == F.lag("member_id").over(order), 0).otherwise(1)
    return (
        delivery.withColumn("reached", F.max("last_offset").over(before))
        .withColumn("duplicates", again)
        .withColumn("gap_records", missed)
        .withColumn("stint", F.sum(changed).over(so_far))
        .groupBy(*_KEY, "stint")
        .agg(
            F.first("member_id").alias("member_id"),
            F.min("at_ms").alias("begins_ms"),
            F.max("at_ms").alias("ends_ms"),
            F.sum("duplicates").alias("duplicates"),
            F.sum("gap_records").alias("gap_records"),
            F.sum(F.col("last_offset") - F.col("first_offset") + 1).alias("records"),
        )
    )


def with_exact(handoff: DataFrame, delivery: DataFrame) -> DataFrame:
    """Add duplicates and gap_records, which the members' logs show between this move and the next one."""
    order = Window.partitionBy(*_KEY).orderBy("begins_ms", "at_once")
    stints = delivered(delivery).select(
        *_KEY,
        "begins_ms",
        F.lit(1).alias("at_once"),
        F.lit(None).cast("long").alias("move_seq"),
        "duplicates",
        "gap_records",
    )
    borders = handoff.select(
        *_KEY,
        F.coalesce("taken_ms", "assigned_ms").alias("begins_ms"),
        F.lit(0).alias("at_once"),
        "move_seq",
        F.lit(0).cast("long").alias("duplicates"),
        F.lit(0).cast("long").alias("gap_records"),
    )
    summed = (
        stints.unionByName(borders)
        .withColumn(
            "move_seq", F.last("move_seq", ignorenulls=True).over(order.rowsBetween(Window.unboundedPreceding, 0))
        )
        .where(F.col("move_seq").isNotNull())
        .groupBy(*_KEY, "move_seq")
        .agg(F.sum("duplicates").alias("duplicates"), F.sum("gap_records").alias("gap_records"))
    )
    return handoff.join(summed, [*_KEY, "move_seq"], "left")
