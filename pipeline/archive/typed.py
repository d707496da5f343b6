"""Typed archives: JSON whose fields become columns, Avro of a given schema, and what fits neither.

The one idea: the record as it was is always kept, so nothing can be lost here. JSON's fields are typed strictly: a
value goes into `data` only if its own type fits the column's; a top-level field of which any part does not fit is
also kept whole, as JSON, in `_rescued`. New fields become new columns. A record that is no JSON object, or no Avro of
the schema, is a dead letter with a reason.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    NullType,
    StringType,
    StructField,
    StructType,
    _parse_datatype_string,
)

from pipeline.errors import PipelineError
from pipeline.schema import DATA, RESCUED

NO_TYPE = StructType()
CONFLUENT_PREFIX_BYTES = 5
MAX_DEPTH = 5
MAX_FIELDS = 1000


class Typing(Protocol):
    def apply(self, records: DataFrame, stored: StructType) -> DataFrame:
        """`records` with the columns data, _rescued and reason; `stored` is data's type in the table so far."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("typed")
    group.add_argument("--value", choices=("raw", "json", "avro"), default="raw", help="(default %(default)s)")
    group.add_argument(
        "--schema", type=Path, metavar="FILE", help="Avro's schema, or the first type of JSON as Spark DDL"
    )
    group.add_argument(
        "--evolve", choices=("add", "none"), default="add", help="new fields of JSON (default %(default)s)"
    )
    group.add_argument("--framing", choices=("none", "confluent"), default="none", help="Avro's (default %(default)s)")
    group.add_argument("--dead-letters", metavar="PATH", help="the table of bad records (default: OUT_dead_letters)")


def dead_letter_path(arguments: argparse.Namespace) -> str:
    return arguments.dead_letters or f"{arguments.out.rstrip('/')}_dead_letters"


def typing_of(arguments: argparse.Namespace) -> Typing | None:
    """None for raw values."""
    if arguments.value == "raw":
        return None
    text = None
    if arguments.schema is not None:
        try:
            text = arguments.schema.read_text()
        except OSError as error:
            raise PipelineError(f"The schema cannot be read: {error}.", "Check --schema.") from error
    if arguments.value == "json":
        return JsonTyping(text, evolve=arguments.evolve == "add")
    if text is None:
        raise PipelineError("Avro needs its schema.", "Name its file with --schema.")
    return AvroTyping(text, framed=arguments.framing == "confluent")


def stored_type(table: StructType) -> StructType:
    """The type of `data` in a table, empty if it has none yet."""
    found = table[DATA].dataType if DATA in table.names else NO_TYPE
    return found if isinstance(found, StructType) else NO_TYPE


@dataclass(frozen=True, slots=True)
class AvroTyping:
    schema: str
    framed: bool

    def apply(self, records: DataFrame, stored: StructType) -> DataFrame:
        from pyspark.sql.avro.functions import from_avro

        value = F.expr(f"substring(value, {CONFLUENT_PREFIX_BYTES + 1})") if self.framed else F.col("value")
        parsed = records.withColumn(DATA, from_avro(value, self.schema, {"mode": "PERMISSIVE"}))
        # A record that cannot be decoded comes back as a null or as a struct of nothing but nulls.
        fields = [F.col(f"{DATA}.`{name}`").isNull() for name in _struct(parsed.schema[DATA].dataType).names]
        empty = F.col(DATA).isNull()
        if fields:
            nothing = fields[0]
            for each in fields[1:]:
                nothing = nothing & each
            empty = empty | nothing
        bad = F.col("value").isNotNull() & empty
        return (
            parsed.withColumn(RESCUED, F.lit(None).cast(StringType()))
            .withColumn("reason", F.when(bad, F.lit("the value is not Avro of the given schema")))
            .withColumn(DATA, F.when(~bad, F.col(DATA)))
        )


@dataclass(frozen=True, slots=True)
class JsonTyping:
    given: str | None
    evolve: bool

    def apply(self, records: DataFrame, stored: StructType) -> DataFrame:
        parsed = parse(records)
        kind = merge(stored, _struct(_parse_datatype_string(self.given))) if self.given else stored
        if self.evolve or not kind.fields:
            kind = merge(kind, infer(parsed))
        return to_typed(parsed, kind)


def parse(records: DataFrame) -> DataFrame:
    """Adds the column `parsed`, a variant, and `reason` where the value is no JSON object. A null value is neither."""
    text = F.col("value").cast(StringType())
    parsed = records.withColumn("parsed", F.try_parse_json(text))
    is_object = F.schema_of_variant("parsed").startswith("OBJECT")
    reason = F.when(F.col("value").isNull(), None)
    reason = reason.when(F.col("parsed").isNull(), "the value is not JSON")
    return parsed.withColumn("reason", reason.when(~is_object, "the value is JSON, but not an object"))


def infer(parsed: DataFrame) -> StructType:
    """The type that the objects of `parsed` share; a field of more than one type is text."""
    found = parsed.where(F.col("parsed").isNotNull() & F.col("reason").isNull()).agg(F.schema_of_variant_agg("parsed"))
    text = found.collect()[0][0]
    return (
        _struct(settle(_parse_datatype_string(struct_words(text)))) if text and text.startswith("OBJECT<") else NO_TYPE
    )


