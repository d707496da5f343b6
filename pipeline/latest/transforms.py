"""Reduce archived records to the newest row of each key, or to all its versions: pure functions of frames."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from pipeline.schema import CHANGE, HISTORY, conform

# Debezium: c (create), u (update) and r (read, of its first snapshot) have `after`; d (delete) has only `before`.
DELETE = "d"
WRITES = ("c", "u", "r")


def plain(records: DataFrame) -> DataFrame:
    """Return `CHANGE` from records whose value is the row. A null value deletes its key."""
    return _changes(records, F.col("value").isNull(), F.col("value"))


def debezium(records: DataFrame) -> DataFrame:
    """Return `CHANGE` from Debezium's JSON, with or without its schema. `value` is the row after the change.

    A null value is the tombstone behind a delete. Records of another operation (truncate, message) are left out, and so
    are those of `foreign`.
    """
    opened = records.withColumns({"_operation": _operation(), "_after": _after()})
    deleted = F.col("value").isNull() | (F.col("_operation") == DELETE)
    rows = opened.where(deleted | (F.col("_operation").isin(*WRITES) & F.col("_after").isNotNull()))
    return _changes(rows, deleted, F.when(~deleted, F.col("_after").cast("binary")))


def foreign(records: DataFrame) -> DataFrame:
    """Return the records with a key whose value is not Debezium's JSON, or lacks the row that it writes.

    MongoDB's connector leaves out the row of an update if it does not look it up, or if the row was deleted before.
    """
    lacks_row = _operation().isin(*WRITES) & _after().isNull()
    return records.where(F.col("key").isNotNull() & F.col("value").isNotNull() & (_operation().isNull() | lacks_row))


def _operation() -> Column:
    return F.try_variant_get(_envelope(), "$.op", "string")


def _after() -> Column:
    """Return the row after the change as JSON, null if the envelope has none. MongoDB's connector writes it as a text
    of JSON.
    """
    return F.try_variant_get(_envelope(), "$.after", "string")


def _envelope() -> Column:
    told = F.try_parse_json(F.col("value").cast("string"))
    return F.coalesce(F.try_variant_get(told, "$.payload", "variant"), told)


def _changes(records: DataFrame, deleted: Column, value: Column) -> DataFrame:
    return conform(
        records.where(F.col("key").isNotNull()).select(
            "topic", "key", deleted.alias("deleted"), value.alias("value"), "partition", "offset", "timestamp"
        ),
        CHANGE,
    )


def newest(changes: DataFrame) -> DataFrame:
    """Return the last change of each key. A key that has moved to another partition is ordered by time. `_ends` has the
    last change of each partition, because it replaces the key's row of that partition even if a clock went backwards.
    """
    last = Window.partitionBy("topic", "key").orderBy(F.col("timestamp").desc(), F.col("offset").desc())
    within = Window.partitionBy("topic", "key", "partition").orderBy(F.col("offset").desc())
    return (
        changes.withColumn("_place", F.row_number().over(within))
        .where("_place = 1")
        .withColumn("_ends", F.collect_list(F.struct("partition", "offset")).over(Window.partitionBy("topic", "key")))
        .withColumn("_place", F.row_number().over(last))
        .where("_place = 1")
        .drop("_place")
    )


def versions(changes: DataFrame, held: DataFrame) -> DataFrame:
    """Return the rows of `HISTORY` that `changes` make or end, from those that the table holds already.

    The versions of a key follow each other by offset within a partition. Between partitions their times decide, so a
    record of an earlier time than its predecessor's is valid from the predecessor's.
    """
    key = ["topic", "key"]
    since = changes.groupBy(*key).agg(F.min("timestamp").alias("_since"))
    # An earlier version that ended before all changes of its key does not change.
    touched = held.join(since, key).where("valid_to IS NULL OR valid_to >= _since").drop("_since")
    fresh = changes.join(touched.select(*key, "partition", "offset"), [*key, "partition", "offset"], "left_anti")
    events = touched.withColumns({"deleted": F.lit(False), "_reach": F.greatest("valid_from", "valid_to")}).unionByName(
        fresh.withColumn("_reach", F.col("timestamp")), allowMissingColumns=True
    )
    so_far = Window.partitionBy(*key, "partition").orderBy("offset")
    events = events.withColumn("valid_from", F.coalesce("valid_from", F.max("_reach").over(so_far)))
    following = Window.partitionBy(*key).orderBy("valid_from", "partition", "offset")
    ended = events.withColumns(
        {"_next": F.lead("valid_from").over(following), "_next_offset": F.lead("offset").over(following)}
    ).where(~F.col("deleted"))
    earlier = F.col("valid_to").isNull() | (F.col("_next") < F.col("valid_to"))
    return conform(
        ended.withColumn(
            "valid_to_offset", F.when(earlier, F.col("_next_offset")).otherwise(F.col("valid_to_offset"))
        ).withColumn("valid_to", F.least("valid_to", "_next")),
        HISTORY,
    )
