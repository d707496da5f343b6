"""Hash an archive's records: pure functions of frames.

The one idea: a record's hash covers its offset, timestamp, key, value and headers in one unambiguous text; a block's
hash covers the hashes of its records in the order of offsets. Both formats of tables, and any order of rows, give the
same hashes.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, IntegerType, LongType, StringType, StructField, StructType

from pipeline.schema import conform
from pipeline.verify.sums import BLOCK, headers_column

BLOCK_HASHES = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("date", DateType()),
        StructField("block", LongType()),
        StructField("first", LongType()),
        StructField("last", LongType()),
        StructField("records", LongType()),
        StructField("hash", StringType()),
    ]
)


def block_hashes(records: DataFrame) -> DataFrame:
    """Return a row per topic, partition, day and block of `BLOCK` offsets."""
    hashed = records.select(
        "topic", "partition", "date", "offset", F.floor(F.col("offset") / BLOCK).alias("block"),
        F.sha2(_encoded(), 256).alias("record"),
    )  # fmt: skip
    found = hashed.groupBy("topic", "partition", "date", "block").agg(
        F.min("offset").alias("first"),
        F.max("offset").alias("last"),
        F.count(F.lit(1)).alias("records"),
        F.array_sort(F.collect_list(F.struct("offset", "record"))).alias("all"),
    )
    text = F.array_join(F.transform("all", lambda each: each["record"]), "")
    return conform(found.withColumn("hash", F.sha2(text.cast("binary"), 256)), BLOCK_HASHES)


def _encoded() -> Column:
    """Return a record as bytes. Lengths come first, so no two records have the same bytes; "-" stands for a null."""
    headers = F.coalesce(headers_column(), F.lit(b""))
    head = F.concat_ws(
        " ", F.col("offset").cast("string"), F.unix_millis("timestamp").cast("string"), "timestamp_type",
        _length("key"), _length("value"),
    )  # fmt: skip
    key, value = (F.coalesce(name, F.lit(b"")) for name in ("key", "value"))
    return F.concat(F.encode(F.concat(head, F.lit("\n")), "UTF-8"), key, value, headers)


def _length(name: str) -> Column:
    return F.coalesce(F.octet_length(name).cast("string"), F.lit("-"))
