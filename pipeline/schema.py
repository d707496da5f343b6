"""The tables of the pipeline. Every column is declared once, with a description.

The one idea: a job creates its tables from these declarations, and every transform ends with a call of `conform`. So a
missing column, or one of another type, is an error in the transform that made it, and not in a later reader.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

# A record as it was in its topic. Columns by which readers filter come first, because Delta keeps statistics of the
# first columns.
RECORD = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestamp_type", StringType()),  # create_time, log_append_time or none
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS),
        StructField("date", DateType()),  # the date of `timestamp`, in UTC, within years 1 to 9999
    ]
)
TIMESTAMP_TYPES = ("none", "create_time", "log_append_time")  # as in librdkafka's numbering
ARCHIVE_PARTITIONS = ("topic", "date")
ARCHIVE_CLUSTER = ("partition", "offset")

DATA, RESCUED = "data", "_rescued"  # columns that typed archives add

DEAD_LETTER = StructType([*RECORD.fields, StructField("reason", StringType())])

# A change of a key's row, and the newest row of a key, each with the place of its record.
CHANGE = StructType(
    [
        StructField("topic", StringType()),
        StructField("key", BinaryType()),
        StructField("deleted", BooleanType()),
        StructField("value", BinaryType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
NEWEST = StructType([field for field in CHANGE.fields if field.name != "deleted"])
# A version of a key's row: from the record that wrote the version to the record that ended it. The current version has
# no end.
HISTORY = StructType(
    [
        *NEWEST.fields,
        StructField("valid_from", TimestampType()),
        StructField("valid_to", TimestampType()),
        StructField("valid_to_offset", LongType()),
    ]
)

# The target of a run of source offsets: source_from + i is at target_from + i for i < records.
OFFSET_MAP = StructType(
    [
        StructField("replay", StringType()),
        StructField("batch", LongType()),
        StructField("source_topic", StringType()),
        StructField("source_partition", IntegerType()),
        StructField("source_from", LongType()),
        StructField("target_topic", StringType()),
        StructField("target_partition", IntegerType()),
        StructField("target_from", LongType()),
        StructField("records", LongType()),
    ]
)


def conform(frame: DataFrame, schema: StructType) -> DataFrame:
    """Return exactly the columns of `schema`, in its order. Raise ValueError if a column is missing or has another
    type.
    """
    for field in schema.fields:
        if field.name not in frame.columns:
            raise ValueError(f"the column {field.name} is missing")
        found = frame.schema[field.name].dataType
        if found.simpleString() != field.dataType.simpleString():
            raise ValueError(f"{field.name} is {found.simpleString()} instead of {field.dataType.simpleString()}")
    return frame.select(*(F.col(f"`{field.name}`") for field in schema.fields))
