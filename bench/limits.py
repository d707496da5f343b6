"""`python -m bench.limits`: by profile, what bounds each workload of produce on this machine.

    python -m bench.limits                          all of them, Sluice, Kafka and a sink: a quarter of an hour
    python -m bench.limits paced --servers sluice   some of it
    python -m bench.limits --write docs/machine-limit.md

While a workload runs, the CPU of every process and thread is taken from /proc (`usage.py`), with the bytes written to
the disk and how busy the cores were. Beside each server stands a sink, which acknowledges everything and keeps nothing
(`sink.py`): its rate is the most that client and sockets can do here. The disk and Postgres are first measured by
themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
from confluent_kafka import KafkaError, Message, Producer

from bench import librdkafka
from bench.machine import measured_by
from bench.servers import pid_of
from bench.sink import sinking
from bench.usage import Spent, Usage, between, snapshot
from storage.embedded import EmbeddedPostgres
from tests.compat.brokers import APACHE_KAFKA, SLUICE

MEGABYTE = 1_000_000
PARTITIONS = 6
PAYLOADS = 1000
"""Number of different payloads. The producer uses them in turn."""
WARM_UP_S = 5.0
STATISTICS_MS = 500
FLUSH_S = 60.0
SEQUENTIAL_BYTES = 4 * 1024 * 1024
SEQUENTIAL_WRITES = 100
COMMITS = 2_000

BUSY = 0.85
"""A core, all cores or the disk count as exhausted from this share of use on."""

OTHERS = 0.25
"""Share of all cores. If other programs use more than this, the figures do not describe this machine."""

SERVERS = {
    "sluice": (SLUICE, {}),
    "kafka": (APACHE_KAFKA, {}),
    "kafka-synced": (APACHE_KAFKA, {"log.flush.interval.messages": "1"}),
}
SINK = "sink"


@dataclass(frozen=True, slots=True)
class Load:
    """How a workload is offered: at full speed, at `pace` records a second, or one record at a time."""

    says: str
    batch_bytes: int = 1_000_000
    record_bytes: int = 1024
    producers: int = 1
    pace: int = 0
    alone: bool = False
    """True if each client sends a record only after the acknowledgement of its previous one."""

    @property
    def flood(self) -> bool:
        return not self.pace and not self.alone


LOADS = {
    "produce": Load("records of 1 KiB at full speed in batches of up to 1 MB"),
    "produce-16k": Load("the same in batches of up to 16 KiB", batch_bytes=16_384),
    "produce-100b": Load("records of 100 bytes at full speed", record_bytes=100),
    "produce-many": Load("records of 1 KiB by twenty producers in one process", producers=20),
    "paced": Load("a thousand records of 100 bytes a second, without linger", record_bytes=100, pace=1000),
    "one-in-flight": Load("one record of 100 bytes at a time", record_bytes=100, alone=True),
}


@dataclass(slots=True)
class _Client:
    """One producer: the reports of its callbacks, and the number of requests that it has sent."""

    records: int = 0
    latencies_ms: list[float] = field(default_factory=list[float])
    failures: list[KafkaError] = field(default_factory=list[KafkaError])
    requests: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Pairs of a time in seconds and the number of Produce requests until then."""

    def on_delivery(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self.records += 1
        else:
            self.failures.append(error)

    def on_delivery_timed(self, error: KafkaError | None, message: Message) -> None:
        self.on_delivery(error, message)
        self.latencies_ms.append((message.latency() or 0.0) * 1000)

    def on_statistics(self, text: str) -> None:
        brokers = json.loads(text)["brokers"].values()
        self.requests.append((time.perf_counter(), sum(broker["req"].get("Produce", 0) for broker in brokers)))

    def requests_between(self, first_s: float, last_s: float) -> float:
        """Return the number of requests in a period, from the rate between the period's first and last statistics."""
        within = [each for each in self.requests if first_s <= each[0] <= last_s]
        if len(within) < 2:
            raise RuntimeError("librdkafka reported no statistics of its requests")
        (since_s, before), (until_s, after) = within[0], within[-1]
        return (after - before) / (until_s - since_s) * (last_s - first_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """Figures of one workload on one server."""

    server: str
    load: Load
    spent: Spent
    records: int
    requests: float
    p50_ms: float | None

    @property
    def payload_bytes(self) -> int:
        return self.records * self.load.record_bytes

    @property
    def megabytes_per_second(self) -> float:
        return self.payload_bytes / MEGABYTE / self.spent.seconds

    @property
    def server_cpu_s(self) -> float:
        return sum(usage.cpu_s for group, usage in self.spent.groups.items() if not group.startswith("client:"))

    def verdict(self) -> str:
        """Return the resource that is exhausted according to these figures."""
        machine, seconds = self.spent.machine, self.spent.seconds
        cores = os.cpu_count() or 1
        busy = 1 - (machine.idle_s + machine.disk_wait_s) / (cores * seconds)
        group, usage = max(self.spent.groups.items(), key=lambda item: item[1].cpu_s)
        most = f"most of it {group}, {usage.cpu_s / seconds:.2f} cores"
        if self.spent.others_s >= OTHERS * cores * seconds:
            return f"what else goes on here, {self.spent.others_s / seconds:.2f} cores: these figures say nothing"
        if busy >= BUSY:
            return f"the cores: {busy:.0%} of both is used, {most}"
        for name in ("event loop", "client: Python"):
            for group, usage in self.spent.groups.items():
                if name in group and usage.cpu_s >= BUSY * seconds:
                    return f"one thread: {group} uses {usage.cpu_s / seconds:.0%} of a core"
        if machine.disk_busy_s >= BUSY * seconds:
            return f"the disk: busy {machine.disk_busy_s / seconds:.0%} of the time"
        if self.load.flood:
            return f"none of cores, threads and disk by itself: {busy:.0%} of the cores is used; {most}"
        return (
            f"nothing: the load is {'one at a time' if self.load.alone else 'given'}, {busy:.0%} of the cores is used"
        )


# --- the load ---------------------------------------------------------------------------------------------------------


def profile(server: str, load: Load, bootstrap: str, pid: int, directory: Path, seconds: float) -> Profile:
    """Offer the load to an existing topic, for that time after a warm-up."""
    clients = [_Client() for _ in range(load.producers)]
    done = threading.Event()
    errors: list[BaseException] = []

    def offer(client: _Client) -> None:
        try:
            _offer(load, bootstrap, client, done)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=offer, args=(client,)) for client in clients]
    roles = {"client": os.getpid(), _role(server): pid}
    for thread in threads:
        thread.start()
    try:
        time.sleep(WARM_UP_S)
        timed = [len(client.latencies_ms) for client in clients]
        before = sum(client.records for client in clients)
        first = snapshot(roles, directory)
        time.sleep(seconds)
        last = snapshot(roles, directory)
        records = sum(client.records for client in clients) - before
    finally:
        done.set()
        for thread in threads:
            thread.join()
    failures = [*errors, *(failure for client in clients for failure in client.failures)]
    if failures or not records:
        raise RuntimeError(f"{len(failures)} failures, {records} records acknowledged: {failures[:1]}")
    latencies_ms = [each for client, begin in zip(clients, timed, strict=True) for each in client.latencies_ms[begin:]]
    return Profile(
        server,
        load,
        between(first, last),
        records,
        sum(client.requests_between(first.at_s, last.at_s) for client in clients),
        statistics.median(latencies_ms) if latencies_ms else None,
    )


