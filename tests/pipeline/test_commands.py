"""Jobs as commands: started as plain spark-submit applications, and stopped by a signal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import jars
from pipeline.kafka import Cluster
from tests.gateway_process import ROOT, GatewayProcess
from tests.pipeline import processes, topics
from tests.pipeline.conftest import FAST_JVM

pytestmark = pytest.mark.timeout(600)
RECORDS, PARTITIONS = 400, 2
JOB_SECONDS = 240


def submit(job: str, *given: str, folder: Path) -> str:
    """Run `spark-submit pipeline/JOB/job.py GIVEN` with the options in docs/pipeline.md. Return its output."""
    spark_submit = shutil.which("spark-submit", path=str(Path(sys.executable).parent))
    assert spark_submit is not None
    libraries = ",".join(str(path) for path in jars.paths(jars.folder()))
    command = [spark_submit, "--master", "local[2]", "--driver-memory", "512m", "--jars", libraries,
               "--conf", "spark.ui.enabled=false", str(ROOT / "pipeline" / job / "job.py"), *given]  # fmt: skip
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "JAVA_TOOL_OPTIONS": FAST_JVM,
                   "SPARK_LOCAL_IP": "127.0.0.1"}  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=JOB_SECONDS)
    assert done.returncode == 0, f"{job} ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def filled(gateway: GatewayProcess, count: int = RECORDS) -> str:
    topic = topics.fresh(gateway.bootstrap, PARTITIONS)
    topics.fill(gateway.bootstrap, topic, topics.records(count, PARTITIONS))
    return topic


@pytest.mark.parametrize("all_jobs", [False, pytest.param(True, marks=pytest.mark.long)])
def test_jobs_are_plain_spark_submit_applications(gateway: GatewayProcess, tmp_path: Path, all_jobs: bool) -> None:
    topic, out, to = filled(gateway), str(tmp_path / "table"), ("--bootstrap", gateway.bootstrap)
    archived = submit("archive", *to, "--topics", topic, "--out", out, "--once", "--group", "seen", folder=tmp_path)
    assert f"holds {RECORDS} offsets of {PARTITIONS} partitions" in archived
    assert f"proved: {RECORDS} offsets" in submit("verify", *to, "--archive", out, folder=tmp_path)
    again = (*to, "--archive", out, "--topic-map", f"{topic}={topic}-again", "--create-topics")
    assert "done: the offset map is" in submit("replay", *again, folder=tmp_path)
    assert {log.end for log in Cluster(gateway.bootstrap).logs([f"{topic}-again"])} == {RECORDS // PARTITIONS}
    if not all_jobs:
        return
    assert "removed 0 files" in submit("compact", "--archive", out, folder=tmp_path)
    submit("audit", "--archive", out, "--out", str(tmp_path / "audit"), folder=tmp_path)
    assert (tmp_path / "audit" / "audit.html").is_file()
    assert gateway.database_url is not None
    submit("analyze", "--database-url", gateway.database_url, "--out", str(tmp_path / "report"), folder=tmp_path)
    assert (tmp_path / "report" / "report.html").is_file()
    assert "nothing is missing" in submit("doctor", *to, "--topics", topic, folder=tmp_path)


@pytest.mark.timeout(2 * processes.JOB_SECONDS)
def test_a_signal_ends_archive_and_replay_after_their_step_and_they_go_on(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    topic, out, to = filled(gateway), str(tmp_path / "table"), ("--bootstrap", gateway.bootstrap)
    given = ("archive", *to, "--topics", topic, "--out", out, "--max-batch-records", "40", "--max-rate", "40")
    stopped(given, "committed", signal.SIGTERM)
    held = stopped(given, "committed", signal.SIGINT)
    assert f"holds {RECORDS} offsets" not in held
    processes.run("archive", *to, "--topics", topic, "--out", out, "--once")
    proof = processes.run("verify", *to, "--archive", out)
    assert [line["offsets"] for line in proof.said if line.get("event") == "proved"] == [RECORDS]

    target = f"{topic}-again"
    replay = ("replay", *to, "--archive", out, "--topic-map", f"{topic}={target}", "--create-topics",
              "--max-batch-records", "40")  # fmt: skip
    assert "start it again to go on" in stopped((*replay, "--max-rate", "40"), "committed", signal.SIGTERM)
    processes.run(*replay)
    assert {log.end for log in Cluster(gateway.bootstrap).logs([target])} == {RECORDS // PARTITIONS}


def stopped(given: tuple[str, ...], event: str, number: signal.Signals, code: int = 0) -> str:
    """Start a job, send the signal after it has reported `event`, and return its last lines. The
    job must end in order.
    """
    job = processes.Job(*given)
    try:
        assert job.wait_for(event) is not None, "".join(job.errors)
        assert job.niceness == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)}
        job.signal(number)
        assert job.wait() == code, "".join(job.errors)
    finally:
        job.close()
    assert "Stopping after this step" in "".join(job.errors)
    return str(job.said[-1]["say"])


PRIORITIES = """
import argparse, os, subprocess, sys
from pipeline import session
parser = argparse.ArgumentParser()
session.add_arguments(parser)
session.give_way(session.options_of(parser.parse_args(), "job").nice)
print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), flush=True)
subprocess.run([sys.executable, "-c", "import os; print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"])
"""


@pytest.mark.parametrize(
    ("given", "scheduler", "nicer"),
    [((), os.SCHED_OTHER, 0), (("--nice", "idle"), os.SCHED_IDLE, 0), (("--nice", "3"), os.SCHED_OTHER, 3)],
)
def test_a_job_and_what_it_starts_give_way(given: tuple[str, ...], scheduler: int, nicer: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRIORITIES, *given], capture_output=True, text=True, timeout=JOB_SECONDS
    )
    priority = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nicer)
    assert done.stdout.splitlines() == [f"{scheduler} {priority}"] * 2, done.stderr


@pytest.mark.parametrize("given", ["20", "-1", "lazy", ""])
def test_a_priority_that_there_is_not_is_refused(given: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRIORITIES, f"--nice={given}"], capture_output=True, text=True, timeout=JOB_SECONDS
    )
    assert done.returncode == 2
    assert f"{given} is neither a number from 0 to 19 nor idle" in done.stderr


def test_who_reads_no_further_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "pipeline.cli", "jars", "--names"]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=JOB_SECONDS)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
