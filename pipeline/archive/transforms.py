"""From the connector's rows to the archive's: pure functions of frames."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.schema import RECORD, conform


def to_records(rows: DataFrame) -> DataFrame:
    """The columns of `RECORD` from Spark's Kafka connector's, read with headers."""
    kind = F.when(F.col("timestampType") == 0, "create_time").when(F.col("timestampType") == 1, "log_append_time")
    return conform(
        rows.withColumn("timestamp_type", kind.otherwise("none")).withColumn("date", F.to_date("timestamp")), RECORD
    )
