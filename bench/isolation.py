"""`python -m bench isolation`: the latency of a paced producer and of its follower, alone and beside other work.

    python -m bench isolation                          all of it, a quarter of an hour
    python -m bench isolation backup snapshot          some of it
    python -m bench isolation --held 1800 snapshot     a snapshot that is held for half an hour, as a large pg_dump does
    python -m bench isolation --write docs/isolation.md    also write the report, and the graph beside it

An idempotent producer sends 1,000 records of 100 bytes a second and never stops. A consumer reads them as they come.
Both are in a process of their own (`isolation_probe.py`). Phases of the same length follow each other: alone, beside
the first work, alone, beside the second, and so on. A ratio compares the p99 of a phase with the mean of the phases
alone before and after it, because the speed of a machine changes over time. Each kind of work must prove that it took
place; otherwise the run ends with an error. The command ends with 1 if a ratio is above its target.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType  # pyright: ignore[reportPrivateImportUsage]  # pyright: ignore[reportPrivateImportUsage]

from bench import librdkafka
from bench.graph import Band, Line, Panel, over_time
from bench.isolation_probe import PARTITIONS
from bench.machine import measured_by
from bench.servers import running_gateway
from storage.embedded import EmbeddedPostgres
from tests.gateway_process import ROOT, GatewayProcess

TARGET = 1.5
SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "log.retention.check.interval.ms": "1000",
    "log.cleaner.backoff.ms": "1000",
    # The mover (the roller, which moves records from Postgres to segments) runs every ten seconds. With the default of
    # 64 MiB it might find too few bytes in one phase.
    "log.store.roll.bytes": str(8 * 1024 * 1024),
}
RECORD_BYTES = 1024
WARM_UP_S = 5.0
REST_S = 5.0
"""Time between two phases in which nothing is measured, so that the end of one phase's work does not affect the next
phase.
"""
STEP_S = 1.0
STOP_S = 90.0
COMPACTED_TOPICS = 10
COMPACTED_KEYS = 100
INLINE_RECORD_BYTES = 50_000
"""A commit of one record of this size stays in Postgres until the mover takes it."""
INLINE_BYTES = 128_000_000
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Stage:
    """The gateway that all phases share, and the size of a run."""

    gateway: GatewayProcess
    directory: Path
    """An empty directory on the gateway's disk."""
    seconds: float
    """Duration of each phase."""
    held_s: float
    """Duration of the phase with an open snapshot."""
    cold_bytes: int

    @property
    def url(self) -> str:
        url = EmbeddedPostgres(self.gateway.data_dir).running_url()
        if url is None:
            raise RuntimeError(f"no Postgres runs in {self.gateway.data_dir}")
        return url

    def logged(self, event: str, amount: str) -> int:
        """Return the sum of one number over all log lines of an event so far."""
        lines = self.gateway.log_text().splitlines()
        return sum(int(json.loads(line)[amount]) for line in lines if f'"{event}"' in line)


Evidence = Callable[[], str]
"""Returns a sentence that shows what the work has done so far in its phase. Raises RuntimeError if it did nothing."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work that runs while the probe is measured. `prepare` runs before the first phase. `beside` works while its
    context lasts.
    """

    says: str
    beside: Callable[[Stage], contextlib.AbstractContextManager[Evidence]]
    prepare: Callable[[Stage], None] = lambda stage: None


# --- the work ---------------------------------------------------------------------------------------------------------


