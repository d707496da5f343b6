"""Measure how long a join takes and how many records it repeats, on a gateway in each handoff mode and on Apache Kafka.

A first consumer receives every record and hands the records to a worker. Then a second consumer joins. A moment later
the worker finishes and the first consumer commits. Records that both consumers receive are duplicates.

Two more figures: how long consumers with auto-commit, librdkafka's and Java's, take from a join until every partition
has exactly one owner again; and how long a join takes if the first member has committed everything that it received.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from tests.compat import suites
from tests.gateway_process import GatewayProcess
from tests.kafka.process import KafkaProcess, assemble

PARTITIONS = 6
RECORDS = 600
WORK_S = 1.0
"""Seconds that the worker needs after the join."""
PATIENCE_S = 60.0
JOINS = 7
JAVA_SUITE = "java4"
JAVA_SECONDS = 300.0
PROTOCOLS: Mapping[str, Mapping[str, str]] = {
    "eager": {"partition.assignment.strategy": "range"},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}
JAVA_ASSIGNORS: Mapping[str, str] = {"eager": "range", "cooperative": "cooperative-sticky", "consumer": "consumer"}


class Member(threading.Thread):
    """A consumer that reads until `stop`. Without auto-commit it commits what it received when `finish` is called."""

    def __init__(self, bootstrap: str, group: str, topic: str, protocol: str, *, auto_commit: bool) -> None:
        super().__init__(daemon=True)
        classic = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "500"} if protocol != "consumer" else {}
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": auto_commit,
                **classic,
                **PROTOCOLS[protocol],
            }
        )
        self._topic = topic
        self.owned: set[int] = set()
        self.given: list[tuple[int, int]] = []
        self._ended, self._finish, self.finished = threading.Event(), threading.Event(), threading.Event()

    def run(self) -> None:
        def assigned(_: Any, partitions: list[confluent_kafka.TopicPartition]) -> None:
            self.owned |= {each.partition for each in partitions}

        def revoked(_: Any, partitions: list[confluent_kafka.TopicPartition]) -> None:
            self.owned -= {each.partition for each in partitions}

        self._consumer.subscribe([self._topic], on_assign=assigned, on_revoke=revoked, on_lost=revoked)
        while not self._ended.is_set():
            message = self._consumer.poll(0.02)
            if message is not None and message.error() is None:
                self.given.append((message.partition() or 0, message.offset() or 0))
            if self._finish.is_set():
                self._finish.clear()
                reached = {partition: offset + 1 for partition, offset in self.given}
                offsets = [confluent_kafka.TopicPartition(self._topic, *each) for each in reached.items()]
                with contextlib.suppress(confluent_kafka.KafkaException):
                    # If the group is between two generations, the commit is refused, although the work is done.
                    self._consumer.commit(offsets=offsets, asynchronous=False)
                self.finished.set()
        self._consumer.close()

    def finish(self) -> None:
        self._finish.set()
        self.finished.wait(PATIENCE_S)

    def stop(self) -> None:
        self._ended.set()
        self.join(PATIENCE_S)


def _topic(bootstrap: str, records: int) -> str:
    name = f"handoff-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(30)
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for number in range(records):
        producer.produce(name, b"x", partition=number % PARTITIONS)
    producer.flush(30)
    return name


def _until(holds: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > PATIENCE_S:
            raise AssertionError("the group did not become stable in time")
        time.sleep(0.005)
    return time.monotonic() - began


def _settled(members: list[Member]) -> bool:
    owned = [partition for member in members for partition in list(member.owned)]
    return len(owned) == len(set(owned)) == PARTITIONS and all(member.owned for member in members)


def duplicates(bootstrap: str, protocol: str) -> tuple[int, float]:
    """Return the number of records delivered twice after a join with uncommitted work, and the seconds from the join
    until both consumers own their share.
    """
    group, topic = f"g-{uuid.uuid4().hex[:8]}", _topic(bootstrap, RECORDS)
    first, second = (Member(bootstrap, group, topic, protocol, auto_commit=False) for _ in range(2))
    first.start()
    _until(lambda: len(first.given) == RECORDS)
    second.start()
    worker = threading.Timer(WORK_S, first.finish)
    worker.start()
    took_s = _until(lambda: _settled([first, second]))
    worker.join()
    # Duplicates arrive at this point, because the second consumer reads to the end of the partitions that it owns.
    time.sleep(2 * WORK_S)
    second.stop()
    first.stop()
    # An eager consumer also reads its retained partitions again from the committed offset. These repetitions are not
    # caused by the handoff.
    return len(set(first.given) & set(second.given)), took_s


def rebalances(bootstrap: str, protocol: str) -> float:
    """Return the median milliseconds from the start of a joining consumer until all own their share,
    with auto-commit.
    """
    took: list[float] = []
    for _ in range(JOINS):
        group, topic = f"g-{uuid.uuid4().hex[:8]}", _topic(bootstrap, RECORDS)
        members = [Member(bootstrap, group, topic, protocol, auto_commit=True) for _ in range(3)]
        for member in members[:2]:
            member.start()
        _until(lambda present=members[:2]: _settled(present))
        members[2].start()
        took.append(_until(lambda all_of=members: _settled(all_of)) * 1000)
        for member in members:
            member.stop()
    return statistics.median(took)


def committed_joins(bootstrap: str, protocol: str) -> float:
    """Return the median milliseconds from the start of a second consumer until both own their share.

    The first consumer has received every record and has committed them all.
    """
    took: list[float] = []
    for _ in range(JOINS):
        group, topic = f"g-{uuid.uuid4().hex[:8]}", _topic(bootstrap, RECORDS)
        first, second = (Member(bootstrap, group, topic, protocol, auto_commit=False) for _ in range(2))
        first.start()
        _until(lambda reader=first: len(reader.given) == RECORDS)
        first.finish()
        second.start()
        took.append(_until(lambda both=(first, second): _settled(list(both))) * 1000)
        second.stop()
        first.stop()
    return statistics.median(took)


def java_joins(bootstrap: str, protocol: str) -> float:
    """Return the same figure as `rebalances`, with Java's consumers."""
    suite = suites.load(suites.FOLDER / JAVA_SUITE)
    with tempfile.TemporaryDirectory(prefix="java-joins-") as directory:
        environment = {
            **os.environ,
            "COMPAT_BOOTSTRAP": bootstrap,
            "COMPAT_DELIVERIES": directory,
            "COMPAT_JOINS": str(JOINS),
            "COMPAT_ASSIGNOR": JAVA_ASSIGNORS[protocol],
        }
        said = subprocess.run(
            suite.command(suite.run),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=JAVA_SECONDS,
            check=True,
        )
    return statistics.median(float(line) for line in said.stdout.split())


