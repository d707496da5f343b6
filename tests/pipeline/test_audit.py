"""Audit: each transform on a few records, the partitioners with known placements, and the advice that follows from the
numbers.
"""

from __future__ import annotations

import random
import tracemalloc
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.audit import transforms
from pipeline.audit.advice import advice
from pipeline.audit.job import audit, compression, of_topics
from pipeline.audit.report import write_audit
from pipeline.errors import PipelineError
from pipeline.partitioners import guessed, murmur2, murmur2_of
from pipeline.progress import Progress, Stop
from pipeline.schema import RECORD

pytestmark = pytest.mark.usefixtures("interpreted")

START = 1_700_000_000_000


def _record(
    partition: int, offset: int, at_ms: int | None, key: bytes | None, value: bytes | None, headers: Any = None
) -> tuple[Any, ...]:
    moment = None if at_ms is None else datetime.fromtimestamp((START + at_ms) / 1_000, UTC)
    return ("t", partition, offset, moment, "create_time", key, value, headers, None)


@pytest.fixture(scope="module")
def records(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(
        [
            _record(0, 0, 0, b"a", b"x" * 10),
            _record(0, 1, 5_000, b"a", b"x" * 100),
            _record(0, 2, 1_000, b"a", b"", [("h", b"12345")]),
            _record(0, 3, 6_000, b"b", None),
            _record(1, 0, 100_000, b"b", b"x" * 3),
            _record(1, 1, None, None, b"x" * 4),
        ],
        RECORD,
    )


def test_partitions(records: DataFrame) -> None:
    rows = {row.partition: row for row in transforms.partitions(transforms.measured(records)).collect()}
    assert (rows[0].records, rows[0].bytes, rows[0].first_offset, rows[0].last_offset) == (4, 110 + 4 + 6, 0, 3)
    assert rows[0].share == pytest.approx(4 / 6)
    assert rows[1].bytes == 3 + 1 + 4


def test_over_time(records: DataFrame) -> None:
    rows = transforms.over_time(transforms.measured(records)).orderBy("begins_ms").collect()
    assert {row.span_ms for row in rows} == {10_000}
    assert [(row.begins_ms - START, row.records, row.bytes, row.tombstones) for row in rows] == [
        (0, 4, 110 + 4 + 6, 1), (100_000, 1, 4, 0),
    ]  # fmt: skip
    assert {row.without_key for row in rows} == {0}


# A producer that writes microseconds into timestamps creates records of the year 55,840. Others write 9999-12-31.
@pytest.mark.parametrize("far_ms", [START * 1_000, 253_402_300_799_000])
def test_a_time_beyond_the_calendar_is_no_span_and_does_not_widen_the_others(
    spark: SparkSession, records: DataFrame, tmp_path: Path, far_ms: int
) -> None:
    far = spark.createDataFrame([_record(0, 4, 7_000, b"a", b"x")], RECORD)
    far = far.withColumn("timestamp", F.timestamp_millis(F.lit(far_ms)))
    found = audit(spark, records.unionByName(far), Progress("audit"), Stop())
    write_audit(tmp_path, found)
    assert [(row["span_ms"], row["records"]) for row in found["t"]["over_time"]] == [(10_000, 4), (10_000, 1)]
    assert found["t"]["keys"]["records"] == 7


def test_header_keys_are_measured_in_bytes(spark: SparkSession) -> None:
    frame = spark.createDataFrame([_record(0, 0, 0, None, None, [("größe", b"12")])], RECORD)
    assert [row.header_bytes for row in transforms.measured(frame).collect()] == [7 + 2]


def test_keys(records: DataFrame) -> None:
    (row,) = transforms.keys(transforms.measured(records)).collect()
    assert (row.records, row.keys, row.keyed_records, row.tombstones) == (6, 2, 5, 1)
    assert (bytes(row.hottest_key), row.hottest_records, row.keys_in_several_partitions) == (b"a", 3, 1)


def test_hottest_keys(records: DataFrame) -> None:
    rows = transforms.hottest_keys(transforms.measured(records), 1).collect()
    assert [(bytes(row.key), row.records, row.partitions, row.share) for row in rows] == [(b"a", 3, 1, 0.5)]


def test_sizes(records: DataFrame) -> None:
    rows = {row.size_class: row.records for row in transforms.sizes(transforms.measured(records)).collect()}
    assert rows == {0: 2, 2: 1, 3: 1, 4: 1, 7: 1}


def test_lateness(records: DataFrame) -> None:
    (row,) = transforms.lateness(transforms.measured(records)).collect()
    assert (row.timed, row.late, row.late_max_ms, row.without_time) == (5, 1, 4_000, 1)
    assert row.partition_skew_ms == 94_000


@pytest.mark.parametrize(
    ("key", "hashed"),
    # Computed with the Java client's Utils.murmur2 and toPositive.
    [
        (b"21", -973932308 & 0x7FFFFFFF),
        (b"foobar", -790332482 & 0x7FFFFFFF),
        (b"a-little-bit-long-string", -985981536 & 0x7FFFFFFF),
        (b"a-little-bit-longer-string", -1486304829 & 0x7FFFFFFF),
        (b"abc", 479470107),
    ],
)  # fmt: skip
def test_murmur2_is_that_of_the_java_client(key: bytes, hashed: int) -> None:
    assert murmur2(key) == hashed


def test_many_keys_hash_as_each_of_them_does() -> None:
    chance = random.Random(2)
    keys = [chance.randbytes(chance.randrange(30)) for _ in range(2000)] + [b"", chance.randbytes(5000)]
    assert murmur2_of(keys).tolist() == [murmur2(key) for key in keys]
    assert murmur2_of([]).tolist() == []


def test_the_partitioner_is_guessed() -> None:
    keys = [f"key-{number}".encode() for number in range(60)]
    java = [(key, murmur2(key) % 6) for key in keys]
    librdkafka = [(key, zlib.crc32(key) % 6) for key in keys]
    assert guessed(java, 6) == "murmur2"
    assert guessed(librdkafka, 6) == "crc32"
    assert guessed(java[:30] + librdkafka[30:], 6) == "mixed"
    assert guessed([(key, number % 6) for number, key in enumerate(keys)], 6) is None
    assert guessed(java, 1) is None


def test_a_quiet_topic_needs_nothing() -> None:
    assert advice(_figures()) == [
        "records are spread evenly, of even size and in order of time: there is nothing to do."
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"keys": {"hottest_records": 400}}, "the owner of its partition"),
        ({"keys": {"keys_in_several_partitions": 3}}, "lie in more than one partition"),
        ({"keys": {"keyed_records": 900}}, "have no key, the others do"),
        ({"partitioner": "mixed"}, "murmur2_random"),
        ({"size_figures": {"largest": 2_000_000}}, "send a reference"),
        ({"lateness": {"late": 50}}, "give windows that much grace"),
        ({"lateness": {"without_time": 1}}, "have no timestamp"),
        ({"lateness": {"partition_skew_ms": 7_200_000}}, "fallen silent"),
        ({"compression": {"zstd": {"ratio": 4.0, "mb_per_s": 100.0}}}, "values shrink 4.0 times with zstd"),
        ({"compression": {"zstd": {"ratio": 1.0, "mb_per_s": 100.0}}}, "do not compress"),
    ],
)
def test_advice(change: dict[str, Any], says: str) -> None:
    told = _figures()
    for name, value in change.items():
        told[name] = {**told[name], **value} if isinstance(value, dict) and name != "compression" else value
    assert says in " ".join(advice(told))