def _role(server: str) -> str:
    return {"sluice": "gateway", SINK: "sink"}.get(server, "kafka")


def _offer(load: Load, bootstrap: str, client: _Client, done: threading.Event) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": 5 if load.flood else 0,
            "batch.size": load.batch_bytes,
            "queue.buffering.max.kbytes": 65536 // load.producers,
            "queue.buffering.max.messages": 1_000_000,
            "statistics.interval.ms": STATISTICS_MS,
            "stats_cb": client.on_statistics,
        }
    )
    turns = itertools.cycle([os.urandom(load.record_bytes) for _ in range(PAYLOADS)])
    if load.flood:
        _flood(producer, turns, client, done)
    elif load.alone:
        while not done.is_set():
            acknowledged = len(client.latencies_ms)
            producer.produce("limits", next(turns), partition=0, on_delivery=client.on_delivery_timed)
            while len(client.latencies_ms) == acknowledged:
                producer.poll(1)
    else:
        began = time.perf_counter()
        number = 0
        while not done.is_set():
            while number < (time.perf_counter() - began) * load.pace:
                producer.produce("limits", next(turns), on_delivery=client.on_delivery_timed)
                number += 1
            producer.poll(0.001)
    if producer.flush(FLUSH_S):
        raise RuntimeError(f"not all records were acknowledged within {FLUSH_S:.0f} s")


