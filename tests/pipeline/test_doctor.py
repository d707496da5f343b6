"""`doctor` names what an incomplete machine lacks, and the next step to take."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import sys
from pathlib import Path

import pytest

from pipeline import jars, session
from pipeline.doctor import job as doctor
from pipeline.errors import PipelineError
from pipeline.progress import Progress, Stop
from tests.gateway_process import GatewayProcess
from tests.pipeline import processes, topics

OLD_JAVA = """#!/bin/sh
echo 'openjdk version "11.0.2" 2019-01-15' >&2
"""


def missing(*given: str) -> list[tuple[str, str, str]]:
    """Return check, cause and next step of each problem that doctor reports, except those of Spark."""
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    session.add_arguments(parser)
    stream = io.StringIO()
    lines = Progress("doctor", as_json=True, stream=stream)
    code = doctor.run(parser.parse_args(["--no-spark", *given]), lines, Stop())
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    found = [(line["check"], line["cause"], line["next"]) for line in said if line["event"] == "missing"]
    assert code == (1 if found else 0)
    return found


def test_nothing_is_missing_where_everything_is(gateway: GatewayProcess) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    assert missing("--bootstrap", gateway.bootstrap, "--topics", topic) == []


def test_a_stopped_doctor_does_not_report_that_nothing_is_missing() -> None:
    parser, stop = argparse.ArgumentParser(), Stop()
    doctor.add_arguments(parser)
    session.add_arguments(parser)
    stop.ask()
    with pytest.raises(PipelineError, match="stopped before it had checked everything"):
        doctor.run(parser.parse_args(["--no-spark"]), Progress("doctor", stream=io.StringIO()), stop)


def test_a_topic_that_is_not_there(gateway: GatewayProcess) -> None:
    topic = topics.fresh(gateway.bootstrap, 1)
    ((check, cause, step),) = missing("--bootstrap", gateway.bootstrap, "--topics", f"{topic},orders")
    assert (check, cause) == ("Kafka", "The topic orders does not exist.")
    assert topic in step


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    ((check, cause, step),) = missing()
    assert (check, cause) == ("Java", "There is no Java in PATH.")
    assert "Install Java 17" in step
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert [cause for _, cause, _ in missing()] == [f"There is no Java in JAVA_HOME ({tmp_path})."]


def test_an_old_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text(OLD_JAVA)
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    ((check, cause, step),) = missing()
    assert (check, cause) == ("Java", "Java 11 is too old for Spark, which needs 17.")
    assert "point JAVA_HOME at one" in step


def test_no_jars(tmp_path: Path) -> None:
    ((check, cause, step),) = missing("--jars", str(tmp_path))
    assert check == "jars"
    assert f"13 of 13 jars are absent from {tmp_path}" in cause
    assert "sluice-pipeline jars" in step


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = importlib.metadata.version

    def version(name: str) -> str:
        if name == "pyarrow":
            raise importlib.metadata.PackageNotFoundError(name)
        return whole(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    ((check, cause, step),) = missing()
    assert (check, cause) == ("packages", f"The package pyarrow is not installed in {sys.prefix}.")
    assert "pip install 'sluice-kafka[pipeline]'" in step


def test_a_place_that_takes_no_table(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    job = processes.Job("doctor", "--table", str(tmp_path / "file" / "table"))
    try:
        assert job.wait() == 1
    finally:
        job.close()
    (told,) = [line for line in job.said if line.get("event") == "missing"]
    assert told["check"] == "Spark and Delta"
    assert told["cause"] == f"{tmp_path / 'file'} is not a folder."


def test_an_empty_jar_is_missing(tmp_path: Path) -> None:
    for name in jars.names():
        (tmp_path / name).write_bytes(b"PK")
    (tmp_path / jars.names()[3]).write_bytes(b"")
    ((check, cause, _),) = missing("--jars", str(tmp_path))
    assert (check, cause.endswith(f"{jars.names()[3]}.")) == ("jars", True)
