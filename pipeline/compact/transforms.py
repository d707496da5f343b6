"""Choose the parts of an archive that are worth rewriting: a pure function of the frame of its files."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

SMALL = 0.5  # a share of the target size


def worth_compacting(files: DataFrame, target_bytes: int, least_files: int) -> DataFrame:
    """Return the topics and dates that have at least `least_files` small files: topic, date, files, small, bytes. Those
    with most files come first.

    `files` has topic, date and size, a row per file.
    """
    small = F.col("size") < int(target_bytes * SMALL)
    return (
        files.groupBy("topic", "date")
        .agg(
            F.count(F.lit(1)).alias("files"),
            F.sum(F.when(small, 1).otherwise(0)).alias("small"),
            F.sum("size").alias("bytes"),
        )
        .where(F.col("small") >= least_files)
        .orderBy(F.col("small").desc(), "topic", "date")
    )