def _flood(producer: Producer, turns: Iterator[bytes], client: _Client, done: threading.Event) -> None:
    while not done.is_set():
        for _ in range(200):
            while True:
                try:
                    producer.produce("limits", next(turns), on_delivery=client.on_delivery)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.poll(0)


@contextlib.contextmanager
def serving(server: str) -> Iterator[tuple[str, int, Path]]:
    """Start a fresh server with the topic. Yield its address, process id and directory."""
    directory = Path(tempfile.mkdtemp(prefix="sluice-limits-", dir=os.environ.get("SLUICE_BENCH_DIR")))
    directory.chmod(0o755)
    try:
        if server == SINK:
            with sinking(PARTITIONS) as (bootstrap, pid):
                yield bootstrap, pid, directory
            return
        broker, settings = SERVERS[server]
        process = broker.process(directory, settings)
        try:
            process.start()
            librdkafka.create_topic(process.bootstrap, "limits", PARTITIONS)
            yield process.bootstrap, pid_of(process), directory
        finally:
            process.close()
    finally:
        shutil.rmtree(directory)


# --- floors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Floors:
    """Costs of the disk and of Postgres alone, measured one after the other."""

    sync_ms: float
    """Median milliseconds of one write of 8 KiB with its sync."""
    sequential: float
    """Megabytes per second when SEQUENTIAL_BYTES are repeatedly written and synced."""
    commit_ms: float
    """Median milliseconds to commit a row of 100 bytes."""
    commit: Spent
    """Use of the machine by all COMMITS commits together."""


def measure_floors() -> Floors:
    directory = Path(tempfile.mkdtemp(prefix="sluice-limits-", dir=os.environ.get("SLUICE_BENCH_DIR")))
    directory.chmod(0o755)
    try:
        sync_ms = librdkafka.disk_sync(str(directory)).p50_ms
        sequential = _sequential(directory / "sequential")
        commit_ms, commit = asyncio.run(_commits(directory / "postgres"))
        return Floors(sync_ms, sequential, commit_ms, commit)
    finally:
        shutil.rmtree(directory)


def _sequential(path: Path) -> float:
    block = os.urandom(SEQUENTIAL_BYTES)
    total_bytes = SEQUENTIAL_BYTES * SEQUENTIAL_WRITES
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, total_bytes)
        os.fsync(descriptor)
        began = time.perf_counter()
        for index in range(SEQUENTIAL_WRITES):
            os.pwrite(descriptor, block, index * SEQUENTIAL_BYTES)
            os.fdatasync(descriptor)
        return total_bytes / MEGABYTE / (time.perf_counter() - began)
    finally:
        os.close(descriptor)
        path.unlink()


