"""`make pipeline-demo`: a gateway, a million real records, archive, verify, audit, consumer groups, analyze, one page.

Each part is started by its command, as a user starts it, in a folder of its own. The gateway ends with the demo. The
archive, the tables and the pictures stay.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain, islice
from pathlib import Path
from types import FrameType
from typing import Any, cast

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline.demo.flights import TOPIC, events
from pipeline.demo.members import Log, Member
from pipeline.errors import PipelineError, explain
from pipeline.progress import Progress

PARTITIONS = 6
GROUP = "arrivals-board"
START_SECONDS = 60.0
FIRST = 960_000
HELD_BACK = 60_000
"""Records that are produced while the consumer group is at work."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(".pipeline-demo"), metavar="FOLDER", help="(default %(default)s)"
    )
    parser.add_argument("--master", default="local[2]", help="Spark's master (default %(default)s)")
    parser.add_argument("--records", type=int, default=2_000_000, help="at most so many (default: all there are)")
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args(arguments)
    lines = Progress("demo")
    # If the user interrupts the demo, the demo must still end its gateway.
    signal.signal(signal.SIGTERM, _ended)
    try:
        return Demo(given, lines).run()
    except Exception as error:
        if given.trace:
            raise
        told = explain(error)
        print(f"demo failed. {told.cause}\nNext: {told.next_step}", file=sys.stderr, flush=True)
        return 1


