"""Derive from commits: lag over time, the offset at which a new owner began, and the offset that the old owner had
reached.

One walk over the offsets of each partition, in the order of `seq`, yields all of it. The journal may hold hundreds of
millions of commits, and sorting them is the most expensive step.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from pipeline.analyze.journal import Journal

_PARTITION = ("group_id", "topic", "partition")


def _accepted() -> Column:
    return (F.col("kind") == "commit") & (F.col("error_code") == 0)


def _refused() -> Column:
    return (F.col("kind") == "commit") & (F.col("error_code") != 0)


def walk(journal: Journal, moves: DataFrame) -> DataFrame:
    """Return every row of offsets, each with the partition's last move before it (null before the first move) and the
    previously committed offset.
    """
    offset_columns = (
        "era",
        *_PARTITION,
        "seq",
        "at_ms",
        "kind",
        "generation_id",
        "member_id",
        "offset",
        "log_start_offset",
        "error_code",
    )
    moved = "struct<move_seq: bigint, source_member_id: string, target_member_id: string>"
    rows = journal.offset.select(*offset_columns, F.lit(None).cast(moved).alias("moved"))
    borders = moves.select(
        "era",
        *_PARTITION,
        F.col("move_seq").alias("seq"),
        F.col("assigned_ms").alias("at_ms"),
        F.lit("move").alias("kind"),
        F.lit(-1).alias("generation_id"),
        F.lit(None).cast("string").alias("member_id"),
        F.lit(-1).cast("long").alias("offset"),
        F.lit(None).cast("long").alias("log_start_offset"),
        F.lit(0).cast("short").alias("error_code"),
        F.struct("move_seq", "source_member_id", "target_member_id").alias("moved"),
    )
    # When an administrator deletes the offsets of a group, the committed offset is unknown after that.
    removals = journal.event.where(F.col("kind").isin("offsets_removed", "deleted")).select(
        "group_id", F.col("seq").alias("removed_seq")
    )
    order = Window.partitionBy("era", *_PARTITION).orderBy("seq")
    so_far = order.rowsBetween(Window.unboundedPreceding, 0)
    earlier = order.rowsBetween(Window.unboundedPreceding, -1)
    accepted = F.when(_accepted(), F.struct(F.col("seq"), F.col("offset")))
    walked = (
        rows.unionByName(borders)
        .withColumn("move", F.last("moved", ignorenulls=True).over(so_far))
        .withColumn("committed", F.last(accepted, ignorenulls=True).over(earlier))
        .where(F.col("kind") != "move")
        .drop("moved")
    )
    last_removed = removals.groupBy("group_id").agg(F.sort_array(F.collect_list("removed_seq")).alias("removed"))
    removed_between = F.exists(
        F.coalesce("removed", F.array().cast("array<bigint>")),
        lambda seq: (seq > F.col("committed.seq")) & (seq < F.col("seq")),
    )
    return (
        walked.join(F.broadcast(last_removed), "group_id", "left")
        .withColumn("committed_seq", F.when(~removed_between, F.col("committed.seq")))
        .withColumn("committed_before", F.when(~removed_between, F.col("committed.offset")))
        .drop("committed", "removed")
    )


def told_otherwise() -> Column:
    """Return a condition on rows of `walk`. It is true if OffsetFetch returned another offset than the previously
    committed one.
    """
    return (
        (F.col("kind") == "fetch")
        & (F.col("error_code") == 0)
        & F.col("committed_before").isNotNull()
        & (F.col("offset") != F.col("committed_before"))
    )


def takeovers(walked: DataFrame) -> DataFrame:
    """Return, for each partition and each move (and the time before the first move), the offsets that the owner
    received, read, and tried to commit.

    Every aggregate is a number, because Spark sorts all rows once more if an aggregate's state is a struct or a text.
    """
    target = F.col("move.target_member_id")
    source = F.col("move.source_member_id")
    told = F.when(
        (F.col("kind") == "fetch") & (F.col("member_id").isNull() | (F.col("member_id") == target)), F.col("seq")
    )
    began = F.when((F.col("kind") == "position") & (F.col("member_id") == target), F.col("seq"))
    read = F.when((F.col("kind") == "position") & F.coalesce(F.col("member_id") == target, F.lit(True)), F.col("seq"))
    return walked.groupBy("era", *_PARTITION, F.col("move.move_seq").alias("move_seq")).agg(
        F.coalesce(F.min_by("offset", told), F.min_by("committed_before", "seq")).alias("start_offset"),
        F.min_by("log_start_offset", told).alias("log_start_offset"),
        F.min_by("offset", began).alias("first_position"),
        # Refused commits are those of the member that lost the partition, after the loss, and those of its owner while
        # it owned it.
        F.max(F.when(_refused() & (F.col("member_id") == source), F.col("offset"))).alias("source_refused"),
        F.max(F.when(_refused() & F.coalesce(F.col("member_id") == target, F.lit(True)), F.col("offset"))).alias(
            "own_refused"
        ),
        F.max_by("offset", read).alias("last_position"),
        F.count_if(told_otherwise()).alias("told_otherwise"),
    )


def lag(offset: DataFrame, *, points: int = 400) -> DataFrame:
    """Return record lag and time lag of each group and partition, reduced to `points` intervals of equal length.

    Each interval keeps its least, greatest and last lag, so no peak is lost. time_lag_max_ms is the age of the oldest
    unread record at the moment of the greatest lag. The age of a record is counted from the first time at which the
    journal shows a log end beyond the record.
    """
    commits = offset.where(_accepted() & F.col("log_end_offset").isNotNull())
    edges = commits.groupBy("group_id").agg(
        F.min("at_ms").alias("begins_ms"),
        F.max("at_ms").alias("ends_ms"),
        F.min("seq").alias("begins_seq"),
        (F.max("seq") - F.min("seq") + 1).alias("seqs"),
    )
    # One number holds the greatest lag and the last row with that lag, because Spark would sort all rows for an
    # aggregate of structs. Lags that are too great for this number count as equal here. The column lag_max still
    # distinguishes them.
    most = F.expr(f"{2**62} div seqs")
    rank = F.least("record_lag", most) * F.col("seqs") + (F.col("seq") - F.col("begins_seq"))
    width = F.greatest(F.lit(1), F.ceil((F.col("ends_ms") - F.col("begins_ms") + 1) / points)).cast("long")
    placed = (
        commits.join(F.broadcast(edges), "group_id")
        .withColumn("width_ms", width)
        .withColumn("bucket_ms", F.col("at_ms") - (F.col("at_ms") - F.col("begins_ms")) % F.col("width_ms"))
        .withColumn("record_lag", F.greatest(F.lit(0), F.col("log_end_offset") - F.col("offset")))
        .withColumn("rank", rank)
    )
    thinned = placed.groupBy(*_PARTITION, "bucket_ms").agg(
        F.min("record_lag").alias("lag_min"),
        F.max("record_lag").alias("lag_max"),
        F.max_by("record_lag", "seq").alias("lag_last"),
        F.max_by("at_ms", "rank").alias("worst_ms"),
        F.max_by("offset", "rank").alias("worst_offset"),
        F.count("*").alias("commits"),
    )
    # Find the first time at which the log end was beyond an offset. To do so, sort log ends and questions (offsets)
    # together by offset, and take the next log end. A question carries all known values of its interval, so the answer
    # needs no join.
    known = ("group_id", "bucket_ms", "lag_min", "lag_max", "lag_last", "worst_ms", "commits")
    asked = "struct<group_id: string, " + ", ".join(f"{name}: bigint" for name in known[1:]) + ">"
    ends = offset.where(F.col("log_end_offset").isNotNull()).select(
        "topic",
        "partition",
        F.col("log_end_offset").alias("position"),
        F.col("at_ms").alias("seen_ms"),
        F.lit(None).cast(asked).alias("asked"),
    )
    questions = thinned.select(
        "topic",
        "partition",
        F.col("worst_offset").alias("position"),
        F.lit(None).cast("long").alias("seen_ms"),
        F.struct(*known).alias("asked"),
    )
    # A log end that equals the offset is not beyond it. So in descending order it comes after the question. The order
    # is descending because a frame that extends to the end of its partition costs Spark the square of the rows.
    order = Window.partitionBy("topic", "partition").orderBy(F.desc("position"), F.col("asked").isNotNull().desc())
    return (
        ends.unionByName(questions)
        .withColumn("written_ms", F.min("seen_ms").over(order.rowsBetween(Window.unboundedPreceding, -1)))
        .where(F.col("asked").isNotNull())
        .select("topic", "partition", "asked.*", "written_ms")
        .select(
            *_PARTITION,
            "bucket_ms",
            "lag_min",
            "lag_max",
            "lag_last",
            F.when(F.col("lag_max") == 0, F.lit(0))
            .otherwise(F.greatest(F.lit(0), F.col("worst_ms") - F.col("written_ms")))
            .cast("long")
            .alias("time_lag_max_ms"),
            "commits",
        )
    )