def test_an_uneven_topic_is_told_with_its_cause() -> None:
    told = _figures()
    told["partitions"][0]["share"], told["partitions"][1]["share"] = 0.9, 0.1
    assert "partition 0 has 90% of the records where an even share is 50%; no single key" in " ".join(advice(told))


def test_a_mistyped_topic_beside_an_existing_one_is_named(spark: SparkSession, records: DataFrame) -> None:
    assert of_topics(records, ["t"]).count() == of_topics(records, []).count() == 6
    with pytest.raises(PipelineError, match=r"no records of tt[.]"):
        of_topics(records, ["t", "tt"])
    with pytest.raises(PipelineError, match=r"no records of any topic[.]"):
        of_topics(records.where("false"), [])


def test_the_sample_of_large_values_is_small(spark: SparkSession) -> None:
    frame = spark.range(16).select(F.repeat(F.lit("x"), 4_000_000).cast("binary").alias("value"))
    tracemalloc.start()
    try:
        told = compression(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(figures["ratio"] > 10 for figures in told.values())
    assert peak < 16 * 1024 * 1024


def test_the_whole(spark: SparkSession, records: DataFrame, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = audit(spark, records, Progress("audit"), Stop())
    assert set(found) == {"t"}
    pictures = write_audit(tmp_path, found)
    assert [path.name for path in pictures] == ["audit-t.png"]
    assert pictures[0].stat().st_size > 5_000
    page = (tmp_path / "audit.html").read_text()
    assert "Topic t" in page
    assert "Records per 10 seconds" in page
    assert "3 (50.0%), partition 0" in page
    # The namespace of SVG is only a name. No browser fetches it.
    assert "http" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")


def _figures() -> dict[str, Any]:
    return {
        "partitions": [{"partition": 0, "share": 0.5}, {"partition": 1, "share": 0.5}],
        "keys": {
            "records": 1_000,
            "keyed_records": 1_000,
            "keys": 500,
            "hottest_records": 5,
            "hottest_key": "61",
            "keys_in_several_partitions": 0,
        },
        "partitioner": "crc32",
        "size_figures": {"points": [100, 200], "largest": 300, "header_bytes": 0.0, "key_bytes": 8.0},
        "lateness": {
            "timed": 1_000,
            "late": 0,
            "late_p99_ms": 2_000,
            "late_max_ms": 3_000,
            "without_time": 0,
            "partition_skew_ms": 0,
        },
        "compression": {"zstd": {"ratio": 1.5, "mb_per_s": 100.0}},
    }
