"""Iceberg tables from the same jobs: what a topic holds, once, also for readers that are not Spark.

The five failures of the Iceberg sink of Kafka Connect that others met in production are tests here by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyiceberg.table import StaticTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipeline import catalog, connector, iceberg, table
from pipeline.archive import job as archive_job
from pipeline.archive.job import last_progress
from pipeline.errors import PipelineError, explain
from pipeline.latest import job as latest_job
from pipeline.schema import CHANGE
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics
from tests.pipeline.conftest import INTERPRETED
from tests.pipeline.histories import PARTITIONS, applied, changes, held, held_versions, lived, living
from tests.pipeline.relay import relayed

pytestmark = pytest.mark.timeout(600)
FORMAT = ("--format", "iceberg")


@pytest.fixture(params=["postgres", "folder"])
def lake(
    request: pytest.FixtureRequest, spark: SparkSession, database_url: str, tmp_path: Path
) -> Iterator[SparkSession]:
    """A session of its own with an empty catalog."""
    with relayed(database_url) as url:
        where = ["--catalog", url, "--warehouse", str(tmp_path / "files")]
        if request.param == "folder":
            where = ["--catalog", str(tmp_path / "files")]
        arguments = jobs.parse(archive_job, ["--bootstrap", "x", "--out", "x", *FORMAT, *where])
        session = spark.newSession()
        for name, value in catalog.settings_of(arguments).items():
            session.conf.set(name, value)
        for name, value in {**INTERPRETED, "spark.sql.shuffle.partitions": "2"}.items():
            session.conf.set(name, value)
        yield session


one_catalog = pytest.mark.parametrize("lake", ["folder"], indirect=True)


def filled(bootstrap: str, partitions: int, count: int) -> str:
    topic = topics.fresh(bootstrap, partitions)
    topics.fill(bootstrap, topic, topics.records(count, partitions))
    return topic


def rows(spark: SparkSession, name: str = "events") -> list[Any]:
    return table.read(spark, f"iceberg:{name}").orderBy("topic", "partition", "offset").collect()


def offsets(spark: SparkSession, name: str = "events") -> list[int]:
    return [row.offset for row in rows(spark, name)]


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
def test_tables_of_the_newest_rows_and_of_all_versions_are_merged_once(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic = topics.fresh(gateway.bootstrap, PARTITIONS)
    records = living(changes(60, seed=4))
    given = ("--max-batch-records", "40", *FORMAT)
    for part in (records[:40], records[40:]):
        topics.fill(gateway.bootstrap, topic, part)
        jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
        jobs.latest(lake, "events", "newest", *given)
        jobs.latest(lake, "events", "history", "--history", *given)
    # A batch without a keyed record still commits its progress.
    topics.fill(gateway.bootstrap, topic, [(0, None, b"no key", topics.START_MS, [])])
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    told = jobs.latest(lake, "events", "newest", *given)
    assert len(told.events("committed")) == 1
    assert held(lake, "iceberg:newest") == applied(records)
    assert held_versions(lake, "iceberg:history") == lived(records)
    done = latest_job.last_merged(lake, "iceberg:newest")
    assert done is not None
    # The number is committed already, so the merge is skipped, as after a lost answer.
    frame = lake.createDataFrame([("t", b"k", False, b"v", 0, 10**9, None)], CHANGE)
    latest_job.merge_batch(frame, "iceberg:newest", done)
    assert held(lake, "iceberg:newest") == applied(records)


def written(spark: SparkSession, where: str, head: int | None) -> int:
    """Return the snapshot after `head` that is not on `main`."""
    name = iceberg.quoted(where)
    main = {commit.version for commit in table.commits(spark, where)}
    found = spark.sql(f"SELECT snapshot_id FROM {name}.snapshots WHERE parent_id = {head}").collect()
    return next(row.snapshot_id for row in found if row.snapshot_id not in main)


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


def test_a_catalog_that_is_not_described_is_refused() -> None:
    given = ["--bootstrap", "x", "--out", "x", *FORMAT]
    for where, words in (
        (["--catalog", ""], "Iceberg tables need a catalog"),
        (["--catalog", "postgresql://postgres@/db?host=/tmp", "--warehouse", "/lake"], "by a Unix socket"),
        (["--catalog", "postgresql://postgres@localhost/db"], "needs a place for files"),
        (["--catalog", "postgresql://postgres@127.0.0.1:1/db", "--warehouse", "/lake"], "Postgres does not answer"),
        (["--catalog", "/lake", "--warehouse", "/files"], "holds the files, too"),
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


# --- the five failures ----------------------------------------------------------------------------------------------


def test_two_coordinators_archive_a_batch_once(lake: SparkSession, gateway: GatewayProcess) -> None:
    """Iceberg issue 17637: two coordinators of one connector both committed."""
    topic = filled(gateway.bootstrap, 1, 20)
    first = jobs.archive_job_of(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    first.open()
    first.step_once()
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    with pytest.raises(PipelineError, match="Another archive job writes"):
        first.step_once()
    assert offsets(lake) == list(range(40))


@one_catalog
def test_two_coordinators_that_write_at_the_same_moment_commit_a_batch_once(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic = filled(gateway.bootstrap, 1, 20)
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    slow = jobs.archive_job_of(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    slow.open()
    whole = iceberg.publish

    def beaten(spark: SparkSession, where: str, branch: str, head: int | None) -> None:
        with patch.object(iceberg, "publish", whole):
            jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
        # The winner dropped the branch; without that, only Iceberg's own check is left.
        late, name = written(spark, where, head), iceberg.quoted(where)
        spark.sql(f"ALTER TABLE {name} CREATE BRANCH IF NOT EXISTS {branch} AS OF VERSION {late}")
        whole(spark, where, branch, head)

    with patch.object(iceberg, "publish", beaten), pytest.raises(PySparkException) as refused:
        slow.step_once()
    assert explain(refused.value).cause.startswith("Another writer changed the table at the same moment.")
    assert offsets(lake) == list(range(40))


@one_catalog
def test_a_branch_that_another_job_dropped_is_not_committed(lake: SparkSession, gateway: GatewayProcess) -> None:
    topic = filled(gateway.bootstrap, 1, 20)
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    name = iceberg.quoted("iceberg:events")
    frame, before = table.read(lake, "iceberg:events"), offsets(lake)
    whole = iceberg.publish

    def dropped(spark: SparkSession, where: str, branch: str, head: int | None) -> None:
        spark.sql(f"ALTER TABLE {name} DROP BRANCH {branch}")
        frame.writeTo(name).append()
        spark.sql(f"ALTER TABLE {name} CREATE BRANCH {branch}")
        frame.writeTo(f"{name}.branch_{branch}").append()
        whole(spark, where, branch, head)

    with (
        patch.object(iceberg, "publish", dropped),
        pytest.raises(PipelineError, match=r"dropped this job's branch. Stop one of the two"),
    ):
        table.append(frame, "iceberg:events", archive_job.APPLICATION, 7, "{}")
    assert offsets(lake) == sorted(before * 2)


@one_catalog
def test_a_zombie_does_not_rewind_the_progress(lake: SparkSession, gateway: GatewayProcess) -> None:
    """Iceberg issue 17551: a zombie task rewound the group's offset, and records were lost or doubled."""
    topic = filled(gateway.bootstrap, 1, 20)
    zombie = jobs.archive_job_of(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    zombie.open()
    read = connector.read

    def overtaken(*given: Any, **named: Any) -> Any:
        with patch.object(connector, "read", read):
            jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
            topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
            jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
        return read(*given, **named)

    with (
        patch.object(connector, "read", overtaken),
        pytest.raises(PipelineError, match="Another archive job writes"),
    ):
        zombie.step_once()
    progress = last_progress(lake, "iceberg:events")
    assert progress is not None
    assert (progress.batch, progress.next[topic, 0]) == (2, 40)
    assert offsets(lake) == list(range(40))


@one_catalog
def test_the_same_files_are_not_committed_twice(lake: SparkSession, gateway: GatewayProcess) -> None:
    """Iceberg issue 17340: after a lost answer the same data files were committed again."""
    topic = filled(gateway.bootstrap, 1, 20)
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    frame, progress = table.read(lake, "iceberg:events"), last_progress(lake, "iceberg:events")
    assert progress is not None
    table.append(frame, "iceberg:events", archive_job.APPLICATION, progress.batch, progress.to_json())
    files = lake.sql(f"SELECT file_path FROM {iceberg.quoted('iceberg:events')}.files").collect()
    assert len(files) == len({row.file_path for row in files})
    assert offsets(lake) == list(range(20))


@one_catalog
def test_a_commit_holds_all_partitions_of_its_batch_or_none(lake: SparkSession, gateway: GatewayProcess) -> None:
    """Iceberg issue 17925: a commit went through without the data of every partition."""
    topic = filled(gateway.bootstrap, 3, 60)
    job = jobs.archive_job_of(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    job.open()
    whole = archive_job.to_records

    def failing(frame: Any) -> Any:
        broken = F.when(F.col("partition") == 2, F.raise_error(F.lit("a task of partition 2 died"))).otherwise("value")
        return whole(frame).withColumn("value", F.coalesce(broken.cast("binary"), "value"))

    with patch.object(archive_job, "to_records", failing), pytest.raises(PySparkException):
        job.step_once()
    assert offsets(lake) == []
    job.step_once()
    assert offsets(lake) == [*range(20), *range(20), *range(20)]


@one_catalog
def test_a_job_that_ends_before_its_commit_is_continued_by_another(lake: SparkSession, gateway: GatewayProcess) -> None:
    """Iceberg issue 16282: a change of the coordinator between write and commit lost or doubled records."""
    topic = filled(gateway.bootstrap, 1, 20)
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    ending = jobs.archive_job_of(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    ending.open()

    with patch.object(iceberg, "publish", side_effect=jobs.DiedError), pytest.raises(jobs.DiedError):
        ending.step_once()
    assert offsets(lake) == list(range(20))
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    assert offsets(lake) == list(range(40))
    assert jobs.verify(lake, gateway.bootstrap, "events", *FORMAT).code == 0
    name = iceberg.quoted("iceberg:events")
    assert len(lake.sql(f"SELECT name FROM {name}.refs WHERE name <> 'main'").collect()) == 1
