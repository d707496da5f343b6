"""The one place that builds a SparkSession.

The one idea: a job says where it runs with a master URL and nothing else changes. Started by spark-submit, master,
memory and jars are spark-submit's, and only what the jobs rely on (both table formats, UTC, Kryo-free defaults) is set
here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import catalog, jars
from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pipeline.progress import Progress

LEAST_JAVA = 17
LEAST_PRIORITY = 19
LOCAL_SHUFFLE_PARTITIONS = 8
LOG_LEVEL = "SLUICE_PIPELINE_SPARK_LOG"
_LOGGING = Path(__file__).with_name("log4j2.properties")

_TIME_ZONE = "spark.sql.session.timeZone"
# Settings that every job needs on every master.
_ALWAYS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    _TIME_ZONE: "UTC",
    # Delta reads its log in as many tasks as this; 50, the default, costs seconds per commit on few cores.
    "spark.databricks.delta.snapshotPartitions": "2",
    # A commit without rows still says how far a job is.
    "spark.databricks.delta.skipRecordingEmptyCommits": "false",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "64",
    "spark.sql.parquet.compression.codec": "zstd",
    # A few topics and days are written side by side as their records come; only what has more of them is sorted first.
    # Each has a row group in memory, hence the size of these.
    "spark.sql.maxConcurrentOutputFileWriters": "4",
    # Otherwise a union of frames of one partition each is one partition, and so one task.
    "spark.sql.unionOutputPartitioning": "false",
    "spark.hadoop.parquet.block.size": str(32 * 1024 * 1024),
    "spark.ui.showConsoleProgress": "false",
    # A table's clean-up must not delete what another job is reading; compact states its horizon itself.
    "spark.databricks.delta.retentionDurationCheck.enabled": "true",
}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The place where a job runs. `master` may be local[N], spark://…, yarn, k8s://…"""

    app_name: str
    master: str = "local[*]"
    memory: str = "1g"
    jars_folder: Path | None = None
    local_dir: Path | None = None
    ui: bool = False
    settings: dict[str, str] = field(default_factory=dict[str, str])
    nice: int | None = 0
    """Niceness of a local job; None runs the job under Linux' SCHED_IDLE, which uses only idle time of the cores."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `options_of`, for every job alike."""
    group = parser.add_argument_group("Spark")
    group.add_argument("--master", default=os.environ.get("SLUICE_PIPELINE_MASTER", "local[*]"), metavar="URL",
                       help="local[N], spark://host:port, yarn, k8s://… (default %(default)s)")  # fmt: skip
    group.add_argument("--memory", default="1g", help="of the driver, and of each executor (default %(default)s)")
    group.add_argument(
        "--jars", type=Path, metavar="FOLDER", help="where the jars are (default: where `jars` puts them)"
    )
    group.add_argument("--local-dir", type=Path, metavar="FOLDER", help="Spark's scratch space")
    group.add_argument("--spark-ui", action="store_true", help="serve Spark's own web page")
    group.add_argument(
        "--nice", type=_nice, default="0", metavar="N",
        help="how far a local[…] job gives way to a broker beside it: 0 to 19, or `idle` (Linux), which uses only idle "
             "time of the cores and stands still on a machine that is never idle (default %(default)s)",
    )  # fmt: skip
    group.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="any Spark setting")


def options_of(arguments: argparse.Namespace, app_name: str) -> SessionOptions:
    settings = catalog.settings_of(arguments)
    for text in arguments.conf:
        name, separator, value = text.partition("=")
        if not separator:
            raise PipelineError(f"--conf {text} is not NAME=VALUE.", "Write it like --conf spark.executor.cores=2.")
        if name == _TIME_ZONE and value != _ALWAYS[_TIME_ZONE]:
            raise PipelineError(
                f"--conf {text} would shift an archive's dates, which are days in UTC.", "Leave it out."
            )
        settings[name] = value
    return SessionOptions(
        app_name=app_name,
        master=arguments.master,
        memory=arguments.memory,
        jars_folder=arguments.jars,
        local_dir=arguments.local_dir,
        ui=arguments.spark_ui,
        settings=settings,
        nice=arguments.nice,
    )


