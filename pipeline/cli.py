"""Run a job by its name: `sluice-pipeline JOB …`.

The one idea: a job is a module with `add_arguments(parser)` and `run(arguments, progress, stop) -> int`, found by its
line in `JOBS`. A module is imported only when its job runs, so help needs neither Spark nor Java. spark-submit runs the
same module: `spark-submit pipeline/archive/job.py ARGUMENTS`. A job that needs no Spark has `USES_SPARK = False`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from pipeline import session
from pipeline.errors import PipelineError, explain
from pipeline.progress import Heartbeat, Progress, Stop

JOBS = {
    "archive": ("pipeline.archive.job", "copy topics into a Delta or Iceberg table, exactly once"),
    "verify": ("pipeline.verify.job", "compare an archive with its topics, record by record"),
    "manifest": (
        "pipeline.manifest.job",
        "write hashes that prove an archive once its topics no longer hold the records",
    ),
    "table": ("pipeline.latest.job", "keep a table of the newest row per key, from an archive"),
    "repair": ("pipeline.repair.job", "archive named offsets again, as long as their topic holds them"),
    "erase": ("pipeline.erase.job", "remove a key from a topic, its archive and tables, and write a proof"),
    "audit": ("pipeline.audit.job", "describe how records are spread, sized and timed, and advise their producers"),
    "analyze": ("pipeline.analyze.job", "report what rebalances cost, from the coordinator's journal"),
    "replay": ("pipeline.replay.job", "write an archive into topics, without gap or duplicate"),
    "compact": ("pipeline.compact.job", "merge a table's small files, and remove files that no reader needs"),
    "doctor": ("pipeline.doctor.job", "check that Python, Java, jars, Spark and Kafka are ready for a job"),
    "jars": ("pipeline.jars_job", "fetch or list the jars that Spark does not bring along"),
}
FAILED, INTERRUPTED = 1, 130
GO_ON = "What was committed stays; start the job again to continue."


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        return 0 if given else 2
    name = given[0]
    if name not in JOBS:
        print(f"There is no job {name}. The jobs are {', '.join(JOBS)}.", file=sys.stderr)
        return 2
    return _run(name, given[1:])


def _run(name: str, given: Sequence[str]) -> int:
    trace = "--trace" in given
    if trace:
        os.environ.setdefault(session.LOG_LEVEL, "ERROR")
    stop = Stop()
    try:
        job = _load(name)
        parser = argparse.ArgumentParser(prog=f"sluice-pipeline {name}", description=JOBS[name][1])
        job.add_arguments(parser)
        if getattr(job, "USES_SPARK", True):
            session.add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="progress as lines of JSON")
        parser.add_argument("--trace", action="store_true", help="print the whole trace of an error")
        arguments = parser.parse_args(given)
        stop.listen()
        lines = Progress(name, as_json=arguments.json)
        with Heartbeat(lines, stop):
            code = int(job.run(arguments, lines, stop))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). So the interpreter's final flush needs another target.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # noqa: BLE001 - a command explains every failure
        if trace:
            traceback.print_exc()
        if stop.asked and not isinstance(error, PipelineError):
            # If a stop signal also reached Spark's JVM, the JVM ends the running step.
            print(f"{name} was stopped in the middle of a step. {GO_ON}", file=sys.stderr, flush=True)
            return INTERRUPTED
        told = explain(error)
        print(f"{name} failed. {told.cause}\nNext: {told.next_step}", file=sys.stderr, flush=True)
        return FAILED


def _load(name: str) -> ModuleType:
    return importlib.import_module(JOBS[name][0])


def _help() -> str:
    lines = [f"  {name:8} {summary}" for name, (_, summary) in JOBS.items()]
    return "\n".join(
        ["usage: sluice-pipeline JOB …", "", *lines, "", "sluice-pipeline JOB --help lists the options of a job."]
    )


if __name__ == "__main__":
    sys.exit(main())
