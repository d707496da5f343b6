"""Typed archives: JSON whose fields become columns, Avro with a given schema, and values that fit neither.

The one idea: the original record is always kept, so typing cannot lose anything. JSON's fields are typed strictly: a
value goes into `data` only if the column can hold it exactly. If any part of a top-level field does not fit, the whole
field is also kept as JSON in `_rescued`. New fields become new columns, as long as Delta allows their names and
`MAX_FIELDS` is not reached; other fields are rescued. A number that needs a wider column widens it (`widening.py`). A
record that is no JSON object, or no Avro of the schema, is a dead letter with a reason.

Expressions stay flat: Spark walks them recursively, so one level per field would overflow its stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    IntegralType,
    LongType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pipeline.archive.avro_references import is_declared, is_union
from pipeline.errors import PipelineError, root_cause
from pipeline.schema import DATA, DEAD_LETTER, RESCUED
from pipeline.widening import MOST_DIGITS, fitted, ladder, widen

NO_TYPE = StructType()
CONFLUENT_PREFIX_BYTES = 5
MAX_DEPTH = 5
# Maximal number of columns that inference adds to a struct, nested columns included. A batch of 400 columns took 20 s
# on two busy cores, one of 1,000 columns more than four minutes: the cost rises with the square.
MAX_FIELDS = 400
# Delta refuses columns whose names contain these characters, unless a table maps its columns by name.
REFUSED_IN_NAMES = frozenset(" ,;{}()\n\t=")
# Matches a number like 1e2 or -7E+3. The pattern may also match inside a text, which does not change the text's type.
WHOLE_WITH_EXPONENT = r"(?<=[:\[,\s])(-?\d{1,7})[eE]\+?\d(?=[\s,}\]])"
# Up to this limit, a double can represent every whole number.
MAX_WHOLE_DOUBLE = 2.0**53
# If a decimal of 38 digits covers a number's fraction at one of these scales, the number can be compared exactly.
COMPARED_SCALES = (18, 37)
# Spark converts more texts than these: it drops the time behind a date and the zone of a timestamp without zone, and it
# gives a time without a date the present day.
WHOLE_TEXTS: dict[type[DataType], str] = {
    DateType: r"^\s*[+-]?\d[\d-]*\s*$",
    TimestampType: r"^\s*[+-]?\d{4}",
    TimestampNTZType: r"^\s*[+-]?\d{4}[\d-]*(?:[T ][\d:.]*)?\s*$",
}
# By default Spark writes milliseconds only.
EXACT_TIMES = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_HELD_DATA, _HELD_RESCUED, _ROW = "_held_data", "_held_rescued", "_row"


class Typing(Protocol):
    def apply(self, records: DataFrame, stored: StructType) -> DataFrame:
        """Return `records` with the columns data, _rescued and reason. `stored` is the type of data in the table so
        far."""
        ...

    def mistyped(self, records: DataFrame, stored: StructType) -> DataFrame:
        """Return the rows whose data or _rescued differs from what their value yields: topic, partition, offset, what.
        `records` come from the table, where data has the type `stored`.
        """
        ...


def stored_type(columns: StructType) -> StructType:
    """Type of `data` in a table; empty if the table has no such column yet."""
    found = columns[DATA].dataType if DATA in columns.names else NO_TYPE
    return found if isinstance(found, StructType) else NO_TYPE


@dataclass(frozen=True, slots=True)
class AvroTyping:
    schema: str
    framed: bool
    decimals: bool = True

    def apply(self, records: DataFrame, stored: StructType) -> DataFrame:
        from pyspark.sql.avro.functions import from_avro

        value = F.expr(f"substring(value, {CONFLUENT_PREFIX_BYTES + 1})") if self.framed else F.col("value")
        try:
            parsed = records.withColumn(DATA, from_avro(value, self.schema, {"mode": "PERMISSIVE"}))
            kind = parsed.schema[DATA].dataType
        except (PySparkException, Py4JJavaError) as error:
            raise PipelineError(
                f"--schema cannot be used: {root_cause(error)}", "Check that the file has an Avro schema."
            ) from error
        # Spark returns a record that it cannot decode as null, or as a struct in which all fields are null.
        fields = [F.col(f"{DATA}.`{name}`").isNull() for name in _struct(kind).names]
        empty = F.col(DATA).isNull()
        if fields:
            nothing = fields[0]
            for each in fields[1:]:
                nothing = nothing & each
            empty = empty | nothing
        nulls = all_nulls(self.schema)
        bad = F.col("value").isNotNull() & empty & (F.lit(True) if nulls is None else ~value.eqNullSafe(F.lit(nulls)))
        data = fitted(F.col(DATA), kind, stored, decimals=self.decimals)
        return (
            parsed.withColumn(RESCUED, F.lit(None).cast(StringType()))
            .withColumn("reason", F.when(bad, F.lit("the value is not Avro of the given schema")))
            .withColumn(DATA, F.when(~bad, data))
        )

    def mistyped(self, records: DataFrame, stored: StructType) -> DataFrame:
        """Return no rows for records that are not Avro of the given schema, because they may have an older schema."""
        again = self.apply(_set_aside(records), stored)
        # Compare texts, because Spark cannot compare maps. Null fields are left out, and so are fields that a schema
        # lacks.
        held, told = (F.to_json(F.struct(each.alias(DATA)), EXACT_TIMES) for each in (F.col(_HELD_DATA), F.col(DATA)))
        unlike = F.col(_HELD_RESCUED).isNotNull() | ~held.eqNullSafe(told)
        return _what(again, F.when(F.col("reason").isNull() & unlike, "its data is not what its value says"))


def all_nulls(schema: str) -> bytes | None:
    """Return the Avro encoding of a record whose fields are all null. None if a field may not be null, or if the schema
    is not a record."""
    told: Any = json.loads(schema)
    if not is_declared(told) or told.get("type") != "record":
        return None
    encoded = bytearray()
    for field in told["fields"]:
        kind: Any = field["type"]
        if kind in ("null", {"type": "null"}):
            continue
        if not is_union(kind) or "null" not in kind:
            return None
        # A union's branch is a zigzag number of variable length.
        number = 2 * kind.index("null")
        while number > 127:
            encoded.append(number & 127 | 128)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


@dataclass(frozen=True, slots=True)
class JsonTyping:
    given: str | None
    evolve: bool
    decimals: bool = True
    known: StructType = NO_TYPE
    """Types of fields, as `given` in Spark's words."""

    def apply(self, records: DataFrame, stored: StructType) -> DataFrame:
        parsed = parse(records)
        kind = stored
        given = _given(self.given) if self.given else self.known
        if given.fields:
            kind = merge(_struct(widen(stored, given, decimals=self.decimals)), given)
        if self.evolve or not kind.fields:
            found = infer(parsed)
            # Inference knows no integer type below 64 bits, so narrow columns are examined one by one.
            kind = _struct(widen(kind, found, decimals=self.decimals, only=LongType))
            kind = merge(climb(parsed, kind, decimals=self.decimals), found)
        return to_typed(parsed, kind)

    def mistyped(self, records: DataFrame, stored: StructType) -> DataFrame:
        """The table may have had fewer or narrower columns when a record was written. Then the row is right if its
        values are in _rescued.
        """
        again = _with_rescued(parse(_set_aside(records)), stored)
        held = F.coalesce(
            F.map_keys(_get(F.try_parse_json(_HELD_RESCUED), "map<string,variant>")), F.array().cast("array<string>")
        )
        kept = F.map_filter("members", lambda name, _: F.array_contains(held, name))
        again = again.withColumn("held", held).withColumn("kept", F.when(F.size(kept) > 0, F.to_json(kept)))
        missing = F.exists(F.map_keys(RESCUED), lambda name: ~F.array_contains("held", name))
        what = F.when(~F.col("kept").eqNullSafe(F.col(_HELD_RESCUED)), "its _rescued is not what its value says")
        what = what.when(missing, "its _rescued lacks what does not fit data")
        if stored.fields:
            alike = [
                F.array_contains("held", field.name)
                | F.col(_HELD_DATA).getField(field.name).eqNullSafe(F.col(DATA).getField(field.name))
                for field in stored.fields
            ]
            what = what.when(~_all(alike), "its data is not what its value says")
        return _what(again, what)


