"""`python -m bench curves`: what a load costs as a count grows, one curve for each kind of count.

    python -m bench curves                       all curves, a quarter of an hour
    python -m bench curves partitions nodes      some of them
    python -m bench curves --quick               the smallest steps of all curves, some minutes
    python -m bench curves --write docs/curves.md    also write the report, and a graph of each curve beside it

Each step starts a fresh gateway, brings up what is counted, and then offers paced Produce requests of idempotent
producers from a process of their own (`paced_requests.py`). In that time it takes the CPU of the gateway and of its
Postgres from /proc. So a step shows the cost of the load and of what is counted, and the latency beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import resource
import shlex
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from bench import cluster
from bench.frames import Connection, frame, join, sync
from bench.graph import Line, Panel, over_count
from bench.machine import measured_by
from bench.paced_requests import Load, Paced
from bench.servers import running_gateway
from bench.usage import Spent, between, snapshot
from protocol.api_keys import ApiKey
from protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from protocol.messages.heartbeat import HeartbeatRequest
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)

PARTITIONS = 6
PACE = 1000.0
"""Requests a second of most curves."""
WIDE_PACE = 10.0
"""Requests a second of the curves that count how wide requests are."""
NODE_PACE = 500.0
"""Requests a second for each node."""
WARM_UP_S = 3.0
SECONDS = 10.0
QUICK_WARM_UP_S, QUICK_SECONDS = 1.0, 2.0
GROUP_INTERVAL_S = 3.0
"""Seconds between two heartbeats of a member, and between two of its commits. Kafka's default for heartbeats is the
same.
"""
LINES = 50
"""Connections that the members of all groups share."""
CONNECTED_AT_ONCE = 500
TOPICS_PER_REQUEST = 100
DEADLINE_S = 300.0
BENT = 2.0
"""A curve bends at the first step whose p99 or CPU is this many times that of the first step."""
NOTABLE_CORES = 0.01
KEPT = 0.95
"""A step keeps its pace if at least this share of its requests is answered in time."""


@dataclass(frozen=True, slots=True)
class Step:
    count: int
    paced: Paced
    spent: Spent

    def cores(self, prefix: str) -> float:
        """Return the cores used by process groups whose names have this prefix, for example `Postgres:`."""
        used_s = sum(usage.cpu_s for group, usage in self.spent.groups.items() if group.startswith(prefix))
        return used_s / self.spent.seconds

    @property
    def postgres_cores(self) -> float:
        return self.cores("Postgres:")

    @property
    def gateway_cores(self) -> float:
        return self.cores("gateway")

    @property
    def kept_pace(self) -> bool:
        return self.paced.answered_per_s >= KEPT * self.paced.offered_per_s


@dataclass(frozen=True, slots=True)
class Curve:
    says: str
    """Description of the count on the x axis and of the load, for the report."""
    steps: Sequence[int]
    quick: Sequence[int]
    measure: Callable[[int, float, float], Step]
    """Takes the count, the seconds of the warm-up, and the measured seconds. Returns a step of the curve."""


# --- the steps of each curve ------------------------------------------------------------------------------------------


def _offer(load: Load, roots: Mapping[str, int], directory: Path, count: int) -> Step:
    """Offer the load from a process of its own. Measure the CPU time of the servers from the end of its warm-up to its
    end. Raise RuntimeError if a request fails or the load does not end in time.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "bench.paced_requests"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with _deadline(process, load.warm_up_s + load.seconds + DEADLINE_S):
            process.stdin.write(json.dumps(asdict(load)))
            process.stdin.close()
            if process.stdout.readline() != "warm\n":
                raise RuntimeError(f"the load of {count:,} did not begin")
            first = snapshot(roots, directory)
            if process.stdout.readline() != "done\n":
                raise RuntimeError(f"the load of {count:,} ended early")
            last = snapshot(roots, directory)
            answer = process.stdout.read()
    if process.returncode or not answer:
        raise RuntimeError(f"the load of {count:,} ended with {process.returncode}")
    return Step(count, Paced(**json.loads(answer)), between(first, last))


