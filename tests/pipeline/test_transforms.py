"""Transforms on a few rows each."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DoubleType, LongType, StringType, StructField, StructType

from pipeline.archive.plan import Progress, Range
from pipeline.archive.transforms import to_records
from pipeline.archive.typed import (
    MAX_FIELDS,
    AvroTyping,
    JsonTyping,
    all_nulls,
    infer,
    merge,
    parse,
    settle,
    stored_type,
    struct_words,
)
from pipeline.compact.transforms import worth_compacting
from pipeline.errors import PipelineError
from pipeline.partitioners import murmur2
from pipeline.replay import compare
from pipeline.replay.plan import Plan
from pipeline.replay.transforms import in_order, select_records, summary, translate, with_targets
from pipeline.schema import DATA, HEADERS, OFFSET_MAP, RECORD, RESCUED, conform
from pipeline.verify.compare import unclaimed, unequal_blocks, unequal_offsets, unequal_ranges
from pipeline.verify.sums import BLOCK, BLOCK_SUMS, COLUMNS, block_sums, bytes_sum, headers_sum, record_sums, time_sum
from pipeline.verify.topic import Chunk, _add

KAFKA = (
    "topic string, partition int, offset long, timestamp timestamp, timestampType int, key binary, value binary, "
    f"headers {HEADERS.simpleString()}"
)
AT = datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)


def record(offset: int, value: bytes | None = b"v", **changes: Any) -> tuple[Any, ...]:
    row = {
        "topic": "a", "partition": 0, "offset": offset, "timestamp": AT, "timestamp_type": "create_time",
        "key": None, "value": value, "headers": None, "date": AT.date(),
    }  # fmt: skip
    return tuple({**row, **changes}.values())


def records_of(spark: SparkSession, rows: Sequence[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(rows, RECORD)


# --- archive --------------------------------------------------------------------------------------------------------


def test_a_row_of_the_connector_becomes_a_record(spark: SparkSession) -> None:
    headers = [("h", b"\x00")]
    rows = spark.createDataFrame(
        [
            ("a", 1, 5, AT, 0, b"k", None, headers),
            ("a", 1, 6, AT, 1, None, b"", None),
            ("a", 1, 7, AT, -1, None, b"", None),
        ],
        KAFKA,
    )
    found = to_records(rows).collect()
    assert [row.timestamp_type for row in found] == ["create_time", "log_append_time", "none"]
    assert found[0].date == date(2026, 1, 31)
    assert (bytes(found[0].key), found[0].value, bytes(found[1].value)) == (b"k", None, b"")
    assert [(header.key, bytes(header.value)) for header in found[0].headers] == headers


def test_a_date_is_one_that_every_reader_knows(spark: SparkSession) -> None:
    kinds = f"{KAFKA}, ms long"
    rows = [
        ("a", 0, at, AT, 0, None, None, None, ms) for at, ms in enumerate([253_402_300_800_000, -62_135_596_800_001])
    ]
    frame = spark.createDataFrame(rows, kinds).withColumn("timestamp", F.timestamp_millis("ms"))
    found = to_records(frame).orderBy("offset").select("date", F.unix_millis("timestamp")).collect()
    assert [tuple(row) for row in found] == [
        (date(9999, 12, 31), 253_402_300_800_000), (date(1, 1, 1), -62_135_596_800_001),
    ]  # fmt: skip


def test_a_missing_or_changed_column_is_an_error(spark: SparkSession) -> None:
    frame = records_of(spark, [record(1)])
    with pytest.raises(ValueError, match="missing"):
        conform(frame.drop("key"), RECORD)
    with pytest.raises(ValueError, match="offset is int"):
        conform(frame.withColumn("offset", frame["offset"].cast("int")), RECORD)


def json_records(spark: SparkSession, *values: str | bytes | None) -> DataFrame:
    raw = [value.encode() if isinstance(value, str) else value for value in values]
    return records_of(spark, [record(index, value) for index, value in enumerate(raw)])


def test_json_is_typed_as_its_own_values_are(spark: SparkSession) -> None:
    values = ['{"id": 1, "price": 1.5, "tags": ["x"], "who": {"name": "n"}}', '{"id": 2, "price": 3, "none": null}']
    kind = infer(parse(json_records(spark, *values)))
    assert kind.simpleString() == "struct<id:bigint,price:double,tags:array<string>,who:struct<name:string>>"
    typed = JsonTyping(None, evolve=True).apply(json_records(spark, *values), StructType())
    rows = typed.orderBy("offset").collect()
    assert (rows[0][DATA].id, rows[0][DATA].price, rows[0][DATA].tags, rows[0][DATA].who.name) == (1, 1.5, ["x"], "n")
    assert (rows[1][DATA].price, rows[1][DATA].tags, rows[1][RESCUED]) == (3.0, None, None)


def test_what_does_not_fit_its_column_is_rescued_and_what_is_new_is_added(spark: SparkSession) -> None:
    stored = StructType([StructField("id", LongType()), StructField("who", StructType([StructField("n", LongType())]))])
    values = ['{"id": "seven", "who": {"n": 1}}', '{"id": 7.5, "new": true}', '{"id": 3, "who": {"n": "x", "m": 2}}']
    rows = JsonTyping(None, evolve=True).apply(json_records(spark, *values), stored).orderBy("offset").collect()
    assert [row[DATA].id for row in rows] == [None, None, 3]
    assert [row[DATA].new for row in rows] == [None, True, None]
    assert (rows[2][DATA].who.n, rows[2][DATA].who.m) == (None, 2)
    assert [json.loads(row[RESCUED]) for row in rows] == [{"id": "seven"}, {"id": 7.5}, {"who": {"m": 2, "n": "x"}}]


def test_without_evolution_what_is_new_is_rescued(spark: SparkSession) -> None:
    stored = StructType([StructField("id", LongType())])
    rows = JsonTyping(None, evolve=False).apply(json_records(spark, '{"id": 1, "new": [1]}'), stored).collect()
    assert rows[0][DATA].asDict() == {"id": 1}
    assert json.loads(rows[0][RESCUED]) == {"new": [1]}


def test_what_is_no_json_object_has_a_reason_and_a_null_has_none(spark: SparkSession) -> None:
    rows = JsonTyping(None, evolve=True).apply(
        json_records(spark, '{"id": 1}', "{", "[1]", "7", b"\xff\xfe", None, ""), StructType()
    ).orderBy("offset").collect()  # fmt: skip
    assert [row.reason for row in rows] == [
        None, "the value is not JSON", "the value is JSON, but not an object", "the value is JSON, but not an object",
        "the value is not JSON", None, "the value is not JSON",
    ]  # fmt: skip
    assert [row[DATA] is None for row in rows] == [False, True, True, True, True, True, True]


def test_value_that_goes_on_behind_its_object_or_is_no_utf_8_is_no_json(spark: SparkSession) -> None:
    whole = ['{"id": 1}', ' {"id": 1}\n\t']
    broken = ['{"id": 1}{"id": 2}', '{"id": 1} x', '{"id": 1}]', '{"id": 1}, {"id": 2}', '{"id": 1}, 0', '{"id": 1} //']
    values: list[str | bytes] = [*whole, *broken, b'{"id": "\xff"}', b'{"\xff": 1}']
    rows = JsonTyping(None, evolve=True).apply(json_records(spark, *values), StructType()).orderBy("offset").collect()
    assert [row.reason for row in rows] == [None] * len(whole) + ["the value is not JSON"] * (len(broken) + 2)
    assert [row[DATA] and row[DATA].id for row in rows] == [1] * len(whole) + [None] * (len(broken) + 2)


def typed_rows(spark: SparkSession, kind: str | None, *values: str) -> list[Any]:
    typing = JsonTyping(kind, evolve=kind is None)
    return typing.apply(json_records(spark, *values), StructType()).orderBy("offset").collect()


@pytest.mark.parametrize("character", [*" ,;{}()=", "\\t", "\\n"])
def test_a_name_that_delta_refuses_is_rescued_at_any_depth(spark: SparkSession, character: str) -> None:
    bad = f"first{character}name"
    value = f'{{"id": 1, "{bad}": "x", "who": {{"age": 2, "{bad}": 3}}}}'
    [row] = typed_rows(spark, None, value)
    assert row[DATA].asDict(recursive=True) == {"id": 1, "who": {"age": 2}}
    expected = json.loads(value)
    assert json.loads(row[RESCUED]) == {name: expected[name] for name in expected if name != "id"}


def test_nested_names_that_differ_in_case_only_make_one_column(spark: SparkSession) -> None:
    [row] = typed_rows(spark, None, '{"who": {"a": 1, "A": 2}}')
    assert len(row[DATA].who) == 1
    assert json.loads(row[RESCUED]) == {"who": {"a": 1, "A": 2}}


@pytest.mark.parametrize(
    ("one", "other"), [("s", "\u017f"), ("\u00b5", "\u03bc"), ("\u03c2", "\u03c3"), ("i", "\u0131")]
)
def test_names_that_java_takes_for_one_make_one_column(
    spark: SparkSession, tmp_path: Any, one: str, other: str
) -> None:
    value = f'{{"{one}": 1, "{other}": 2, "in": {{"{one}": 1, "{other}": 2}}}}'
    frame = JsonTyping(None, evolve=True).apply(json_records(spark, value), StructType())
    frame.write.format("delta").save(str(tmp_path / "table"))
    [row] = spark.read.format("delta").load(str(tmp_path / "table")).collect()
    assert row[DATA].asDict(recursive=True)[one] == 1
    assert json.loads(row[RESCUED])[other] == 2


def test_a_schema_with_a_name_that_delta_refuses_is_an_error(spark: SparkSession) -> None:
    with pytest.raises(PipelineError, match="'first name'"):
        typed_rows(spark, "`first name` string", "{}")


@pytest.mark.parametrize(
    "typing", [JsonTyping("id bigint name", evolve=True), AvroTyping('{"type": "x"}', framed=False)]
)
def test_schema_that_cannot_be_read_is_an_error_in_words(spark: SparkSession, typing: JsonTyping | AvroTyping) -> None:
    with pytest.raises(PipelineError, match=r"^--schema ") as refused:
        typing.apply(json_records(spark, "{}"), StructType())
    assert "\n" not in refused.value.cause


def test_records_that_each_bring_a_field_are_typed_up_to_the_limit(spark: SparkSession) -> None:
    rows = typed_rows(spark, None, *(f'{{"u{number}": {number}}}' for number in range(MAX_FIELDS + 10)))
    typed = [row for row in rows if row[RESCUED] is None]
    assert len(typed) == MAX_FIELDS
    assert all(row[DATA][f"u{row.offset}"] == row.offset for row in typed)
    assert [json.loads(row[RESCUED]) for row in rows if row[RESCUED]] == [
        {f"u{row.offset}": row.offset} for row in rows if row[RESCUED]
    ]


@pytest.mark.parametrize(
    ("kind", "fitting", "rescued"),
    [
        ("bigint", ["9223372036854775807", "-1", "1e2"],
         ["9223372036854775808", "1.5", "1.5e0", "1e17", "true", '"1"']),
        ("int", ["8"], ["8.5", "true", "2147483648", '"8"']),
        ("double", ["1.5", "0.30000000000000004", "1e2", "9007199254740992", "0.1", "123456789012345.67", "-0.001"],
         ["9007199254740993", "12345678901234567890", "0.1234567890123456789", "true", '"1"']),
        ("float", ["1.5", "0.1", "1.2345E-4", "3.4028235E38"],
         ["0.123456789", "1.23456789E-4", "1e300", "16777217", "true"]),
        ("decimal(10,2)", ["8.5", "8", "0.120", "12345678.91"], ["0.1234567", "123456789.1", "true", "1e2"]),
        ("date", ['"2026-01-31"', '"2026-1-3"'],
         ["7", "true", '"soon"', '"2026-01-31T12:00:00Z"', '"2026-01-31 12:00"']),
        ("timestamp", ['"2026-01-31T12:00:00.123456Z"', '"2026-01-31 12:00:00+02:00"', '"2026-01-31"'],
         ['"12:30"', '"T12:30:00"', '"now"']),
        ("timestamp_ntz", ['"2026-01-31T12:00:00.1234560"'],
         ['"2026-01-31T12:00:00+02:00"', '"2026-01-31T12:00:00Z"', '"2026-01-31 12:00:00 Europe/Berlin"']),
        ("boolean", ["true"], ["1", '"true"']),
    ],
)  # fmt: skip
def test_only_a_value_that_its_column_holds_exactly_is_typed(
    spark: SparkSession, kind: str, fitting: list[str], rescued: list[str]
) -> None:
    rows = typed_rows(spark, f"v {kind}", *(f'{{"v": {value}}}' for value in [*fitting, *rescued]))
    assert [row[RESCUED] is None and row[DATA].v is not None for row in rows] == (
        [True] * len(fitting) + [False] * len(rescued)
    )
    assert all(row[DATA].v is None and row[RESCUED] for row in rows[len(fitting) :])


def test_an_avro_record_of_nothing_but_nulls_is_no_dead_letter(spark: SparkSession) -> None:
    fields = '{"name": "a", "type": ["null", "long"]}, {"name": "b", "type": ["string", "null"]}'
    schema = f'{{"type": "record", "name": "r", "fields": [{fields}]}}'
    values = [b"\x00\x02", b"\x02", b"\x00\x02\x00", None]
    rows = (
        AvroTyping(schema, framed=False).apply(json_records(spark, *values), StructType()).orderBy("offset").collect()
    )
    assert [row.reason is None for row in rows] == [True, False, False, True]
    assert rows[0][DATA].asDict() == {"a": None, "b": None}
    assert all_nulls('{"type": "record", "name": "r", "fields": [{"name": "a", "type": "long"}]}') is None
    long_union = '["int", "long", "float"]'.replace(
        "]", "".join(f', {{"type": "fixed", "name": "f{n}", "size": 1}}' for n in range(70)) + ', "null"]'
    )
    assert (
        all_nulls(f'{{"type": "record", "name": "r", "fields": [{{"name": "a", "type": {long_union}}}]}}')
        == b"\x92\x01"
    )


def test_a_whole_number_with_an_exponent_does_not_make_its_column_a_double(spark: SparkSession) -> None:
    values = ('{"id": 1e2, "in": {"n": [ 2E+3 , 4]}, "text": "a 1e2, b"}', '{"id": 9007199254740993, "text": "x"}')
    rows = typed_rows(spark, None, *values)
    assert [(row[DATA].id, row[DATA].text) for row in rows] == [(100, "a 1e2, b"), (9007199254740993, "x")]
    assert (rows[0][DATA]["in"].n, [row[RESCUED] for row in rows]) == ([2000, 4], [None, None])
    [fraction] = typed_rows(spark, None, '{"x": 1.5e-3}')
    assert fraction[DATA].x == 0.0015


def test_an_integer_beyond_64_bits_is_a_decimal(spark: SparkSession) -> None:
    [row] = typed_rows(spark, None, '{"v": 12345678901234567890}')
    assert (row[DATA].v, row[RESCUED]) == (12345678901234567890, None)


def test_types_that_later_values_fit_as_well() -> None:
    assert struct_words("OBJECT<`OBJECT<`: OBJECT<>, b: ARRAY<OBJECT<c: BIGINT>>>") == (
        "STRUCT<`OBJECT<`: VOID, b: ARRAY<STRUCT<c: BIGINT>>>"
    )
    kind = StructType([StructField("a", ArrayType(StructType([StructField("b", LongType())])))])
    more = StructType(
        [StructField("a", ArrayType(StructType([StructField("c", DoubleType())]))), StructField("A", LongType())]
    )
    assert merge(kind, more).simpleString() == "struct<a:array<struct<b:bigint,c:double>>>"
    deep: Any = LongType()
    for name in string.ascii_lowercase[:8]:
        deep = StructType([StructField(name, deep)])
    assert settle(deep).simpleString().count("struct") == 5
    assert settle(deep).simpleString().endswith(StringType().simpleString() + ">" * 5)


def test_nested_fields_count_towards_the_limit() -> None:
    wide = StructType([StructField(f"f{number}", LongType()) for number in range(MAX_FIELDS - 1)])
    found = StructType([StructField("a", wide), StructField("b", wide), StructField("c", LongType())])
    assert merge(StructType(), found).names == ["a", "c"]


@pytest.mark.parametrize(
    ("shape", "kind", "values", "wide", "decimals"),
    [
        ("{}", "int", ["1", "9223372036854775808"], "decimal(38,0)", True),
        ("{}", "int", ["1", "9223372036854775808"], "int", False),
        ("{}", "bigint", ["1", "9223372036854775808"], "bigint", False),
        ("{}", "bigint", ["1", "1.5"], "bigint", True),
        ("struct<in:{}>", "bigint", ["1", "9223372036854775808"], "decimal(38,0)", True),
        ("struct<in:{}>", "int", ["1", "2147483648", '"text"'], "bigint", False),
        ("struct<in:{}>", "int", ["1", "2"], "int", True),
        ("struct<in:{}>", "decimal(10,2)", ["1.25", "123456789.75"], "decimal(38,2)", False),
        ("array<{}>", "smallint", ["1", "40000"], "int", True),
        ("array<{}>", "float", ["1.5", "0.123456789"], "double", False),
    ],
)
def test_a_column_becomes_as_wide_as_its_values_need(
    spark: SparkSession, shape: str, kind: str, values: list[str], wide: str, decimals: bool
) -> None:
    text = {"{}": "%s", "struct<in:{}>": '{"in":%s}', "array<{}>": "[%s,null]"}[shape]
    stored = StructType.fromDDL(f"v {shape.format(kind)}")
    frame = json_records(spark, *('{"v":%s}' % (text % value) for value in values))
    typed = JsonTyping(None, evolve=True, decimals=decimals).apply(frame, stored).orderBy("offset")
    assert typed.schema[DATA].dataType.simpleString() == f"struct<v:{shape.format(wide)}>"
    for value, row in zip(values, typed.select(F.to_json(DATA), RESCUED).collect(), strict=True):
        assert (row[RESCUED] is None) is (value in row[0])


def test_a_column_keeps_its_type_without_evolution(spark: SparkSession) -> None:
    stored = StructType.fromDDL("v int")
    [row] = JsonTyping(None, evolve=False).apply(json_records(spark, '{"v": 2147483648}'), stored).collect()
    assert (row[DATA].v, row[RESCUED]) == (None, '{"v":2147483648}')


def test_avro_of_an_older_schema_becomes_as_wide_as_the_table(spark: SparkSession) -> None:
    stored = StructType.fromDDL("id bigint, s string")
    schema = AVRO.replace('"long"', '"int"')
    frame = AvroTyping(schema, framed=False).apply(json_records(spark, b"\x0e\x02x"), stored)
    assert frame.schema[DATA].dataType.simpleString() == "struct<id:bigint,s:string>"
    assert frame.collect()[0][DATA].asDict() == {"id": 7, "s": "x"}


def test_data_that_is_not_what_the_value_says_is_found(spark: SparkSession) -> None:
    typing = JsonTyping(None, evolve=False)
    stored = StructType.fromDDL("id bigint, who struct<n:bigint>")
    wrong_data, wrong_rescued = "its data is not what its value says", "its _rescued is not what its value says"
    changes = [
        ("data", "named_struct('id', 8L, 'who', data.who)", wrong_data),
        ("data", "null", wrong_data),
        ("data", "named_struct('id', data.id, 'who', null)", wrong_data),
        ("_rescued", "null", "its _rescued lacks what does not fit data"),
        ("_rescued", "'{\"new\":2}'", wrong_rescued),
        ("_rescued", '\'{"new":1,"old":1}\'', wrong_rescued),
        ("value", "cast('no json' as binary)", wrong_rescued),
    ]
    values = ['{"id": 7, "who": {"n": 1}, "new": 1}'] * len(changes)
    values += ['{"id": 7, "who": {"n": 1}, "new": 1}', '{"id": 1e2}', "no json", None, '{"who": {"n": "x"}}']
    frame = typing.apply(json_records(spark, *values), stored).drop("reason")
    for offset, (name, text, _) in enumerate(changes):
        frame = frame.withColumn(name, F.expr(f"if(offset = {offset}, {text}, {name})"))
    found = {row.offset: row.what for row in typing.mistyped(frame, stored).collect()}
    assert found == {offset: what for offset, (_, _, what) in enumerate(changes)}


def test_rows_typed_with_fewer_and_narrower_columns_are_right(spark: SparkSession) -> None:
    typing = JsonTyping(None, evolve=False)
    before = StructType.fromDDL("id int, who struct<n:bigint>")
    after = StructType.fromDDL("id bigint, who struct<n:bigint,m:bigint>, new bigint")
    values = ['{"id": 2147483648, "who": {"n": 1, "m": 2}, "new": 1}', '{"id": 1, "who": {"n": 3}}', "{}"]
    frame = typing.apply(json_records(spark, *values), before).drop("reason")
    grown = frame.withColumn(
        DATA,
        F.expr(
            "named_struct('id', cast(data.id as bigint), "
            "'who', if(data.who is null, null, named_struct('n', data.who.n, 'm', cast(null as bigint))), "
            "'new', cast(null as bigint))"
        ),
    )
    assert typing.mistyped(grown, after).collect() == []
    without = frame.drop(DATA)
    assert [row.offset for row in typing.mistyped(without, StructType()).collect()] == [1]


def test_avro_data_that_is_not_what_the_value_says_is_found(spark: SparkSession) -> None:
    typing = AvroTyping(AVRO, framed=False)
    stored = StructType.fromDDL("id bigint, s string, more bigint")
    right = typing.apply(json_records(spark, b"\x0e\x02x", b"\x0e", None), stored).drop("reason")
    assert typing.mistyped(right, stored).collect() == []
    wrong = right.withColumn(DATA, F.when(F.col("offset") == 0, F.struct(F.lit(8).alias("id"), F.lit("x").alias("s"))))
    assert [(row.offset, row.what) for row in typing.mistyped(wrong, stored).collect()] == [
        (0, "its data is not what its value says")
    ]


def test_avro_data_that_is_a_microsecond_off_is_found(spark: SparkSession) -> None:
    kinds = ("timestamp-micros", "local-timestamp-micros")
    fields = [{"name": f"t{at}", "type": {"type": "long", "logicalType": kind}} for at, kind in enumerate(kinds)]
    typing = AvroTyping(json.dumps({"type": "record", "name": "r", "fields": fields}), framed=False)
    right = typing.apply(json_records(spark, b"\x02\x02", b"\x02\x02", b"\x02\x02"), StructType()).drop("reason")
    stored = stored_type(right.schema)
    assert typing.mistyped(right, stored).collect() == []
    later = [
        F.when(F.col("offset") == at, F.col(DATA)[f"t{at}"] + F.expr("INTERVAL '0.000001' SECOND"))
        .otherwise(F.col(DATA)[f"t{at}"])
        .alias(f"t{at}")
        for at in range(2)
    ]
    wrong = right.withColumn(DATA, F.struct(*later))
    assert sorted(row.offset for row in typing.mistyped(wrong, stored).collect()) == [0, 1]


AVRO = '{"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}, {"name": "s", "type": "string"}]}'


def test_avro_of_a_given_schema_with_and_without_a_registrys_prefix(spark: SparkSession) -> None:
    encoded = b"\x0e\x02x"  # 7, "x"
    for framed, prefix in ((False, b""), (True, b"\x00\x00\x00\x00\x01")):
        frame = json_records(spark, prefix + encoded, prefix + b"\x0e", None)
        rows = AvroTyping(AVRO, framed).apply(frame, StructType()).orderBy("offset").collect()
        assert rows[0][DATA].asDict() == {"id": 7, "s": "x"}
        assert [row.reason for row in rows] == [None, "the value is not Avro of the given schema", None]
        assert rows[1][DATA] is None


# --- verify ---------------------------------------------------------------------------------------------------------


def test_both_sides_sum_alike(spark: SparkSession) -> None:
    chance = random.Random(5)
    rows: list[tuple[Any, ...]] = []
    expected: dict[int, list[int]] = {}
    for offset in range(BLOCK - 60, BLOCK + 60):
        ms = chance.choice([-1, 0, 1_700_000_000_123 + offset, -86_400_001])
        kind = chance.choice(["create_time", "log_append_time"])
        key = chance.choice([None, b"", chance.randbytes(9)])
        value = chance.choice([None, b"", chance.randbytes(300)])
        headers: Any = chance.choice([None, [("größe", b"")], [("a", None), ("a", chance.randbytes(3)), ("", b";:=-")]])
        rows.append((offset, ms, kind, key, value, headers))
        found = expected.setdefault(offset // BLOCK, [0, 0, 0, 0, 0])
        sums = (time_sum(ms, 1 if kind == "create_time" else 2), bytes_sum(key), bytes_sum(value), headers_sum(headers))
        found[0] += 1
        for index, each in enumerate(sums, 1):
            found[index] += each * (offset % BLOCK + 1)
    kinds = f"offset long, ms long, timestamp_type string, key binary, value binary, headers {HEADERS.simpleString()}"
    frame = (
        spark.createDataFrame(rows, kinds)
        .withColumns({"topic": F.lit("a"), "partition": F.lit(0), "timestamp": F.timestamp_millis("ms")})
        .drop("ms")
    )
    summed = {row.block: list(row)[3:] for row in block_sums(record_sums(frame)).collect()}
    assert summed == expected


def test_chunks_add_up_to_blocks() -> None:
    import numpy as np

    sums: dict[int, list[int]] = {}
    offsets = np.array([BLOCK - 2, BLOCK - 1, BLOCK, 3 * BLOCK + 5], np.int64)
    ones = [np.ones(4, np.int64) for _ in COLUMNS]
    _add(sums, Chunk(offsets, ones))
    _add(sums, Chunk(offsets[:1] + 4, [each[:1] for each in ones]))
    assert sums == {0: [2, *[2 * BLOCK - 1] * 4], 1: [2, *[1 + 3] * 4], 3: [1, *[6] * 4]}


def sums_of(spark: SparkSession, rows: Sequence[tuple[Any, ...]]) -> DataFrame:
    return record_sums(records_of(spark, rows))


def test_blocks_that_differ_in_anything_are_found(spark: SparkSession) -> None:
    good = [record(offset, b"%d" % offset) for offset in range(10)]
    whole = block_sums(sums_of(spark, good))
    changes: dict[str, list[tuple[Any, ...]]] = {
        "missing": good[:4] + good[5:],
        "doubled": [*good, good[3]],
        "changed": [*good[:9], record(9, b"x")],
        "swapped": [*good[:8], record(8, b"9"), record(9, b"8")],
        "null for empty": [*good[:9], record(9, None)],
        "key": [*good[:9], record(9, b"9", key=b"")],
        "headers": [*good[:9], record(9, b"9", headers=[("a", None)])],
        "timestamp": [*good[:9], record(9, b"9", timestamp=datetime(2026, 1, 31, tzinfo=UTC))],
    }
    assert unequal_blocks(whole, whole).collect() == []
    for what, rows in changes.items():
        assert len(unequal_blocks(block_sums(sums_of(spark, rows)), whole).collect()) == 1, what
    empty = spark.createDataFrame([], BLOCK_SUMS)
    assert [tuple(row) for row in unequal_blocks(whole, empty).collect()] == [("a", 0, 0)]
    assert [tuple(row) for row in unequal_blocks(empty, whole).collect()] == [("a", 0, 0)]


def test_a_block_that_the_topic_side_summed_in_two_pieces_is_one(spark: SparkSession) -> None:
    good = [record(offset, b"%d" % offset) for offset in range(10)]
    parts = block_sums(sums_of(spark, good[:4])).unionAll(block_sums(sums_of(spark, good[4:])))
    assert unequal_blocks(block_sums(sums_of(spark, good)), parts).collect() == []


def test_differences_are_named_record_by_record(spark: SparkSession) -> None:
    topic = sums_of(spark, [record(1), record(2), record(3), record(4)])
    archive = sums_of(spark, [record(1), record(3, b"x"), record(4), record(4), record(5)])
    found = {row.offset: row.what for row in unequal_offsets(archive, topic).collect()}
    assert found == {
        2: "the archive does not hold it, the topic does",
        3: "its value is another in the archive than in the topic",
        4: "the archive holds it more than once",
        5: "the topic does not hold it, the archive does",
    }
    assert {row.offset for row in unequal_offsets(archive, topic, compacted=True).collect()} == {2, 3, 4}


def test_differences_of_consecutive_offsets_are_one_range(spark: SparkSession) -> None:
    topic = sums_of(spark, [record(offset) for offset in range(20)])
    archive = sums_of(spark, [record(offset) for offset in range(20) if offset != 2 and not 5 <= offset < 15])
    found = unequal_ranges(unequal_offsets(archive, topic)).orderBy("first").collect()
    assert [(row.first, row["last"], row.records) for row in found] == [(2, 2, 1), (5, 14, 10)]


def test_records_outside_of_the_claim_are_counted(spark: SparkSession) -> None:
    frame = records_of(spark, [record(1), record(5), record(6), record(6, partition=3)])
    progress = Progress(1, "r", {"a": "i"}, {("a", 0): 2}, {("a", 0): 6})
    found = {(row.topic, row.partition): row["count"] for row in unclaimed(frame, progress).collect()}
    assert found == {("a", 0): 2, ("a", 3): 1}


# --- replay ---------------------------------------------------------------------------------------------------------


def a_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "name": "r", "archive": "x", "topics": {"a": "b"}, "partitions": {1: 0}, "condition": None, "from_ms": None,
        "until_ms": None, "timestamps": "keep", "ranges": (), "batch_records": 30, "target_ids": {},
        "bases": {("b", 0): 0, ("b", 2): 0},
    }  # fmt: skip
    return Plan(**{**values, **changes})


def test_records_are_chosen_by_range_time_and_condition(spark: SparkSession) -> None:
    early = datetime(2026, 1, 1, tzinfo=UTC)
    frame = records_of(
        spark, [record(1), record(2), record(3, None), record(4, timestamp=early), record(5), record(2, partition=1)]
    )
    ranges = [Range("a", 0, 2, 5)]
    chosen = select_records(frame, a_plan(condition="value IS NOT NULL", from_ms=1_768_000_000_000), ranges)
    assert [(row.partition, row.offset) for row in chosen.collect()] == [(0, 2)]
    assert select_records(frame, a_plan(until_ms=1_768_000_000_000), ranges).collect()[0].offset == 4


def test_each_target_partition_is_in_one_task_and_in_order(spark: SparkSession) -> None:
    rows = [record(offset, partition=partition) for offset in (3, 1, 2) for partition in (1, 0, 2)]
    ordered = in_order(with_targets(records_of(spark, rows), a_plan()), a_plan(), 2)
    parts = ordered.rdd.glom().map(
        lambda part: [(row.target_topic, row.target_partition, row.partition, row.offset) for row in part]
    ).collect()  # fmt: skip
    assert parts == [
        [("b", 0, partition, offset) for partition in (0, 1) for offset in (1, 2, 3)],
        [("b", 2, 2, offset) for offset in (1, 2, 3)],
    ]


def test_a_thousand_target_partitions_and_topics_are_placed(spark: SparkSession) -> None:
    topics = {f"a{number}": f"b{number}" for number in range(1000)}
    plan = a_plan(
        topics=topics, partitions={number: number for number in range(1000)},
        bases={(topic, partition): 0 for topic in ("b7", "b999") for partition in range(1000)},
    )  # fmt: skip
    rows = [record(1, topic="a999", partition=999), record(2, topic="a7", partition=3)]
    found = in_order(with_targets(records_of(spark, rows), plan), plan, 2).collect()
    assert {(row.target_topic, row.target_partition, row.offset) for row in found} == {("b999", 999, 1), ("b7", 3, 2)}


def test_a_key_goes_where_the_java_client_puts_it_and_what_has_none_stays(spark: SparkSession) -> None:
    keys = [b"21", b"foobar", b"", b"a-little-bit-longer-string", b"abc", None]
    rows = [record(offset, key=key, partition=5) for offset, key in enumerate(keys)]
    plan = a_plan(by_key=0, counts={"b": 3})
    found = with_targets(records_of(spark, rows), plan).orderBy("offset").collect()
    expected = [murmur2(key) % 3 if key is not None else 5 % 3 for key in keys]
    assert [row.target_partition for row in found] == expected
    assert len(set(expected)) > 1


def test_a_dry_run_counts(spark: SparkSession) -> None:
    frame = records_of(spark, [record(1, b"12", key=b"k"), record(2, None), record(7, partition=1)])
    found = [tuple(row) for row in summary(with_targets(frame, a_plan())).collect()]
    assert found == [("a", 0, "b", 0, 2, 3, 1, 2), ("a", 1, "b", 0, 1, 1, 7, 7)]


def test_group_offsets_follow_the_map(spark: SparkSession) -> None:
    runs = [
        ("r", 1, "a", 0, 10, "b", 0, 100, 5),  # 10..14 to 100..104
        ("r", 2, "a", 0, 20, "b", 0, 105, 5),  # 20..24 to 105..109
        ("r", 1, "a", 1, 0, "b", 1, 110, 3),
    ]
    offset_map = spark.createDataFrame(runs, OFFSET_MAP)
    cases = {
        "before": (0, 5, 100), "inside": (0, 12, 102), "gap": (0, 17, 105), "end": (0, 25, 110), "far": (0, 99, 110),
        "other": (1, 1, 111),
    }  # fmt: skip
    committed = spark.createDataFrame(
        [(group, "a", partition, offset) for group, (partition, offset, _) in cases.items()]
        + [("elsewhere", "z", 0, 3)],
        "group string, topic string, partition int, offset long",
    )
    found = {row["group"]: row.offset for row in translate(committed, offset_map).collect()}
    assert found == {group: target for group, (_, _, target) in cases.items()}


def test_group_reads_the_partitions_that_it_has_not_committed_of_a_merged_target(spark: SparkSession) -> None:
    runs = [
        ("r", 1, "a", 0, 10, "b", 0, 100, 5),
        ("r", 1, "a", 1, 0, "b", 0, 105, 3),  # the other source partition of b-0
        ("r", 2, "a", 0, 20, "b", 0, 108, 5),
        ("r", 1, "a", 2, 0, "b", 1, 0, 5),
    ]
    commits = [("one", "a", 0, 25), ("both", "a", 0, 24), ("both", "a", 1, 3)]
    committed = spark.createDataFrame(commits, "group string, topic string, partition int, offset long")
    found = translate(committed, spark.createDataFrame(runs, OFFSET_MAP)).collect()
    # A target whose sources are all without a commit stays without one, like its sources.
    assert [tuple(row) for row in found] == [("both", "b", 0, 112), ("one", "b", 0, 105)]


def targeted(spark: SparkSession, rows: Sequence[tuple[Any, ...]]) -> DataFrame:
    return with_targets(records_of(spark, rows), a_plan())


def test_targets_that_differ_from_the_archive_are_named_by_source(spark: SparkSession) -> None:
    good = [record(offset, partition=partition) for partition in (0, 1, 2) for offset in (1, 2, 3)]
    archive = compare.expected(targeted(spark, good), keep_timestamps=True)
    changed = [*good[:4], record(2, b"x", partition=1), *good[5:8], good[7]]
    held = compare.expected(targeted(spark, changed), keep_timestamps=True)
    assert compare.unequal_partitions(compare.totals(archive), compare.totals(archive)).collect() == []
    unequal = compare.unequal_partitions(compare.totals(archive), compare.totals(held)).collect()
    assert {tuple(row) for row in unequal} == {("b", 0), ("b", 2)}
    found = {row.mark.rpartition("/")[0]: row.what for row in compare.unequal_marks(archive, held).collect()}
    assert found == {
        "a/1/2": "its value is another in the target than in the archive",
        "a/2/2": "the target holds it more than once",
        "a/2/3": "the target does not hold it, the archive does",
    }
    foreign = {row.what for row in compare.unequal_marks(held.limit(0), archive).collect()}
    assert foreign == {"the archive does not hold it, the target does"}


def test_sums_of_the_latest_timestamps_do_not_overflow(spark: SparkSession) -> None:
    frame = targeted(spark, [record(offset) for offset in range(20)])
    frame = frame.withColumn("timestamp", F.timestamp_millis(F.lit((2**63 - 1) // 1000)))
    (row,) = compare.totals(compare.expected(frame, keep_timestamps=True)).collect()
    assert row.records == 20


# --- compact --------------------------------------------------------------------------------------------------------


def test_days_with_small_files_are_worth_compacting(spark: SparkSession) -> None:
    rows = [("a", "d1", 10), ("a", "d1", 20), ("a", "d2", 10), ("b", "d1", 90), ("b", "d1", 95), ("b", "d1", 4)]
    files = spark.createDataFrame(rows, "topic string, date string, size long")
    assert [tuple(row) for row in worth_compacting(files, 100, 2).collect()] == [("a", "d1", 2, 2, 30)]