def _set_aside(records: DataFrame) -> DataFrame:
    """Rename a table's typed columns, so that they can be computed again beside them."""
    if DATA not in records.columns:
        records = records.withColumn(DATA, F.lit(None).cast("struct<>"))
    return records.withColumnsRenamed({DATA: _HELD_DATA, RESCUED: _HELD_RESCUED})


def _what(frame: DataFrame, what: Column) -> DataFrame:
    return _chosen(frame.select("topic", "partition", "offset", what.alias("what")), F.col("what").isNotNull())


def rejected(typed: DataFrame) -> DataFrame:
    """Return the rows of `apply` that have a reason, as dead letters."""
    return _chosen(typed, F.col("reason").isNotNull()).select(*DEAD_LETTER.names)


def _chosen(frame: DataFrame, condition: Column) -> DataFrame:
    """Return the rows that satisfy `condition`.

    Spark moves no filter below a column such as `_row`. Otherwise it would replace each name in the condition by its
    whole expression, level by level: it would decode each value many times, and planning several schemas of a registry
    took minutes and most of the JVM's heap.
    """
    numbered = frame.withColumn(_ROW, F.monotonically_increasing_id())
    return numbered.where(condition & (F.col(_ROW) >= 0)).drop(_ROW)


def parse(records: DataFrame) -> DataFrame:
    """Add the column `parsed`, a variant, and `reason` if the value is not a JSON object. For a null value, both are
    null."""
    text = F.try_validate_utf8(F.col("value").cast(StringType()))
    # Spark ignores what follows a JSON value. Within an array it does not, and another element shows the array's end.
    pair = _get(F.try_parse_json(F.concat(F.lit("["), text, F.lit(",0]"))), "array<variant>")
    parsed = records.withColumn("parsed", F.when(F.size(pair) == 2, F.get(pair, 0)))
    is_object = F.schema_of_variant("parsed").startswith("OBJECT")
    reason = F.when(F.col("value").isNull(), None)
    reason = reason.when(F.col("parsed").isNull(), "the value is not JSON")
    return parsed.withColumn("reason", reason.when(~is_object, "the value is JSON, but not an object"))


