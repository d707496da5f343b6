"""`python -m bench.pipeline`: rates of archive, verify and replay on local[2], with a gateway on the same two cores.

    python -m bench.pipeline                    rates of archive, verify and replay, and of Iceberg beside Delta
    python -m bench.pipeline table              the newest row per key, from ten changes of each key
    python -m bench.pipeline topics             a thousand small topics in one job
    python -m bench.pipeline peer               archive beside the same job from Apache Kafka, in turns
    python -m bench.pipeline latency            the gateway's produce latency, without an archive and with one
    python -m bench.pipeline size --gigabytes 4 --memory 512m    a large topic through a small heap

A rate excludes the first batch, in which the JVM compiles; verify's rate is of its whole comparison. Clients, broker,
Postgres and Spark share the machine. Records have 200 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import KafkaError, Message, Producer

from bench.librdkafka import create_topic
from bench.servers import running_gateway
from tests.gateway_process import GatewayProcess
from tests.kafka.process import KafkaProcess, assemble

PARTITIONS, RECORD_BYTES, BATCH = 4, 200, 1_000_000
REPLAYS = {"replay into 24 partitions": 24, "replay into 1,000 partitions": 1_000}
TARGETS = {"archive": 150_000, "verify": 300_000, **dict(zip(REPLAYS, (100_000, 60_000), strict=True))}
PEER_RATIO, ICEBERG_RATIO, LATENCY_RATIO = 1.0, 0.8, 2.0
TABLE_CHANGES, CHANGES_PER_KEY, TABLE_SECONDS = 10_000_000, 10, 240
TOPICS, TOPIC_PARTITIONS, TOPIC_RECORDS, TOPICS_SECONDS = 1_000, 2, 50, 120
JOB_SECONDS = 1800
PACE_SECONDS, PROBES_PER_SECOND, LIVE_PER_SECOND = 25.0, 100, 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=tuple(MEASURES), default="rates")
    parser.add_argument("--records", type=int, default=5_000_000, help="of a topic (default %(default)s)")
    parser.add_argument("--changes", type=int, default=TABLE_CHANGES, help="of `table` (default %(default)s)")
    parser.add_argument("--topics", type=int, default=TOPICS, help="of `topics` (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--gigabytes", type=float, default=4.0, help="size of the topic of `size` (default %(default)s)"
    )
    parser.add_argument("--memory", default="1500m", help="memory of the job of `size` (default %(default)s)")
    parser.add_argument("--nice", default="idle", help="niceness of the archive of `latency` (default %(default)s)")
    given = parser.parse_args(arguments)
    with running_gateway() as gateway, tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        return MEASURES[given.what](given, gateway, Path(folder))


# --- what is measured -------------------------------------------------------------------------------------------------


def rates(given: argparse.Namespace, gateway: GatewayProcess, folder: Path) -> int:
    bootstrap, limit = gateway.bootstrap, ("--max-batch-records", str(BATCH))
    topic, to = fresh(bootstrap, given.records), ("--bootstrap", bootstrap)
    out = str(folder / "table")
    archived = run("archive", gateway.pid, *to, "--topics", topic, "--out", out, "--once", *limit)
    told(archive := warm(archived.said), "archive", archived)
    proved = run("verify", gateway.pid, *to, "--archive", out)
    told(verify := compared(proved.said), "verify", proved)
    found = {"archive": archive, "verify": verify}
    for name, partitions in REPLAYS.items():
        into = ("--topic-map", f"{topic}={topic}-{partitions}", "--partition-map", f"key:{partitions}")
        begun = ("--create-topics", "--name", f"into-{partitions}", *limit)
        replayed = run("replay", gateway.pid, *to, "--archive", out, *into, *begun)
        told(rate := warm(replayed.said), name, replayed)
        found[name] = rate
    catalog = ("--format", "iceberg", "--catalog", str(folder / "lake"))
    iceberg = run("archive", gateway.pid, *to, "--topics", topic, "--out", "events", "--once", *limit, *catalog)
    told(warm(iceberg.said), "archive to Iceberg", iceberg)
    ratio = warm(iceberg.said) / archive
    print(f"Iceberg beside Delta: {ratio:.2f}, target {ICEBERG_RATIO}: {met(ratio >= ICEBERG_RATIO)}", flush=True)
    return verdict(found) or int(ratio < ICEBERG_RATIO)


def table(given: argparse.Namespace, gateway: GatewayProcess, folder: Path) -> int:
    """Merge changes of keys into the newest row of each."""
    keys = given.changes // CHANGES_PER_KEY
    topic, to = fresh(gateway.bootstrap, given.changes, keys), ("--bootstrap", gateway.bootstrap)
    out = str(folder / "events")
    run("archive", gateway.pid, *to, "--topics", topic, "--out", out, "--once")
    started = time.monotonic()
    merged = run("table", gateway.pid, "--archive", out, "--out", str(folder / "newest"))
    seconds = time.monotonic() - started
    told(warm(merged.said), "table", merged)
    print(f"table: {given.changes:,} changes of {keys:,} keys in {seconds:.0f} s, target {TABLE_SECONDS} s: "
          f"{met(seconds <= TABLE_SECONDS)}", flush=True)  # fmt: skip
    return int(seconds > TABLE_SECONDS)


def topics(given: argparse.Namespace, gateway: GatewayProcess, folder: Path) -> int:
    """Archive with one job many topics that have few records each."""
    names = [f"small-{number}" for number in range(given.topics)]
    for name in names:
        create_topic(gateway.bootstrap, name, TOPIC_PARTITIONS)
    producer = Producer({"bootstrap.servers": gateway.bootstrap, "linger.ms": 20})
    values = payloads()
    for name in names:
        for index in range(TOPIC_RECORDS):
            producer.produce(name, values[index], b"%d" % index, index % TOPIC_PARTITIONS)
        producer.poll(0)
    if producer.flush(300):
        raise RuntimeError(f"{gateway.bootstrap} did not acknowledge all records")
    started = time.monotonic()
    archived = run("archive", gateway.pid, "--bootstrap", gateway.bootstrap, "--pattern", "small-.*", "--once",
                   "--out", str(folder / "table"))  # fmt: skip
    seconds = time.monotonic() - started
    rows = sum(line["rows"] for line in archived.said if line.get("event") == "committed")
    print(f"topics: {len(names):,} topics, {rows:,} records in {seconds:.0f} s, at most {archived.peak_mib:,} MiB "
          f"resident; target {TOPICS_SECONDS} s: {met(seconds <= TOPICS_SECONDS)}", flush=True)  # fmt: skip
    return int(seconds > TOPICS_SECONDS)


def met(reached: bool) -> str:
    return "met" if reached else "MISSED"


def verdict(found: dict[str, float]) -> int:
    for job, rate in found.items():
        print(f"{job}: {rate:,.0f} records/s, target {TARGETS[job]:,}: {met(rate >= TARGETS[job])}", flush=True)
    return 0 if all(rate >= TARGETS[job] for job, rate in found.items()) else 1


def peer(given: argparse.Namespace, gateway: GatewayProcess, folder: Path) -> int:
    found: dict[str, list[float]] = {}
    with apache_kafka(folder / "kafka") as kafka:
        brokers: dict[str, GatewayProcess | KafkaProcess] = {"sluice": gateway, "kafka": kafka}
        of = {name: fresh(broker.bootstrap, given.records) for name, broker in brokers.items()}
        for number in range(given.rounds):
            for name in brokers if number % 2 == 0 else reversed(brokers):
                broker = brokers[name]
                done = run("archive", broker.pid, "--bootstrap", broker.bootstrap, "--topics", of[name], "--once",
                           "--out", str(folder / f"{name}-{number}"), "--max-batch-records", str(BATCH))  # fmt: skip
                found.setdefault(name, []).append(warm(done.said))
                told(found[name][-1], f"archive from {name}", done)
    medians = {name: statistics.median(rate) for name, rate in found.items()}
    ratio = medians["sluice"] / medians["kafka"]
    print(f"archive: sluice {medians['sluice']:,.0f}/s, kafka {medians['kafka']:,.0f}/s, ratio {ratio:.2f}; "
          f"target {PEER_RATIO}: {met(ratio >= PEER_RATIO)}", flush=True)  # fmt: skip
    return 0 if ratio >= PEER_RATIO else 1


def latency(given: argparse.Namespace, gateway: GatewayProcess, folder: Path) -> int:
    """Measure the p99 of one acknowledged record at a time, while an archive follows a topic and while it catches up.

    The p99 without an archive is measured before and after that, because the speed of a machine changes over time.
    """
    bootstrap = gateway.bootstrap
    create_topic(bootstrap, "probe", 1)
    live, backlog = f"live-{time.time_ns()}", fresh(bootstrap, given.records)
    create_topic(bootstrap, live, PARTITIONS)
    options = ("--bootstrap", bootstrap, "--max-batch-records", str(BATCH), "--nice", given.nice, "--out")
    found: dict[str, float] = {}

    def measure(name: str) -> None:
        p50, found[name] = probe(bootstrap)
        print(f"produce {name}: p50 {p50:.1f} ms, p99 {found[name]:.1f} ms", flush=True)

    with feeding(bootstrap, live):
        measure("without")
        follow = (*options, str(folder / "live"), "--topics", live, "--interval", "1")
        with job("archive", gateway.pid, *follow) as following:
            following.wait_for("committed", 2)
            measure("while an archive follows")
        with job("archive", gateway.pid, *options, str(folder / "backlog"), "--topics", backlog) as catching_up:
            catching_up.wait_for("committed", 1)
            measure("while an archive catches up")
            done = [line for line in catching_up.said if line.get("event") == "committed"]
        measure("without again")
    without = statistics.mean((found.pop("without"), found.pop("without again")))
    ratios = {name: p99 / without for name, p99 in found.items()}
    words = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    print(f"the archive that caught up: {sum(line['rows'] for line in done):,} records in {len(done)} batches")
    reached = max(ratios.values()) <= LATENCY_RATIO
    print(f"produce p99: {without:.1f} ms without, {words}; target {LATENCY_RATIO}: {met(reached)}")
    return 0 if reached else 1


def size(given: argparse.Namespace, gateway: GatewayProcess, folder: Path) -> int:
    """Archive and verify a topic that is many times larger than the heap. Memory use must depend on the batch, not on
    the topic.
    """
    started, bootstrap = time.monotonic(), gateway.bootstrap
    topic, out = fresh(bootstrap, int(given.gigabytes * 1e9 / RECORD_BYTES)), str(folder / "table")
    print(f"{given.gigabytes:g} GB were produced in {time.monotonic() - started:.0f} s", flush=True)
    to, memory = ("--bootstrap", bootstrap), ("--memory", given.memory)
    archived = run("archive", gateway.pid, *to, "--topics", topic, "--out", out, "--once", *memory)
    told(warm(archived.said), "archive", archived)
    quarters = archived.resident_by_quarter()
    print("resident by quarter of the run: " + ", ".join(f"{each:,} MiB" for each in quarters), flush=True)
    proved = run("verify", gateway.pid, *to, "--archive", out, *memory)
    told(compared(proved.said), "verify", proved)
    print(next(line["say"] for line in proved.said if line.get("event") == "proved"))
    return 0


MEASURES: dict[str, Callable[[argparse.Namespace, GatewayProcess, Path], int]] = {
    "rates": rates, "table": table, "topics": topics, "peer": peer, "latency": latency, "size": size,
}  # fmt: skip


# --- records ----------------------------------------------------------------------------------------------------------


def fresh(bootstrap: str, records: int, keys: int = 100_000) -> str:
    """Create a topic with this many records. Return its name."""
    topic = f"bench-{time.time_ns()}"
    create_topic(bootstrap, topic, PARTITIONS)
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 1_000_000})
    values = payloads()
    for index in range(records):
        while True:
            try:
                producer.produce(topic, values[index % 1000], b"%d" % (index % keys), index % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(300):
        raise RuntimeError(f"{bootstrap} did not acknowledge all records")
    return topic


def payloads() -> list[bytes]:
    """Return a thousand different texts that compress as ordinary values do."""
    return [os.urandom(RECORD_BYTES // 2).hex().encode() for _ in range(1000)]


@contextlib.contextmanager
def feeding(bootstrap: str, topic: str) -> Iterator[None]:
    """Produce `LIVE_PER_SECOND` records a second into a topic until the context ends."""
    ended = threading.Event()

    def feed() -> None:
        producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 1_000_000})
        values, sent, started = payloads(), 0, time.monotonic()
        while not ended.wait(0.02):
            due = int((time.monotonic() - started) * LIVE_PER_SECOND)
            # If the machine is too slow, the producer sends the remaining records later. If the producer ended instead,
            # the figures would look better than they are.
            with contextlib.suppress(BufferError):
                while sent < due:
                    producer.produce(topic, values[sent % 1000], partition=sent % PARTITIONS)
                    sent += 1
            producer.poll(0)
        producer.flush(60)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def probe(bootstrap: str) -> tuple[float, float]:
    """Return the p50 and p99 in milliseconds from produce to acknowledgement, one record at a time."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
    times: list[float] = []
    answers: list[KafkaError | None] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        answers.append(error)

    until = time.perf_counter() + PACE_SECONDS
    while (started := time.perf_counter()) < until:
        answers.clear()
        producer.produce("probe", b"x" * RECORD_BYTES, on_delivery=delivered)
        while not answers:
            producer.poll(1)
        if answers[0] is not None:
            raise RuntimeError(str(answers[0]))
        times.append((time.perf_counter() - started) * 1000)
        time.sleep(max(0.0, started + 1 / PROBES_PER_SECOND - time.perf_counter()))
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


