"""Rows of a journal as DataFrames, for tests of transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from pipeline.analyze.journal import DELIVERY, TABLES, Journal, with_eras


def frame(spark: SparkSession, schema: T.StructType, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    columns = {name: [row.get(name) for row in rows] for name in schema.names}
    return spark.createDataFrame(pa.table(columns, schema=to_arrow_schema(schema)), schema)


def journal_of(spark: SparkSession, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Journal:
    """Return a journal of these rows. Its range goes from the smallest to the greatest number among them."""
    numbers = [row["seq"] for name in TABLES for row in tables.get(name, ())]
    frames = [frame(spark, schema, tables.get(name, ())) for name, schema in TABLES.items()]
    delivery = frame(spark, DELIVERY, tables["delivery"]) if "delivery" in tables else None
    return with_eras(
        Journal(*frames, first_seq=min(numbers), next_seq=max(numbers) + 1, delivery=delivery)
    )  # fmt: skip