def struct_words(text: str) -> str:
    """A variant's type in the words of Spark's DDL; names in backticks stay as they are."""
    pieces = re.split(r"(`(?:[^`]|``)*`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"\bOBJECT<", "STRUCT<", piece).replace("STRUCT<>", "VOID")
        for piece in pieces
    )


def settle(kind: DataType, depth: int = 0) -> DataType:
    """A type that later values fit as well: decimals are doubles, mixed values text, unknown ones left out."""
    if isinstance(kind, DecimalType):
        return LongType() if kind.scale == 0 and kind.precision <= 18 else DoubleType()
    if isinstance(kind, LongType | DoubleType | BooleanType | StringType | NullType):
        return kind
    if isinstance(kind, StructType) and depth < MAX_DEPTH:
        fields = [StructField(field.name, settle(field.dataType, depth + 1)) for field in kind.fields]
        known = [field for field in fields if not isinstance(field.dataType, NullType)]
        return StructType(known[:MAX_FIELDS]) if known else NullType()
    if isinstance(kind, ArrayType) and depth < MAX_DEPTH:
        element = settle(kind.elementType, depth + 1)
        return NullType() if isinstance(element, NullType) else ArrayType(element)
    return StringType()


def merge(stored: StructType, found: DataType) -> StructType:
    """`stored` with the fields that only `found` has. A field of both keeps its stored type."""
    if not isinstance(found, StructType):
        return stored
    # Delta takes names that differ in case only for the same column.
    held = {field.name.lower(): field for field in stored.fields}
    fields: list[StructField] = []
    for field in stored.fields:
        other = next((each for each in found.fields if each.name == field.name), None)
        fields.append(field if other is None else StructField(field.name, _merge_types(field.dataType, other.dataType)))
    for field in found.fields:
        if field.name.lower() not in held and len(fields) < MAX_FIELDS:
            held[field.name.lower()] = field
            fields.append(field)
    return StructType(fields)


def _merge_types(stored: DataType, found: DataType) -> DataType:
    if isinstance(stored, StructType):
        return merge(stored, found)
    if isinstance(stored, ArrayType) and isinstance(found, ArrayType):
        return ArrayType(_merge_types(stored.elementType, found.elementType))
    return stored


def to_typed(parsed: DataFrame, kind: StructType) -> DataFrame:
    """Columns data and _rescued from `parsed`."""
    value = F.col("parsed")
    good = F.col("parsed").isNotNull() & F.col("reason").isNull()
    members = F.expr("try_variant_get(parsed, '$', 'map<string,variant>')")
    rescued = F.map_filter(members, lambda name, member: _misfits(name, member, kind))
    typed = parsed
    if kind.fields:
        typed = typed.withColumn(DATA, F.when(good, cast(value, kind)))
    return typed.withColumn(RESCUED, F.when(good & (F.size(rescued) > 0), F.to_json(rescued))).drop("parsed")


def _misfits(name: Column, member: Column, kind: StructType) -> Column:
    answer = F.schema_of_variant(member) != "VOID"
    for field in reversed(kind.fields):
        answer = F.when(name == field.name, ~fits(member, field.dataType)).otherwise(answer)
    return answer


def _get(value: Column, kind: str) -> Column:
    return F.try_variant_get(value, "$", kind)


def _member(value: Column, name: str) -> Column:
    return F.try_element_at(_get(value, "map<string,variant>"), F.lit(name))


def cast(value: Column, kind: DataType) -> Column:
    """A variant as `kind`, null where it does not fit."""
    if isinstance(kind, StructType):
        members = [cast(_member(value, field.name), field.dataType).alias(field.name) for field in kind.fields]
        return F.when(F.schema_of_variant(value).startswith("OBJECT"), F.struct(*members))
    if isinstance(kind, ArrayType):
        return F.transform(_get(value, "array<variant>"), lambda element: cast(element, kind.elementType))
    if isinstance(kind, StringType):
        # Text as it is, anything else as JSON.
        return F.when(F.schema_of_variant(value) == "VOID", None).otherwise(_get(value, "string"))
    return F.when(fits(value, kind), _get(value, kind.simpleString()))


def fits(value: Column, kind: DataType) -> Column:
    """Return whether `cast` loses nothing of a variant. Null fits everything."""
    own = F.schema_of_variant(value)
    nothing = value.isNull() | (own == "VOID")
    if isinstance(kind, StructType):
        known = [field.name for field in kind.fields]
        inside = own.startswith("OBJECT") & ~F.exists(
            F.map_keys(_get(value, "map<string,variant>")), lambda name: ~name.isin(known)
        )
        for field in kind.fields:
            inside = inside & fits(_member(value, field.name), field.dataType)
        return nothing | inside
    if isinstance(kind, ArrayType):
        inside = own.startswith("ARRAY") & F.forall(
            _get(value, "array<variant>"), lambda element: fits(element, kind.elementType)
        )
        return nothing | inside
    if isinstance(kind, StringType):
        return F.lit(True)
    if isinstance(kind, LongType):
        return nothing | (own == "BIGINT")
    if isinstance(kind, DoubleType):
        return nothing | own.isin("BIGINT", "DOUBLE", "FLOAT") | own.startswith("DECIMAL")
    if isinstance(kind, BooleanType):
        return nothing | (own == "BOOLEAN")
    # A type that only a given schema has, such as a date: any value that Spark can convert.
    return nothing | _get(value, kind.simpleString()).isNotNull()


def _struct(kind: DataType) -> StructType:
    return kind if isinstance(kind, StructType) else NO_TYPE