def _fill(bootstrap: str, topic: str, total_bytes: int, *, keys: int = 0) -> None:
    """Produce records of 1 KiB. With `keys`, each record has one of that many keys."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "queue.buffering.max.kbytes": 65536})
    payload = os.urandom(RECORD_BYTES)
    for number in range(total_bytes // RECORD_BYTES):
        while True:
            try:
                producer.produce(topic, payload, b"%d" % (number % keys) if keys else None)
                break
            except BufferError:
                producer.poll(0.01)
    if producer.flush(STOP_S):
        raise RuntimeError(f"{topic} was not filled within {STOP_S:.0f} s")


def _prepare_cold(stage: Stage) -> None:
    librdkafka.create_topic(stage.gateway.bootstrap, "cold", PARTITIONS)
    _fill(stage.gateway.bootstrap, "cold", stage.cold_bytes)


@contextlib.contextmanager
def _cold_reader(stage: Stage) -> Iterator[Evidence]:
    records = stage.cold_bytes // RECORD_BYTES
    arguments = ("read", stage.gateway.bootstrap, "cold", str(records), str(stage.gateway.data_dir / "log"))
    with tempfile.TemporaryFile() as counts:
        reader = subprocess.Popen(
            [sys.executable, "-m", "bench.isolation_probe", *arguments], stdin=subprocess.DEVNULL, stdout=counts
        )

        def evidence() -> str:
            if reader.poll() is not None:
                raise RuntimeError(f"the reader ended with {reader.returncode}")
            # The reader writes at the file position, which both processes share. So this process must not move that
            # position.
            said = os.pread(counts.fileno(), os.fstat(counts.fileno()).st_size, 0)
            # The last line may be incomplete.
            read = [int(line) for line in said.splitlines()[:-1]]
            if not read:
                raise RuntimeError("the reader has read nothing")
            return f"{read[-1] * RECORD_BYTES / MEGABYTE:,.0f} MB read cold"

        try:
            yield evidence
        finally:
            reader.kill()
            reader.wait()


def _configure(bootstrap: str, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)


@contextlib.contextmanager
def _stepping(stage: Stage, step: Callable[[float], None]) -> Iterator[None]:
    """Call `step` once per second in a thread, with the share of the phase that has passed. If a step raises an error,
    the phase ends.
    """
    done = threading.Event()
    failures: list[Exception] = []

    def work() -> None:
        began_s = time.monotonic()
        try:
            while not done.wait(STEP_S):
                step(min(1.0, (time.monotonic() - began_s) / stage.seconds))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="steps")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        # If a step failed, the work has no evidence either. Raise the step's error, because it explains more.
        if failures:
            raise failures[0]


def _prepare_retention(stage: Stage) -> None:
    librdkafka.create_topic(stage.gateway.bootstrap, "retained", PARTITIONS)
    _fill(stage.gateway.bootstrap, "retained", stage.cold_bytes // 2)


@contextlib.contextmanager
def _retention(stage: Stage) -> Iterator[Evidence]:
    event, amount = "retention removed batches", "deleted_bytes"
    before = stage.logged(event, amount)
    share_bytes = stage.cold_bytes // 2 // PARTITIONS

    def evidence() -> str:
        if not (deleted := stage.logged(event, amount) - before):
            raise RuntimeError("retention removed nothing")
        return f"{deleted / MEGABYTE:,.0f} MB removed"

    def shrink(passed: float) -> None:
        _configure(stage.gateway.bootstrap, "retained", "retention.bytes", str(int(share_bytes * (1 - passed))))

    with _stepping(stage, shrink):
        yield evidence


def _prepare_compaction(stage: Stage) -> None:
    for number in range(COMPACTED_TOPICS):
        topic = f"compacted-{number}"
        configs = {"segment.ms": "1000", "min.cleanable.dirty.ratio": "0.01"}
        librdkafka.create_topic(stage.gateway.bootstrap, topic, 1, configs)
        _fill(stage.gateway.bootstrap, topic, stage.cold_bytes // 4 // COMPACTED_TOPICS, keys=COMPACTED_KEYS)


@contextlib.contextmanager
def _compaction(stage: Stage) -> Iterator[Evidence]:
    event, amount = "partition compacted", "dropped_records"
    before = stage.logged(event, amount)
    waiting = [f"compacted-{number}" for number in range(COMPACTED_TOPICS)]

    def evidence() -> str:
        if not (dropped := stage.logged(event, amount) - before):
            raise RuntimeError("compaction dropped nothing")
        return f"{dropped:,} records dropped of {COMPACTED_TOPICS - len(waiting)} topics"

    def compact(passed: float) -> None:
        # The last topics begin early enough that they are compacted within the phase.
        while waiting and 1 - len(waiting) / COMPACTED_TOPICS <= passed * 1.25:
            _configure(stage.gateway.bootstrap, waiting.pop(), "cleanup.policy", "compact")

    with _stepping(stage, compact):
        yield evidence


def _inline_bytes(stage: Stage) -> int:
    async def ask() -> int:
        connection = await asyncpg.connect(stage.url)
        try:
            return await connection.fetchval(
                "select coalesce(sum(size_bytes), 0)::bigint from sluice.chunk where object_id is null"
            )
        finally:
            await connection.close()

    return asyncio.run(ask())


def _prepare_mover(stage: Stage) -> None:
    librdkafka.create_topic(stage.gateway.bootstrap, "moved", PARTITIONS)


@contextlib.contextmanager
def _mover(stage: Stage) -> Iterator[Evidence]:
    """Let small commits gather in Postgres, and measure while the roller moves them to the log's directory."""
    settings = {"bootstrap.servers": stage.gateway.bootstrap, "linger.ms": 0, "max.in.flight": 1, "batch.size": 1}
    producer = Producer({**settings, "queue.buffering.max.messages": 1000})
    payload = os.urandom(INLINE_RECORD_BYTES)
    for _ in range(INLINE_BYTES // INLINE_RECORD_BYTES):
        producer.produce("moved", payload)
        while len(producer) >= 100:
            producer.poll(0.01)
    if producer.flush(STOP_S):
        raise RuntimeError("the inline records were not acknowledged")
    before = _inline_bytes(stage)

    def evidence() -> str:
        if (left := _inline_bytes(stage)) >= before:
            raise RuntimeError(f"the mover moved nothing: {before:,} bytes were inline and {left:,} are")
        return f"{(before - left) / MEGABYTE:,.0f} MB moved out of Postgres"

    yield evidence


@contextlib.contextmanager
def _backup(stage: Stage) -> Iterator[Evidence]:
    """Make backups one after the other, each into an empty directory. They are removed after the phase, because a
    removal of so many bytes delays commits, and is no part of a backup."""
    done = threading.Event()
    failures: list[str] = []
    copied: list[int] = []
    target = stage.directory / "backups"
    command = [sys.executable, "-m", "gateway.cli", "backup", "--data-dir", str(stage.gateway.data_dir)]

    def size_bytes() -> int:
        """Return the size of the last backup, whether it is complete or not."""
        found = 0
        last = target / str(len(copied))
        for directory, _, names in os.walk(last):
            for name in names:
                # A running backup renames its files.
                with contextlib.suppress(FileNotFoundError):
                    found += (Path(directory) / name).stat().st_size
        return found

    def work() -> None:
        while not done.is_set():
            words = [*command, str(target / str(len(copied)))]
            with tempfile.TemporaryFile("w+") as said:
                process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
                while process.poll() is None:
                    if done.wait(0.1):
                        process.kill()
                        process.wait()
                        return
                if process.returncode:
                    said.seek(0)
                    failures.append(f"sluice backup ended with {process.returncode}: {said.read()[-1000:]}")
                    return
            copied.append(size_bytes())

    def evidence() -> str:
        if failures:
            raise RuntimeError(failures[0])
        if copied:
            return f"{len(copied)} backups of {copied[-1] / MEGABYTE:,.0f} MB"
        if not (under_way := size_bytes()):
            raise RuntimeError("the backup copied nothing")
        return f"{under_way / MEGABYTE:,.0f} MB of the first backup"

    target.mkdir()
    thread = threading.Thread(target=work, name="backup")
    thread.start()
    try:
        yield evidence
    finally:
        done.set()
        thread.join()
        shutil.rmtree(target)


@contextlib.contextmanager
def _snapshot(stage: Stage) -> Iterator[Evidence]:
    """Hold a snapshot open, as pg_dump does."""
    loop = asyncio.new_event_loop()
    settings = {"idle_in_transaction_session_timeout": "0"}
    connection: asyncpg.Connection = loop.run_until_complete(asyncpg.connect(stage.url, server_settings=settings))
    began_s = time.monotonic()
    try:
        loop.run_until_complete(connection.execute("begin isolation level repeatable read"))
        before = loop.run_until_complete(connection.fetchval("select count(*) from sluice.chunk"))

        def evidence() -> str:
            if loop.run_until_complete(connection.fetchval("select count(*) from sluice.chunk")) != before:
                raise RuntimeError("the snapshot was not held")
            return f"held for {time.monotonic() - began_s:,.0f} s"

        yield evidence
    finally:
        loop.run_until_complete(connection.close())
        loop.close()


WORK: Mapping[str, Work] = {
    "cold-reader": Work("a reader of a cold log that catches up again and again", _cold_reader, _prepare_cold),
    "retention": Work("retention, whose bound sinks every second", _retention, _prepare_retention),
    "compaction": Work("compaction of ten topics", _compaction, _prepare_compaction),
    "mover": Work("small commits that move out of Postgres", _mover, _prepare_mover),
    "backup": Work("`sluice backup`, again and again", _backup),
    "snapshot": Work("a snapshot of Postgres that is held", _snapshot),
}


# --- the measurement --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    """Name of the work; empty if the probe ran alone."""
    begins_s: float
    ends_s: float
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    sent_s: float
    waited_ms: float


@dataclass(frozen=True, slots=True)
class Run:
    phases: Sequence[Phase]
    acknowledged: Sequence[Sample]
    """Milliseconds from send to acknowledgement, in the order in which the records were acknowledged."""
    read: Sequence[Sample]
    """Milliseconds from send to the consumer's poll."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One phase with other work. The ratios divide its p99 by the p99 of the phases without other work."""

    phase: Phase
    p50_ms: float
    p99_ms: float
    ratio: float
    read_p99_ms: float
    read_ratio: float

    @property
    def met(self) -> bool:
        return max(self.ratio, self.read_ratio) <= TARGET


@contextlib.contextmanager
def _probe(stage: Stage) -> Generator[Path]:
    """Run the probe. Yield its file, which is complete once the context has ended."""
    librdkafka.create_topic(stage.gateway.bootstrap, "probe", PARTITIONS)
    path = stage.directory / "probe"
    command = [sys.executable, "-m", "bench.isolation_probe", "follow", stage.gateway.bootstrap, "probe", str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield path
        process.communicate(b"", timeout=STOP_S)
        if process.returncode:
            raise RuntimeError(f"the probe ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def measure(names: Sequence[str], *, seconds: float, held_s: float, cold_bytes: int) -> Run:
    """Run all phases on one fresh gateway."""

    def configured(gateway: GatewayProcess) -> GatewayProcess:
        return GatewayProcess(gateway.data_dir, database_url=None, settings=SETTINGS, environment={})

    with running_gateway(configured) as gateway, tempfile.TemporaryDirectory(dir=gateway.data_dir.parent) as directory:
        stage = Stage(gateway, Path(directory), seconds, held_s, cold_bytes)
        for name in names:
            _say(f"preparing {name} …")
            WORK[name].prepare(stage)
        # The node still holds the last records in memory. A restart leaves them on disk alone.
        gateway.restart()
        phases: list[Phase] = []
        with _probe(stage) as path:
            time.sleep(WARM_UP_S)
            for name in names:
                phases += [_alone(seconds), _beside(name, stage)]
            phases.append(_alone(seconds))
        samples: dict[str, list[Sample]] = {"a": [], "r": []}
        with path.open() as lines:
            for line in lines:
                kind, sent_s, waited_ms = line.split()
                samples[kind].append(Sample(float(sent_s), float(waited_ms)))
    return Run(phases, samples["a"], samples["r"])


def _alone(seconds: float) -> Phase:
    time.sleep(REST_S)
    _say("measuring alone …")
    began_s = time.perf_counter()
    time.sleep(seconds)
    return Phase("", began_s, time.perf_counter())


def _beside(name: str, stage: Stage) -> Phase:
    _say(f"measuring beside {name} …")
    with WORK[name].beside(stage) as evidence:
        began_s = time.perf_counter()
        time.sleep(stage.held_s if name == "snapshot" else stage.seconds)
        ended_s = time.perf_counter()
        said = evidence()
    _say(f"  {said}")
    return Phase(name, began_s, ended_s, said)


def compare(run: Run) -> list[Beside]:
    """Return each phase with other work, together with the mean of the phases without other work directly before and
    after it.
    """
    found: list[Beside] = []
    for before, phase, after in zip(run.phases[::2], run.phases[1::2], run.phases[2::2], strict=False):
        alone = statistics.mean(_p99(_within(run.acknowledged, each)) for each in (before, after))
        read_alone = statistics.mean(_p99(_within(run.read, each)) for each in (before, after))
        waited, read = _within(run.acknowledged, phase), _within(run.read, phase)
        found.append(
            Beside(
                phase,
                statistics.median(waited),
                _p99(waited),
                _p99(waited) / alone,
                _p99(read),
                _p99(read) / read_alone,
            )
        )
    return found


def _within(samples: Sequence[Sample], phase: Phase) -> list[float]:
    found = [each.waited_ms for each in samples if phase.begins_s <= each.sent_s < phase.ends_s]
    if len(found) < 2:
        raise RuntimeError(f"no record of the phase {phase.name or 'alone'} was answered")
    return found


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def graph(run: Run) -> str:
    """Return the p99 of each second as SVG. Phases with other work are shaded, and a dashed line shows the target of
    each.
    """
    begins_s = run.phases[0].begins_s
    bands = [Band(each.name, each.begins_s - begins_s, each.ends_s - begins_s) for each in run.phases]
    panels: list[Panel] = []
    for name, samples in (("acknowledged", run.acknowledged), ("read", run.read)):
        by_second: dict[int, list[float]] = {}
        for each in samples:
            if each.sent_s >= begins_s:
                by_second.setdefault(int(each.sent_s - begins_s), []).append(each.waited_ms)
        points = [(second + 0.5, _p99(values)) for second, values in sorted(by_second.items()) if len(values) > 1]
        alone = statistics.mean(_p99(_within(samples, each)) for each in run.phases if not each.name)
        panels.append(Panel([Line(name, points)], "ms", TARGET * alone))
    return over_time("The p99 of each second beside other work", panels, bands)


def report(run: Run, command: str, picture: str = "") -> str:
    """Return the report as Markdown. `picture` is the name of the graph's file."""
    alone = [_p99(_within(run.acknowledged, each)) for each in run.phases if not each.name]
    lines = [
        "# Isolation",
        "",
        measured_by(command),
        "",
        "An idempotent producer sends 1,000 records of 100 bytes a second without linger, and a consumer follows it. "
        "Ratios compare a phase's p99 with the mean of the phases alone before and after it. "
        f"Alone, the p99 to the acknowledgement was {min(alone):.2f} to {max(alone):.2f} ms. "
        f"The target is {TARGET} for each ratio.",
        "",
        *([f"![The p99 of each second; shaded: beside other work]({picture})", ""] if picture else []),
        "| beside | p50 | p99 | ratio | p99 until read | ratio | what took place | met |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {WORK[each.phase.name].says} | {each.p50_ms:.2f} ms | {each.p99_ms:.2f} ms | {each.ratio:.2f} | "
        f"{each.read_p99_ms:.2f} ms | {each.read_ratio:.2f} | {each.phase.evidence} | "
        f"{'yes' if each.met else '**no**'} |"
        for each in compare(run)
    ]
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench isolation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", nargs="*", metavar="WORK", help=f"one of {', '.join(WORK)}; all if none is named")
    parser.add_argument("--seconds", type=float, default=30, help="length of each phase (default %(default)s)")
    parser.add_argument(
        "--held", type=float, default=60, metavar="SECONDS", help="how long the snapshot is held (default %(default)s)"
    )
    parser.add_argument("--gigabytes", type=float, default=2, help="size of the cold log (default %(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="also write the report, and FILE.svg beside it")
    given = parser.parse_args(arguments)
    if unknown := set(given.work) - set(WORK):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    names = [name for name in WORK if name in given.work or not given.work]
    run = measure(names, seconds=given.seconds, held_s=given.held, cold_bytes=int(given.gigabytes * 1e9))
    command = shlex.join(["python", "-m", "bench", "isolation", *arguments])
    print(report(run, command))
    if given.write is not None:
        picture = given.write.with_suffix(".svg")
        picture.write_text(graph(run))
        given.write.write_text(report(run, command, picture.name))
    return 0 if all(each.met for each in compare(run)) else 1