def infer(parsed: DataFrame) -> StructType:
    """Return the type that all objects of `parsed` fit. A field with values of several types becomes text.

    A whole number with an exponent counts as an integer here. Otherwise a single 1e2 would make a column of ids a
    double for ever.
    """
    text = F.col("value").cast(StringType())
    without = F.try_parse_json(F.regexp_replace(text, WHOLE_WITH_EXPONENT, "$1"))
    seen = F.when(text.rlike(WHOLE_WITH_EXPONENT), F.coalesce(without, "parsed")).otherwise(F.col("parsed"))
    # A filter would move below `parsed`, and parse each value again for each name in its condition.
    found = parsed.agg(F.schema_of_variant_agg(F.when(F.col("reason").isNull(), seen)))
    text = found.collect()[0][0]
    return _struct(settle(DataType.fromDDL(struct_words(text)))) if text and text.startswith("OBJECT<") else NO_TYPE


def struct_words(text: str) -> str:
    """Return a variant's type in the form of Spark's DDL, with the names in backticks unchanged."""
    pieces = re.split(r"(`(?:[^`]|``)*`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"\bOBJECT<", "STRUCT<", piece).replace("STRUCT<>", "VOID")
        for piece in pieces
    )


def settle(kind: DataType, depth: int = 0) -> DataType:
    """Return a type that later values are likely to fit.

    Fractions are doubles, integers beyond 64 bits decimals, mixed values text. Fields of unknown type, or of a name
    that a column cannot have, are left out.
    """
    if isinstance(kind, DecimalType):
        if kind.scale:
            return DoubleType()
        return LongType() if kind.precision <= 18 else DecimalType(MOST_DIGITS, 0)
    if isinstance(kind, LongType | DoubleType | BooleanType | StringType | NullType):
        return kind
    if isinstance(kind, StructType) and depth < MAX_DEPTH:
        fields = [StructField(field.name, settle(field.dataType, depth + 1)) for field in kind.fields]
        known = [field for field in fields if not isinstance(field.dataType, NullType)]
        allowed = merge(NO_TYPE, StructType(known))
        return allowed if allowed.fields else NullType()
    if isinstance(kind, ArrayType) and depth < MAX_DEPTH:
        element = settle(kind.elementType, depth + 1)
        return NullType() if isinstance(element, NullType) else ArrayType(element)
    return StringType()


