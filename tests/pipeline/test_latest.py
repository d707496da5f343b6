"""The table of the newest row per key equals the state of a client that has applied every change in order."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from deltalake import DeltaTable
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from pipeline import table
from pipeline.archive import job as archive_job
from pipeline.archive.plan import Progress
from pipeline.errors import PipelineError
from pipeline.latest import job as latest_job
from pipeline.latest.transforms import debezium, foreign, versions
from pipeline.partitioning import partitions
from pipeline.schema import CHANGE, HISTORY, NEWEST, RECORD
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics
from tests.pipeline.histories import PARTITIONS, applied, changes, held, held_versions, lived, living
from tests.pipeline.jobs import DiedError, Record

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted")]
AT = datetime(2026, 1, 31, tzinfo=UTC)
SPREAD = ("--partition-by", "bucket(4,key),day(timestamp),hour(timestamp)", "--sort-by", "key,timestamp")


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def test_the_table_holds_what_a_client_that_applies_every_change_holds(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic, latest = topics.fresh(gateway.bootstrap, PARTITIONS), f"{out}_latest"
    records = changes(120, seed=1)
    topics.fill(gateway.bootstrap, topic, records)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    told = jobs.latest(spark, out, latest, "--max-batch-records", "50")
    assert len(told.events("committed")) == 3
    assert held(spark, latest) == applied(records)

    more = changes(40, seed=2)
    topics.fill(gateway.bootstrap, topic, more)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    with patch.object(table, "merge", side_effect=DiedError), pytest.raises(DiedError):
        jobs.latest(spark, out, latest)
    jobs.latest(spark, out, latest)
    assert held(spark, latest) == applied([*records, *more])
    assert jobs.latest(spark, out, latest).events("committed") == []
    with pytest.raises(PipelineError, match="made with another --archive, --envelope, --topics or --history"):
        jobs.latest(spark, out, latest, "--envelope", "debezium")

    # If a batch is merged again from its beginning, nothing changes and no deleted row returns.
    done = latest_job.last_merged(spark, latest)
    assert done is not None
    first = latest_job.Merged(out, "none", (), done.batch)
    with (
        patch.object(latest_job, "last_merged", side_effect=[first, None]),
        pytest.raises(PipelineError, match="Another job merges"),
    ):
        jobs.latest(spark, out, latest)
    assert held(spark, latest) == applied([*records, *more])


def test_the_history_holds_every_version_and_when_it_was_valid(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic, history = topics.fresh(gateway.bootstrap, PARTITIONS), f"{out}_history"
    records = living(changes(120, seed=3))
    topics.fill(gateway.bootstrap, topic, records)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    jobs.latest(spark, out, history, "--history", "--max-batch-records", "60")
    assert held_versions(spark, history) == lived(records)
    assert any(version[4] is None for version in lived(records))

    # If a batch is merged again from its beginning, nothing changes.
    done = latest_job.last_merged(spark, history)
    assert done is not None
    first = latest_job.Merged(out, "none", (), done.batch, history=True)
    with (
        patch.object(latest_job, "last_merged", side_effect=[first, None]),
        pytest.raises(PipelineError, match="Another job merges"),
    ):
        jobs.latest(spark, out, history, "--history")
    assert held_versions(spark, history) == lived(records)
    with pytest.raises(PipelineError, match="or --history"):
        jobs.latest(spark, out, history)


@pytest.mark.parametrize("history", [False, True])
def test_a_delta_table_has_partitions_that_are_derived_from_its_columns(
    spark: SparkSession, gateway: GatewayProcess, out: str, history: bool
) -> None:
    topic, where = topics.fresh(gateway.bootstrap, PARTITIONS), f"{out}_table"
    records = living(changes(60, seed=5))
    given = (*SPREAD, *(["--history"] if history else []), "--max-batch-records", "15")

    def check() -> None:
        if history:
            assert held_versions(spark, where) == lived(records)
        else:
            assert held(spark, where) == applied(records)

    topics.fill(gateway.bootstrap, topic, records)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    jobs.latest(spark, out, where, *given)
    check()
    opened = DeltaTable(where)
    assert opened.metadata().partition_columns == ["key_bucket", "timestamp_day", "timestamp_hour"]
    rows = opened.to_pyarrow_table().to_pylist()
    assert len({row["key_bucket"] for row in rows}) > 1
    for row in rows:
        assert 0 <= row["key_bucket"] < 4
        assert row["timestamp_day"] == row["timestamp"].date()
        assert row["timestamp_hour"] == f"{row['timestamp']:%Y-%m-%d-%H}"
    more = [record for record in changes(20, seed=6) if record[2] is not None]
    topics.fill(gateway.bootstrap, topic, more)
    records += more
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    jobs.latest(spark, out, where, *given)
    check()


def test_small_files_of_a_delta_table_are_merged_within_their_partitions(spark: SparkSession, out: str) -> None:
    table.create(spark, out, NEWEST, partitions("bucket(2,key),day(timestamp)", NEWEST), ["key"])

    def append(number: int, count: int) -> None:
        # Records with even numbers are from the first of two days.
        rows = [
            ("t", b"key %d" % at, b"v", 0, at, datetime(2026, 1, 1 + at % 2, 12, tzinfo=UTC))
            for at in range(1000 * number, 1000 * number + count)
        ]
        table.append(spark.createDataFrame(rows, NEWEST).coalesce(1), out, "tests", number, "{}")

    for number in (1, 2, 3):
        append(number, 40)
    assert len(DeltaTable(out).file_uris()) == 12
    before = table.read(spark, out).orderBy("offset").collect()
    assert table.merge_files(spark, out, 1 << 20, 2) == (12, 4)
    assert table.merge_files(spark, out, 1 << 20, 2) == (0, 0)
    assert table.read(spark, out).orderBy("offset").collect() == before
    append(4, 1)
    assert jobs.compact(spark, out).events("merged")[0]["removed"] == 2
    assert len(DeltaTable(out).file_uris()) == 4


def test_a_merge_begins_again_if_the_files_of_a_delta_table_were_merged(
    spark: SparkSession, out: str, tmp_path: Path
) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    for fifo in (begun, ended):
        os.mkfifo(fifo)

    def held_up(key: bytes) -> bytes:
        """Let the files be merged while the first attempt reads its rows."""
        if begun.exists():
            begun.write_bytes(b"")
            ended.read_bytes()
        return key

    def compacted() -> tuple[int, int]:
        begun.read_bytes()
        begun.unlink()
        try:
            return table.merge_files(spark.newSession(), out, 1 << 20, 2)
        finally:
            ended.write_bytes(b"")

    def merge(batch: int, key: Column) -> None:
        rows = [("t", each, False, b"%d" % batch, 0, batch, AT) for each in (b"%d" % batch, b"k")[:batch]]
        frame = spark.createDataFrame(rows, CHANGE).coalesce(1).withColumn("key", key)
        latest_job.merge_batch(frame, out, latest_job.Merged("x", "none", (), batch))

    table.create(spark, out, NEWEST)
    merge(1, F.col("key"))
    merge(2, F.col("key"))
    with ThreadPoolExecutor(1) as pool:
        merged = pool.submit(compacted)
        merge(3, F.udf(held_up, "binary")("key"))
        assert merged.result() == (2, 1)
    assert held(spark, out) == {b"1": b"1", b"2": b"2", b"3": b"3", b"k": b"3"}
    done = latest_job.last_merged(spark, out)
    assert done is not None
    assert done.batch == 3


def test_versions_of_a_key_that_moved_to_another_partition_follow_each_other_by_time(spark: SparkSession) -> None:
    def change(second: int, partition: int, offset: int, *, deleted: bool = False) -> tuple[Any, ...]:
        at = datetime(2026, 1, 31, 12, 0, second, tzinfo=UTC)
        return ("t", b"k", deleted, None if deleted else b"%d" % second, partition, offset, at)

    batches = [
        [change(10, 0, 5), change(20, 1, 0)],
        [change(15, 0, 6), change(5, 1, 1)],
        [change(30, 1, 2, deleted=True)],
    ]
    held = spark.createDataFrame([], HISTORY)
    for batch in batches:
        found = versions(spark.createDataFrame(batch, CHANGE), held)
        rest = held.join(found, ["topic", "key", "partition", "offset"], "left_anti")
        held = spark.createDataFrame(found.unionByName(rest).collect(), HISTORY)
    found = held.orderBy("valid_from", "partition", "offset").collect()
    assert [(row.value.decode(), row.valid_from.second, row.valid_to.second, row.valid_to_offset) for row in found] == [
        ("10", 10, 20, 0),
        ("15", 20, 20, 0),
        ("20", 20, 20, 1),
        ("5", 20, 30, 2),
    ]


def test_a_table_does_not_mix_the_records_of_two_topics_of_one_name(spark: SparkSession, out: str) -> None:
    def archive(topic_id: str, *values: bytes) -> None:
        at = datetime(2026, 1, 31, 12, tzinfo=UTC)
        rows = [("t", 0, n, at, "create_time", b"%d" % n, value, None, at.date()) for n, value in enumerate(values)]
        place = ("t", 0)
        progress = Progress(1, "run", {"t": topic_id}, {place: 0}, {place: len(values)})
        table.create(spark, out, RECORD)
        table.append(spark.createDataFrame(rows, RECORD), out, archive_job.APPLICATION, 1, progress.to_json())

    archive("first", b"a", b"b")
    jobs.latest(spark, out, f"{out}_latest")
    jobs.latest(spark, out, f"{out}_latest")
    table.drop(spark, out)
    archive("second", b"c", b"d", b"e")
    with pytest.raises(PipelineError, match="The topic t was deleted and created again"):
        jobs.latest(spark, out, f"{out}_latest")
    assert held(spark, f"{out}_latest") == {b"0": b"a", b"1": b"b"}


def test_a_table_whose_log_has_lost_its_progress_is_refused(spark: SparkSession, out: str) -> None:
    """Delta keeps its log for 30 days."""
    latest, at = f"{out}_latest", datetime(2026, 1, 31, 12, tzinfo=UTC)
    table.create(spark, latest, NEWEST)
    rows = [("t", b"k", b"v", 0, 7, at)]
    spark.createDataFrame(rows, NEWEST).write.format("delta").mode("append").save(latest)
    table.create(spark, out, RECORD)
    records = [("t", 0, 8, at, "create_time", b"k", b"w", None, at.date())]
    progress = Progress(1, "run", {"t": "id"}, {("t", 0): 8}, {("t", 0): 9})
    table.append(spark.createDataFrame(records, RECORD), out, archive_job.APPLICATION, 1, progress.to_json())
    with pytest.raises(PipelineError, match="its log holds no progress of this job"):
        jobs.latest(spark, out, latest)
    assert held(spark, latest) == {b"k": b"v"}


def test_progress_of_an_idle_table_outlives_the_commits_that_delta_forgets(spark: SparkSession, out: str) -> None:
    latest = f"{out}_latest"
    table.create(spark, out, RECORD)

    def archive(number: int) -> None:
        row = ("t", 0, number, AT, "create_time", b"k", b"%d" % number, None, AT.date())
        progress = Progress(number, "run", {"t": "id"}, {("t", 0): 1}, {("t", 0): number + 1})
        frame = spark.createDataFrame([row], RECORD)
        table.append(frame, out, archive_job.APPLICATION, number, progress.to_json())

    archive(1)
    jobs.latest(spark, out, latest)
    # Other jobs commit, as `compact` does each night, and each commit makes a checkpoint.
    for setting in ("'delta.checkpointInterval' = '1'", "'night' = '1'"):
        spark.sql(f"ALTER TABLE delta.`{latest}` SET TBLPROPERTIES ({setting})").collect()
    jobs.latest(spark, out, latest)
    assert jobs.latest(spark, out, latest).events("committed") == []
    # After 30 days Delta removes the files of its log that a checkpoint replaces.
    for path in sorted(Path(latest, "_delta_log").glob("*.json"))[:-1]:
        path.unlink()
    archive(2)
    jobs.latest(spark, out, latest)
    assert held(spark, latest) == {b"k": b"2"}


def test_a_row_that_its_partition_has_replaced_does_not_stay_for_its_later_clock(spark: SparkSession, out: str) -> None:
    table.create(spark, out, NEWEST)
    batches = [[(1, 3, 20)], [(0, 5, 10), (1, 4, 5)], [(1, 5, 1)]]
    for number, batch in enumerate(batches, 1):
        rows = [
            ("t", b"k", False, b"%d/%d" % (partition, offset), partition, offset, AT.replace(second=second))
            for partition, offset, second in batch
        ]
        latest_job.merge_batch(spark.createDataFrame(rows, CHANGE), out, latest_job.Merged("x", "none", (), number))
        assert held(spark, out) == {b"k": b"1/3" if number == 1 else b"0/5"}


def test_a_delta_table_keeps_keys_of_any_bytes_whatever_partitions_it(spark: SparkSession, out: str) -> None:
    with pytest.raises(PipelineError, match=r"cannot be partitioned by the column key.*bucket\(16,key\)"):
        table.create(spark, out, NEWEST, partitions("topic,key", NEWEST))
    at, keys = datetime(2026, 1, 31, 12, tzinfo=UTC), [b"\xff\x00", b"", b"k"]
    table.create(spark, out, NEWEST, partitions("topic,bucket(16,key)", NEWEST))
    for batch in (1, 2):
        rows = [("t", key, False, b"%d" % batch, 0, 10 * batch + n, at) for n, key in enumerate(keys)]
        latest_job.merge_batch(spark.createDataFrame(rows, CHANGE), out, latest_job.Merged("x", "none", (), batch))
    assert held(spark, out) == dict.fromkeys(keys, b"2")


def test_debeziums_envelope_is_opened(spark: SparkSession, gateway: GatewayProcess, out: str) -> None:
    topic, latest = topics.fresh(gateway.bootstrap, 1), f"{out}_latest"

    def change(operation: str, key: int, after: object, *, schema: bool = False) -> Record:
        told = {"op": operation, "before": {"id": key}, "after": after}
        value = {"schema": {}, "payload": told} if schema else told
        return (0, b'{"id":%d}' % key, json.dumps(value).encode(), topics.START_MS, [])

    given = [
        change("r", 1, {"id": 1, "name": "a"}), change("c", 2, {"id": 2}, schema=True),
        change("u", 1, {"id": 1, "name": "b"}, schema=True), change("c", 3, {"id": 3}), change("d", 3, None),
        (0, b'{"id":3}', None, topics.START_MS, []), change("t", 2, None), change("d", 4, None),
        (0, b'{"id":5}', b'{"id":5,"name":"flat"}', topics.START_MS, []), (0, b"5", b"\xff{", topics.START_MS, []),
    ]  # fmt: skip
    topics.fill(gateway.bootstrap, topic, given)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    made = jobs.latest(spark, out, latest, "--envelope", "debezium")
    assert {key: json.loads(value) for key, value in held(spark, latest).items()} == {
        b'{"id":1}': {"id": 1, "name": "b"}, b'{"id":2}': {"id": 2},
    }  # fmt: skip
    [told] = made.events("foreign")
    words = f"left out 2 records whose value is not Debezium's JSON or lacks the row, the first is {topic}-0 offset 8"
    assert (told["say"], told["records"]) == (words, 2)


def test_debezium_write_without_its_row_is_left_out_and_a_row_of_mongodb_is_opened(spark: SparkSession) -> None:
    values = [
        '{"op":"u","after":{"n":1}}', '{"op":"u","after":null}', '{"payload":{"op":"c"}}', '{"op":"d"}', "5",
        '{"op":"c","after":"{\\"_id\\":7}"}',
    ]  # fmt: skip
    rows = [("t", 0, n, AT, "create_time", b"k", value.encode(), None, AT.date()) for n, value in enumerate(values)]
    records = spark.createDataFrame(rows, RECORD)
    found = [(row.offset, row.deleted, row.value and bytes(row.value)) for row in debezium(records).collect()]
    assert sorted(found) == [(0, False, b'{"n":1}'), (3, True, None), (5, False, b'{"_id":7}')]
    assert sorted(row.offset for row in foreign(records).collect()) == [1, 2, 4]
