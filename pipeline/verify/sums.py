"""Checksums of records, implemented twice: as Spark columns for the archive, and in Python for the topic.

The one idea: offsets are cut into blocks of `BLOCK`. A block's sum of a column is the sum of each record's CRC-32 times
its place in the block. So a value that is changed, missing, doubled or moved to another offset changes the sum. Both
sides must agree on every bit; a test compares them on generated records.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from pipeline.schema import TIMESTAMP_TYPES

BLOCK = 4096
NULL_SUM = 1 << 32  # no CRC-32 is this large
TIME_MODULUS = (1 << 32) - 5
COLUMNS = ("timestamp", "key", "value", "headers")

BLOCK_SUMS = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("block", LongType()),
        StructField("records", LongType()),
        *(StructField(f"{name}_sum", LongType()) for name in COLUMNS),
    ]
)
RECORD_SUMS = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        *(StructField(f"{name}_sum", LongType()) for name in COLUMNS),
    ]
)

Headers = Sequence[tuple[str, bytes | None]] | None


def record_sums(records: DataFrame) -> DataFrame:
    """Return `RECORD_SUMS` for an archive's records."""
    return records.select(
        "topic",
        "partition",
        "offset",
        _time_column().alias("timestamp_sum"),
        crc_column(F.col("key")).alias("key_sum"),
        crc_column(F.col("value")).alias("value_sum"),
        crc_column(headers_column()).alias("headers_sum"),
    )


def block_sums(sums: DataFrame) -> DataFrame:
    """Return `BLOCK_SUMS` from record sums."""
    place = F.col("offset") % BLOCK + 1
    return (
        sums.withColumn("block", F.floor(F.col("offset") / BLOCK))
        .groupBy("topic", "partition", "block")
        .agg(
            F.count(F.lit(1)).alias("records"),
            *(F.sum(F.col(f"{name}_sum") * place).alias(f"{name}_sum") for name in COLUMNS),
        )
    )


def time_sum(timestamp_ms: int, timestamp_type: int) -> int:
    """Return the sum for a timestamp. `timestamp_type` is librdkafka's number."""
    return timestamp_ms % TIME_MODULUS * 4 + timestamp_type


def bytes_sum(value: bytes | None) -> int:
    return NULL_SUM if value is None else zlib.crc32(value)


def headers_sum(headers: Headers) -> int:
    """Return the sum for a record's headers. No headers and an empty list of headers have the same sum."""
    return bytes_sum(headers_text(headers).encode()) if headers else NULL_SUM


def headers_text(headers: Headers) -> str:
    """Return headers as a text that contains the lengths of keys. So different lists of headers
    have different texts.
    """
    return ";".join(f"{len(key)}:{key}={'-' if value is None else value.hex().upper()}" for key, value in headers or ())


def crc_column(column: Column) -> Column:
    """Return `bytes_sum` for a column of bytes."""
    return F.coalesce(F.crc32(column), F.lit(NULL_SUM))


def _time_column() -> Column:
    number = F.lit(0)
    for index, name in enumerate(TIMESTAMP_TYPES):
        number = F.when(F.col("timestamp_type") == name, index).otherwise(number)
    return F.pmod(F.unix_millis("timestamp"), F.lit(TIME_MODULUS).cast(LongType())) * 4 + number


def headers_column() -> Column:
    """Return `headers_text` as bytes, null if there are no headers."""

    def text(header: Column) -> Column:
        value = F.coalesce(F.hex(header["value"]), F.lit("-"))
        return F.concat(F.length(header["key"]).cast(StringType()), F.lit(":"), header["key"], F.lit("="), value)

    joined = F.array_join(F.transform("headers", text), ";")
    return F.when(F.size("headers") > 0, F.encode(joined, "UTF-8"))
