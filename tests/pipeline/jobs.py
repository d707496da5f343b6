"""Run a job as its command would, on the session of the tests, and return its output."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from pyspark.sql import DataFrame, SparkSession

from pipeline import session, table
from pipeline.archive import job as archive_job
from pipeline.compact import job as compact_job
from pipeline.erase import job as erase_job
from pipeline.kafka import Cluster
from pipeline.latest import job as latest_job
from pipeline.manifest import job as manifest_job
from pipeline.progress import Progress, Stop
from pipeline.repair import job as repair_job
from pipeline.replay import job as replay_job
from pipeline.verify import job as verify_job

Record = tuple[int, bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]
"""Partition, key, value, timestamp in ms, headers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    said: list[dict[str, Any]]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.said if line.get("event") == name]

    @property
    def words(self) -> str:
        return "\n".join(line["say"] for line in self.said)


def archive(spark: SparkSession, bootstrap: str, out: str, *given: str) -> Outcome:
    arguments = parse(archive_job, ["--bootstrap", bootstrap, "--out", out, "--once", *given])
    topics = [name for name in arguments.topics.split(",") if name]
    stream = io.StringIO()
    cluster = Cluster(bootstrap)
    archive_job.Archive(spark, cluster, arguments, topics, _lines("archive", stream), Stop()).run()
    return _outcome(0, stream)


def archive_job_of(
    spark: SparkSession,
    bootstrap: str,
    out: str,
    *given: str,
    lines: Progress | None = None,
    stop: Stop | None = None,
) -> archive_job.Archive:
    """An archive job. A test runs it step by step, or in a thread while the test acts."""
    arguments = parse(archive_job, ["--bootstrap", bootstrap, "--out", out, *given])
    names = [name for name in arguments.topics.split(",") if name]
    lines = lines or _lines("archive", io.StringIO())
    return archive_job.Archive(spark, Cluster(bootstrap), arguments, names, lines, stop or Stop())


class DiedError(Exception):
    """Simulates the death of the job's process at this point."""


@contextmanager
def dying_before_the_commit_of(path: str, at: int | None = None) -> Iterator[None]:
    """Let the job die at one append to `path` (number `at`, or the first): after all work of the append, but before its
    commit.
    """
    whole = table.append

    def append(frame: DataFrame, to: str, application: str, number: int, metadata: str, **options: bool) -> None:
        if to != path or at not in (None, number):
            whole(frame, to, application, number, metadata, **options)
            return
        frame.collect()
        raise DiedError

    with patch.object(table, "append", append):
        yield


def compact(spark: SparkSession, path: str, *given: str) -> Outcome:
    arguments = parse(compact_job, ["--archive", path, *given])
    stream = io.StringIO()
    where = table.location(path, arguments.format)
    compact_job.merge(spark, where, arguments, _lines("compact", stream), Stop())
    compact_job.vacuum(spark, where, arguments.horizon_hours, _lines("compact", stream))
    return _outcome(0, stream)


def verify(spark: SparkSession, bootstrap: str, path: str, *given: str) -> Outcome:
    arguments = parse(verify_job, ["--bootstrap", bootstrap, "--archive", path, *given])
    stream = io.StringIO()
    code = verify_job.Verification(spark, Cluster(bootstrap), arguments, _lines("verify", stream), Stop()).run()
    return _outcome(code, stream)


def manifest(spark: SparkSession, path: str, out: str, *given: str) -> Outcome:
    arguments = parse(manifest_job, ["--archive", path, "--out", out, *given])
    stream = io.StringIO()
    manifest_job.make(spark, arguments, _lines("manifest", stream), Stop())
    return _outcome(0, stream)


def verify_by_manifest(spark: SparkSession, path: str, manifest: str, *given: str) -> Outcome:
    arguments = parse(verify_job, ["--archive", path, "--manifest", manifest, *given])
    stream = io.StringIO()
    return _outcome(verify_job.by_manifest(spark, arguments, _lines("verify", stream), Stop()), stream)


def erase(spark: SparkSession, bootstrap: str, path: str, *given: str) -> Outcome:
    arguments = parse(erase_job, ["--bootstrap", bootstrap, "--archive", path, *given])
    stream, cluster = io.StringIO(), Cluster(bootstrap)
    if arguments.check:
        return _outcome(erase_job.check(spark, cluster, arguments, _lines("erase", stream), Stop()), stream)
    key = erase_job.key_of(arguments)
    erase_job.Erasure(spark, cluster, arguments, key, _lines("erase", stream), Stop()).run()
    return _outcome(0, stream)


def latest(spark: SparkSession, path: str, out: str, *given: str) -> Outcome:
    arguments = parse(latest_job, ["--archive", path, "--out", out, *given])
    stream = io.StringIO()
    latest_job.merge(spark, arguments, _lines("table", stream), Stop())
    return _outcome(0, stream)


def repair(spark: SparkSession, bootstrap: str, path: str, *given: str) -> Outcome:
    arguments = parse(repair_job, ["--bootstrap", bootstrap, "--archive", path, *given])
    stream = io.StringIO()
    ranges = repair_job.parse_ranges(arguments.ranges)
    repair_job.repair(spark, Cluster(bootstrap), arguments, ranges, _lines("repair", stream), Stop())
    return _outcome(0, stream)


def replay(spark: SparkSession, bootstrap: str, path: str, *given: str) -> Outcome:
    arguments = parse(replay_job, ["--bootstrap", bootstrap, "--archive", path, *given])
    stream = io.StringIO()
    job = replay_job.Replay(spark, Cluster(bootstrap), arguments, _lines("replay", stream), Stop())
    if arguments.translate_groups is not None:
        job.translate_groups()
    elif arguments.dry_run:
        job.dry_run()
    else:
        job.run()
    return _outcome(0, stream)


def parse(job: Any, given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    job.add_arguments(parser)
    session.add_arguments(parser)
    return parser.parse_args(given)


def _lines(name: str, stream: io.StringIO) -> Progress:
    return Progress(name, as_json=True, stream=stream)


def _outcome(code: int, stream: io.StringIO) -> Outcome:
    return Outcome(code, [json.loads(line) for line in stream.getvalue().splitlines()])
