"""Five failures of Kafka Connect's Iceberg sink that users reported from production. Each has a test.

docs/iceberg-failures.md explains why none of these failures can happen here.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipeline import connector, iceberg, table
from pipeline.archive import job as archive_job
from pipeline.archive.job import last_progress
from pipeline.errors import PipelineError, explain
from pipeline.iceberg import _append_to
from pipeline.schema import ARCHIVE_CLUSTER, NEWEST, RECORD
from tests.gateway_process import GatewayProcess
from tests.pipeline import jobs, topics
from tests.pipeline.catalogs import FORMAT, filled, offsets, one_catalog

pytestmark = pytest.mark.timeout(600)


def written(spark: SparkSession, where: str, head: int | None) -> int:
    """Return the snapshot after `head` that is not on the branch `main`."""
    name = iceberg.quoted(where)
    main = {commit.version for commit in table.commits(spark, where)}
    found = spark.sql(f"SELECT snapshot_id FROM {name}.snapshots WHERE parent_id = {head}").collect()
    return next(row.snapshot_id for row in found if row.snapshot_id not in main)


def test_two_coordinators_archive_a_batch_once(lake: SparkSession, gateway: GatewayProcess) -> None:
    """Iceberg issue 17637: two coordinators of one connector both committed a batch."""
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
        # The other append has dropped the branch. If this check is missing, only Iceberg's own check prevents a second
        # commit.
        late, name = written(spark, where, head), iceberg.quoted(where)
        spark.sql(f"ALTER TABLE {name} CREATE BRANCH IF NOT EXISTS {branch} AS OF VERSION {late}")
        whole(spark, where, branch, head)

    with patch.object(iceberg, "publish", beaten), pytest.raises(PySparkException) as refused:
        slow.step_once()
    assert explain(refused.value).cause.startswith("Another writer changed the table at the same moment.")
    assert offsets(lake) == list(range(40))


@one_catalog
def test_append_is_committed_though_files_were_merged_while_it_was_written(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic = filled(gateway.bootstrap, 1, 20)
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    job = jobs.archive_job_of(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    job.open()
    whole, merged = iceberg.publish, list[tuple[int, int]]()

    def overtaken(spark: SparkSession, where: str, branch: str, head: int | None) -> None:
        if not merged:
            merged.append(table.rewrite(spark, where, f"topic = '{topic}'", 1 << 20, ARCHIVE_CLUSTER))
        whole(spark, where, branch, head)

    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    with patch.object(iceberg, "publish", overtaken):
        job.step_once()
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    job.step_once()
    assert merged == [(2, 1)]
    assert offsets(lake) == list(range(60))
    branches = lake.sql(f"SELECT name FROM {iceberg.quoted('iceberg:events')}.refs").collect()
    assert len(branches) == 2
    assert jobs.verify(lake, gateway.bootstrap, "events", *FORMAT).code == 0


@one_catalog
def test_append_is_committed_though_old_snapshots_were_removed_while_it_was_written(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic = filled(gateway.bootstrap, 1, 20)
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, "--max-batch-records", "10", *FORMAT)
    job = jobs.archive_job_of(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    job.open()
    whole, merged = iceberg.publish, list[tuple[int, int]]()

    def compact() -> None:
        if not merged:
            merged.append(table.rewrite(lake, "iceberg:events", f"topic = '{topic}'", 1 << 20, ARCHIVE_CLUSTER))
            table.vacuum(lake, "iceberg:events", 0)

    def overtaken(*given: Any) -> None:
        compact()
        whole(*given)

    def overtaken_at_first(*given: Any) -> None:
        compact()
        _append_to(*given)

    for overtaken_function, name in ((overtaken, "publish"), (overtaken_at_first, "_append_to")):
        merged.clear()
        topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
        with patch.object(iceberg, name, overtaken_function):
            job.step_once()
        assert len(merged) == 1
    assert offsets(lake) == list(range(60))
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
    job.step_once()
    branches = lake.sql(f"SELECT name FROM {iceberg.quoted('iceberg:events')}.refs").collect()
    assert len(branches) == 2
    assert jobs.verify(lake, gateway.bootstrap, "events", *FORMAT).code == 0


@one_catalog
def test_repair_beside_an_archive_of_the_same_day_is_refused_in_words(
    lake: SparkSession, gateway: GatewayProcess
) -> None:
    topic = filled(gateway.bootstrap, 1, 20)
    jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
    lake.sql(f"DELETE FROM {iceberg.quoted('iceberg:events')} WHERE offset = 5").collect()
    given, whole = ("--ranges", f"{topic}-0:5", *FORMAT), table.replace

    def overtaken(*given: Any) -> None:
        topics.fill(gateway.bootstrap, topic, topics.records(20, 1))
        jobs.archive(lake, gateway.bootstrap, "events", "--topics", topic, *FORMAT)
        whole(*given)

    with patch.object(table, "replace", overtaken), pytest.raises((PySparkException, Py4JJavaError)) as refused:
        jobs.repair(lake, gateway.bootstrap, "events", *given)
    assert explain(refused.value).cause.startswith("Another writer changed the table at the same moment.")
    jobs.repair(lake, gateway.bootstrap, "events", *given)
    assert offsets(lake) == list(range(40))


@one_catalog
def test_repair_of_an_archive_that_was_killed_before_its_first_commit_is_refused_in_words(lake: SparkSession) -> None:
    table.create(lake, "iceberg:events", RECORD)
    with pytest.raises(PipelineError, match="iceberg:events holds no archive yet"):
        jobs.repair(lake, "127.0.0.1:1", "events", "--ranges", "topic-0:5", *FORMAT)


@one_catalog
def test_table_whose_creation_was_killed_gets_its_order_at_the_next_start(lake: SparkSession) -> None:
    where = "iceberg:newest"
    table.create(lake, where, NEWEST)
    table.create(lake, where, NEWEST, order=["key"])
    rows = [("t", b"key %d" % (at * 37 % 100), b"v", 0, at, datetime(2026, 1, 1, tzinfo=UTC)) for at in range(40)]
    table.append(lake.createDataFrame(rows, NEWEST).coalesce(1), where, "tests", 1, "{}")
    assert [bytes(row.key) for row in table.read(lake, where).collect()] == sorted(row[1] for row in rows)


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
    """Iceberg issue 16282: the coordinator changed between write and commit, and records were lost or doubled."""
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