async def _commits(directory: Path) -> tuple[float, Spent]:
    server = EmbeddedPostgres(directory)
    connection = await asyncpg.connect(await server.start())
    try:
        await connection.execute("create table floor (number bigint primary key, bytes bytea not null)")
        times_ms: list[float] = []
        payload = os.urandom(100)
        roles = {"client": os.getpid(), "postgres": server.pid or 0}
        first = snapshot(roles, directory)
        for number in range(COMMITS):
            began = time.perf_counter()
            await connection.execute("insert into floor values ($1, $2)", number, payload)
            times_ms.append((time.perf_counter() - began) * 1000)
        return statistics.median(times_ms), between(first, snapshot(roles, directory))
    finally:
        await connection.close()
        await server.stop()


# --- the report -------------------------------------------------------------------------------------------------------


def report(floors: Floors, found: dict[str, list[Profile]]) -> str:
    commit_cpu_ms = {
        group.removeprefix("Postgres: "): usage.cpu_s * 1000 / COMMITS
        for group, usage in floors.commit.groups.items()
        if group.startswith("Postgres")
    }
    lines = [
        "## What the parts take by themselves",
        "",
        f"- A write of 8 KiB and its sync: {floors.sync_ms:.2f} ms (p50).",
        f"- {SEQUENTIAL_BYTES / MEGABYTE:.1f} MB and a sync, again and again into room that is allocated: "
        f"{floors.sequential:.0f} MB/s.",
        f"- A row of 100 bytes committed in Postgres: {floors.commit_ms:.2f} ms (p50), CPU "
        f"{sum(commit_cpu_ms.values()):.2f} ms of Postgres ("
        + ", ".join(
            f"{group.removeprefix('Postgres: ')} {ms:.2f}" for group, ms in commit_cpu_ms.items() if ms >= 0.005
        )
        + f"), {floors.commit.machine.flushes / COMMITS:.1f} flushes of the disk.",
        "",
    ]
    for name, profiles in found.items():
        lines += [f"## {name}: {LOADS[name].says}", "", *_summary(profiles)]
        if LOADS[name].flood:
            lines += _ceilings(profiles)
        else:
            lines += _beside_commit(profiles, floors.commit_ms, sum(commit_cpu_ms.values()))
        lines.append("")
        for each in profiles:
            lines += _table(each)
    return "\n".join(lines)


def _summary(profiles: Sequence[Profile]) -> list[str]:
    cores = os.cpu_count() or 1
    lines = [
        "| server | MB/s | requests/s | records each | p50 ms | server CPU ms/MB | ms/request | cores used "
        "| of it kernel | waiting for the disk | disk MB/MB | flushes/s | disk busy |",
        "|---" * 13 + "|",
    ]
    for each in profiles:
        spent, machine = each.spent, each.spent.machine
        lines.append(
            f"| {each.server} | {each.megabytes_per_second:.1f} | {each.requests / spent.seconds:,.0f} "
            f"| {each.records / each.requests:.1f} | {'' if each.p50_ms is None else f'{each.p50_ms:.2f}'} "
            f"| {each.server_cpu_s * 1000 / (each.payload_bytes / MEGABYTE):.2f} "
            f"| {each.server_cpu_s * 1000 / each.requests:.3f} "
            f"| {(machine.user_s + machine.system_s) / spent.seconds:.2f} of {cores} "
            f"| {machine.system_s / max(machine.user_s + machine.system_s, 1e-9):.0%} "
            f"| {machine.disk_wait_s / spent.seconds:.2f} | {machine.written_bytes / each.payload_bytes:.2f} "
            f"| {machine.flushes / spent.seconds:,.0f} | {machine.disk_busy_s / spent.seconds:.0%} |"
        )
    lines.append("")
    lines += [f"- {each.server} is bounded by {each.verdict()}." for each in profiles]
    return lines


def _ceilings(profiles: Sequence[Profile]) -> list[str]:
    """Return the rates that could be reached if only the cores were a limit."""
    cores = os.cpu_count() or 1
    lines: list[str] = []
    for each in profiles:
        megabytes = each.payload_bytes / MEGABYTE
        client_ms = (each.spent.known_s - each.server_cpu_s) * 1000 / megabytes
        server_ms = each.server_cpu_s * 1000 / megabytes
        lines.append(
            f"- {each.server}: {client_ms:.2f} ms/MB of the client and {server_ms:.2f} of the server fill {cores} "
            f"cores at {cores * 1000 / (client_ms + server_ms):.0f} MB/s."
        )
    return lines


