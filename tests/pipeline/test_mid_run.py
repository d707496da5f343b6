"""Disturbances of a running job: topics are deleted, recreated and extended; retention removes records;

Postgres, the gateway or the disk fails. Afterwards the archive passes `verify`, or the error names the reason and the
next step.
"""

from __future__ import annotations

import io
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from confluent_kafka import KafkaError, KafkaException
from pyspark.sql import SparkSession

from pipeline import table
from pipeline.archive import job as archive_job
from pipeline.archive import plan, unfit
from pipeline.archive.job import last_progress
from pipeline.errors import PipelineError
from pipeline.kafka import Cluster
from pipeline.progress import Progress, Stop
from pipeline.replay.plan import MARK
from pipeline.ticker import Ticker
from pipeline.verify import job as verify_job
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.pipeline import jobs, running, topics

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("interpreted")]
PACE = ("--max-batch-records", "20")
SMALL_DISK_MIB, ROOM_MIB = 2, 64
TIMED_OUT = -185
"""An error code of librdkafka itself."""


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system for the test."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(options, capture_output=True, text=True, timeout=30)
    except OSError as error:
        pytest.skip(f"a small file system cannot be mounted: {error}")
    if mounted.returncode:
        pytest.skip(f"a small file system needs the right to mount one (run as root): {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def held(spark: SparkSession, path: str) -> int:
    return spark.read.format("delta").load(path).count()


def filled(bootstrap: str, partitions: int, count: int, size: int = 40) -> str:
    topic = topics.fresh(bootstrap, partitions)
    topics.fill(bootstrap, topic, topics.records(count, partitions, size=size))
    return topic


# --- topics ---------------------------------------------------------------------------------------------------------


def test_a_topic_that_is_deleted_ends_the_archive_in_words_or_the_others_go_on(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    stays, goes = filled(gateway.bootstrap, 1, 30), filled(gateway.bootstrap, 1, 30)
    given = ("--topics", f"{stays},{goes}")
    with running.archive(spark, gateway.bootstrap, out, *given) as job:
        job.wait_for("committed")
        topics.delete(gateway.bootstrap, goes)
        told = job.failure()
    assert told.cause == f"The topic {goes} has been deleted; the archive holds what was committed before."
    assert "--on-data-loss continue" in told.next_step
    with running.archive(spark, gateway.bootstrap, out, *given, "--on-data-loss", "continue") as job:
        job.wait_for("deleted")
        topics.fill(gateway.bootstrap, stays, topics.records(10, 1))
        job.wait_for("committed")
        job.stop()
        assert len(job.events("deleted")) == 1
    assert held(spark, out) == 70
    assert jobs.verify(spark, gateway.bootstrap, out, "--topics", stays).code == 0


def test_a_topic_that_is_deleted_and_made_again_ends_the_archive(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = filled(gateway.bootstrap, 1, 30)
    # The job refuses this even if losses are allowed, because a table must not mix the offsets of two topics.
    with running.archive(
        spark, gateway.bootstrap, out, "--topics", topic, "--interval", "2", "--on-data-loss", "continue"
    ) as job:
        job.wait_for("committed")
        topics.delete(gateway.bootstrap, topic)
        topics.make(gateway.bootstrap, topic, 1)
        topics.fill(gateway.bootstrap, topic, topics.records(50, 1))
        told = job.failure()
    assert "was deleted and created again" in told.cause
    assert "Archive the new topic into another table" in told.next_step
    assert held(spark, out) == 30


def test_a_topic_that_grows_is_archived_whole(spark: SparkSession, gateway: GatewayProcess, out: str) -> None:
    topic = filled(gateway.bootstrap, 1, 30)
    with running.archive(spark, gateway.bootstrap, out, "--topics", topic, "--from", "latest") as job:
        job.wait_for("committed")
        topics.grow(gateway.bootstrap, topic, 3)
        topics.fill(gateway.bootstrap, topic, topics.records(60, 3))
        while held(spark, out) < 60:
            job.wait_for("committed")
        job.stop()
    assert held(spark, out) == 60
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 60)


def test_retention_that_passes_a_running_archive_is_named(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = filled(gateway.bootstrap, 1, 400)
    slow = ("--topics", topic, "--max-rate", "20", *PACE)
    with running.archive(spark, gateway.bootstrap, out, *slow) as job:
        job.wait_for("committed")
        topics.delete_records(gateway.bootstrap, topic, 0, 300)
        told = job.failure()
    assert "offsets were removed from their topic before they were archived" in told.cause
    assert f"{topic}-0 offsets " in told.cause
    assert "to 299." in told.cause
    assert "--on-data-loss continue" in told.next_step
    whole = ("--topics", topic, "--on-data-loss", "continue")
    with running.archive(spark, gateway.bootstrap, out, *whole) as job:
        lost = job.wait_for("lost")["lost"]
        job.wait_for("committed")
        job.stop()
    assert [(name, partition, end) for name, partition, _, end in lost] == [(topic, 0, 300)]
    assert held(spark, out) == 400 - (300 - lost[0][2])
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 100)


@pytest.mark.parametrize("made_again", [False, True])
def test_a_target_topic_that_is_deleted_or_made_again_ends_the_replay_in_words(
    spark: SparkSession, gateway: GatewayProcess, out: str, monkeypatch: pytest.MonkeyPatch, made_again: bool
) -> None:
    monkeypatch.setattr("pipeline.replay.job.RETRY_SECONDS", (0.1,))
    topic = filled(gateway.bootstrap, 1, 200)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    target = f"{topic}-again"
    given = ("--topic-map", f"{topic}={target}", "--create-topics", "--max-rate", "40", *PACE)
    with running.replay(spark, gateway.bootstrap, out, *given) as job:
        job.wait_for("committed", 2)
        topics.delete(gateway.bootstrap, target)
        if made_again:
            topics.make(gateway.bootstrap, target, 1)
        told = job.failure()
    happened = "was deleted and created again" if made_again else "has been deleted"
    assert told.cause == f"The target topic {target} {happened} since the replay began."
    assert "another --name" in told.next_step


# --- beside another job ---------------------------------------------------------------------------------------------


def test_files_are_merged_while_an_archive_adds_more(spark: SparkSession, gateway: GatewayProcess, out: str) -> None:
    topic = filled(gateway.bootstrap, 2, 400)
    with running.archive(spark, gateway.bootstrap, out, "--topics", topic, "--max-rate", "40", *PACE) as job:
        job.wait_for("committed", 3)
        merged = jobs.compact(spark, out).events("merged")
        job.wait_for("committed", 2)
        job.stop()
    assert sum(line["removed"] for line in merged) > sum(line["added"] for line in merged) > 0
    commits = [commit.operation for commit in table.commits(spark, out)]
    assert "WRITE" in commits[: commits.index("OPTIMIZE")]
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 400)


def test_verify_proves_an_archive_that_grows_in_the_meantime(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = filled(gateway.bootstrap, 1, 20)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    topics.fill(gateway.bootstrap, topic, topics.records(20, 1))

    def growing(session: SparkSession, where: str) -> plan.Progress | None:
        found = last_progress(session, where)
        jobs.archive(session, gateway.bootstrap, where, "--topics", topic)
        return found

    with patch.object(verify_job, "last_progress", growing):
        proof = jobs.verify(spark, gateway.bootstrap, out)
    assert held(spark, out) == 40
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 20)


# --- pace, figures, a group -----------------------------------------------------------------------------------------


def test_a_continuous_archive_keeps_its_rate_shows_figures_and_commits_a_groups_offsets(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic = filled(gateway.bootstrap, 2, 200)
    port, group = free_ports(1)[0], f"lag-of-{topic}"
    given = ("--topics", topic, "--max-rate", "100", "--interval", "0.5", "--group", group, "--metrics-port", str(port))
    with running.archive(spark, gateway.bootstrap, out, *given) as job:
        first = job.wait_for("committed")
        last = job.wait_for("committed")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            figures = answer.read().decode()
        job.stop()
    # At a rate of 100/s the job reads 100 records each second. So the second batch begins a second after the first.
    assert (first["rows"], last["rows"]) == (100, 100)
    assert last["seconds"] - first["seconds"] > 0.5
    assert "sluice_archive_records_total 200.0" in figures
    assert "sluice_archive_batches_total 2.0" in figures
    assert f'sluice_archive_lag_records{{partition="1",topic="{topic}"}} 0.0' in figures
    assert Cluster(gateway.bootstrap).group_offsets(group) == {(topic, 0): 100, (topic, 1): 100}
    assert jobs.verify(spark, gateway.bootstrap, out).code == 0


def test_a_step_that_can_be_done_again_is_broken_off_when_a_stop_is_asked_for(spark: SparkSession) -> None:
    said, stop = io.StringIO(), Stop()
    stop.ask()
    with (
        pytest.raises(PipelineError, match=r"stopped within a step. Start it again; it begins anew"),
        Ticker(spark, Progress("verify", stream=said), stop),
    ):
        spark.range(10**14).selectExpr("sum(hash(id))").collect()
    # The Spark session is still usable.
    assert spark.range(3).count() == 3


# --- machines -------------------------------------------------------------------------------------------------------


def test_search_for_timestamps_that_do_not_fit_is_done_again_if_a_broker_is_silent(
    spark: SparkSession, gateway: GatewayProcess, out: str
) -> None:
    topic, whole = topics.fresh(gateway.bootstrap, 1, message_timestamp_after_max_ms=str(2**63 - 1)), unfit.find
    topics.fill(gateway.bootstrap, topic, [(0, None, b"{}", 2**62, []), *topics.records(3, 1)])
    silent = [KafkaException(KafkaError(TIMED_OUT))]

    def find(*given: Any, **named: Any) -> unfit.Found:
        if silent:
            raise silent.pop()
        return whole(*given, **named)

    with (
        patch.object(unfit, "find", find),
        running.archive(spark, gateway.bootstrap, out, "--topics", topic, "--once") as job,
    ):
        assert job.wait_for("retry")["cause"].startswith("No Kafka broker answers")
        job.finish()
    assert (held(spark, out), held(spark, f"{out}_dead_letters")) == (3, 1)


def test_postgres_and_the_gateway_may_die_under_an_archive_and_a_replay(
    spark: SparkSession, gateway_factory: GatewayFactory, out: str
) -> None:
    gateway = gateway_factory(embedded=True)
    topic = filled(gateway.bootstrap, 2, 400)
    with running.archive(spark, gateway.bootstrap, out, "--topics", topic, "--max-rate", "100") as job:
        job.wait_for("committed")
        gateway.kill_postgres()
        job.wait_for("committed")
        gateway.kill()
        gateway.start()
        job.wait_for("committed", 2)
        job.stop()
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 400)

    target = f"{topic}-again"
    given = ("--topic-map", f"{topic}={target}", "--create-topics", "--max-batch-records", "100", "--max-rate", "100")
    with running.replay(spark, gateway.bootstrap, out, *given) as job:
        job.wait_for("committed")
        job.wait_for("writing")
        gateway.kill_postgres()
        job.wait_for("committed")
        job.wait_for("writing")
        gateway.kill()
        gateway.start()
        job.finish()
    for partition in (0, 1):
        end = {log.partition: log.end for log in Cluster(gateway.bootstrap).logs([target])}[partition]
        came = [record[4][-1] for _, record in topics.read(gateway.bootstrap, target, partition, end)]
        assert all(name == MARK for name, _ in came)
        assert [int((value or b"").split(b"/")[2]) for _, value in came] == list(range(200))


def test_a_full_disk_is_told_and_the_archive_goes_on_when_there_is_room(
    spark: SparkSession, gateway: GatewayProcess, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_job, "RETRY_SECONDS", (0.1, 0.1))
    topic, out = filled(gateway.bootstrap, 1, 8_000, size=1_500), str(small_disk / "table")
    with running.archive(
        spark, gateway.bootstrap, out, "--topics", topic, "--max-batch-records", "500", "--once"
    ) as job:
        job.wait_for("committed")
        told = job.failure()
        assert job.events("retry")[0]["cause"].startswith("There is no space left where the job writes.")
    assert told.cause.startswith("There is no space left where the job writes.")
    assert told.next_step.startswith("Free some, or name another folder")
    before = held(spark, out)
    assert 0 < before < 8_000
    subprocess.run(["mount", "-o", f"remount,size={ROOM_MIB}m", str(small_disk)], check=True, timeout=30)
    jobs.archive(spark, gateway.bootstrap, out, "--topics", topic)
    proof = jobs.verify(spark, gateway.bootstrap, out)
    assert (proof.code, proof.events("proved")[0]["offsets"]) == (0, 8_000)
