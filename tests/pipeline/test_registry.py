"""Values that name their schemas in a registry: several schemas in one topic, and a registry that is unreachable for
some time.
"""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import to_avro

from pipeline import table
from pipeline.archive.framed import RegistryTyping
from pipeline.archive.registry import Registry
from pipeline.archive.typed import NO_TYPE, AvroTyping, rejected, stored_type
from pipeline.errors import PipelineError
from pipeline.kafka import UnreachableError
from pipeline.schema import DATA, RECORD, RESCUED
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted")]
FIELDS = [
    {"name": "id", "type": "int"},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
    {"name": "tags", "type": {"type": "array", "items": "string"}},
]
AT = datetime(2026, 1, 31, 12, 0, 0, 123456, UTC)


def record(*fields: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "order", "fields": fields})


OLDER, NEWER = record(FIELDS[0]), record({"name": "id", "type": "long"}, *FIELDS[1:])


class ARegistry:
    """A fake registry. It answers requests for a schema's id and for a version of a subject, as Confluent's and
    Karapace do.
    """

    def __init__(self) -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.versions: dict[tuple[str, int], dict[str, Any]] = {}
        self.asked: list[str] = []
        self.status = 200
        registry = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.removesuffix("?deleted=true")
                registry.asked.append(path)
                kind, *where, last = path.strip("/").split("/")
                if kind == "schemas":
                    told, code = registry.schemas.get(int(last)), 40403
                else:
                    told, code = registry.versions.get((where[0], int(last))), 40401
                status = registry.status
                if status == 200 and told is None:
                    status, told = 404, {"error_code": code, "message": "not found"}
                content = json.dumps(told if status in (200, 404) else {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing to the test's output."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)


@pytest.fixture
def registry() -> Iterator[ARegistry]:
    found = ARegistry()
    found.thread.start()
    yield found
    found.server.shutdown()
    found.thread.join()
    found.server.server_close()


def framed(number: int, content: bytes) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + content


def packed(spark: SparkSession, schema: str, ddl: str, *rows: tuple[Any, ...]) -> list[bytes]:
    return [
        bytes(row[0]) for row in spark.createDataFrame(list(rows), ddl).select(to_avro(F.struct("*"), schema)).collect()
    ]


def test_records_of_several_schemas_share_a_table_and_wait_for_their_registry(
    spark: SparkSession, gateway: GatewayProcess, registry: ARegistry, tmp_path: Path
) -> None:
    topic, out = topics.fresh(gateway.bootstrap, 1), str(tmp_path / "table")
    registry.schemas = {
        1: {"schema": OLDER},
        2: {"schema": NEWER, "schemaType": "AVRO"},
        3: {"schema": "{}", "schemaType": "JSON"},
        4: {"schema": "no Protobuf", "schemaType": "PROTOBUF"},
        5: {"schema": "no Avro"},
    }
    [first] = packed(spark, OLDER, "id int", (1,))
    ddl = "id long, at timestamp, price decimal(10,2), tags array<string>"
    [second] = packed(spark, NEWER, ddl, (2**40, AT, Decimal("8.50"), ["a", "b"]))
    values = [
        framed(1, first), framed(2, second), framed(3, b'{"id":3,"more":true}'), framed(3, b'{"id":"x"}'), None,
        framed(1, b""), framed(4, b"x"), framed(5, first), framed(99, first), first, b"\0\0",
    ]  # fmt: skip
    given = ("--topics", topic, "--value", "registry", "--registry", registry.url)
    job = jobs.archive_job_of(spark, gateway.bootstrap, out, *given)
    job.open()

    topics.fill(gateway.bootstrap, topic, [(0, None, values[0], topics.START_MS, [])])
    refusals = ((503, "does not answer .it answers 503"), (401, "answers 401 Unauthorized to /schemas/ids/1"))
    for status, words in refusals:
        registry.status = status
        with pytest.raises(PipelineError, match=words) as refused:
            job.step_once()
        assert isinstance(refused.value, UnreachableError) == (status == 503)
    assert table.read(spark, out).count() == table.read(spark, f"{out}_dead_letters").count() == 0
    registry.status = 200
    job.step_once()
    assert table.schema(spark, out)[DATA].dataType.simpleString() == "struct<id:int>"

    topics.fill(gateway.bootstrap, topic, [(0, None, value, topics.START_MS, []) for value in values[1:]])
    job.step_once()
    rows = table.read(spark, out).orderBy("offset").collect()
    assert table.schema(spark, out)[DATA].dataType.simpleString() == (
        "struct<id:bigint,at:timestamp,price:decimal(10,2),tags:array<string>,more:boolean>"
    )
    assert [None if row.value is None else bytes(row.value) for row in rows] == values
    data = [None if row[DATA] is None else tuple(row[DATA]) for row in rows]
    nothing = (None, None, None, None)
    at = AT.astimezone().replace(tzinfo=None)
    assert data == [
        (1, *nothing), (2**40, at, Decimal("8.50"), ["a", "b"], None), (3, None, None, None, True), (None, *nothing),
        *[None] * 7,
    ]  # fmt: skip
    assert [row[RESCUED] for row in rows] == [*[None] * 3, '{"id":"x"}', *[None] * 7]
    letters = {row.offset: (bytes(row.value), row.reason) for row in table.read(spark, f"{out}_dead_letters").collect()}
    unframed = "the value does not begin with the id of a schema"
    assert {offset: why.partition(": ")[0] for offset, (_, why) in letters.items()} == {
        5: "the value is not Avro of the schema 1",
        6: "the schema 4 cannot be used",
        7: "the schema 5 cannot be used",
        8: "the registry has no schema 99",
        9: unframed,
        10: unframed,
    }
    assert {offset: value for offset, (value, _) in letters.items()} == {offset: values[offset] for offset in letters}
    assert registry.asked.count("/schemas/ids/1") == 3
    typed = ("--value", "registry", "--registry", registry.url)
    assert jobs.verify(spark, gateway.bootstrap, out, *typed).code == 0


def optimized(frame: DataFrame) -> str:
    """Return Spark's optimized plan of a frame."""
    with redirect_stdout(io.StringIO()) as printed:
        frame.explain(extended=True)
    return printed.getvalue().partition("== Optimized Logical Plan ==")[2].partition("== Physical Plan ==")[0]


def stored(frame: DataFrame, path: Path) -> DataFrame:
    """Return the same rows, read from files. Spark computes rows in memory while it optimizes a plan."""
    frame.write.parquet(str(path))
    return frame.sparkSession.read.parquet(str(path))


def records_of(spark: SparkSession, values: list[bytes], path: Path) -> DataFrame:
    rows = [("a", 0, at, AT, "create_time", None, value, None, AT.date()) for at, value in enumerate(values)]
    return stored(spark.createDataFrame(rows, RECORD), path)


def test_each_schema_is_planned_a_few_times(spark: SparkSession, registry: ARegistry, tmp_path: Path) -> None:
    registry.schemas = {number: {"schema": OLDER} for number in range(8)}
    [content] = packed(spark, OLDER, "id int", (1,))
    records = records_of(spark, [framed(number, content) for number in registry.schemas], tmp_path / "records")
    typing, plans = RegistryTyping(Registry(registry.url), evolve=True), list[str]()
    whole = type(records).collect

    def planned(frame: DataFrame) -> list[Row]:
        plans.append(optimized(frame))
        return whole(frame)

    with patch.object(type(records), "collect", planned):
        typed = typing.apply(records, NO_TYPE)
    plans += [optimized(typed), optimized(rejected(typed))]
    archived = stored(typed.drop("reason"), tmp_path / "typed")
    again = typing.mistyped(archived, stored_type(archived.schema))
    plans.append(optimized(again))
    assert len(registry.schemas) <= max(plan.count("from_avro") for plan in plans) <= 3 * len(registry.schemas)
    assert again.collect() == rejected(typed).collect() == []


def test_value_of_avro_is_decoded_once_to_find_dead_letters(spark: SparkSession, tmp_path: Path) -> None:
    names = [f"f{number}" for number in range(20)]
    schema = record(*({"name": name, "type": ["null", "int"]} for name in names))
    packed_rows = packed(spark, schema, ", ".join(f"{name} int" for name in names), (None,) * 19 + (1,))
    typing, records = AvroTyping(schema, framed=False), records_of(spark, packed_rows, tmp_path / "records")
    typed = typing.apply(records, NO_TYPE)
    archived = stored(typed.drop("reason"), tmp_path / "typed")
    again = typing.mistyped(archived, stored_type(archived.schema))
    assert [optimized(frame).count("from_avro") for frame in (rejected(typed), again)] == [1, 1]
    assert again.collect() == rejected(typed).collect() == []


def test_small_decimals_floats_and_local_times_of_avro_are_exact(spark: SparkSession, registry: ARegistry) -> None:
    small = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 28}
    schema = record(
        {"name": "zero", "type": small},
        {"name": "list", "type": {"type": "array", "items": small}},
        {"name": "in", "type": {"type": "record", "name": "in", "fields": [{"name": "f", "type": ["null", small]}]}},
        {"name": "map", "type": {"type": "map", "values": small}},
        {"name": "ratio", "type": "float"},
        {"name": "at", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
    )
    registry.schemas = {1: {"schema": schema}}
    number = "decimal(38,28)"
    ddl = f"zero {number}, list array<{number}>, in struct<f: {number}>, map map<string,{number}>, ratio float, "
    tiny, at = Decimal("1.23456789012345678901E-8"), datetime(2026, 1, 31, 12, 0, 0, 123456)
    rows = [
        (Decimal(0), [tiny, -tiny], (tiny,), {"k": Decimal("0.0000001")}, 1.2345e-4, at),
        (Decimal(2), [], (None,), {}, 1e30, at),
    ]
    values = [framed(1, each) for each in packed(spark, schema, f"{ddl} at timestamp_ntz", *rows)]
    given = spark.createDataFrame(list(enumerate(values)), "offset long, value binary")
    typed = RegistryTyping(Registry(registry.url), evolve=True).apply(given, NO_TYPE)
    assert typed.schema[DATA].dataType.simpleString() == (
        f"struct<zero:{number},list:array<{number}>,in:struct<f:{number}>,ratio:float,at:string,map:struct<k:double>>"
    )
    first, second = typed.orderBy("offset").collect()
    assert (first.reason, first[RESCUED], second.reason, second[RESCUED]) == (None,) * 4
    assert first[DATA].zero == 0
    assert first[DATA].list == [tiny, -tiny]
    assert first[DATA]["in"].f == tiny
    assert first[DATA].map.k == 1e-7
    assert first[DATA].at == "2026-01-31T12:00:00.123456"
    assert (second[DATA].zero, second[DATA].list, second[DATA]["in"].f) == (2, [], None)


ORDER = """
syntax = "proto3";
package shop;
import "money.proto";
import "google/protobuf/timestamp.proto";
message Order {
  int32 id = 1; Money price = 2; google.protobuf.Timestamp at = 3; map<string, uint32> counts = 4;
  repeated float weights = 5; Order parent = 6; oneof by { string card = 7; bytes token = 8; }
  message Refund { uint64 id = 1; bool whole = 2; }
}
"""
MONEY = 'syntax = "proto3"; package shop; enum Currency { EUR = 0; USD = 1; } ' + (
    "message Money { int64 cents = 1; Currency currency = 2; }"
)
# An order 7 of 5 dollars at AT, with counts, weights, a parent and a token; a refund of order 2**63.
NEW_ORDER = bytes.fromhex(
    "00"
    + "0807"
    + "1205" + "08f403" + "1001"
    + "1a0b" + "08c0ddf7cb06" + "108094ef3a"
    + "2205" + "0a0161" + "1003"
    + "2a08" + "0000003f" + "cdcccc3d"
    + "3202" + "0806"
    + "4201" + "ff"
)  # fmt: skip
REFUND = bytes.fromhex("04" + "00" + "00" + "08" + "80808080808080808001" + "1001")


def test_protobuf_of_several_schemas_shares_the_table(
    spark: SparkSession, gateway: GatewayProcess, registry: ARegistry, tmp_path: Path
) -> None:
    topic, out = topics.fresh(gateway.bootstrap, 1), str(tmp_path / "table")
    older = 'syntax = "proto3"; message Order { int32 id = 1; }'
    money = {"name": "money.proto", "subject": "money/1", "version": 3}
    lost = {"name": "lost.proto", "subject": "lost", "version": 1}
    registry.schemas = {
        1: {"schema": older, "schemaType": "PROTOBUF"},
        2: {"schema": ORDER, "schemaType": "PROTOBUF", "references": [money]},
        3: {"schema": ORDER, "schemaType": "PROTOBUF", "references": [lost]},
        4: {"schema": older.replace("int32", "Id"), "schemaType": "PROTOBUF"},
        5: {"schema": '{"type": "object"}', "schemaType": "JSON"},
    }
    registry.versions = {("money%2F1", 3): {"schema": MONEY, "schemaType": "PROTOBUF"}}
    values = [
        framed(1, b"\0\x08\x01"), framed(2, NEW_ORDER), framed(2, REFUND), framed(5, b'{"id":4,"note":"n"}'), None,
        framed(1, b"\0"), framed(1, b"\0\x10\x01"), framed(2, b"\x02\x08"), framed(3, NEW_ORDER), framed(4, b"\0"),
        framed(1, b""),
    ]  # fmt: skip
    given = ("--value", "registry", "--registry", registry.url)
    job = jobs.archive_job_of(spark, gateway.bootstrap, out, "--topics", topic, *given)
    job.open()
    topics.fill(gateway.bootstrap, topic, [(0, None, values[0], topics.START_MS, [])])
    job.step_once()
    assert table.schema(spark, out)[DATA].dataType.simpleString() == "struct<id:int>"

    topics.fill(gateway.bootstrap, topic, [(0, None, value, topics.START_MS, []) for value in values[1:]])
    registry.status = 503
    with pytest.raises(UnreachableError):
        job.step_once()
    registry.status = 200
    job.step_once()
    assert table.schema(spark, out)[DATA].dataType.simpleString() == (
        "struct<id:decimal(38,0),price:struct<cents:bigint,currency:string>,at:timestamp,weights:array<float>,"
        "card:string,token:string,whole:boolean,counts:struct<a:bigint>,note:string,parent:struct<id:bigint>>"
    )
    rows = table.read(spark, out).orderBy("offset").collect()
    assert [None if row.value is None else bytes(row.value) for row in rows] == values
    second = rows[1][DATA].asDict(recursive=True)
    assert second == {
        "id": 7, "price": {"cents": 500, "currency": "USD"}, "at": AT.astimezone().replace(tzinfo=None),
        "weights": [0.5, pytest.approx(0.1)], "card": None, "token": "/w==", "whole": None, "counts": {"a": 3},
        "note": None, "parent": {"id": 6},
    }  # fmt: skip
    assert [row[DATA] and row[DATA].id for row in rows] == [1, 7, 2**63, 4, None, 0, *[None] * 5]
    assert [row[RESCUED] for row in rows] == [None] * 11
    assert rows[2][DATA].whole
    letters = {row.offset: row.reason for row in table.read(spark, f"{out}_dead_letters").collect()}
    assert letters == {
        6: "the value is not Protobuf of the schema 1: it has a field 2, which Order lacks",
        7: "the value is not Protobuf of the schema 2: the schema has no message at the indexes [4]",
        8: "the schema 3 refers to version 1 of lost, which the registry lacks",
        9: "the schema 4 cannot be used: the type Id of Order.id is declared nowhere",
        10: "the value is not Protobuf of the schema 1: it ends within a number",
    }
    assert jobs.verify(spark, gateway.bootstrap, out, *given).code == 0


def test_avro_that_refers_to_other_schemas_is_read(
    spark: SparkSession, gateway: GatewayProcess, registry: ARegistry, tmp_path: Path
) -> None:
    topic, out = topics.fresh(gateway.bootstrap, 1), str(tmp_path / "table")
    unit = {"type": "enum", "name": "Unit", "namespace": "measure", "symbols": ["KG", "G"]}
    weight = {
        "type": "record", "name": "Weight", "namespace": "measure",
        "fields": [{"name": "amount", "type": "int"}, {"name": "unit", "type": "Unit"}],
    }  # fmt: skip
    parcel = {
        "type": "record", "name": "Parcel",
        "fields": [{"name": "net", "type": "measure.Weight"}, {"name": "gross", "type": ["null", "measure.Weight"]}],
    }  # fmt: skip
    of_unit, of_weight = ({"name": name, "subject": name, "version": 1} for name in ("measure.Unit", "measure.Weight"))
    registry.versions = {
        ("measure.Unit", 1): {"schema": json.dumps(unit)},
        ("measure.Weight", 1): {"schema": json.dumps(weight), "references": [of_unit]},
    }
    registry.schemas = {1: {"schema": json.dumps(parcel), "references": [of_weight]}}
    value = framed(1, bytes((4, 2, 2, 6, 0)))
    topics.fill(gateway.bootstrap, topic, [(0, None, value, topics.START_MS, [])])
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic, "--value", "registry", "--registry", registry.url)
    [row] = table.read(spark, out).collect()
    assert row[DATA].asDict(recursive=True) == {
        "net": {"amount": 2, "unit": "G"}, "gross": {"amount": 3, "unit": "KG"},
    }  # fmt: skip


def test_a_registry_that_is_none_is_named_without_its_password(registry: ARegistry) -> None:
    registry.schemas = {1: {"message": "hello"}}
    with pytest.raises(PipelineError, match="is none of a schema registry"):
        Registry(registry.url).schema(1)
    closed = Registry("http://user:secret@127.0.0.1:1")
    with pytest.raises(UnreachableError) as away:
        closed.schema(1)
    assert "secret" not in str(away.value)
    with pytest.raises(PipelineError, match="registry:8081 is no URL"):
        Registry("registry:8081")
