"""Run Spark's scenarios, with JSON lines on stdout: `python -m tests.compat.spark.main JARS [--version]`.

One Spark session serves all of them. All output of Spark and its JVM goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from tests.compat.spark import batch, sink, streaming  # noqa: F401  (importing registers their scenarios)
from tests.compat.spark.peer import Peer
from tests.compat.spark.scenario import SCENARIOS, Body, Run, SkippedError

SCENARIO_SECONDS = 100.0
MAX_DETAIL = 600
# The first lines of a JVM error name the error. A stack trace follows them.
MAX_ERROR_LINES = 3


def main(arguments: Sequence[str]) -> int:
    jars = sorted(Path(arguments[0]).glob("*.jar"))
    if "--version" in arguments:
        print(version(jars))
        return 0
    if streaming.STREAM_TO_FILES in arguments:
        return stream_to_files(jars, *arguments[arguments.index(streaming.STREAM_TO_FILES) + 1 :])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    named = [name for name in os.environ.get("COMPAT_SCENARIOS", "").split(",") if name]
    with tempfile.TemporaryDirectory(prefix="spark-") as directory:
        spark = open_session(jars, Path(directory))
        peer = Peer(os.environ["COMPAT_BOOTSTRAP"])
        for name, body in SCENARIOS.items():
            if named and name not in named:
                continue
            run = Run(name, spark, peer, os.environ["COMPAT_CONTROL"], Path(directory))
            outcome, seconds, detail = attempt(run, body)
            answer = {"scenario": name, "outcome": outcome, "seconds": round(seconds, 2), "detail": detail[:MAX_DETAIL]}
            print(json.dumps(answer), file=answers, flush=True)
        peer.close()
        spark.stop()
    # If a scenario hangs, its threads must not keep the program running.
    sys.stderr.flush()
    os._exit(0)


def stream_to_files(jars: Sequence[Path], source: str, checkpoint: str, files: str) -> int:
    """Stream a topic to Parquet files until the process is killed."""
    with tempfile.TemporaryDirectory(prefix="spark-") as directory:
        peer = Peer(os.environ["COMPAT_BOOTSTRAP"])
        run = Run("crash", open_session(jars, Path(directory)), peer, "", Path(directory))
        writer = streaming.to_files(run, source, checkpoint, files)
        writer.trigger(processingTime=streaming.FAST).start().awaitTermination()
    return 0


def version(jars: Sequence[Path]) -> str:
    clients = next((found[1] for jar in jars if (found := re.fullmatch(r"kafka-clients-(.+)\.jar", jar.name))), "none")
    return f"pyspark {importlib.metadata.version('pyspark')} with kafka-clients {clients}"


def open_session(jars: Sequence[Path], directory: Path) -> SparkSession:
    """Open a session with two cores that listens on loopback only and starts fast."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.io.tmpdir={directory}",
        "spark.jars": ",".join(str(jar) for jar in jars),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.noDataProgressEventInterval": "100ms",
        "spark.sql.streaming.stopTimeout": "30s",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master("local[2]").appName("compat")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(os.environ.get("COMPAT_LOG_LEVEL", "ERROR"))
    return spark


def attempt(run: Run, body: Body) -> tuple[str, float, str]:
    """Run one scenario on a thread of its own, within its deadline. Return outcome, seconds and detail."""
    ended: list[tuple[str, str]] = []

    def target() -> None:
        try:
            try:
                body(run)
            finally:
                run.end()
            ended.append(("passed", run.detail))
        except SkippedError as reason:
            ended.append(("skipped", str(reason)))
        except BaseException as error:  # Any exception is the outcome of the scenario.
            traceback.print_exc()
            lines = str(error).strip().splitlines()[:MAX_ERROR_LINES]
            ended.append(("failed", f"{type(error).__name__}: {' '.join(lines)}"))

    print(f"--- {run.name}", file=sys.stderr, flush=True)
    started = time.monotonic()
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(SCENARIO_SECONDS)
    seconds = time.monotonic() - started
    if ended:
        outcome, detail = ended[0]
        return outcome, seconds, detail
    run.spark.sparkContext.cancelAllJobs()
    for query in run.spark.streams.active:
        query.stop()
    return "failed", seconds, f"did not end in {SCENARIO_SECONDS:.0f} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
