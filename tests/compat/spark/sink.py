"""The connector as a batch sink: topics, partitions, headers, nulls and codecs, with no record repeated."""

from __future__ import annotations

import os
import threading
import urllib.request
import zlib

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    StringType,
    StructField,
    StructType,
)

from tests.compat.spark.batch import BIG_BYTES, CODECS
from tests.compat.spark.peer import Record
from tests.compat.spark.scenario import Run, raises, rows, same, scenario, texts, wait_until

HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
ROW = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", ArrayType(HEADER)),
    ]
)
OUTAGE_ROWS = 120_000


def _codec(run: Run, codec: str) -> None:
    topic = run.peer.create()
    big = bytes(index * 7919 % 251 for index in range(BIG_BYTES))
    wanted = [
        Record(b"plain"),
        Record(b"keyed", b"k", (("h", b"v"), ("h", b"w"), ("ünï", b""))),
        Record(None, b"tombstone"),
        Record(b"", b""),
        *(Record(zlib.compress(str(index).encode()) * 20, str(index).encode()) for index in range(100)),
        Record(big, b"big"),
    ]
    frame = run.spark.createDataFrame(
        [(topic, 0, record.key, record.value, list(record.headers)) for record in wanted], ROW
    ).coalesce(1)
    run.write(frame, kafka_compression_type=codec, kafka_max_request_size=2_000_000)
    stored = run.peer.read(topic)
    found = [Record(entry.record.value, entry.record.key, entry.record.headers) for entry in stored]
    same(found, wanted, "records")
    same([row.record for row in rows(run.batch(topic, includeHeaders="true"))], wanted, "records read by Spark")


for _name in CODECS:

    def _bound(run: Run, codec: str = _name) -> None:
        _codec(run, codec)

    scenario(f"spark.sink.codec.{_name}")(_bound)


@scenario("spark.sink.columns")
def columns(run: Run) -> None:
    """Each row names its topic and may name its partition. Headers may be null, and so may their values."""
    one, two = run.peer.create(3), run.peer.create(3)
    frame = run.spark.createDataFrame(
        [
            (one, 2, b"k", b"a", [("h", None), ("h", b"")]),
            (one, 0, None, b"b", None),
            (two, 1, b"k", None, []),
            (two, 1, None, None, [("only", b"h")]),
        ],
        ROW,
    )
    run.write(frame)
    found = rows(run.batch(f"{one},{two}", includeHeaders="true"))
    same(
        sorted([(row.topic, row.partition, row.record) for row in found], key=repr),
        sorted(
            [
                (one, 2, Record(b"a", b"k", (("h", None), ("h", b"")))),
                (one, 0, Record(b"b")),
                (two, 1, Record(None, b"k")),
                (two, 1, Record(None, None, (("only", b"h"),))),
            ],
            key=repr,
        ),
        "rows",
    )
    run.write(frame.drop("partition"), one)
    assert sum(run.peer.ends(one).values()) == 2 + 4, "the option beats the column"
    raises(lambda: run.write(frame.drop("topic")), "topic")
    raises(lambda: run.write(frame.selectExpr("topic", "7 AS partition", "value"), one, kafka_max_block_ms=3000), "7")


@scenario("spark.sink.partitioner")
def partitioner(run: Run) -> None:
    """Without a partition column, equal keys go to the same partition, and the keys spread over all partitions."""
    topic = run.peer.create(4)
    frame = run.spark.range(400).selectExpr("CAST(id % 20 AS STRING) AS key", "CAST(id AS STRING) AS value")
    run.write(frame, topic)
    stored = run.peer.read(topic)
    homes = {(entry.record.key, entry.partition) for entry in stored}
    assert (len(stored), len(homes)) == (400, 20), f"{len(stored)} records, {len(homes)} pairs of key and partition"
    assert {partition for _, partition in homes} == {0, 1, 2, 3}, homes


@scenario("spark.sink.creates-topic")
def creates_topic(run: Run) -> None:
    """A missing topic is created because of auto.create.topics.enable."""
    topic = f"auto-{run.peer.create()}"
    run.write(run.spark.range(5).selectExpr("CAST(id AS STRING) AS value"), topic)
    assert sorted(run.peer.texts(topic)) == list("01234")


@scenario("spark.sink.idempotent")
def idempotent(run: Run) -> None:
    """The gateway is killed during an idempotent write of many small batches. Records are stored once and in order."""
    topic = run.peer.create(2)
    before = _producer_ids()
    frame = run.spark.range(0, OUTAGE_ROWS, 1, 2).selectExpr(
        "CAST(id % 2 AS INT) AS partition", "CAST(id AS STRING) AS value"
    )
    failures: list[BaseException] = []

    def write() -> None:
        try:
            run.write(frame, topic, kafka_enable_idempotence="true", kafka_batch_size=2048, kafka_acks="all")
        except BaseException as error:  # The scenario raises the error below.
            failures.append(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    wait_until(lambda: bool(failures) or sum(run.peer.ends(topic).values()) > 0, "the write has begun")
    after = _producer_ids()
    assert before is None or after is None or after > before, "no producer id was asked for"
    at_kill = sum(run.peer.ends(topic).values())
    run.kill_gateway()
    assert at_kill < OUTAGE_ROWS, "the write ended before the kill"
    writer.join(60)
    if failures:
        raise failures[0]
    assert not writer.is_alive(), "the write hangs"
    found = [int(text) for text in texts(run.batch(topic))]
    half = OUTAGE_ROWS // 2
    for partition in (0, 1):
        for task in (range(partition, half, 2), range(half + partition, OUTAGE_ROWS, 2)):
            wanted = set(task)
            same([number for number in found if number in wanted], task, f"partition {partition} from {task.start}")
    assert len(found) == OUTAGE_ROWS, f"{len(found)} records"
    run.detail = f"killed after {at_kill} of {OUTAGE_ROWS} records"


def _producer_ids() -> float | None:
    """Return how many InitProducerId requests were answered since the gateway's start. Return None if the broker does
    not report it.
    """
    if not os.environ["COMPAT_METRICS"]:
        return None
    with urllib.request.urlopen(os.environ["COMPAT_METRICS"], timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("sluice_requests_total{") and 'api="init_producer_id"' in line
    )