class Demo:
    def __init__(self, arguments: argparse.Namespace, lines: Progress) -> None:
        self._out: Path = arguments.out.resolve()
        self._master: str = arguments.master
        self._records: int = arguments.records
        self._lines = lines
        self._data_dir = self._out / "gateway"
        self._bootstrap = f"127.0.0.1:{_free_port()}"

    def run(self) -> int:
        self._clear()
        archive = str(self._out / "archive")
        with self._gateway():
            self._make_topic()
            feed = islice(events(), self._records)
            produced = self._produce(feed, min(FIRST, max(1, self._records - HELD_BACK)))
            self._job("archive", "--bootstrap", self._bootstrap, "--topics", TOPIC, "--out", archive, "--once")
            self._job("verify", "--bootstrap", self._bootstrap, "--archive", archive)
            produced += self._groups(feed)
            self._lines.say(
                f"{produced:,} records in all; the rest is archived by a second run, behind what the first one did"
            )
            self._job("archive", "--bootstrap", self._bootstrap, "--topics", TOPIC, "--out", archive, "--once")
            self._job("audit", "--archive", archive, "--topics", TOPIC, "--out", str(self._out / "audit"))
            self._analyze()
        self._lines.say(f"done: {self._out / 'report' / 'report.html'} and {self._out / 'audit' / 'audit.html'}")
        return 0

    def _clear(self) -> None:
        """Make an empty folder in place of that of an earlier demo. Raise PipelineError if it holds anything else."""
        if self._out.exists():
            if not (self._out / "gateway.log").is_file() and (not self._out.is_dir() or any(self._out.iterdir())):
                raise PipelineError(f"{self._out} is not the folder of an earlier demo.", "Name another --out.")
            shutil.rmtree(self._out)
        self._out.mkdir(parents=True)

    # --- the gateway ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _gateway(self) -> Generator[None, None, None]:
        command = Path(sys.prefix) / "bin" / "sluice"
        if not command.exists():
            raise PipelineError(
                f"There is no sluice command in {sys.prefix}.", "Install the project there: make pipeline-demo."
            )
        with (self._out / "gateway.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    str(command),
                    "serve",
                    "--listen",
                    self._bootstrap,
                    "--data-dir",
                    str(self._data_dir),
                    "--metrics-listen",
                    f"127.0.0.1:{_free_port()}",
                    "--set",
                    "group.initial.rebalance.delay.ms=500",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_for(process)
            self._lines.say(f"a gateway with a Postgres of its own serves on {self._bootstrap}")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (self._out / "gateway.log").read_text(errors="replace").splitlines()[-3:]
                raise PipelineError(
                    f"The gateway did not start: {' | '.join(tail)}", f"See {self._out / 'gateway.log'}."
                )
            try:
                AdminClient({"bootstrap.servers": self._bootstrap, "log_level": 0}).list_topics(timeout=1)
            except KafkaException:
                continue
            return

    def _make_topic(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._bootstrap, "log_level": 0})
        futures = cast("Mapping[str, Future[Any]]", admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]))
        for created in futures.values():
            created.result(30)

    # --- records ----------------------------------------------------------------------------------------------------

    def _produce(self, feed: Iterator[tuple[bytes, bytes]], most: int, per_second: int | None = None) -> int:
        producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "linger.ms": 20,
                "compression.type": "lz4",
                "enable.idempotence": True,
                "queue.buffering.max.messages": 200_000,
                "log_level": 0,
            }
        )
        failures: list[str] = []
        sent = 0
        taken = islice(feed, most)
        first = next(taken, None)  # Reading the data set takes seconds, which must not count as the gateway's time.
        started = said = time.monotonic()
        for key, value in chain((first,), taken) if first is not None else ():
            while True:
                try:
                    producer.produce(
                        TOPIC, value, key, on_delivery=lambda error, _: failures.append(str(error)) if error else None
                    )
                    break
                except BufferError:
                    producer.poll(0.05)
            sent += 1
            if sent % 2_000 == 0:
                producer.poll(0)
                if per_second is not None:
                    time.sleep(max(0.0, started + sent / per_second - time.monotonic()))
                if time.monotonic() - said > 5:
                    said = time.monotonic()
                    self._lines.say(f"produced {sent:,} records, {sent / (said - started):,.0f}/s")
        left = producer.flush(120)
        if left or failures:
            raise PipelineError(
                f"{left + len(failures)} records were not produced: {(failures or ['timeout'])[0]}", "See gateway.log."
            )
        self._lines.step("produced", sent, time.monotonic() - started)
        return sent

    def _groups(self, feed: Iterator[tuple[bytes, bytes]]) -> int:
        """Let members join and leave while records are produced. One member leaves with uncommitted work."""
        log = Log()

        def member(name: str) -> Member:
            return Member(self._bootstrap, GROUP, TOPIC, name, log).start()

        self._lines.say(f"consumer group {GROUP}: the first member joins")
        first = member("board-1")
        first.wait_until_assigned()
        sent = self._produce(feed, 10_000, per_second=4_000)
        self._lines.say("two more join")
        others = [member("board-2"), member("board-3")]
        for other in others:
            other.wait_until_assigned()
        sent += self._produce(feed, 16_000, per_second=4_000)
        self._lines.say("board-2 stops committing, works on, and leaves: what it did will be done again")
        others[0].commits = False
        sent += self._produce(feed, 8_000, per_second=4_000)
        others[0].end()
        sent += self._produce(feed, 8_000, per_second=4_000)
        self._lines.say("a restart, again and again: a storm")
        for turn in range(4):
            flapping = member(f"board-{4 + turn}")
            flapping.wait_until_assigned()
            flapping.end()
        sent += self._produce(feed, 200_000, per_second=20_000)
        for last in (first, others[1]):
            last.end()
        runs = log.write(self._out / "delivery")
        processed = first.processed + sum(other.processed for other in others)
        self._lines.say(f"members processed {processed:,} records in {runs:,} runs")
        return sent

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _analyze(self) -> None:
        report = self._out / "report"
        code = self._job(
            "analyze",
            "--data-dir",
            str(self._data_dir),
            "--delivery",
            str(self._out / "delivery"),
            "--out",
            str(report),
            "--storm-rebalances",
            "4",
            may_fail=True,
        )
        if code == 0:
            return
        told = (self._out / "analyze.log").read_text(errors="replace")
        if "The journal has no rows" not in told and "There is no journal" not in told:
            raise PipelineError("analyze failed.", f"See {self._out / 'analyze.log'}.")
        self._lines.say("this gateway writes no journal yet: the page shows what the members' own logs say")
        self._job("analyze", "--delivery-only", str(self._out / "delivery"), "--out", str(report))

    def _job(self, name: str, *arguments: str, may_fail: bool = False) -> int:
        """Run `sluice-pipeline NAME` and print its lines among those of the demo. Raise PipelineError if it fails."""
        started = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "pipeline.cli",
            name,
            *arguments,
            "--master",
            self._master,
            "--conf",
            "spark.sql.shuffle.partitions=4",
        ]
        with (self._out / f"{name}.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
            assert process.stdout is not None
            for line in process.stdout:
                print(f"  {line.rstrip()}", flush=True)
                log.write(line)
            code = process.wait()
        if code and not may_fail:
            tail = (self._out / f"{name}.log").read_text(errors="replace").splitlines()[-2:]
            raise PipelineError(f"{name} ended with {code}: {' '.join(tail)}", f"See {self._out / f'{name}.log'}.")
        self._lines.say(f"{name} took {time.monotonic() - started:.0f} s", code=code)
        return code


def _ended(_number: int, _frame: FrameType | None) -> None:
    sys.exit(143)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
