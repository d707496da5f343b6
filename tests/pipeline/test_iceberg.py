"""Iceberg tables that the same jobs write. They hold each record of a topic once, also for readers other than Spark.
The failures of Kafka Connect's Iceberg sink are in `test_iceberg_failures.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pipeline import catalog, iceberg, table
from pipeline.archive import job as archive_job
from pipeline.archive.job import last_progress
from pipeline.archive.plan import Progress
from pipeline.errors import PipelineError
from pipeline.kafka import Cluster
from pipeline.latest import job as latest_job
from pipeline.partitioning import partitions
from pipeline.replay import job as replay_job
from pipeline.schema import CHANGE, NEWEST
from pipeline.verify import job as verify_job
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics
from tests.pipeline.catalogs import FORMAT, filled, offsets, one_catalog, rows
from tests.pipeline.histories import PARTITIONS, applied, changes, held, held_versions, lived, living

pytestmark = pytest.mark.timeout(600)
SPREAD = ("--partition-by", "bucket(4,key),day(timestamp)", "--sort-by", "key")


def test_a_topic_becomes_a_table_that_verifies_and_that_pyiceberg_reads(
    lake: SparkSession, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic = filled(gateway.bootstrap, 2, 300)
    told = jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, "--max-batch-records", "120", *FORMAT)
    assert [line["rows"] for line in told.events("committed")] == [120, 120, 60]
    assert jobs.verify(lake, gateway.bootstrap, "events", *FORMAT).code == 0
    topics.fill(gateway.bootstrap, topic, topics.records(20, 2))
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    newest = max((tmp_path / "files").glob("**/*.metadata.json"), key=lambda path: path.stat().st_mtime_ns)
    found = StaticTable.from_metadata(str(newest)).scan().to_arrow().sort_by([("partition", "ascending"),
                                                                              ("offset", "ascending")])  # fmt: skip
    assert found.column("offset").to_pylist() == [*range(160), *range(160)]
    ours = rows(lake)
    assert found.column("value").to_pylist() == [None if row.value is None else bytes(row.value) for row in ours]
    assert found.column("timestamp").cast("int64").to_pylist() == [
        int(row.timestamp.timestamp() * 1000) * 1000 for row in ours
    ]


@one_catalog
def test_verify_names_a_changed_value_and_a_record_that_is_missing(lake: SparkSession, gateway: GatewayProcess) -> None:
    topic = filled(gateway.bootstrap, 2, 200)
    jobs.archive(lake, gateway.bootstrap, "lake.events", "--topics", topic, *FORMAT)
    name = iceberg.quoted("iceberg:lake.events")
    lake.sql(f"UPDATE {name} SET value = X'00' WHERE partition = 1 AND offset = 17").collect()
    lake.sql(f"DELETE FROM {name} WHERE partition = 0 AND offset = 20").collect()
    proof = jobs.verify(lake, gateway.bootstrap, "lake.events", *FORMAT)
    assert proof.code == 3
    assert f"{topic}-0 offset 20: the archive does not hold it, the topic does" in proof.words
    assert f"{topic}-1 offset 17: its value is another in the archive than in the topic" in proof.words
    jobs.repair(lake, gateway.bootstrap, "lake.events", "--ranges", f"{topic}-0:20,{topic}-1:17", *FORMAT)
    assert jobs.verify(lake, gateway.bootstrap, "lake.events", *FORMAT).code == 0
    topics.fill(gateway.bootstrap, topic, topics.records(20, 2))
    jobs.archive(lake, gateway.bootstrap, "lake.events", "--topics", topic, *FORMAT)
    assert jobs.verify(lake, gateway.bootstrap, "lake.events", *FORMAT).code == 0


@one_catalog
def test_a_replay_from_iceberg_writes_every_record_once(lake: SparkSession, gateway: GatewayProcess) -> None:
    topic = filled(gateway.bootstrap, 2, 200)
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    given = ("--topic-map", f"{topic}={topic}-2", "--create-topics", "--max-batch-records", "80", *FORMAT)
    told = jobs.replay(lake, gateway.bootstrap, "events", *given)
    assert told.events("held")[0]["records"] == 200
    for partition in (0, 1):
        came = [record for _, record in topics.read(gateway.bootstrap, f"{topic}-2", partition, 100)]
        went = [record for _, record in topics.read(gateway.bootstrap, topic, partition, 100)]
        assert [record[1:3] for record in came] == [record[1:3] for record in went]


@one_catalog
def test_verify_and_replay_see_the_records_that_they_plan_for_while_the_archive_grows(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic, target = filled(gateway.bootstrap, 1, 20), "grown"
    given = ("--topics", topic, *FORMAT)
    jobs.archive(lake, gateway.bootstrap, "events", *given)

    def growing(session: SparkSession, where: str) -> Progress | None:
        topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
        jobs.archive(session, gateway.bootstrap, "events", *given)
        return last_progress(session, where)

    with patch.object(verify_job, "last_progress", growing):
        proof = jobs.verify(lake, gateway.bootstrap, "events", *FORMAT)
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 40)
    with patch.object(replay_job, "last_progress", growing):
        jobs.replay(lake, gateway.bootstrap, "events", "--topic-map", f"{topic}={target}", "--create-topics", *FORMAT)
    assert [log.end for log in Cluster(gateway.bootstrap).logs([target])] == [60]


@one_catalog
def test_new_fields_of_json_become_columns_and_an_empty_batch_keeps_them(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    given = ("--topics", topic, "--value", "json", *FORMAT)
    batches = [
        b'{"a":1,"in":{"x":1},"many":[{"p":1}]}',
        b'{"a":2,"b.c":"t","in":{"y":2},"many":[{"q":"r"}]}',
        b"no JSON",
    ]
    for value in batches:
        topics.fill(gateway.bootstrap, topic, [(0, None, value, topics.START_MS, [])])
        jobs.archive(lake, gateway.bootstrap, "events", *given)
    topics.grow(gateway.bootstrap, topic, 2)
    jobs.archive(lake, gateway.bootstrap, "events", *given)
    first, second, third = (row.data for row in rows(lake))
    assert (first.a, first["b.c"], first["in"].asDict(), first.many[0].asDict()) == (
        1, None, {"x": 1, "y": None}, {"p": 1, "q": None}
    )  # fmt: skip
    assert (second.a, second["b.c"], second["in"].asDict(), second.many[0].asDict()) == (
        2, "t", {"x": None, "y": 2}, {"p": None, "q": "r"}
    )  # fmt: skip
    assert third is None
    assert [row.reason for row in rows(lake, "events_dead_letters")] == ["the value is not JSON"]
    assert jobs.verify(lake, gateway.bootstrap, "events", *FORMAT).code == 0


@one_catalog
@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_rows_that_lack_nested_fields_of_their_table_are_appended(
    lake: SparkSession, tmp_path: Path, kind: str
) -> None:
    where = "iceberg:nested" if kind == "iceberg" else str(tmp_path / "nested")
    whole = "id bigint, who struct<name:struct<a:bigint,b:string>>, many array<struct<p:bigint,q:string>>"
    table.create(lake, where, StructType.fromDDL(whole))
    kinds = "id bigint, who struct<name:struct<a:bigint>>, many array<struct<p:bigint>>"
    frame = lake.createDataFrame([(1, ((7,),), [(2,), None])], kinds)
    table.append(frame, where, "tests", 1, "{}", merge_schema=True)
    [row] = table.read(lake, where).collect()
    assert row.asDict(recursive=True) == {
        "id": 1, "who": {"name": {"a": 7, "b": None}}, "many": [{"p": 2, "q": None}, None],
    }  # fmt: skip


@one_catalog
def test_columns_widen_as_far_as_iceberg_can(lake: SparkSession, gateway: GatewayProcess, tmp_path: Path) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    (tmp_path / "schema").write_text("n int, x float, `in` struct<many:array<int>>")
    given = ("--topics", topic, "--value", "json", "--schema", str(tmp_path / "schema"), *FORMAT)
    for values in (
        [b'{"n":1,"x":0.5,"in":{"many":[1]}}'],
        [b'{"n":2147483648,"x":0.123456789,"in":{"many":[2147483648]}}', b'{"n":9223372036854775808}'],
    ):
        topics.fill(gateway.bootstrap, topic, [(0, None, value, topics.START_MS, []) for value in values])
        jobs.archive(lake, gateway.bootstrap, "events", *given)
    assert table.schema(lake, "iceberg:events")["data"].dataType.simpleString() == (
        "struct<n:bigint,x:double,in:struct<many:array<bigint>>>"
    )
    found = rows(lake)
    assert [row.data.n for row in found] == [1, 2147483648, None]
    assert [row.data.x for row in found] == [0.5, 0.123456789, None]
    assert [row["_rescued"] for row in found] == [None, None, '{"n":9223372036854775808}']
    assert jobs.verify(lake, gateway.bootstrap, "events", "--value", "json", *FORMAT).code == 0


@one_catalog
def test_offsets_of_a_lost_and_of_a_damaged_file_are_named_and_repaired(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    values = [(n % 2, b"k", b'{"b.c":%d}' % n, topics.START_MS, []) for n in range(120)]
    topics.fill(gateway.bootstrap, topic, values)
    typed = ("--value", "json", *FORMAT)
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, "--max-batch-records", "60", *typed)
    name = iceberg.quoted("iceberg:events")
    for partition, offset in ((0, 5), (1, 35)):
        rows_of = f"partition = {partition} AND offset = {offset}"
        [row] = lake.sql(f"SELECT DISTINCT _file FROM {name} WHERE {rows_of}").collect()
        path = Path(row[0].removeprefix("file:"))
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        if partition:
            path.write_bytes(b"PAR1" + bytes(path.stat().st_size - 8) + b"PAR1")
        else:
            path.unlink()
    proof = jobs.verify(lake, gateway.bootstrap, "events", *FORMAT)
    assert proof.code == 3
    assert proof.events("damaged")
    ranges = re.findall(rf"DIFFERS {topic}-(\d) offsets (\d+) to (\d+), 30 records: the archive does not", proof.words)
    assert sorted(ranges) == [("0", "0", "29"), ("1", "30", "59")]
    named = ",".join(f"{topic}-{partition}:{first}-{last}" for partition, first, last in ranges)
    jobs.repair(lake, gateway.bootstrap, "events", "--ranges", named, *typed)
    proof = jobs.verify(lake, gateway.bootstrap, "events", *typed)
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 120)
    assert [row.data["b.c"] for row in rows(lake)] == [*range(0, 120, 2), *range(1, 120, 2)]


@one_catalog
def test_small_files_of_a_table_are_merged_within_its_partitions_and_in_its_order(lake: SparkSession) -> None:
    where = "iceberg:newest"
    table.create(lake, where, NEWEST, partitions("bucket(2,key),day(timestamp)", NEWEST), ["key"])
    for number in (1, 2, 3):
        rows = [
            ("t", b"key %d" % (at * 37 % 100), b"v", 0, at, datetime(2026, 1, 1 + at % 2, 12, tzinfo=UTC))
            for at in range(40 * number, 40 * number + 40)
        ]
        table.append(lake.createDataFrame(rows, NEWEST).coalesce(1), where, "tests", number, "{}")
    before = table.read(lake, where).orderBy("offset").collect()
    [merged] = jobs.compact(lake, "newest", *FORMAT).events("merged")
    assert (merged["removed"], merged["added"]) == (12, 4)
    assert table.merge_files(lake, where, 1 << 20, 2) == (0, 0)
    assert table.read(lake, where).orderBy("offset").collect() == before
    for row in lake.sql(f"SELECT file_path FROM {iceberg.quoted(where)}.files").collect():
        keys = pq.read_table(row.file_path.removeprefix("file:"), columns=["key"], partitioning=None)["key"].to_pylist()
        assert keys == sorted(keys)


@one_catalog
def test_a_merge_begins_again_if_files_were_merged_and_not_if_rows_were_changed(lake: SparkSession) -> None:
    name, whole = "iceberg:newest", iceberg.publish
    table.create(lake, name, NEWEST)

    def merged(batch: int, meanwhile: Callable[[], object]) -> int:
        at = datetime(2026, 1, batch, tzinfo=UTC)
        rows = [("t", key, False, b"%d" % batch, 0, batch, at) for key in (b"%d" % batch, b"k")[:batch]]
        pending = [meanwhile]

        def overtaken(spark: SparkSession, where: str, branch: str, head: int | None) -> None:
            if pending:
                pending.pop()()
            whole(spark, where, branch, head)

        with patch.object(iceberg, "publish", overtaken):
            latest_job.merge_batch(lake.createDataFrame(rows, CHANGE), name, latest_job.Merged("x", "none", (), batch))
        return table.read(lake, name).count()

    def compacted() -> None:
        assert table.merge_files(lake, name, 1 << 20, 2) == (2, 1)

    assert [merged(1, lambda: None), merged(2, lambda: None), merged(3, compacted)] == [1, 3, 4]
    assert {key: value for key, value in held(lake, name).items() if key == b"k"} == {b"k": b"3"}
    done = latest_job.last_merged(lake, name)
    assert done is not None
    assert done.batch == 3
    with pytest.raises(Exception, match="is not an ancestor of"):
        merged(4, lambda: lake.sql(f"DELETE FROM {iceberg.quoted(name)} WHERE key = X'31'").collect())


@one_catalog
def test_tables_of_the_newest_rows_and_of_all_versions_are_merged_once(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic = topics.fresh(gateway.bootstrap, PARTITIONS)
    records = living(changes(60, seed=4))
    given = ("--max-batch-records", "40", *FORMAT)
    for part in (records[:40], records[40:]):
        topics.fill(gateway.bootstrap, topic, part)
        jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
        jobs.latest(lake, "events", "newest", *SPREAD, *given)
        jobs.latest(lake, "events", "history", "--history", *given)
    # A batch without any keyed record still commits its progress.
    topics.fill(gateway.bootstrap, topic, [(0, None, b"no key", topics.START_MS, [])])
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    told = jobs.latest(lake, "events", "newest", *given)
    assert len(told.events("committed")) == 1
    files = lake.sql(f"SELECT partition, file_path FROM {iceberg.quoted('iceberg:newest')}.files").collect()
    assert {tuple(row.partition.asDict()) for row in files} == {("key_bucket", "timestamp_day")}
    assert len({row.partition.key_bucket for row in files}) > 1
    for row in files:
        keys = pq.read_table(row.file_path.removeprefix("file:"), columns=["key"], partitioning=None)["key"].to_pylist()
        assert keys == sorted(keys)
    assert held(lake, "iceberg:newest") == applied(records)
    assert held_versions(lake, "iceberg:history") == lived(records)
    done = latest_job.last_merged(lake, "iceberg:newest")
    assert done is not None
    # The batch's number is committed already, so the merge is skipped. This also happens if the answer to the commit
    # was lost.
    frame = lake.createDataFrame([("t", b"k", False, b"v", 0, 10**9, None)], CHANGE)
    latest_job.merge_batch(frame, "iceberg:newest", done)
    assert held(lake, "iceberg:newest") == applied(records)


@one_catalog
def test_the_progress_outlives_merged_files_and_expired_snapshots(lake: SparkSession, gateway: GatewayProcess) -> None:
    topic, name = filled(gateway.bootstrap, 1, 20), "table => 'default.events'"
    given = ("--topics", topic, "--max-batch-records", "10", *FORMAT)
    jobs.archive(lake, gateway.bootstrap, "events", *given)
    lake.sql(f"CALL sluice.system.rewrite_data_files({name}, options => map('min-input-files', '2'))").collect()
    now = "older_than => TIMESTAMP '2999-01-01 00:00:00'"
    lake.sql(f"CALL sluice.system.expire_snapshots({name}, {now}, retain_last => 1)").collect()
    assert next(commit.operation for commit in table.commits(lake, "iceberg:events")) == "replace"
    topics.fill(gateway.bootstrap, topic, topics.records(10, 1))
    jobs.archive(lake, gateway.bootstrap, "events", *given)
    assert offsets(lake) == list(range(30))


@one_catalog
def test_the_progress_outlives_an_expired_snapshot_between_it_and_the_newest_one(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic, name = filled(gateway.bootstrap, 1, 20), "table => 'default.events'"
    given = ("--topics", topic, *FORMAT)
    jobs.archive(lake, gateway.bootstrap, "events", *given)
    progress = last_progress(lake, "iceberg:events")
    # An append that is killed leaves a branch, too.
    topics.fill(gateway.bootstrap, topic, topics.records(10, 1))
    with patch.object(iceberg, "publish", side_effect=jobs.DiedError), pytest.raises(jobs.DiedError):
        jobs.archive(lake, gateway.bootstrap, "events", *given)
    for _ in range(2):
        lake.sql(f"CALL sluice.system.rewrite_data_files({name}, options => map('rewrite-all', 'true'))").collect()
    now = "older_than => TIMESTAMP '2999-01-01 00:00:00'"
    lake.sql(f"CALL sluice.system.expire_snapshots({name}, {now}, retain_last => 1)").collect()
    assert last_progress(lake, "iceberg:events") == progress
    topics.fill(gateway.bootstrap, topic, topics.records(10, 1))
    jobs.archive(lake, gateway.bootstrap, "events", *given)
    assert offsets(lake) == list(range(40))
    assert jobs.verify(lake, gateway.bootstrap, "events", *FORMAT).code == 0


@one_catalog
def test_small_files_are_merged_in_order_and_old_ones_removed(
    lake: SparkSession, gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic = topics.fresh(gateway.bootstrap, 2)
    for _ in range(3):
        topics.fill(gateway.bootstrap, topic, topics.records(20, 2))
        jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    before, progress = rows(lake), last_progress(lake, "iceberg:events")
    assert table.files(lake, "iceberg:events").count() >= 6
    told = jobs.compact(lake, "events", "--horizon-hours", "0", *FORMAT)
    assert [line["added"] for line in told.events("merged")] == [1]
    assert rows(lake) == before
    # After the last append, its branch does not retain the files that were merged.
    [left] = (tmp_path / "files").glob("**/*.parquet")
    held = pq.read_table(left, columns=["partition", "offset"]).to_pydict()
    assert list(zip(held["partition"], held["offset"], strict=True)) == [(n // 30, n % 30) for n in range(60)]
    assert last_progress(lake, "iceberg:events") == progress
    topics.fill(gateway.bootstrap, topic, topics.records(20, 2))
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    assert offsets(lake) == [*range(40), *range(40)]
    assert jobs.verify(lake, gateway.bootstrap, "events", *FORMAT).code == 0


def test_a_catalog_that_is_not_described_is_refused() -> None:
    given = ["--bootstrap", "x", "--out", "x", *FORMAT]
    for where, words in (
        (["--catalog", ""], "Iceberg tables need a catalog"),
        (["--catalog", "postgresql://postgres@/db?host=/tmp", "--warehouse", "/lake"], "by a Unix socket"),
        (["--catalog", "postgresql://postgres@localhost/db"], "A catalog in Postgres holds no files"),
        (["--catalog", "postgresql://postgres@127.0.0.1:1/db", "--warehouse", "/lake"], "Postgres does not answer"),
        (["--catalog", "/lake", "--warehouse", "/files"], "also holds the files"),
    ):
        with pytest.raises(PipelineError, match=words):
            catalog.settings_of(jobs.parse(archive_job, [*given, *where]))


def test_a_rest_catalog_and_one_of_the_users_own_are_passed_to_spark() -> None:
    given = ["--bootstrap", "x", "--out", "x", *FORMAT]
    rest = catalog.settings_of(jobs.parse(archive_job, [*given, "--catalog", "https://lake/v1", "--warehouse", "w"]))
    assert {name.removeprefix(catalog.SPARK_NAME): value for name, value in rest.items()} == {
        "": "org.apache.iceberg.spark.SparkCatalog", ".cache-enabled": "false", ".type": "rest",
        ".uri": "https://lake/v1", ".warehouse": "w",
    }  # fmt: skip
    assert catalog.settings_of(jobs.parse(archive_job, [*given, "--conf", f"{catalog.SPARK_NAME}=my.Catalog"])) == {}
