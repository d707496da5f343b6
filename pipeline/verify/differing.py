"""Find the records in which a copy differs from its source by comparing sums, and describe each difference.

The one idea: a comparison has two steps. Sums over groups of records show which groups differ, and only the records of
those groups are compared one by one. `verify` compares an archive with its topic, `replay` a target topic with its
archive; each chooses its own keys for groups and records.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.verify.sums import COLUMNS

SUMS = tuple(f"{name}_sum" for name in COLUMNS)


def unequal_groups(left: DataFrame, right: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return the keys of the groups whose `records` or sums differ, or that only one side has."""
    joined = left.alias("l").join(right.alias("r"), _all([_alike("l", "r", key) for key in keys]), "full_outer")
    alike = _all([_alike("l", "r", name) for name in ("records", *SUMS)])
    return joined.where(~alike).select(*(F.coalesce(f"l.{key}", f"r.{key}").alias(key) for key in keys))


def unequal_records(
    source: DataFrame,
    copy: DataFrame,
    keys: Sequence[str],
    *,
    source_name: str,
    copy_name: str,
    source_may_lack: bool = False,
) -> DataFrame:
    """Return the keys of the records that differ, and `what` in words.

    The source has each key once; the copy may have a key more than once. With `source_may_lack`, a record that only the
    copy has is not a difference.
    """
    counted = copy.groupBy(*keys).agg(F.count(F.lit(1)).alias("copies"), *(F.first(name).alias(name) for name in SUMS))
    held = source.withColumn("held", F.lit(True))
    joined = counted.alias("copy").join(
        held.alias("source"), list(keys), "right_outer" if source_may_lack else "full_outer"
    )
    what = F.when(F.col("held").isNull(), f"{source_name} does not hold it, {copy_name} does")
    what = what.when(F.col("copies").isNull(), f"{copy_name} does not hold it, {source_name} does")
    for name, summed in zip(COLUMNS, SUMS, strict=True):
        what = what.when(
            ~_alike("copy", "source", summed), f"its {name} is another in {copy_name} than in {source_name}"
        )
    what = what.when(F.col("copies") > 1, f"{copy_name} holds it more than once")
    return joined.withColumn("what", what).where("what IS NOT NULL").select(*keys, "what")


def _alike(left: str, right: str, name: str) -> Column:
    return F.col(f"{left}.{name}").eqNullSafe(F.col(f"{right}.{name}"))


def _all(conditions: Sequence[Column]) -> Column:
    return reduce(lambda one, other: one & other, conditions)
