"""Check everything that a job needs: Python's packages, Java, jars, Spark, Kafka, and the place of a table. The one
idea: the checks do what a job would do, in the same order. If a check fails, it names the next step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from pipeline import catalog, jars, session
from pipeline.errors import PipelineError, explain
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop

PACKAGES = ("pyspark", "pyarrow", "pandas", "numpy", "confluent-kafka", "prometheus-client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bootstrap", metavar="HOST:PORT", help="try this Kafka cluster")
    parser.add_argument("--topics", default="", metavar="A,B", help="try to read these topics")
    parser.add_argument("--table", metavar="TABLE", help="try to write a table beside this one, and remove it again")
    catalog.add_arguments(parser)
    parser.add_argument("--client-conf", action="append", default=[], metavar="NAME=VALUE", help="for librdkafka")
    parser.add_argument("--no-spark", action="store_true", help="do not start a Spark session")


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    checks: list[tuple[str, Callable[[], str]]] = [
        ("Python", _python),
        ("packages", _packages),
        ("Java", _java),
        ("jars", lambda: _jars(arguments.jars or jars.folder())),
    ]
    if arguments.bootstrap:
        checks.append(("Kafka", lambda: _kafka(arguments)))
    if not arguments.no_spark:
        checks.append((f"Spark and {arguments.format.capitalize()}", lambda: _spark(arguments, lines)))
    failed = 0
    for name, check in checks:
        if stop.asked:
            raise PipelineError("The job was stopped before it had checked everything.", "Start it again.")
        try:
            lines.say(f"ok       {name}: {check()}", event="ok", check=name)
        except Exception as error:  # noqa: BLE001 - a check that fails is a result
            failed += 1
            told = explain(error)
            lines.say(f"MISSING  {name}: {told.cause}\n         next: {told.next_step}", event="missing", check=name,
                      cause=told.cause, next=told.next_step)  # fmt: skip
    lines.say("nothing is missing" if not failed else f"{failed} of {len(checks)} checks failed", event="end")
    return 1 if failed else 0


def _python() -> str:
    return f"{platform.python_version()}, {sys.executable}"


def _packages() -> str:
    found: list[str] = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError as error:
            raise PipelineError(
                f"The package {name} is not installed in {sys.prefix}.",
                "Install the extra: pip install 'sluice-kafka[pipeline]'.",
            ) from error
    return ", ".join(found)


def _java() -> str:
    session.check_java()
    return f"{session.java_version()}, {session.java()}"


def _jars(folder: Path) -> str:
    return f"{len(jars.paths(folder))} in {folder}"


def _kafka(arguments: argparse.Namespace) -> str:
    from pipeline.kafka import Cluster, settings_of

    cluster = Cluster(arguments.bootstrap, settings_of(arguments.client_conf, "--client-conf"))
    existing = cluster.existing()
    topics = cluster.topics([name for name in arguments.topics.split(",") if name])
    logs = cluster.logs(topics)
    held = sum(log.end - log.start for log in logs)
    words = f"{arguments.bootstrap} answers and has {len(existing)} topics"
    return words + (f"; {len(logs)} partitions of {', '.join(topics)} hold {held:,} offsets" if topics else "")


def _spark(arguments: argparse.Namespace, lines: Lines) -> str:
    if arguments.format == "iceberg":
        return _write_table(arguments, f"iceberg:{arguments.table or 'doctor'}_doctor_{uuid.uuid4().hex}", lines)
    if arguments.table is None:
        with tempfile.TemporaryDirectory(prefix="sluice-doctor-") as folder:
            return _write_table(arguments, f"{folder}/table", lines)
    return _write_table(arguments, f"{arguments.table.rstrip('/')}_doctor_{uuid.uuid4().hex}", lines)


def _write_table(arguments: argparse.Namespace, path: str, lines: Lines) -> str:
    from pipeline import table
    from pipeline.schema import RECORD

    if "://" not in path and not table.is_iceberg(path):
        _check_folder(Path(path).parent)
    spark = session.open_session(session.options_of(arguments, "sluice doctor"), lines)
    try:
        table.create(spark, path, RECORD)
        table.append(spark.createDataFrame([], RECORD), path, "sluice-doctor", 1, "{}")
        table.read(spark, path).count()
        table.drop(spark, path)
        return f"{spark.version} on {spark.sparkContext.master} wrote and read a table at {path}"
    finally:
        spark.stop()


def _check_folder(folder: Path) -> None:
    """Raise PipelineError if the user may not create a table in the folder, or in its nearest parent that exists."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise PipelineError(f"{there} is not a folder.", "Name another place for the table.")
    if not os.access(there, os.W_OK):
        raise PipelineError(f"This user may not write to {there}.", "Give the user access, or name another place.")


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["doctor", *sys.argv[1:]]))
