"""Workloads of stock producers that keep their client's default settings, at full speed and at a thousand records a
second.

Each client is a program of its own in its own language, so that no client uses CPU of the measuring process. All
programs use the same protocol with their parent process (`producers.py`).
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from confluent_kafka import libversion

from bench import librdkafka
from bench.producers import RECORD_BYTES
from bench.servers import cpu_s
from tests.compat.brokers import BrokerProcess
from tests.compat.suites import CACHE, FOLDER
from tests.kafka.process import LOGGING, POM, assemble, java

PACE = 1000
"""Records a second of the paced workloads."""
PARTITIONS = 6
WARM_UP_S = 5.0
BUILD_S = 600.0
DEADLINE_S = 300.0
"""How long a program may take beyond the requested time, for its start and its last acknowledgements."""
MEBIBYTE = 1024 * 1024

GO_SOURCES = FOLDER / "franz_go"
GO_PROGRAM = CACHE / "bench" / "franz_go"
JAVA_SOURCE = Path(__file__).parent / "Produce.java"


@dataclass(frozen=True, slots=True)
class StockProducer:
    name: str
    """Name of the client, which is a part of the names of its workloads."""
    says: Callable[[], str]
    """Return the producer with its version and settings, as the end of a sentence that contains "by"."""
    command: Callable[[], Sequence[str]]
    """Build the program if it must be built, and return its command."""
    needs: tuple[str, ...] = ()
    """Executables that must be on PATH."""

    def missing(self) -> str | None:
        """Return why this machine cannot run the client, or None."""
        absent = [name for name in self.needs if shutil.which(name) is None]
        return f"needs {' and '.join(absent)}, not on PATH" if absent else None


@dataclass(frozen=True, slots=True)
class Produced:
    """The measured part of one program's run."""

    records: int
    """Number of records that were acknowledged while the server's CPU time was counted."""
    seconds: float
    server_cpu_s: float
    latencies_ms: Sequence[float]
    """Milliseconds from send to acknowledgement, for each record sent in the measured time; empty at full speed."""


def _java() -> Sequence[str]:
    assemble()
    return java(str(JAVA_SOURCE), options=(f"-Dlog4j2.configurationFile={LOGGING}",))


def _franz_go() -> Sequence[str]:
    GO_PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["go", "build", "-o", str(GO_PROGRAM), "./produce"],
        cwd=GO_SOURCES,
        check=True,
        timeout=BUILD_S,
        stdin=subprocess.DEVNULL,
    )
    return [str(GO_PROGRAM)]


def _python(client: str) -> Callable[[], Sequence[str]]:
    return lambda: [sys.executable, "-m", "bench.producers", client]


def _java_version() -> str:
    return POM.read_text().partition("<kafka.version>")[2].partition("<")[0]


def _franz_go_version() -> str:
    found = re.search(r"^\s*github.com/twmb/franz-go v(\S+)$", (GO_SOURCES / "go.mod").read_text(), re.MULTILINE)
    return "unknown" if found is None else found[1]


_DEFAULT = "with its default settings"
PRODUCERS = (
    StockProducer("java", lambda: f"Java's producer {_java_version()} {_DEFAULT}", _java, ("java", "mvn")),
    StockProducer(
        "librdkafka",
        lambda: f"librdkafka {libversion()[0]} {_DEFAULT}, so not idempotent",
        _python("librdkafka"),
    ),
    StockProducer(
        "librdkafka-idempotent",
        lambda: f"librdkafka {libversion()[0]} with `enable.idempotence` and no other setting",
        _python("librdkafka-idempotent"),
    ),
    StockProducer(
        "kafka-python", lambda: f"kafka-python {version('kafka-python')} {_DEFAULT}", _python("kafka-python")
    ),
    StockProducer("franz-go", lambda: f"franz-go {_franz_go_version()} {_DEFAULT}", _franz_go, ("go",)),
)


def run(
    producer: StockProducer,
    broker: BrokerProcess,
    topic: str,
    *,
    seconds: float,
    pace: int,
    warm_up_s: float = WARM_UP_S,
) -> Produced:
    """Run a producer against an existing topic. Raise RuntimeError with the end of its errors if it fails or does not
    end in time. `pace` is records per second, or 0 for full speed.
    """
    command = [*producer.command(), broker.bootstrap, topic, str(warm_up_s), str(seconds), str(pace)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        watchdog = threading.Timer(warm_up_s + seconds + DEADLINE_S, process.kill)
        watchdog.start()
        try:
            warm = process.stdout.readline()
            before_s = cpu_s(broker)
            done = process.stdout.readline()
            spent_s = cpu_s(broker) - before_s
            latencies = process.stdout.readline()
            returncode = process.wait()
        finally:
            watchdog.cancel()
            process.kill()
        if returncode or warm != "warm\n" or not latencies:
            errors.seek(0)
            raise RuntimeError(f"{producer.name}'s producer ended with {returncode}: {errors.read()[-2000:]}")
    _, records, took_s = done.split()
    return Produced(int(records), float(took_s), spent_s, [float(each) for each in latencies.split()])


@dataclass(frozen=True, slots=True)
class ClientWorkload:
    """A workload for `bench.peers`: a function of a fresh broker and the seconds, which returns figures by name."""

    producer: StockProducer
    pace: int
    """Records a second; 0 for full speed."""

    @property
    def name(self) -> str:
        return f"{'paced' if self.pace else 'produce'}-{self.producer.name}"

    @property
    def says(self) -> str:
        """Return the sentence that explains the workload in a report."""
        speed = f"{self.pace:,} a second, from send to acknowledgement" if self.pace else "at full speed"
        return f"Produce different records of 1 KiB by {self.producer.says()}, {speed}."

    def __call__(self, broker: BrokerProcess, seconds: float) -> dict[str, float]:
        topic = self.name
        librdkafka.create_topic(broker.bootstrap, topic, PARTITIONS)
        produced = run(self.producer, broker, topic, seconds=seconds, pace=self.pace)
        if not self.pace:
            mebibytes = produced.records * RECORD_BYTES / MEBIBYTE
            return {
                "MiB/s": mebibytes / produced.seconds,
                "server CPU ms/MiB": produced.server_cpu_s * 1000 / mebibytes,
            }
        return {
            "server CPU ms/record": produced.server_cpu_s * 1000 / produced.records,
            "p50 ms": statistics.median(produced.latencies_ms),
            "p99 ms": statistics.quantiles(produced.latencies_ms, n=100)[98],
        }


CLIENT_WORKLOADS = {
    workload.name: workload
    for pace in (0, PACE)
    for workload in (ClientWorkload(producer, pace) for producer in PRODUCERS)
}
