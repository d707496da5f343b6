"""Widen columns to types that can hold all of their values. The one idea:

each type has a ladder, which is a list of wider types. If a column cannot hold a value, the column gets the first type
of the ladder that holds the value exactly. A ladder has only types to which the table format can change a column
without rewriting files. Iceberg cannot make an integer a decimal, so the ladder of integers ends at 64 bits there.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructField,
    StructType,
)

from pipeline.sql import identifier

_INTEGERS: tuple[DataType, ...] = (ByteType(), ShortType(), IntegerType(), LongType())
MOST_DIGITS = 38


def ladder(kind: DataType, *, decimals: bool) -> tuple[DataType, ...]:
    """Return `kind` and the types that it can become, the narrowest first. With `decimals`, an integer may become a
    decimal.
    """
    if kind in _INTEGERS:
        return (*_INTEGERS[_INTEGERS.index(kind) :], *((DecimalType(MOST_DIGITS, 0),) if decimals else ()))
    if isinstance(kind, FloatType):
        return (kind, DoubleType())
    if isinstance(kind, DecimalType) and kind.precision < MOST_DIGITS:
        return (kind, DecimalType(MOST_DIGITS, kind.scale))
    return (kind,)


def widen(stored: DataType, wanted: DataType, *, decimals: bool, only: type[DataType] = DataType) -> DataType:
    """Return `stored` with each column, nested ones too, as wide as in `wanted` if its ladder leads there.

    Only columns of the type `only` change.
    """
    if isinstance(stored, StructType):
        found = {field.name: field.dataType for field in wanted.fields} if isinstance(wanted, StructType) else {}
        return StructType(
            [
                StructField(field.name, widen(field.dataType, found[field.name], decimals=decimals, only=only))
                if field.name in found
                else field
                for field in stored.fields
            ]
        )
    if isinstance(stored, ArrayType):
        inner = wanted.elementType if isinstance(wanted, ArrayType) else stored.elementType
        return ArrayType(widen(stored.elementType, inner, decimals=decimals, only=only))
    return wanted if isinstance(stored, only) and wanted in ladder(stored, decimals=decimals) else stored


def wider(stored: DataType, wanted: DataType, path: str = "") -> Iterator[tuple[str, DataType]]:
    """Yield the columns of `stored` that are wider in `wanted`, by their names in SQL, with their new types."""
    if isinstance(stored, ArrayType) and isinstance(wanted, ArrayType):
        yield from wider(stored.elementType, wanted.elementType, f"{path}.element")
    elif isinstance(stored, StructType) and isinstance(wanted, StructType):
        found = {field.name: field.dataType for field in wanted.fields}
        for field in stored.fields:
            if field.name in found:
                name = identifier(field.name)
                yield from wider(field.dataType, found[field.name], f"{path}.{name}" if path else name)
    elif wanted in ladder(stored, decimals=True)[1:]:
        yield path, wanted


def fitted(column: Column, held: DataType, stored: DataType, *, decimals: bool) -> Column:
    """Return `column`, which has the type `held`, with each part as wide as in `stored`. Other parts do not change."""
    if isinstance(held, StructType) and isinstance(stored, StructType):
        found = {field.name: field.dataType for field in stored.fields}
        parts = [
            fitted(column[field.name], field.dataType, found.get(field.name, field.dataType), decimals=decimals)
            for field in held.fields
        ]
        named = [part.alias(field.name) for part, field in zip(parts, held.fields, strict=True)]
        return F.when(column.isNotNull(), F.struct(*named))
    if isinstance(held, ArrayType) and isinstance(stored, ArrayType):
        inner, outer = held.elementType, stored.elementType
        return F.transform(column, lambda element: fitted(element, inner, outer, decimals=decimals))
    return column.cast(stored) if stored in ladder(held, decimals=decimals)[1:] else column