def merge(stored: StructType, found: DataType) -> StructType:
    """Return `stored` with the fields that only `found` has. A field that both have keeps its stored type."""
    if not isinstance(found, StructType):
        return stored
    held = {name for field in stored.fields for name in _alike(field.name)}
    fields: list[StructField] = []
    for field in stored.fields:
        other = next((each for each in found.fields if each.name == field.name), None)
        fields.append(field if other is None else StructField(field.name, _merge_types(field.dataType, other.dataType)))
    room = MAX_FIELDS - _leaves(StructType(fields))
    for field in found.fields:
        needed = _leaves(field.dataType)
        if held.isdisjoint(_alike(field.name)) and needed <= room and can_be_column(field.name):
            held |= _alike(field.name)
            fields.append(field)
            room -= needed
    return StructType(fields)


def _alike(name: str) -> set[str]:
    """Return the forms of a name by which Delta and Spark recognise the same column: Delta lowers the whole name, and
    Spark compares letter by letter, first in upper and then in lower case. To Spark, s and long s are the same letter.
    """
    upper = (letter.upper() if len(letter.upper()) == 1 else letter for letter in name)
    return {name.lower(), "".join(letter.lower()[0] for letter in upper)}


def climb(parsed: DataFrame, kind: StructType, *, decimals: bool) -> StructType:
    """Return `kind` with its narrow numbers widened for the values of `parsed`.

    Only a given schema has such columns; without a given schema the job reads no values.
    """
    steps = [step for field in kind.fields for step in _steps(field.dataType, (field.name,), decimals)]
    if not steps:
        return kind
    asked = [F.max(each.height(F.col("parsed"))).alias(str(at)) for at, each in enumerate(steps)]
    # A value that is no object has no fields, so it needs no wider column.
    heights: Any = parsed.agg(*asked).collect()[0]
    for step, height in zip(steps, heights, strict=True):
        kind = _struct(_replaced(kind, step.path, step.ladder[height or 0]))
    return kind


@dataclass(frozen=True, slots=True)
class _Step:
    """A narrow number in `data`. `height` is the step of the ladder of types that a variant's value needs, or null if
    the ladder has no such step.
    """

    path: tuple[str, ...]
    """Names of nested fields. An empty name stands for an array's elements."""
    ladder: tuple[DataType, ...]
    height: Callable[[Column], Column]


def _steps(kind: DataType, path: tuple[str, ...], decimals: bool) -> list[_Step]:
    if isinstance(kind, StructType):
        return [step for field in kind.fields for step in _steps(field.dataType, (*path, field.name), decimals)]
    if isinstance(kind, ArrayType):
        return _steps(kind.elementType, (*path, ""), decimals)
    if not isinstance(kind, ByteType | ShortType | IntegerType | FloatType | DecimalType):
        return []
    found = ladder(kind, decimals=decimals)
    return [_Step(path, found, _height(path, found))] if len(found) > 1 else []


def _height(path: tuple[str, ...], steps: Sequence[DataType]) -> Callable[[Column], Column]:
    if not path:
        return lambda value: _lowest(value, steps)
    inner = _height(path[1:], steps)
    if path[0]:
        return lambda value: inner(_member(value, path[0]))
    return lambda value: F.array_max(F.transform(_get(value, "array<variant>"), inner))


def _lowest(value: Column, steps: Sequence[DataType]) -> Column:
    found = F.when(fits(value, steps[0]), 0)
    for height, kind in enumerate(steps[1:], 1):
        found = found.when(fits(value, kind), height)
    return found