def open_session(options: SessionOptions, lines: Progress | None = None) -> SparkSession:
    """A session with Delta, Iceberg and the Kafka connector. PipelineError if Java, pyspark or a jar is missing.

    `lines` announce the start first, because a JVM starts slowly.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise PipelineError(
            f"PySpark is not installed in {sys.prefix} ({error}).",
            "Install the extra: pip install 'sluice-kafka[pipeline]'.",
        ) from error
    settings = dict(_ALWAYS)
    if not submitted():
        check_java()
        settings |= _own(options)
        if options.master.startswith("local"):
            give_way(options.nice)
    settings |= options.settings
    if lines is not None:
        lines.say(f"starts Spark ({settings.get('spark.master', 'submitted')})", event="spark")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(options.app_name)
    for name, value in settings.items():
        builder = builder.config(name, value)
    # PySpark takes Ctrl-C for itself; who asked to hear of it before goes on doing so.
    interrupted = signal.getsignal(signal.SIGINT)
    session = builder.getOrCreate()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupted)
    session.sparkContext.setLogLevel(_log_level())
    return session


def give_way(nice: int | None) -> None:
    """Put this process and its future children behind all other processes of the machine.

    By weight alone (a niceness) a busy job still keeps a broker that wakes up waiting for its turn to end; under
    SCHED_IDLE no other process waits.
    """
    if nice is not None:
        os.nice(nice)
    elif hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(LEAST_PRIORITY)


def _nice(text: str) -> int | None:
    if text == "idle":
        return None
    if text.isdecimal() and int(text) <= LEAST_PRIORITY:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is neither a number from 0 to {LEAST_PRIORITY} nor idle")


def _log_level() -> str:
    """Return the JVM's log level: errors are explained in words, and traces appear only on request."""
    return os.environ.get(LOG_LEVEL, "OFF").upper()


def submitted() -> bool:
    """Return whether spark-submit started this program: it passes its JVM by this variable."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _own(options: SessionOptions) -> dict[str, str]:
    """Settings that spark-submit would have set."""
    found = jars.paths(options.jars_folder or jars.folder())
    settings = {
        "spark.master": options.master,
        "spark.driver.memory": options.memory,
        "spark.executor.memory": options.memory,
        "spark.jars": ",".join(str(path.resolve()) for path in found),
        "spark.driver.defaultJavaOptions": _collector(options.settings),
        "spark.ui.enabled": "true" if options.ui else "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
    }
    if options.local_dir is not None:
        options.local_dir.mkdir(parents=True, exist_ok=True)
        settings["spark.local.dir"] = str(options.local_dir.resolve())
    if options.master.startswith("local"):
        # Nothing but this process talks to the driver.
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        # Spark's 200 are for a cluster; on a few cores each costs more than what is in it.
        settings["spark.sql.shuffle.partitions"] = str(LOCAL_SHUFFLE_PARTITIONS)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return settings


def _collector(settings: Mapping[str, str]) -> str:
    """Choose the collector with the least total cost, because pauses of this JVM delay no client.

    Return nothing if the user chose a collector: a JVM does not start with two.
    """
    chosen = [os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")]
    chosen += [value for name, value in settings.items() if name.endswith("JavaOptions")]
    return "" if any("GC" in words for words in chosen) else "-XX:+UseParallelGC"


def java() -> str | None:
    """The java that Spark would start."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which(str(Path(home) / "bin" / "java")) if home else shutil.which("java")


def java_version() -> int | None:
    """Return the major version of `java`, None without Java."""
    found = java()
    if found is None:
        return None
    words = subprocess.run([found, "-version"], capture_output=True, text=True, timeout=60).stderr
    quoted = words.split('"')
    if len(quoted) < 2:
        return None
    numbers = quoted[1].split(".")
    return int(numbers[1] if numbers[0] == "1" else numbers[0].partition("-")[0])


def check_java() -> None:
    """PipelineError unless there is a Java that Spark runs on."""
    version = java_version()
    if version is None:
        where = f"JAVA_HOME ({os.environ['JAVA_HOME']})" if "JAVA_HOME" in os.environ else "PATH"
        raise PipelineError(
            f"There is no Java on {where}.",
            f"Install Java {LEAST_JAVA} (Debian: apt-get install openjdk-17-jre-headless), or point JAVA_HOME at one.",
        )
    if version < LEAST_JAVA:
        raise PipelineError(
            f"Java {version} is too old for Spark, which needs {LEAST_JAVA}.",
            f"Install Java {LEAST_JAVA}, or point JAVA_HOME at one.",
        )
