"""Report Spark's progress within a long step, and cancel the step on a request to stop.

The one idea: Spark counts the tasks of each stage, and a ticker adds up the stages that have appeared so far. The job's
heartbeat prints the sum. A step may be cancelled only if it can be repeated, because its work is lost.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pipeline.errors import PipelineError
from pipeline.progress import LOOK_SECONDS, Progress, Stop

PLANS = "Spark plans the step"
IDLE = "waits for an executor to take its tasks: do workers run with the memory and cores that the job needs?"


class Ticker:
    """Watches a step, as a context manager. A cancelled step raises PipelineError.

    Without `stop` the step is never cancelled. `begun` is a text that tells the user what happens at the next start.
    """

    def __init__(
        self, spark: SparkSession, lines: Progress, stop: Stop | None = None, begun: str = "it begins anew"
    ) -> None:
        self._context, self._lines, self._stop, self._begun = spark.sparkContext, lines, stop, begun
        self._seen: dict[int, tuple[int, int]] = {}
        self._idle = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._lines.watch(self._figures)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.watch(None)
        self._ended.set()
        self._thread.join()
        if self._stop is not None and self._stop.asked and isinstance(error, PySparkException | Py4JError):
            raise PipelineError("The job was stopped within a step.", f"Start it again; {self._begun}.") from error

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            if self._stop is not None and self._stop.asked:
                self._context.cancelAllJobs()

    def _figures(self) -> tuple[str, dict[str, Any]]:
        words, done, total = self._words()
        return words, {"event": "tasks", "done": done, "total": total}

    def _words(self) -> tuple[str, int, int]:
        tracker = self._context.statusTracker()
        active = {stage: tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()}
        for stage, (_, total) in self._seen.items():
            if stage not in active:
                self._seen[stage] = (total, total)
        self._seen |= {stage: (info.numCompletedTasks, info.numTasks) for stage, info in active.items() if info}
        if not self._seen:
            return PLANS, 0, 0
        # In local mode, no task may run for a moment between two stages. On a cluster, there may be no executor yet.
        idle = bool(active) and not any(info.numActiveTasks for info in active.values() if info)
        self._idle = self._idle + 1 if idle and not (self._context.master or "").startswith("local") else 0
        if self._idle > 1:
            return IDLE, 0, 0
        done, total = (sum(numbers) for numbers in zip(*self._seen.values(), strict=True))
        return f"{done:,} of {total:,} tasks are done", done, total
