"""Turn the rows of Spark's connector into an archive's records, and select ranges of them: pure functions of frames."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.archive.plan import Range
from pipeline.schema import RECORD, conform

# Python ends its dates with the year 9999, so delta-rs cannot read a table that holds a later date.
FIRST_DAY, LAST_DAY = "0001-01-01", "9999-12-31"


def to_records(rows: DataFrame) -> DataFrame:
    """Return `RECORD` from the rows of Spark's Kafka connector, which must be read with headers."""
    kind = F.when(F.col("timestampType") == 0, "create_time").when(F.col("timestampType") == 1, "log_append_time")
    return conform(rows.withColumn("timestamp_type", kind.otherwise("none")).withColumn("date", _day()), RECORD)


def misdated(records: DataFrame) -> DataFrame:
    """Return the rows whose date does not fit their timestamp, by partition and date: first, last and number of
    records.
    """
    return (
        records.where(~F.col("date").eqNullSafe(_day()))
        .groupBy("topic", "partition", "date")
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"), F.count(F.lit(1)).alias("records"))
        .orderBy("topic", "partition", "first")
    )


def _day() -> Column:
    return F.greatest(F.least(F.to_date("timestamp"), F.to_date(F.lit(LAST_DAY))), F.to_date(F.lit(FIRST_DAY)))


def within(records: DataFrame, ranges: Sequence[Range]) -> DataFrame:
    """Return the rows of `ranges`. A filter by topics and by the span of offsets lets Spark skip files."""
    rows = [(each.topic, each.partition, each.start, each.end) for each in ranges]
    frame = records.sparkSession.createDataFrame(rows, "r_topic string, r_partition int, r_start long, r_end long")
    held = (
        (F.col("topic") == F.col("r_topic"))
        & (F.col("partition") == F.col("r_partition"))
        & (F.col("offset") >= F.col("r_start"))
        & (F.col("offset") < F.col("r_end"))
    )
    span = F.col("topic").isin(sorted({each.topic for each in ranges})) & F.col("offset").between(
        min((each.start for each in ranges), default=0), max((each.end for each in ranges), default=0)
    )
    return records.where(span).join(F.broadcast(frame), held, "left_semi")
