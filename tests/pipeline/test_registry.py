"""Values that name their schemas in a registry: several schemas in a topic, and a registry that is away for a while."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import to_avro

from pipeline import table
from pipeline.archive.registry import Registry
from pipeline.errors import PipelineError
from pipeline.kafka import UnreachableError
from pipeline.schema import DATA, RESCUED
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
    """A registry's answers to `GET /schemas/ids/N`, as the ones of Confluent and Karapace give them."""

    def __init__(self) -> None:
        self.schemas: dict[int, dict[str, Any]] = {}
        self.asked: list[int] = []
        self.status = 200
        registry = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                number = int(self.path.rpartition("/")[2])
                registry.asked.append(number)
                status, told = registry.status, registry.schemas.get(number)
                if status == 200 and told is None:
                    status, told = 404, {"error_code": 40403, "message": "Schema not found"}
                content = json.dumps(told if status in (200, 404) else {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing on the test's output."""

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
        4: {"schema": "message M {}", "schemaType": "PROTOBUF"},
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
    for status, words in ((503, "does not answer .it answers 503"), (401, "answers 401 Unauthorized to the schema 1")):
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
        6: "the schema 4 is PROTOBUF, which this job cannot read",
        7: "the schema 5 cannot be used",
        8: "the registry has no schema 99",
        9: unframed,
        10: unframed,
    }
    assert {offset: value for offset, (value, _) in letters.items()} == {offset: values[offset] for offset in letters}
    assert registry.asked.count(1) == 3
    typed = ("--value", "registry", "--registry", registry.url)
    assert jobs.verify(spark, gateway.bootstrap, out, *typed).code == 0


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