def _beside_commit(profiles: Sequence[Profile], commit_ms: float, commit_cpu_ms: float) -> list[str]:
    lines: list[str] = []
    for each in profiles:
        ms = {
            part: sum(usage.cpu_s for group, usage in each.spent.groups.items() if group.startswith(part)) * 1000
            for part in ("Postgres", "gateway")
        }
        if ms["Postgres"]:
            lines.append(
                f"- A bare commit takes {commit_ms:.2f} ms and {commit_cpu_ms:.3f} ms of Postgres' CPU; a request to "
                f"{each.server} {each.p50_ms or 0:.2f} ms, {ms['Postgres'] / each.requests:.3f} of Postgres' CPU and "
                f"{ms['gateway'] / each.requests:.3f} of the gateway's."
            )
    return lines


def _table(found: Profile) -> list[str]:
    spent = found.spent
    megabytes = found.payload_bytes / MEGABYTE
    lines = [
        f"Where the CPU goes with {found.server}, {spent.seconds:.0f} s:",
        "",
        "| who | cores | of it kernel | ms/MB | ms/request | waits/request | preempted/request | disk MB/MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = sorted(spent.groups.items(), key=lambda item: -item[1].cpu_s)
    others = Usage(spent.others_s)
    for group, usage in [*rows, ("others: kernel threads, interrupts, programs beside", others)]:
        kernel = "" if usage is others or not usage.cpu_s else f"{usage.system_s / usage.cpu_s:.0%}"
        lines.append(
            f"| {group} | {usage.cpu_s / spent.seconds:.3f} | {kernel} | {usage.cpu_s * 1000 / megabytes:.2f} "
            f"| {usage.cpu_s * 1000 / found.requests:.3f} | {usage.waits / found.requests:.2f} "
            f"| {usage.preempted / found.requests:.2f} | {usage.written_bytes / found.payload_bytes:.2f} |"
        )
    return [*lines, ""]


_ABOUT = (
    "Servers take turns, one at a time, with the same stock client, which shares the cores. `sink` acknowledges "
    "everything at once and keeps nothing: the most that client and sockets can do here. CPU is that of each thread as "
    "the kernel counts it, user and system; a wait is a context switch that the thread asked for. Kafka acknowledges "
    "before a sync as it is shipped, Sluice after one. What bounds a workload is told by the figures: cores, a thread "
    f"or the disk of which {BUSY:.0%} is used."
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"one of {', '.join(LOADS)}")
    parser.add_argument("--seconds", type=float, default=15, help="seconds of each workload on each server")
    parser.add_argument("--servers", default=f"{SINK},sluice,kafka", help=f"some of {SINK}, {', '.join(SERVERS)}")
    parser.add_argument("--write", type=Path, help="also write the report to this file")
    given = parser.parse_args()
    names, servers = given.workloads or list(LOADS), given.servers.split(",")
    if unknown := {*names} - {*LOADS} | {*servers} - {SINK, *SERVERS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    _say("the disk and Postgres by themselves")
    floors = measure_floors()
    found: dict[str, list[Profile]] = {}
    for name in names:
        for server in servers:
            with serving(server) as (bootstrap, pid, directory):
                each = profile(server, LOADS[name], bootstrap, pid, directory, given.seconds)
            found.setdefault(name, []).append(each)
            _say(f"{name:14} {server:12} {each.megabytes_per_second:8.1f} MB/s, bounded by {each.verdict()}")
    head = f"# What the machine's limit is\n\n{measured_by('python -m bench.limits')}\n\n{_ABOUT}"
    text = f"{head}\n\n{report(floors, found)}"
    print(text)
    if given.write is not None:
        given.write.write_text(text)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
