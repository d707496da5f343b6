"""Partitions and order of a table, as a user names them: columns, days and hours of a time, buckets of a column.

The one idea: a part is checked against the table's columns before anything is made, and becomes the words of the
format. Only Iceberg derives partitions from columns; Delta's are columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyspark.sql.types import ArrayType, StructType, TimestampType

from pipeline.errors import PipelineError

_PART = re.compile(
    r"(?:(?P<unit>day|hour)\((?P<time>\w+)\)|bucket\((?P<count>\d+),(?P<bucketed>\w+)\)|(?P<column>\w+))"
)
MAX_BUCKETS = 10_000


def partitions(text: str, schema: StructType, *, derived: bool) -> list[str]:
    """Return the parts of `--partition-by` in SQL. `derived`: the format derives partitions from columns.

    PipelineError if a part has no meaning for these columns.
    """
    found: list[str] = []
    for part in _parts(text):
        match = _PART.fullmatch(part)
        if match is None:
            raise PipelineError(
                f"--partition-by {part} is neither a column nor day(COLUMN), hour(COLUMN) or bucket(N,COLUMN).",
                "Write it like bucket(16,key),day(timestamp).",
            )
        name = match["time"] or match["bucketed"] or match["column"]
        _check(name, "--partition-by", schema)
        if match["column"] is None and not derived:
            raise PipelineError(
                f"--partition-by {part}: a Delta table has no partitions that are derived from a column.",
                "Take --format iceberg, or name columns only.",
            )
        if match["time"] is not None and not isinstance(schema[name].dataType, TimestampType):
            raise PipelineError(f"--partition-by {part}: {name} is no time.", "Name a column of timestamps.")
        if match["count"] is not None and not 1 <= int(match["count"]) <= MAX_BUCKETS:
            raise PipelineError(f"--partition-by {part} has no buckets, or too many.", f"Take 1 to {MAX_BUCKETS:,}.")
        unit = f"{match['unit']}s(`{name}`)" if match["unit"] else None
        found.append(unit or (f"bucket({match['count']}, `{name}`)" if match["count"] else f"`{name}`"))
    return found


def order(text: str, schema: StructType) -> list[str]:
    """Return the columns of `--sort-by` in SQL. PipelineError if one cannot be sorted by."""
    found = _parts(text)
    for name in found:
        _check(name, "--sort-by", schema)
    return [f"`{name}`" for name in found]


def _parts(text: str) -> Sequence[str]:
    """Return the parts between commas that are not within parentheses."""
    return [part for part in re.split(r",(?![^(]*\))", text.replace(" ", "")) if part]


def _check(name: str, option: str, schema: StructType) -> None:
    if name not in schema.names or isinstance(schema[name].dataType, ArrayType | StructType):
        raise PipelineError(f"{option}: the table has no column {name}.", f"It has {', '.join(schema.names)}.")
