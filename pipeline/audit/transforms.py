"""Describe a topic's records: pure transforms of the table that `archive` writes (pipeline/schema.py)."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

LATE_MS = 1_000
"""A record is late if an earlier record of its partition has a timestamp that is newer by this much."""
SIZE_CLASSES = 24
_SECOND, _MINUTE, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000
SPANS_MS = (
    100, _SECOND, 10 * _SECOND, _MINUTE, 10 * _MINUTE, _HOUR, 6 * _HOUR, _DAY, 7 * _DAY, 30 * _DAY, 365 * _DAY,
    10_000 * _DAY,
)  # fmt: skip
MOST_SPANS = 100
YEAR_9500_MS = 237_623_846_400_000


def measured(records: DataFrame) -> DataFrame:
    """Return records with their sizes in bytes and their time in ms, without their values."""

    def size(part: Column) -> Column:
        return F.coalesce(F.octet_length(part), F.lit(0))

    headers = F.aggregate(
        F.coalesce("headers", F.array().cast("array<struct<key:string,value:binary>>")),
        F.lit(0),
        lambda total, header: total + size(header.key) + size(header.value),
    )
    return records.select(
        "topic",
        "partition",
        "offset",
        "key",
        size(F.col("key")).alias("key_bytes"),
        size(F.col("value")).alias("value_bytes"),
        F.col("value").isNull().alias("tombstone"),
        headers.alias("header_bytes"),
        F.unix_millis("timestamp").alias("at_ms"),
    )


def partitions(records: DataFrame) -> DataFrame:
    """Return a row per partition: records, bytes, their share of the topic, offsets and times."""
    whole = Window.partitionBy("topic")
    size = F.col("key_bytes") + F.col("value_bytes") + F.col("header_bytes")
    return (
        records.groupBy("topic", "partition")
        .agg(
            F.count("*").alias("records"),
            F.sum(size).alias("bytes"),
            F.min("offset").alias("first_offset"),
            F.max("offset").alias("last_offset"),
            F.min("at_ms").alias("first_ms"),
            F.max("at_ms").alias("last_ms"),
        )
        .withColumn("share", F.col("records") / F.sum("records").over(whole))
        .withColumn("bytes_share", F.col("bytes") / F.greatest(F.lit(1), F.sum("bytes").over(whole)))
    )


def over_time(records: DataFrame) -> DataFrame:
    """Return a row per topic and span of time with records: its begin, its length, records and bytes.

    All spans of a topic have the same length: the shortest of `SPANS_MS` that gives at most `MOST_SPANS` spans. Records
    without a time are left out. So are records after the year 9499, because a chart also shows some time after its last
    record, and Python's calendar ends with the year 9999.
    """
    timed = records.where((F.col("at_ms") >= 0) & (F.col("at_ms") < YEAR_9500_MS))
    whole = timed.groupBy("topic").agg((F.max("at_ms") - F.min("at_ms")).alias("_reach"))
    span = F.lit(SPANS_MS[-1])
    for each in reversed(SPANS_MS[:-1]):
        span = F.when(F.col("_reach") < each * (MOST_SPANS - 1), each).otherwise(span)
    size = F.col("key_bytes") + F.col("value_bytes") + F.col("header_bytes")
    return (
        timed.join(F.broadcast(whole.withColumn("span_ms", span.cast("long"))), "topic")
        .withColumn("begins_ms", F.floor(F.col("at_ms") / F.col("span_ms")) * F.col("span_ms"))
        .groupBy("topic", "span_ms", "begins_ms")
        .agg(
            F.count("*").alias("records"),
            F.sum(size).alias("bytes"),
            F.count_if(F.col("key").isNull()).alias("without_key"),
            F.count_if(F.col("tombstone")).alias("tombstones"),
        )
    )


def keys(records: DataFrame) -> DataFrame:
    """Return a row per topic: the number of keys, the most frequent key, and keys in several partitions."""
    per_key = (
        records.where(F.col("key").isNotNull())
        .groupBy("topic", "key")
        .agg(F.count("*").alias("records"), F.count_distinct("partition").alias("partitions"))
    )
    told = per_key.groupBy("topic").agg(
        F.count("*").alias("keys"),
        F.max("records").alias("hottest_records"),
        F.max_by("key", "records").alias("hottest_key"),
        F.count_if(F.col("partitions") > 1).alias("keys_in_several_partitions"),
        F.sum("records").alias("keyed_records"),
    )
    totals = records.groupBy("topic").agg(
        F.count("*").alias("records"), F.count_if(F.col("tombstone")).alias("tombstones")
    )
    return totals.join(told, "topic", "left").fillna(
        0, ["keys", "keyed_records", "keys_in_several_partitions", "hottest_records"]
    )


def hottest_keys(records: DataFrame, most: int = 20) -> DataFrame:
    """Return the most frequent keys of each topic, with the partition of each and its share of the topic."""
    rank = Window.partitionBy("topic").orderBy(F.desc("records"), "key")
    totals = records.groupBy("topic").agg(F.count("*").alias("all_records"))
    return (
        records.where(F.col("key").isNotNull())
        .groupBy("topic", "key")
        .agg(
            F.count("*").alias("records"),
            F.min("partition").alias("partition"),
            F.count_distinct("partition").alias("partitions"),
        )
        .withColumn("rank", F.row_number().over(rank))
        .where(F.col("rank") <= most)
        .join(totals, "topic")
        .withColumn("share", F.col("records") / F.col("all_records"))
        .drop("all_records")
    )


def sizes(records: DataFrame) -> DataFrame:
    """Return the number of values in each size class. Class n has sizes from 2^(n-1) to below 2^n, class 0 size 0."""
    bits = F.when(F.col("value_bytes") == 0, 0).otherwise(F.floor(F.log2("value_bytes")) + 1)
    return records.groupBy("topic", F.least(bits, F.lit(SIZE_CLASSES)).cast("int").alias("size_class")).agg(
        F.count("*").alias("records")
    )


def size_figures(records: DataFrame) -> DataFrame:
    """Return the median, 99th percentile and maximum of the value size of each topic."""
    return records.groupBy("topic").agg(
        F.percentile_approx("value_bytes", F.array(F.lit(0.5), F.lit(0.99)), F.lit(10_000)).alias("points"),
        F.max("value_bytes").alias("largest"),
        F.avg("key_bytes").alias("key_bytes"),
        F.avg("header_bytes").alias("header_bytes"),
    )


def lateness(records: DataFrame) -> DataFrame:
    """Return a row per topic: how far timestamps are behind those of earlier records, and how far partitions are apart
    in time.
    """
    before = Window.partitionBy("topic", "partition").orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    late_ms = F.greatest(F.lit(0), F.coalesce(F.max("at_ms").over(before) - F.col("at_ms"), F.lit(0)))
    timed = records.where(F.col("at_ms") >= 0).withColumn("late_ms", late_ms)
    ends = (
        timed.groupBy("topic", "partition")
        .agg(F.max("at_ms").alias("newest_ms"))
        .groupBy("topic")
        .agg((F.max("newest_ms") - F.min("newest_ms")).alias("partition_skew_ms"))
    )
    untimed = records.groupBy("topic").agg(
        F.count_if(F.coalesce(F.col("at_ms") < 0, F.lit(True))).alias("without_time")
    )
    figures = timed.groupBy("topic").agg(
        F.count("*").alias("timed"),
        F.count_if(F.col("late_ms") > LATE_MS).alias("late"),
        F.percentile_approx("late_ms", F.lit(0.99), F.lit(10_000)).alias("late_p99_ms"),
        F.max("late_ms").alias("late_max_ms"),
    )
    return untimed.join(figures, "topic", "left").join(ends, "topic", "left")
