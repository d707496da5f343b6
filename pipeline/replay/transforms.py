"""Turn archived records into records to produce, and an offset map into a group's offsets: pure functions of frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType

from pipeline.archive.plan import Range
from pipeline.archive.transforms import within
from pipeline.partitioners import murmur2_of
from pipeline.replay.plan import Plan
from pipeline.schema import HEADERS


def select_records(records: DataFrame, plan: Plan, ranges: Sequence[Range]) -> DataFrame:
    """Return the records of `ranges` within the plan's times and condition."""
    chosen = within(records, ranges)
    if plan.from_ms is not None:
        chosen = chosen.where(F.col("timestamp") >= F.timestamp_millis(F.lit(plan.from_ms)))
    if plan.until_ms is not None:
        chosen = chosen.where(F.col("timestamp") < F.timestamp_millis(F.lit(plan.until_ms)))
    return chosen if plan.condition is None else chosen.where(plan.condition)


def with_targets(records: DataFrame, plan: Plan) -> DataFrame:
    """Add the columns target_topic and target_partition."""
    session = records.sparkSession
    # Use broadcast joins. A chain of CASE expressions, one per topic or partition, is a tree that overflows the JVM's
    # stack.
    topics = session.createDataFrame(
        [(source, target, plan.counts.get(target)) for source, target in plan.topics.items()],
        "_source string, target_topic string, _count int",
    )
    found = records.join(F.broadcast(topics), F.col("topic") == F.col("_source"), "left")
    if plan.by_key is not None:
        partition = F.coalesce(_murmur2(F.col("key")), F.col("partition")) % F.col("_count")
    else:
        numbers = session.createDataFrame(list(plan.partitions.items()), "_from int, _to int")
        found = found.join(F.broadcast(numbers), F.col("partition") == F.col("_from"), "left")
        partition = F.coalesce("_to", "partition")
    return found.withColumn("target_partition", partition.cast(IntegerType())).drop("_source", "_count", "_from", "_to")


def _murmur2(key: Column) -> Column:
    def hashed(keys: pd.Series) -> pd.Series:
        there = keys.notna()
        found = pd.Series(pd.NA, index=keys.index, dtype="Int64")
        found[there] = murmur2_of(cast("list[bytes]", keys[there].tolist()))
        return found

    return F.pandas_udf(hashed, LongType())(key)  # type: ignore[call-overload]


def in_order(targeted: DataFrame, plan: Plan, tasks: int) -> DataFrame:
    """Put each target partition into one task, with its records in the order of source topic, partition and offset."""
    places = targeted.sparkSession.createDataFrame(
        [(topic, partition, number % tasks) for number, (topic, partition) in enumerate(sorted(plan.bases))],
        "target_topic string, target_partition int, _task int",
    )
    return (
        targeted.join(F.broadcast(places), ["target_topic", "target_partition"], "left")
        .repartitionById(tasks, F.col("_task"))
        .sortWithinPartitions("target_topic", "target_partition", "topic", "partition", "offset")
        .select(
            "target_topic", "target_partition", "topic", "partition", "offset",
            F.unix_millis("timestamp").alias("timestamp_ms"), "key", "value",
            # For each row, Arrow's writer walks again over all null lists before it, but not over empty lists.
            F.coalesce("headers", F.array().cast(HEADERS)).alias("headers"),
        )
    )  # fmt: skip


def summary(targeted: DataFrame) -> DataFrame:
    """Count records and bytes, and give the first and last offset, per source and target partition."""
    size = F.coalesce(F.octet_length("key"), F.lit(0)) + F.coalesce(F.octet_length("value"), F.lit(0))
    return (
        targeted.groupBy("topic", "partition", "target_topic", "target_partition")
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.sum(size).alias("bytes"),
            F.min("offset").alias("first"),
            F.max("offset").alias("last"),
        )
        .orderBy("topic", "partition")
    )


def written(offset_map: DataFrame) -> DataFrame:
    """Return the number of records per target partition."""
    return offset_map.groupBy("target_topic", "target_partition").agg(F.sum("records").alias("records"))


def translate(committed: DataFrame, offset_map: DataFrame) -> DataFrame:
    """Translate a group's offsets in the source into offsets in the target.

    `committed` has group, topic, partition, offset. The translated offset is the target offset of the first record that
    the group has not read, or the end if the group has read every record. If several source partitions went into one
    target partition, the lowest offset wins, so that the group reads records twice rather than misses one. For the same
    reason, a group that has committed some of them has read nothing of the others. Partitions that were not replayed
    are left out.
    """
    runs = offset_map.select(
        F.col("source_topic").alias("topic"), F.col("source_partition").alias("partition"),
        "source_from", "target_topic", "target_partition", "target_from", "records",
    )  # fmt: skip
    end = F.col("source_from") + F.col("records")
    ahead = F.col("target_from") + F.greatest(F.col("offset") - F.col("source_from"), F.lit(0))
    places = runs.select("topic", "partition", "target_topic", "target_partition").distinct()
    targets = committed.join(places, ["topic", "partition"]).select("group", "target_topic", "target_partition")
    sources = (
        targets.join(places, ["target_topic", "target_partition"]).select("group", "topic", "partition").distinct()
    )
    whole = sources.join(committed, ["group", "topic", "partition"], "left").fillna(0, ["offset"])
    each = (
        whole.join(runs, ["topic", "partition"])
        .withColumn("unread", end > F.col("offset"))
        .groupBy("group", "topic", "partition", "target_topic", "target_partition")
        .agg(
            F.min(F.when(F.col("unread"), ahead)).alias("next"),
            F.max(F.col("target_from") + F.col("records")).alias("behind"),
        )
    )
    return (
        each.groupBy("group", "target_topic", "target_partition")
        .agg(F.coalesce(F.min("next"), F.max("behind")).alias("offset"))
        .orderBy("group", "target_topic", "target_partition")
    )