def _replaced(kind: DataType, path: tuple[str, ...], wide: DataType) -> DataType:
    if not path:
        return wide
    if isinstance(kind, ArrayType):
        return ArrayType(_replaced(kind.elementType, path[1:], wide))
    fields = [
        StructField(field.name, _replaced(field.dataType, path[1:], wide)) if field.name == path[0] else field
        for field in _struct(kind).fields
    ]
    return StructType(fields)


def _leaves(kind: DataType) -> int:
    """Return the number of columns that a type becomes in a Parquet file."""
    if isinstance(kind, StructType):
        return sum(_leaves(field.dataType) for field in kind.fields)
    return _leaves(kind.elementType) if isinstance(kind, ArrayType) else 1


def can_be_column(name: str) -> bool:
    """Return whether Delta accepts `name` as a column's name."""
    return bool(name) and REFUSED_IN_NAMES.isdisjoint(name)


def _given(text: str) -> StructType:
    """Return the type in --schema. Raise PipelineError if it is no DDL of columns, or if Delta refuses one of its
    names.
    """
    try:
        kind = _struct(DataType.fromDDL(text))
    except PySparkException as error:
        raise PipelineError(
            f"--schema is no DDL of Spark: {root_cause(error)}", "Write it like: id BIGINT, name STRING."
        ) from error
    refused = [field.name for field in kind.fields if not can_be_column(field.name)]
    if refused:
        raise PipelineError(
            f"The field {refused[0]!r} of --schema cannot be a column's name.",
            "Leave it out of the schema; its values are kept in _rescued.",
        )
    return kind


def _merge_types(stored: DataType, found: DataType) -> DataType:
    if isinstance(stored, StructType):
        return merge(stored, found)
    if isinstance(stored, ArrayType) and isinstance(found, ArrayType):
        return ArrayType(_merge_types(stored.elementType, found.elementType))
    return stored


def to_typed(parsed: DataFrame, kind: StructType) -> DataFrame:
    """Return the columns data and _rescued for `parsed`."""
    text = F.when(F.size(RESCUED) > 0, F.to_json(RESCUED))
    return _with_rescued(parsed, kind).withColumn(RESCUED, text).drop("parsed", "members")


def _with_rescued(parsed: DataFrame, kind: StructType) -> DataFrame:
    """Return three columns: data; `members`, the fields of the value; and _rescued, the fields that do not fit. The
    last two columns are maps of variants.
    """
    good = F.col("parsed").isNotNull() & F.col("reason").isNull()
    # Make the map a column of its own. Otherwise Spark would build it again for every field.
    typed = parsed.withColumn("members", F.when(good, F.expr("try_variant_get(parsed, '$', 'map<string,variant>')")))
    members = F.col("members")
    at = {field.name: F.try_element_at(members, F.lit(field.name)) for field in kind.fields}
    fitting = F.array(*(F.when(fits(at[field.name], field.dataType), F.lit(field.name)) for field in kind.fields)).cast(
        "array<string>"
    )
    rescued = F.map_filter(
        members,
        lambda name, member: (
            (F.schema_of_variant(member) != "VOID") & ~F.coalesce(F.array_contains(fitting, name), F.lit(False))
        ),
    )
    typed = typed.withColumn(RESCUED, rescued)
    if kind.fields:
        columns = [cast(at[field.name], field.dataType).alias(field.name) for field in kind.fields]
        typed = typed.withColumn(DATA, F.when(good, F.struct(*columns)))
    return typed


def _all(conditions: Sequence[Column]) -> Column:
    """Return whether all `conditions` hold. The depth of the expression tree is the logarithm of their number."""
    if not conditions:
        return F.lit(True)
    if len(conditions) == 1:
        return conditions[0]
    middle = len(conditions) // 2
    return _all(conditions[:middle]) & _all(conditions[middle:])


def _get(value: Column, kind: str) -> Column:
    return F.try_variant_get(value, "$", kind)


def _member(value: Column, name: str) -> Column:
    return F.try_element_at(_get(value, "map<string,variant>"), F.lit(name))


