"""The only module that builds a SparkSession.

The one idea: only the master URL determines where a job runs. If spark-submit starts the job, spark-submit chooses
master, memory and jars, and this module sets only what the jobs rely on: both table formats, and UTC.
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
    # Number of tasks in which Delta reads its log. The default, 50, costs seconds per commit on few cores.
    "spark.databricks.delta.snapshotPartitions": "2",
    # A commit without rows still stores a job's progress.
    "spark.databricks.delta.skipRecordingEmptyCommits": "false",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "64",
    "spark.sql.parquet.compression.codec": "zstd",
    # A task writes files of up to this many topics and days at once. With more of them Spark sorts the rows first. Each
    # open file holds a row group in memory, so row groups are small (below).
    "spark.sql.maxConcurrentOutputFileWriters": "4",
    # Otherwise Spark combines frames of one partition each into one partition, and so into one task.
    "spark.sql.unionOutputPartitioning": "false",
    "spark.hadoop.parquet.block.size": str(32 * 1024 * 1024),
    "spark.ui.showConsoleProgress": "false",
    # A replay writes to Kafka, and two attempts of a task at the same time would write records twice.
    "spark.speculation": "false",
    # A vacuum must not delete files that another job reads. `compact` passes its own horizon.
    "spark.databricks.delta.retentionDurationCheck.enabled": "true",
}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The place and the resources of a job. `master` may be local[N], spark://…, yarn, k8s://…"""

    app_name: str
    master: str = "local[*]"
    memory: str = "1g"
    jars_folder: Path | None = None
    local_dir: Path | None = None
    ui: bool = False
    settings: dict[str, str] = field(default_factory=dict[str, str])
    nice: int | None = 0
    """Niceness of a local job. None runs the job under Linux' SCHED_IDLE, in which it only uses
    idle time of the cores.
    """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `options_of` reads. They are the same for all jobs."""
    group = parser.add_argument_group("Spark")
    group.add_argument("--master", default=os.environ.get("SLUICE_PIPELINE_MASTER", "local[*]"), metavar="URL",
                       help="local[N], spark://host:port, yarn, k8s://… (default %(default)s)")  # fmt: skip
    group.add_argument("--memory", default="1g", help="heap of the driver and of each executor (default %(default)s)")
    group.add_argument(
        "--jars", type=Path, metavar="FOLDER", help="folder of the jars (default: where the job `jars` puts them)"
    )
    group.add_argument("--local-dir", type=Path, metavar="FOLDER", help="folder for Spark's temporary files")
    group.add_argument("--spark-ui", action="store_true", help="serve Spark's own web page")
    group.add_argument(
        "--nice", type=_nice, default="0", metavar="N",
        help="niceness of a local[…] job, 0 to 19, so that it yields to a broker on the same machine; or `idle` "
             "(Linux), which uses only idle time of the cores, so on a busy machine the job stands still "
             "(default %(default)s)",
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
    """Return a session with Delta, Iceberg and the Kafka connector. Raise PipelineError if Java, pyspark or a jar is
    missing.

    Print the start on `lines`, because a JVM starts slowly.
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
    # PySpark installs its own handler of SIGINT, so the job's handler is restored below.
    interrupted = signal.getsignal(signal.SIGINT)
    session = builder.getOrCreate()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupted)
    session.sparkContext.setLogLevel(_log_level())
    return session


def give_way(nice: int | None) -> None:
    """Give all other processes of the machine precedence over this process and its future children.

    A niceness only lowers the job's weight: a broker that wakes up still waits until the job's time slice ends. Under
    SCHED_IDLE no other process waits for the job.
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
    """Return the JVM's log level. Errors are explained in words, and traces appear only on request."""
    return os.environ.get(LOG_LEVEL, "OFF").upper()


def submitted() -> bool:
    """Return whether spark-submit started this program. If so, this variable tells the program how to reach the JVM."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _own(options: SessionOptions) -> dict[str, str]:
    """Return the settings that spark-submit would otherwise set."""
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
        # Only this process connects to the driver.
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        # Spark's default of 200 is for a cluster. On a few cores each partition costs more than its rows.
        settings["spark.sql.shuffle.partitions"] = str(LOCAL_SHUFFLE_PARTITIONS)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return settings


def _collector(settings: Mapping[str, str]) -> str:
    """Choose the garbage collector with the least total cost, because pauses of this JVM delay no client. Return
    nothing if the user chose a collector, because a JVM does not start with two.
    """
    chosen = [os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")]
    chosen += [value for name, value in settings.items() if name.endswith("JavaOptions")]
    return "" if any("GC" in words for words in chosen) else "-XX:+UseParallelGC"


def java() -> str | None:
    """Return the path of the java that Spark would start. Return None if there is no Java."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which(str(Path(home) / "bin" / "java")) if home else shutil.which("java")


def java_version() -> int | None:
    """Return the major version of `java`. Return None if there is no Java."""
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
    """Raise PipelineError if Java is missing or too old for Spark."""
    version = java_version()
    if version is None:
        where = f"JAVA_HOME ({os.environ['JAVA_HOME']})" if "JAVA_HOME" in os.environ else "PATH"
        raise PipelineError(
            f"There is no Java in {where}.",
            f"Install Java {LEAST_JAVA} (Debian: apt-get install openjdk-17-jre-headless), or point JAVA_HOME at one.",
        )
    if version < LEAST_JAVA:
        raise PipelineError(
            f"Java {version} is too old for Spark, which needs {LEAST_JAVA}.",
            f"Install Java {LEAST_JAVA}, or point JAVA_HOME at one.",
        )
