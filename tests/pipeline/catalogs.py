"""Iceberg tables in the tests: in which catalogs they are, and what they contain."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline import table
from tests.pipeline import topics

FORMAT = ("--format", "iceberg")
one_catalog = pytest.mark.parametrize("lake", ["folder"], indirect=True)


def filled(bootstrap: str, partitions: int, count: int) -> str:
    topic = topics.fresh(bootstrap, partitions)
    topics.fill(bootstrap, topic, topics.records(count, partitions))
    return topic


def rows(spark: SparkSession, name: str = "events") -> list[Any]:
    return table.read(spark, f"iceberg:{name}").orderBy("topic", "partition", "offset").collect()


def offsets(spark: SparkSession, name: str = "events") -> list[int]:
    return [row.offset for row in rows(spark, name)]