@contextlib.contextmanager
def apache_kafka(folder: Path) -> Iterator[KafkaProcess]:
    assemble()
    kafka = KafkaProcess(folder, settings={})
    kafka.start()
    try:
        yield kafka
    finally:
        kafka.close()


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A job in a process of its own: its output lines, and the resident memory of all its processes together."""

    name: str
    process: subprocess.Popen[str]
    broker: int
    """Process id of the broker that the job uses."""
    said: list[dict[str, Any]] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                line = json.loads(text)
                if line.get("event") in ("committed", "compare", "compared"):
                    line |= {"job_cpu": cpu_seconds(self.process.pid), "broker_cpu": cpu_seconds(self.broker)}
                with self._news:
                    self.said.append(line)
                    self._news.notify_all()
        with self._news:
            self._ended.set()
            self._news.notify_all()

    def watch(self) -> None:
        while not self._ended.wait(0.5):
            with contextlib.suppress(psutil.NoSuchProcess):
                whole = psutil.Process(self.process.pid)
                # Shared memory is divided among the processes that share it. Otherwise a JVM that starts a command
                # would be counted twice for a moment.
                family = (whole, *whole.children(recursive=True))
                self.resident.append(sum(each.memory_full_info().pss for each in family))

    def wait_for(self, event: str, times: int) -> None:
        with self._news:
            self._news.wait_for(lambda: self._ended.is_set() or self._count(event) >= times, JOB_SECONDS)
        if self._count(event) < times:
            raise RuntimeError(f"{self.name} ended before it printed {event} {times} times")

    def _count(self, event: str) -> int:
        return sum(1 for line in self.said if line.get("event") == event)

    @property
    def peak_mib(self) -> int:
        return max(self.resident, default=0) >> 20

    def resident_by_quarter(self) -> list[int]:
        count = len(self.resident)
        return [max(self.resident[count * part // 4 : count * (part + 1) // 4]) >> 20 for part in range(4)]


@contextlib.contextmanager
def job(name: str, broker: int, *given: str) -> Iterator[Job]:
    """Run a job until the end of the context. Then stop the job as a user does."""
    command = [sys.executable, "-m", "pipeline.cli", name, "--json", "--master", "local[2]", *given]
    started = Job(name, subprocess.Popen(command, stdout=subprocess.PIPE, text=True), broker)
    threads = [threading.Thread(target=work, daemon=True) for work in (started.read, started.watch)]
    for thread in threads:
        thread.start()
    try:
        yield started
    finally:
        started.process.terminate()
        try:
            started.process.wait(120)
        except subprocess.TimeoutExpired:
            started.process.kill()
            raise
        finally:
            for thread in threads:
                thread.join()


def run(name: str, broker: int, *given: str) -> Job:
    """Run a job until it ends. Raise RuntimeError if it failed."""
    with job(name, broker, *given) as running:
        code = running.process.wait(JOB_SECONDS)
    if code:
        raise RuntimeError(f"{name} ended with {code}")
    return running


def cpu_seconds(process: int) -> float:
    """Return the user and system time of a process and of all its living descendants."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        whole = psutil.Process(process)
        for each in (whole, *whole.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
    return total


def warm(lines: Sequence[dict[str, Any]]) -> float:
    """Return the rows per second between the first and the last commit."""
    done = [line for line in lines if line.get("event") == "committed"]
    return sum(line["rows"] for line in done[1:]) / (done[-1]["seconds"] - done[0]["seconds"])


def compared(lines: Sequence[dict[str, Any]]) -> float:
    """Return the rows per second of the whole comparison."""
    began = next(line["seconds"] for line in lines if line.get("event") == "compare")
    done = [line for line in lines if line.get("event") == "compared"]
    return sum(line["rows"] for line in done) / (done[-1]["seconds"] - began)


def told(rate: float, what: str, done: Job) -> None:
    """Print the rate, and the CPU time per million records. The CPU time shows which rate a machine without other work
    would reach.
    """
    lines = [line for line in done.said if "job_cpu" in line]
    first, last = lines[0], lines[-1]
    million = sum(line.get("rows", 0) for line in lines[1:]) / 1e6
    costs = [f"{of} {(last[name] - first[name]) / million:.1f} s"
             for of, name in (("job", "job_cpu"), ("broker", "broker_cpu"))]  # fmt: skip
    print(f"{what}: {rate:,.0f} records/s, at most {done.peak_mib:,} MiB resident; "
          f"CPU of a million: {', '.join(costs)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
