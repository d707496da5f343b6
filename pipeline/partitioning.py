"""Partitions and sort order of a table, as a user writes them: columns, days and hours of a time, buckets of a column.

The one idea: each part is checked against the table's columns before the table is created. Each format then writes the
part in its own SQL (`delta.py`, `iceberg.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql.types import ArrayType, StructType, TimestampType

from pipeline.errors import PipelineError

_PART = re.compile(
    r"(?:(?P<unit>day|hour)\((?P<time>\w+)\)|bucket\((?P<count>\d+),(?P<bucketed>\w+)\)|(?P<column>\w+))"
)
MAX_BUCKETS = 10_000


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a partitioning: a column, or a value derived from a column."""

    column: str
    unit: str = ""
    """day, hour or bucket; empty if the column itself is meant"""
    count: int = 0
    """Number of buckets."""


def partitions(text: str, schema: StructType) -> list[Part]:
    """Return the parts of `--partition-by`. Raise PipelineError if one has no meaning for these columns."""
    found: list[Part] = []
    for part in _parts(text):
        match = _PART.fullmatch(part)
        if match is None:
            raise PipelineError(
                f"--partition-by {part} is neither a column nor day(COLUMN), hour(COLUMN) or bucket(N,COLUMN).",
                "Write it like bucket(16,key),day(timestamp).",
            )
        name = match["time"] or match["bucketed"] or match["column"]
        _check(name, "--partition-by", schema)
        if match["time"] is not None and not isinstance(schema[name].dataType, TimestampType):
            raise PipelineError(f"--partition-by {part}: the column {name} is no time.", "Name a column of timestamps.")
        if match["count"] is not None and not 1 <= int(match["count"]) <= MAX_BUCKETS:
            raise PipelineError(f"--partition-by {part} has no buckets, or too many.", f"Take 1 to {MAX_BUCKETS:,}.")
        unit = match["unit"] or ("bucket" if match["count"] else "")
        found.append(Part(name, unit, int(match["count"] or 0)))
    return found


def order(text: str, schema: StructType) -> list[str]:
    """Return the columns of `--sort-by`. Raise PipelineError if a table cannot be sorted by one of them."""
    found = _parts(text)
    for name in found:
        _check(name, "--sort-by", schema)
    return list(found)


def _parts(text: str) -> Sequence[str]:
    """Return the parts between commas. Commas within parentheses do not separate."""
    return [part for part in re.split(r",(?![^(]*\))", text.replace(" ", "")) if part]


def _check(name: str, option: str, schema: StructType) -> None:
    if name not in schema.names or isinstance(schema[name].dataType, ArrayType | StructType):
        raise PipelineError(f"{option}: the table has no column {name}.", f"It has {', '.join(schema.names)}.")
