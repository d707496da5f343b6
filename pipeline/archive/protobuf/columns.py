"""Types of columns for Protobuf's fields, and the column of a value's JSON.

The one idea: Spark's own reader of Protobuf needs a compiled descriptor, refuses types that refer to themselves and
does not say why a value is unreadable. So Python workers decode the values, an Arrow batch at a time.
"""

# Spark reads the annotations of `decode` at run time, so they must not be postponed.
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.functions import arrow_udf  # pyright: ignore[reportUnknownVariableType]
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pipeline.archive.protobuf.types import Field, Types
from pipeline.archive.protobuf.values import WRAPPED, Decoder, UnreadableError
from pipeline.widening import MOST_DIGITS

MAX_DEPTH = 5
"""Maximal depth of structs within structs whose types come from the schema."""
_INTEGER, _LONG, _TEXT = IntegerType(), LongType(), StringType()
# Wide enough for every integer, so that a column of integers can have the same type.
_UNSIGNED = DecimalType(MOST_DIGITS, 0)
_SCALARS: dict[str, DataType] = {
    **dict.fromkeys(("int32", "sint32", "sfixed32"), _INTEGER),
    **dict.fromkeys(("uint32", "fixed32", "int64", "sint64", "sfixed64"), _LONG),
    **dict.fromkeys(("uint64", "fixed64"), _UNSIGNED),
    **dict.fromkeys(("string", "bytes"), _TEXT),
    "double": DoubleType(), "float": FloatType(), "bool": BooleanType(),
}  # fmt: skip
_WELL_KNOWN: dict[str, DataType | None] = {
    "google.protobuf.Timestamp": TimestampType(),
    "google.protobuf.Duration": _TEXT,
    # These messages hold any JSON, so the values themselves determine their types.
    **dict.fromkeys((f"google.protobuf.{name}" for name in ("Value", "Struct", "ListValue")), None),
}
_WRAPPERS = frozenset(f"google.protobuf.{name}Value" for name in WRAPPED)


def columns(types: Types, name: str, path: tuple[str, ...] = ()) -> StructType:
    """Return the fields of a message whose types the schema determines. All other fields are typed by their JSON.

    These are maps, messages that hold any JSON, and messages that are nested too deeply or contain themselves.
    """
    found = [(each.name, _column(types, each, (*path, name))) for each in types.messages[name].fields]
    return StructType([StructField(field, kind) for field, kind in found if kind is not None])


def _column(types: Types, each: Field, path: tuple[str, ...]) -> DataType | None:
    kind = _single(types, each, path)
    return ArrayType(kind) if kind is not None and each.repeated else kind


def _single(types: Types, each: Field, path: tuple[str, ...]) -> DataType | None:
    name = each.type_name
    if each.kind == "map":
        return None
    if each.kind != "message":
        return _TEXT if each.kind == "enum" else _SCALARS[each.kind]
    if name in _WELL_KNOWN:
        return _WELL_KNOWN[name]
    if name in _WRAPPERS:
        return _single(types, types.messages[name].fields[0], path)
    if name in path or len(path) == MAX_DEPTH:
        return None
    inner = columns(types, name, path)
    return inner if inner.fields else None


def as_json(number: Column, payload: Column, schemas: Mapping[int, Types]) -> Column:
    """Return a struct of `text`, the JSON of the bytes after a schema's id, and `why`, the reason if there is no JSON.
    Both are null if `schemas` lacks `number`.
    """
    decoders = {each: Decoder(types) for each, types in schemas.items()}

    def decode(numbers: pa.Array, payloads: pa.Array) -> pa.Array:
        texts: list[str | None] = []
        reasons: list[str | None] = []
        for each, raw in zip(numbers.to_pylist(), payloads.to_pylist(), strict=True):
            text = why = None
            decoder = decoders.get(each)
            if decoder is not None and raw is not None:
                try:
                    text = decoder.json(raw)
                except UnreadableError as error:
                    why = f"the value is not Protobuf of the schema {each}: {error}"
            texts.append(text)
            reasons.append(why)
        columns = [pa.array(texts, pa.string()), pa.array(reasons, pa.string())]
        return pa.StructArray.from_arrays(columns, ["text", "why"])

    # The type stubs of Spark have no overload for a type given as text.
    make: Any = arrow_udf
    return make(decode, "text string, why string")(number, payload)
