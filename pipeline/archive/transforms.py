"""From the connector's rows to the archive's: pure functions of frames."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.schema import RECORD, conform

# Python ends its dates with the year 9999, so delta-rs cannot read a table that holds a later date.
FIRST_DAY, LAST_DAY = "0001-01-01", "9999-12-31"


def to_records(rows: DataFrame) -> DataFrame:
    """The columns of `RECORD` from Spark's Kafka connector's, read with headers."""
    kind = F.when(F.col("timestampType") == 0, "create_time").when(F.col("timestampType") == 1, "log_append_time")
    day = F.greatest(F.least(F.to_date("timestamp"), F.to_date(F.lit(LAST_DAY))), F.to_date(F.lit(FIRST_DAY)))
    return conform(rows.withColumn("timestamp_type", kind.otherwise("none")).withColumn("date", day), RECORD)