def cast(value: Column, kind: DataType) -> Column:
    """Return a variant as `kind`; null if it does not fit."""
    if isinstance(kind, StructType):
        members = [cast(_member(value, field.name), field.dataType).alias(field.name) for field in kind.fields]
        return F.when(F.schema_of_variant(value).startswith("OBJECT"), F.struct(*members))
    if isinstance(kind, ArrayType):
        return F.transform(_get(value, "array<variant>"), lambda element: cast(element, kind.elementType))
    if isinstance(kind, StringType):
        # Keep text as it is, and turn anything else into JSON.
        return F.when(F.schema_of_variant(value) == "VOID", None).otherwise(_get(value, "string"))
    return F.when(fits(value, kind), _get(value, kind.simpleString()))


def fits(value: Column, kind: DataType) -> Column:
    """Return whether `cast` would lose nothing of a variant. Null fits every type."""
    own = F.schema_of_variant(value)
    nothing = value.isNull() | (own == "VOID")
    if isinstance(kind, StringType):
        return F.lit(True)
    return nothing | _fits(value, own, kind)


def _fits(value: Column, own: Column, kind: DataType) -> Column:
    """Return whether a variant that has the type `own` and is not null fits `kind`."""
    if isinstance(kind, StructType):
        known = [field.name for field in kind.fields]
        names = F.map_keys(_get(value, "map<string,variant>"))
        inside = _all([fits(_member(value, field.name), field.dataType) for field in kind.fields])
        return own.startswith("OBJECT") & ~F.exists(names, lambda name: ~name.isin(known)) & inside
    if isinstance(kind, ArrayType):
        elements = _get(value, "array<variant>")
        return own.startswith("ARRAY") & F.forall(elements, lambda element: fits(element, kind.elementType))
    if isinstance(kind, BooleanType):
        return own == "BOOLEAN"
    if isinstance(kind, IntegralType):
        # Null if the integer is too large for a narrower type.
        return ((own == "BIGINT") | _is_whole(value, own)) & _get(value, kind.simpleString()).isNotNull()
    exact = (own == "BIGINT") | own.startswith("DECIMAL")
    if isinstance(kind, DecimalType):
        return exact & _get(value, kind.simpleString()).isNotNull() & (_fraction_digits(value) <= kind.scale)
    if isinstance(kind, DoubleType):
        return (own == "DOUBLE") | (exact & _is_as_written(value, kind))
    if isinstance(kind, FloatType):
        narrow, wide = _get(value, "float"), _get(value, "double")
        # The texts are equal if a writer has written a float in its shortest form.
        same = (narrow.cast("double") == wide) | (narrow.cast("string") == wide.cast("string"))
        return ((own == "DOUBLE") & same) | (exact & _is_as_written(value, kind))
    # Only a given schema has such a type, for example a date: text that Spark can convert.
    converts = (own == "STRING") & _get(value, kind.simpleString()).isNotNull()
    whole = next((pattern for found, pattern in WHOLE_TEXTS.items() if isinstance(kind, found)), None)
    return converts if whole is None else converts & _get(value, "string").rlike(whole)


def _is_whole(value: Column, own: Column) -> Column:
    """Return whether a double is an integer to which no other double rounds."""
    number = _get(value, "double")
    return (own == "DOUBLE") & (F.abs(number) <= MAX_WHOLE_DOUBLE) & (F.rint(number) == number)


def _fraction_digits(value: Column) -> Column:
    """Return the number of digits behind the point of an integer or decimal variant, without trailing zeros."""
    return F.length(F.regexp_extract(_get(value, "string"), r"\.(\d*?)0*$", 1))


def _is_as_written(value: Column, kind: DataType) -> Column:
    """Return whether a binary number, in its shortest decimal form, equals the decimal number in the text."""
    text, binary = _get(value, "string"), _get(value, kind.simpleString()).cast("string")
    same = [
        (_fraction_digits(value) <= scale)
        & text.try_cast(f"decimal(38,{scale})").eqNullSafe(binary.try_cast(f"decimal(38,{scale})"))
        & text.try_cast(f"decimal(38,{scale})").isNotNull()
        for scale in (0, *COMPARED_SCALES)
    ]
    return F.coalesce(same[0] | same[1] | same[2], F.lit(False))


def _struct(kind: DataType) -> StructType:
    return kind if isinstance(kind, StructType) else NO_TYPE
