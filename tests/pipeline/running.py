"""A job that runs on the tests' Spark session in a thread, so that the test can disturb it while it runs."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from pyspark.sql import SparkSession

from pipeline.errors import PipelineError, explain
from pipeline.kafka import Cluster
from pipeline.progress import Progress, Stop
from pipeline.replay import job as replay_job
from tests.pipeline import jobs

SECONDS = 120.0


class _Lines:
    """An output stream on whose lines another thread can wait."""

    def __init__(self) -> None:
        self.said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._part = ""

    def write(self, text: str) -> int:
        *whole, self._part = (self._part + text).split("\n")
        for line in whole:
            self.said.put(json.loads(line))
        return len(text)

    def flush(self) -> None:
        """Make each complete line available to readers at once."""


class Running:
    """A running job, which is stopped at the end of the context unless it has ended."""

    def __init__(self, job: Callable[[Progress, Stop], None], name: str) -> None:
        self.said: list[dict[str, Any]] = []
        self._stream, self._stop = _Lines(), Stop()
        self._error: BaseException | None = None
        lines = Progress(name, as_json=True, stream=self._stream)  # type: ignore[arg-type]

        def work() -> None:
            try:
                job(lines, self._stop)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, daemon=True)

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.ask()
        self._thread.join(SECONDS)

    def wait_for(self, event: str, times: int = 1) -> dict[str, Any]:
        """Return the next line that reports this event, or an event that follows it. If the job ends before, raise
        AssertionError with the job's error.
        """
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                line = self._stream.said.get(timeout=0.2)
            except queue.Empty:
                assert self._thread.is_alive(), f"ended before it said {event}: {self._error!r}"
                assert time.monotonic() < deadline, f"did not say {event}; said {self.said[-3:]}"
                continue
            self.said.append(line)
            if line.get("event") == event:
                times -= 1
                if not times:
                    return line

    def events(self, name: str) -> list[dict[str, Any]]:
        while not self._stream.said.empty():
            self.said.append(self._stream.said.get())
        return [line for line in self.said if line.get("event") == name]

    def stop(self) -> None:
        """Request a stop and wait for the end. Return the error that ended the job, or None."""
        self._stop.ask()
        self.finish()

    def finish(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), f"it did not end; said {self.events('')[-3:] or self.said[-3:]}"
        if self._error is not None:
            raise self._error

    def failure(self) -> PipelineError:
        """Return the explanation of why the job failed. Raise AssertionError if the job succeeded, or if the
        explanation mentions Java.
        """
        self._thread.join(SECONDS)
        assert self._error is not None, f"it did not fail; said {self.said[-3:]}"
        told = explain(self._error)
        for line in (told.cause, told.next_step):
            assert "\n" not in line
            assert "\tat " not in line
        return told


def archive(spark: SparkSession, bootstrap: str, out: str, *given: str) -> Running:
    def run(lines: Progress, stop: Stop) -> None:
        job = jobs.archive_job_of(spark, bootstrap, out, "--interval", "0.2", *given, lines=lines, stop=stop)
        job.run()

    return Running(run, "archive")


def replay(spark: SparkSession, bootstrap: str, path: str, *given: str) -> Running:
    def run(lines: Progress, stop: Stop) -> None:
        arguments = jobs.parse(replay_job, ["--bootstrap", bootstrap, "--archive", path, *given])
        replay_job.Replay(spark, Cluster(bootstrap), arguments, lines, stop).run()

    return Running(run, "replay")
