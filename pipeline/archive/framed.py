"""Typed archives of a topic whose records name their schemas by id in a registry.

The one idea: each value becomes JSON by its own schema, and is then typed as JSON is. So records of several schemas,
and of several kinds of schemas, share one table; a field that a newer schema brings becomes a column, and a value that
does not fit its column is rescued. The columns take their types from Avro's schemas where they can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from pipeline.archive import avro_references
from pipeline.archive.protobuf import types as protobuf
from pipeline.archive.protobuf.columns import as_json, columns
from pipeline.archive.protobuf.values import read_indexes
from pipeline.archive.registry import Registry, Schema
from pipeline.archive.typed import EXACT_TIMES, NO_TYPE, JsonTyping, all_nulls, can_be_column, merge
from pipeline.errors import root_cause
from pipeline.widening import widen

MAX_SCHEMAS = 200
"""Maximal number of schemas in one batch. Any bytes may look like a schema's id, so a batch may seem to refer to any
number of schemas.
"""
_ID, _TEXT, _WHY, _RAW, _PROTOBUF = "_schema_id", "_text", "_why", "_raw", "_protobuf"
_PAYLOAD = "substring(value, 6)"
# Up to eight message indexes in hex, each a varint of at most two bytes. Before them stands their number as a zigzag
# varint.
_INDEX = "(?:[89A-F][0-9A-F])?[0-7][0-9A-F]"
INDEXES = "^(?:00|" + "|".join(f"{2 * count:02X}(?:{_INDEX}){{{count}}}" for count in range(1, 9)) + ")"
_MOST_INDEX_BYTES = 17
_MOST_PLAIN_DIGITS = 6
"""Maximal scale of a decimal that `to_json` always writes without an exponent."""
_KEPT = (BooleanType, IntegralType, FloatType, DoubleType, DecimalType, StringType, DateType, TimestampType)

_Readable = Schema | protobuf.Types | str
"""A schema that a job can read, or the reason why it cannot."""


@dataclass(frozen=True, slots=True)
class RegistryTyping:
    registry: Registry
    evolve: bool
    decimals: bool = True

    def apply(self, records: DataFrame, stored: StructType) -> DataFrame:
        opened, given = self._opened(records)
        typing = JsonTyping(None, evolve=self.evolve, decimals=self.decimals, known=given if self.evolve else NO_TYPE)
        typed = typing.apply(opened, stored)
        return _closed(typed).withColumn("reason", F.coalesce(_WHY, "reason")).drop(_WHY)

    def mistyped(self, records: DataFrame, stored: StructType) -> DataFrame:
        opened, _ = self._opened(records)
        return JsonTyping(None, evolve=False, decimals=self.decimals).mistyped(opened, stored)

    def _opened(self, records: DataFrame) -> tuple[DataFrame, StructType]:
        """Return `records` with their values as JSON, a reason for each value that has no JSON, and the type of the
        fields. The type has what the schemas of Avro and Protobuf say. Raise UnreachableError if the registry does not
        respond.
        """
        named = records.withColumn(_ID, _schema_id())
        counted = named.where(F.col(_ID).isNotNull()).groupBy(_ID).count().orderBy(F.desc("count"), _ID)
        numbers = [row[_ID] for row in counted.limit(MAX_SCHEMAS).collect()]
        found = {number: self._read(number) for number in numbers}
        messages = {number: each for number, each in found.items() if isinstance(each, protobuf.Types)}
        used = _used(named, messages)
        if messages:
            asked = F.when(F.col(_ID).isin(*messages), F.col(_ID))
            named = named.withColumn(_PROTOBUF, as_json(asked, F.expr(_PAYLOAD), messages))
        text, why, given = F.lit(None).cast("string"), F.when(F.lit(False), ""), NO_TYPE
        for number, each in found.items():
            json, reason, kind = _decoded(number, each, records)
            text = F.when(F.col(_ID) == number, json).otherwise(text)
            why = F.when(F.col(_ID) == number, reason).otherwise(why)
            given = merge(_wider(given, kind, decimals=self.decimals), kind)
        for kind in used:
            given = merge(_wider(given, kind, decimals=self.decimals), kind)
        beyond = F.col(_ID).isNotNull() & ~F.col(_ID).isin(numbers)
        why = F.when(beyond, f"the batch has more than {MAX_SCHEMAS} schemas").otherwise(why)
        why = F.when(F.col(_ID).isNull(), "the value does not begin with the id of a schema").otherwise(why)
        named = named.withColumn(_TEXT, text).withColumn(_WHY, F.when(F.col("value").isNotNull(), why))
        named = named.withColumn(_RAW, F.col("value"))
        return named.withColumn("value", F.when(F.col(_WHY).isNull(), F.col(_TEXT).cast("binary"))).drop(
            _ID, _TEXT, _PROTOBUF
        ), given

    def _read(self, number: int) -> _Readable:
        """Return the schema of an id in the form that `_decoded` reads, or the reason why this job cannot read it."""
        schema = self.registry.schema(number)
        if schema is None:
            return f"the registry has no schema {number}"
        if schema.kind == "JSON":
            return schema
        try:
            others = [each.text for each in self.registry.referred(schema)]
        except LookupError as error:
            return f"the schema {number} refers to {error.args[0]}"
        try:
            if schema.kind == "PROTOBUF":
                return protobuf.parse(schema.text, others)
            if schema.kind == "AVRO":
                return Schema("AVRO", avro_references.whole(schema.text, others) if others else schema.text)
        except (protobuf.SchemaError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            return f"the schema {number} cannot be used: {error}"
        return f"the schema {number} is {schema.kind}, which this job cannot read"


def _closed(opened: DataFrame) -> DataFrame:
    return opened.withColumn("value", F.col(_RAW)).drop(_RAW)


def _schema_id() -> Column:
    """Return the id that follows a zero byte. Null if the value does not begin in this way."""
    number = F.conv(F.hex(F.expr("substring(value, 2, 4)")), 16, 10).cast("long")
    return F.when((F.octet_length("value") >= 5) & (F.expr("substring(value, 1, 1)") == F.lit(b"\0")), number)


def _decoded(number: int, schema: _Readable, records: DataFrame) -> tuple[Column, Column, StructType]:
    """Return the value as JSON, the reason if it has no JSON, and the type of its fields."""
    nothing, payload = F.lit(None).cast("string"), F.expr(_PAYLOAD)
    if isinstance(schema, str):
        return nothing, F.lit(schema), NO_TYPE
    if isinstance(schema, protobuf.Types):
        return F.col(_PROTOBUF)["text"], F.col(_PROTOBUF)["why"], NO_TYPE
    if schema.kind == "JSON":
        return payload.cast("string"), nothing, NO_TYPE
    try:
        return _avro(number, schema.text, payload, records)
    except (PySparkException, Py4JJavaError) as error:
        return nothing, F.lit(f"the schema {number} cannot be used: {root_cause(error)}"), NO_TYPE


def _used(named: DataFrame, schemas: Mapping[int, protobuf.Types]) -> list[StructType]:
    """Return those fields of the Protobuf messages that occur in the records of a batch."""
    if not schemas:
        return []
    indexes = F.regexp_extract(F.hex(F.expr(f"substring(value, 6, {_MOST_INDEX_BYTES})")), INDEXES, 0)
    pairs = named.where(F.col(_ID).isin(*schemas)).select(_ID, indexes.alias("indexes")).where("indexes != ''")
    found: list[StructType] = []
    for row in pairs.distinct().orderBy(_ID, "indexes").limit(MAX_SCHEMAS).collect():
        types = schemas[row[_ID]]
        name = types.at(read_indexes(bytes.fromhex(row.indexes))[0])
        if name is not None:
            found.append(columns(types, name))
    return found


def _avro(number: int, schema: str, payload: Column, records: DataFrame) -> tuple[Column, Column, StructType]:
    from pyspark.sql.avro.functions import from_avro

    found = from_avro(payload, schema, {"mode": "PERMISSIVE"})
    kind = records.select(found.alias("found")).schema["found"].dataType
    if not isinstance(kind, StructType):
        return F.lit(None).cast("string"), F.lit(f"the schema {number} is no record"), NO_TYPE
    text, nulls = F.to_json(_plain(found, kind), EXACT_TIMES), all_nulls(schema)
    # Spark returns a record that it cannot decode as null, or as a struct in which all fields are null.
    empty = F.coalesce(text == "{}", F.lit(True))
    bad = empty if nulls is None else empty & (payload != F.lit(nulls))
    return text, F.when(bad & F.lit(bool(kind.fields)), f"the value is not Avro of the schema {number}"), _columns(kind)


def _plain(column: Column, kind: DataType) -> Column:
    """Return `column` with its small decimals as variants.

    `to_json` writes a decimal below a millionth with an exponent, and a reader takes such a number for a double. It
    writes a variant without an exponent.
    """
    if not _has_small_decimals(kind):
        return column
    if isinstance(kind, StructType):
        fields = [_plain(column[field.name], field.dataType).alias(field.name) for field in kind.fields]
        return F.when(column.isNotNull(), F.struct(*fields))
    if isinstance(kind, ArrayType):
        return F.transform(column, lambda element: _plain(element, kind.elementType))
    if isinstance(kind, MapType):
        return F.transform_values(column, lambda _, value: _plain(value, kind.valueType))
    return column.cast(VariantType())


def _has_small_decimals(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_small_decimals(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType | MapType):
        return _has_small_decimals(kind.elementType if isinstance(kind, ArrayType) else kind.valueType)
    return isinstance(kind, DecimalType) and kind.scale > _MOST_PLAIN_DIGITS


def _columns(kind: StructType) -> StructType:
    """Return the fields whose columns take their type, or parts of it, from the schema. The values of other fields are
    typed as JSON is."""
    fields = starmap(
        StructField, ((each.name, _kept(each.dataType)) for each in kind.fields if can_be_column(each.name))
    )
    return StructType([each for each in fields if each.dataType is not NO_TYPE])


def _kept(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        found = _columns(kind)
        return found if found.fields else NO_TYPE
    if isinstance(kind, ArrayType):
        element = _kept(kind.elementType)
        return element if element is NO_TYPE else ArrayType(element)
    return kind if isinstance(kind, _KEPT) else NO_TYPE


def _wider(given: StructType, kind: StructType, *, decimals: bool) -> StructType:
    found = widen(given, kind, decimals=decimals)
    return found if isinstance(found, StructType) else NO_TYPE