def _java_missing() -> str | None:
    """Build the Java consumers. Return why they cannot be measured on this machine, or None."""
    suite = suites.load(suites.FOLDER / JAVA_SUITE)
    missing = suite.missing()
    if missing is None:
        suite.build_dir.mkdir(parents=True, exist_ok=True)
        subprocess.run(suite.command(suite.build), check=True, timeout=suite.build_limit_s)
    return missing


@contextlib.contextmanager
def _gateway(mode: str) -> Iterator[str]:
    directory = Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    directory.chmod(0o755)
    settings = {"group.initial.rebalance.delay.ms": "0", "group.handoff.mode": mode}
    gateway = GatewayProcess(directory, database_url=None, settings=settings, environment={})
    gateway.start()
    try:
        yield gateway.bootstrap
    finally:
        gateway.close()
        shutil.rmtree(directory)


@contextlib.contextmanager
def _kafka() -> Iterator[str]:
    assemble()
    with tempfile.TemporaryDirectory(prefix="kafka-") as directory:
        kafka = KafkaProcess(Path(directory), settings={"group.initial.rebalance.delay.ms": "0"})
        kafka.start()
        try:
            yield kafka.bootstrap
        finally:
            kafka.close()


def measure() -> list[tuple[str, str, str, bool]]:
    """Return rows of name, target, measured value and whether the target was met."""
    servers: dict[str, Callable[[], contextlib.AbstractContextManager[str]]] = {
        "off": lambda: _gateway("off"),
        "ack": lambda: _gateway("ack"),
        "drain": lambda: _gateway("drain"),
        "Apache Kafka": _kafka,
    }
    twice: dict[tuple[str, str], int] = {}
    took: dict[tuple[str, str], float] = {}
    java: dict[tuple[str, str], float] = {}
    committed: dict[tuple[str, str], float] = {}
    no_java = _java_missing()
    for name, server in servers.items():
        with server() as bootstrap:
            for protocol in PROTOCOLS:
                twice[name, protocol], _ = duplicates(bootstrap, protocol)
                if name in ("off", "ack"):
                    took[name, protocol] = rebalances(bootstrap, protocol)
                    if no_java is None:
                        java[name, protocol] = java_joins(bootstrap, protocol)
                if name in ("off", "drain"):
                    committed[name, protocol] = committed_joins(bootstrap, protocol)
    lines = [
        (
            f"records read twice at a join, {RECORDS} of them in uncommitted work, {protocol}",
            "0 in drain; off as Kafka",
            ", ".join(f"{name} {twice[name, protocol]}" for name in servers),
            twice["drain", protocol] == 0,
        )
        for protocol in PROTOCOLS
    ]
    for protocol in PROTOCOLS:
        off_ms, ack_ms = took["off", protocol], took["ack", protocol]
        lines.append(
            (
                f"a third consumer joins two, default prefetch and auto-commit, {protocol}",
                "ack at most 5 % over off",
                f"off {off_ms:.0f} ms, ack {ack_ms:.0f} ms (medians of {JOINS})",
                ack_ms <= 1.05 * off_ms,
            )
        )
        if no_java is None:
            off_ms, ack_ms = java["off", protocol], java["ack", protocol]
            measured = f"off {off_ms:.0f} ms, ack {ack_ms:.0f} ms (medians of {JOINS})"
        lines.append(
            (
                f"a third consumer of Java joins two, default prefetch and auto-commit, {protocol}",
                "ack at most 10 % over off",
                measured if no_java is None else f"not measured: {no_java}",
                no_java is None and ack_ms <= 1.1 * off_ms,
            )
        )
        off_ms, drain_ms = committed["off", protocol], committed["drain", protocol]
        lines.append(
            (
                f"a second consumer joins one that has committed everything, {protocol}",
                "drain less than 200 ms over off",
                f"off {off_ms:.0f} ms, drain {drain_ms:.0f} ms (medians of {JOINS})",
                drain_ms < off_ms + 200,
            )
        )
    return lines