@contextlib.contextmanager
def _deadline(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """Kill the process after this time, or if the context ends with an error."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        timer.cancel()


def _topics(bootstrap: str, count: int, partitions: int) -> list[str]:
    names = [f"curve-{number}" for number in range(count)]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for first in range(0, count, TOPICS_PER_REQUEST):
        some = [NewTopic(name, partitions, 1) for name in names[first : first + TOPICS_PER_REQUEST]]
        for made in admin.create_topics(some, operation_timeout=60).values():
            made.result(60)
    return names


def _on_one_node(
    count: int,
    warm_up_s: float,
    seconds: float,
    *,
    topics: int = 1,
    partitions: int = PARTITIONS,
    producers: int = 1,
    topics_per_request: int = 1,
    pace: float = PACE,
    crowd: Callable[[str, int], contextlib.AbstractAsyncContextManager[None]] | None = None,
) -> Step:
    """Measure one step on a fresh gateway with an embedded Postgres. `crowd` exists while the load is offered."""
    with running_gateway() as gateway:
        names = _topics(gateway.bootstrap, topics, partitions)
        load = Load([gateway.bootstrap], names, partitions, producers, topics_per_request, pace, warm_up_s, seconds)

        async def measure() -> Step:
            context = contextlib.nullcontext() if crowd is None else crowd(gateway.bootstrap, count)
            async with context:
                return await asyncio.to_thread(_offer, load, {"gateway": gateway.pid}, gateway.data_dir, count)

        return asyncio.run(measure())


def _partitions(count: int, warm_up_s: float, seconds: float) -> Step:
    return _on_one_node(count, warm_up_s, seconds, partitions=count)


def _producers(count: int, warm_up_s: float, seconds: float) -> Step:
    return _on_one_node(count, warm_up_s, seconds, producers=count)


def _topics_per_request(count: int, warm_up_s: float, seconds: float) -> Step:
    return _on_one_node(count, warm_up_s, seconds, topics=count, partitions=1, topics_per_request=count, pace=WIDE_PACE)


def _connections(count: int, warm_up_s: float, seconds: float) -> Step:
    return _on_one_node(count, warm_up_s, seconds, crowd=_idle_connections)


def _groups(count: int, warm_up_s: float, seconds: float) -> Step:
    return _on_one_node(count, warm_up_s, seconds, crowd=_live_groups)


def _nodes(count: int, warm_up_s: float, seconds: float) -> Step:
    with cluster.nodes_on_one_postgres(count) as (nodes, postmaster):
        cluster.start(nodes)
        names = _topics(nodes[0].bootstrap, 1, PARTITIONS * count)
        bootstraps = [node.bootstrap for node in nodes]
        load = Load(bootstraps, names, PARTITIONS * count, count, 1, NODE_PACE * count, warm_up_s, seconds)
        roots = {**{f"gateway {number}": node.pid for number, node in enumerate(nodes, 1)}, "postgres": postmaster}
        return _offer(load, roots, nodes[0].data_dir, count)


@contextlib.asynccontextmanager
async def _idle_connections(bootstrap: str, count: int) -> AsyncIterator[None]:
    """Open connections that send ApiVersions and then nothing more."""
    host, _, port = bootstrap.rpartition(":")
    hello = ApiVersionsRequest(client_software_name="bench", client_software_version="1")

    async def connect() -> Connection:
        connection = await Connection.open(host, int(port))
        await connection.ask(ApiKey.API_VERSIONS, 3, hello, ApiVersionsResponse)
        return connection

    connections: list[Connection] = []
    try:
        for first in range(0, count, CONNECTED_AT_ONCE):
            some = min(CONNECTED_AT_ONCE, count - first)
            connections += await asyncio.gather(*(connect() for _ in range(some)))
        yield
    finally:
        for connection in connections:
            connection.writer.close()


@contextlib.asynccontextmanager
async def _live_groups(bootstrap: str, count: int) -> AsyncIterator[None]:
    """Run classic groups of one member each, which sends a heartbeat and commits an offset every three seconds."""
    host, _, port = bootstrap.rpartition(":")
    lines = [await Connection.open(host, int(port)) for _ in range(min(LINES, count))]
    name = f"curve-{time.time_ns()}"

    async def enter(line: Connection, groups: Sequence[str]) -> list[bytes]:
        """Return the frames that the members of these groups send every three seconds."""
        frames: list[bytes] = []
        for group_id in groups:
            joined = await join(line, group_id)
            await sync(line, group_id, joined)
            beat = HeartbeatRequest(group_id=group_id, generation_id=joined.generation_id, member_id=joined.member_id)
            commit = OffsetCommitRequest(
                group_id=group_id,
                generation_id_or_member_epoch=joined.generation_id,
                member_id=joined.member_id,
                topics=(
                    OffsetCommitRequestTopic(
                        name="curve-0",
                        partitions=(OffsetCommitRequestPartition(partition_index=0, committed_offset=0),),
                    ),
                ),
            )
            frames += [frame(ApiKey.HEARTBEAT, 4, 1, beat), frame(ApiKey.OFFSET_COMMIT, 8, 1, commit)]
        return frames

    async def live(line: Connection, frames: Sequence[bytes]) -> None:
        """Send each frame once in an interval, one after the other."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for number, request in enumerate(itertools.cycle(frames)):
            await asyncio.sleep(max(0.0, began_s + GROUP_INTERVAL_S * number / len(frames) - loop.time()))
            line.writer.write(request)
            (size_bytes,) = struct.unpack(">i", await line.reader.readexactly(4))
            await line.reader.readexactly(size_bytes)

    try:
        groups = [[f"{name}-{number}" for number in range(at, count, len(lines))] for at in range(len(lines))]
        entered = await asyncio.gather(*(enter(line, own) for line, own in zip(lines, groups, strict=True)))
        living = [asyncio.create_task(live(line, own)) for line, own in zip(lines, entered, strict=True)]
        try:
            yield
        finally:
            for task in living:
                task.cancel()
            ended = await asyncio.gather(*living, return_exceptions=True)
        for outcome in ended:
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError(f"the members of a connection ended: {outcome!r}")
    finally:
        for line in lines:
            line.writer.close()


CURVES: Mapping[str, Curve] = {
    "partitions": Curve(
        "partitions of one topic, 1,000 requests a second over all of them",
        (1, 10, 100, 1_000, 10_000), (1, 10, 100), _partitions,
    ),
    "groups": Curve(
        "groups whose member sends a heartbeat and a commit every three seconds, beside 1,000 requests a second",
        (1, 10, 100, 1_000, 10_000), (1, 10, 100), _groups,
    ),
    "connections": Curve(
        "idle connections beside 1,000 requests a second",
        (1, 10, 100, 1_000, 10_000), (1, 10, 100), _connections,
    ),
    "producers": Curve(
        "producers that share 1,000 requests a second",
        (1, 10, 100, 1_000), (1, 10, 100), _producers,
    ),
    "topics": Curve(
        "topics in each request, 10 requests a second",
        (1, 10, 100, 1_000), (1, 10, 100), _topics_per_request,
    ),
    "nodes": Curve(
        "nodes on one Postgres, 500 requests a second for each",
        (1, 2, 3, 4), (1, 2), _nodes,
    ),
}  # fmt: skip


# --- the report -------------------------------------------------------------------------------------------------------


def measure(name: str, counts: Sequence[int], warm_up_s: float, seconds: float) -> list[Step]:
    """Measure the steps of a curve. In that time the limit of open files is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        steps: list[Step] = []
        for count in counts:
            print(f"measuring {count:,} {name} …", file=sys.stderr, flush=True)
            steps.append(CURVES[name].measure(count, warm_up_s, seconds))
        return steps
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def bend(steps: Sequence[Step]) -> str:
    """Return the step at which the curve bends, and the processes whose CPU time grew most from the step before."""
    first = steps[0]
    for before, step in itertools.pairwise(steps):
        grown = {
            "p99": step.paced.p99_ms / first.paced.p99_ms,
            "the gateway's CPU": step.gateway_cores / max(first.gateway_cores, 0.01),
            "Postgres' CPU": step.postgres_cores / max(first.postgres_cores, 0.01),
        }
        over = [
            f"{what} is {factor:.1f} times that of {first.count:,}" for what, factor in grown.items() if factor >= BENT
        ]
        if not step.kept_pace:
            over.insert(
                0, f"only {step.paced.answered_per_s:,.0f} of {step.paced.offered_per_s:,.0f} requests/s were answered"
            )
        if over:
            cores = {group: step.cores(group) - before.cores(group) for group in step.spent.groups}
            group = max(cores, key=lambda each: cores[each])
            grew = f"{group} grew most, by {cores[group]:.2f} cores"
            if cores[group] < NOTABLE_CORES:
                grew = "no process used more CPU"
            return f"It bends at {step.count:,}: {', '.join(over)}. From {before.count:,} to {step.count:,}, {grew}."
    return (
        f"It does not bend up to {steps[-1].count:,}: neither p99 nor CPU reaches {BENT:.0f} times that of "
        f"{first.count:,}."
    )


def table(name: str, steps: Sequence[Step]) -> str:
    lines = [
        f"| {name} | gateway, cores | Postgres, cores | p50 | p99 | answered |",
        "|---|---|---|---|---|---|",
        *(
            f"| {step.count:,} | {step.gateway_cores:.2f} | {step.postgres_cores:.2f} | {step.paced.p50_ms:.2f} ms | "
            f"{step.paced.p99_ms:.2f} ms | {step.paced.answered_per_s:,.0f} of {step.paced.offered_per_s:,.0f}/s |"
            for step in steps
        ),
    ]
    return "\n".join(lines)


def graph(name: str, steps: Sequence[Step]) -> str:
    """Return the latency and the CPU time over the count as SVG."""

    def line(what: str, value: Callable[[Step], float]) -> Line:
        return Line(what, [(step.count, value(step)) for step in steps])

    panels = [
        Panel([line("p50", lambda step: step.paced.p50_ms), line("p99", lambda step: step.paced.p99_ms)], "ms"),
        Panel(
            [line("gateway", lambda step: step.gateway_cores), line("Postgres", lambda step: step.postgres_cores)],
            "cores",
        ),
    ]
    return over_count(f"Latency and CPU by {CURVES[name].says}", panels, [step.count for step in steps])


def report(found: Mapping[str, Sequence[Step]], command: str, pictures: Mapping[str, str]) -> str:
    """Return the report as Markdown. `pictures` holds the file name of each curve's graph."""
    lines = [
        "# Cost as it grows",
        "",
        measured_by(command),
        "",
        "Each step is a fresh gateway under a paced load of idempotent Produce requests, with one record of 100 bytes "
        "for each partition that they name. Latency is from send to answer.",
    ]
    for name, steps in found.items():
        lines += ["", f"## {name.capitalize()}", "", f"x: {CURVES[name].says}.", ""]
        if name in pictures:
            lines += [f"![Latency and CPU by {name}]({pictures[name]})", ""]
        lines += [table(name, steps), "", bend(steps)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench curves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("curves", nargs="*", metavar="CURVE", help=f"one of {', '.join(CURVES)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="few and small steps, to see that everything runs")
    parser.add_argument(
        "--write", type=Path, metavar="FILE.md", help="also write the report, and FILE-CURVE.svg for each curve"
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.curves) - set(CURVES):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    warm_up_s, seconds = (QUICK_WARM_UP_S, QUICK_SECONDS) if given.quick else (WARM_UP_S, SECONDS)
    found: dict[str, list[Step]] = {}
    for name, curve in CURVES.items():
        if name in given.curves or not given.curves:
            found[name] = measure(name, curve.quick if given.quick else curve.steps, warm_up_s, seconds)
            print(f"{table(name, found[name])}\n\n{bend(found[name])}\n", flush=True)
    if given.write is not None:
        pictures: dict[str, str] = {}
        for name, steps in found.items():
            picture = given.write.with_name(f"{given.write.stem}-{name}.svg")
            picture.write_text(graph(name, steps))
            pictures[name] = picture.name
        command = shlex.join(["python", "-m", "bench", "curves", *arguments])
        given.write.write_text(report(found, command, pictures))
    return 0
