"""`python -m bench.peers`: Sluice beside Apache Kafka, the same client on the same machine, one server at a time.

    python -m bench.peers                        all workloads, three servers, three rounds: some hours
    python -m bench.peers produce one-in-flight  some of it
    python -m bench.peers --seconds 5 --rounds 1 paced-java end-to-end
    python -m bench.peers produce-java paced-java produce-franz-go paced-franz-go   clients with their default settings
    python -m bench.peers --against ../before --rounds 4 consume   beside another checkout instead of Kafka

Servers take turns within a round, so that other load on the machine falls on all. Kafka is measured twice: as it is
shipped, when it acknowledges before a sync, and with a sync for every message (`log.flush.interval.messages=1`). Sluice
always syncs. Two checkouts change their order with each round. Ratios are of medians. A ratio above 1 says that Sluice
is faster, or needs more if the figure is a cost.

A workload is left out, and the report says so, if this machine lacks a program that its client needs.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench import commit_floor
from bench.client_defaults import ClientWorkload
from bench.machine import measured_by
from bench.servers import fresh_directory
from bench.workloads import WORKLOADS
from tests.compat.brokers import APACHE_KAFKA, SLUICE, Broker, BrokerProcess
from tests.gateway_process import GatewayProcess

# Each server has its name, the way to start it, and its settings. Ratios compare the first server with each other one.
Servers = Sequence[tuple[str, Broker, dict[str, str]]]

PEERS: Servers = (
    ("Sluice", SLUICE, {}),
    ("Kafka", APACHE_KAFKA, {}),
    ("Kafka synced", APACHE_KAFKA, {"log.flush.interval.messages": "1"}),
)


def checkouts(other: Path) -> Servers:
    """Return this checkout and another one. The other checkout runs with the same packages."""

    def process(directory: Path, settings: Mapping[str, str]) -> BrokerProcess:
        return GatewayProcess(directory, database_url=None, settings=settings, environment={}, root=other)

    return (("Sluice", SLUICE, {}), (other.name, replace(SLUICE, name=other.name, process=process), {}))


def measure(
    names: Sequence[str], servers: Servers, *, seconds: float, rounds: int
) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return the values of each server for each workload and figure, in the order of the rounds."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name in names:
        for number in range(rounds):
            # Servers take turns at being first, so that the order favours no server.
            turns = servers[::-1] if len(servers) == 2 and number % 2 else servers
            for server, broker, settings in turns:
                with fresh_directory("sluice-peers-") as directory:
                    process = broker.process(directory, settings)
                    try:
                        process.start()
                        figures = WORKLOADS[name](process, seconds)
                    finally:
                        process.close()
                for figure, value in figures.items():
                    found.setdefault((name, figure), {}).setdefault(server, []).append(value)
                print(
                    f"{name:15} {server:13} " + ", ".join(f"{value:.2f} {figure}" for figure, value in figures.items())
                )
    return found


class Target(NamedTuple):
    """A limit for the ratio of Sluice's median to another server's median."""

    server: str
    bound: float
    at_most: bool = False
    """True if the ratio must not exceed the limit, because the figure is a time or a cost."""

    def met(self, ratio: float) -> bool:
        return ratio <= self.bound if self.at_most else ratio >= self.bound


_THROUGHPUT = (Target("Kafka", 1.0), Target("Kafka synced", 4.0))
_LATENCY = (Target("Kafka synced", 1.0, at_most=True),)
_COST = (Target("Kafka synced", 0.8, at_most=True),)
TARGETS: Mapping[tuple[str, str], Sequence[Target]] = {
    ("produce-idempotent", "MiB/s"): _THROUGHPUT,
    ("produce-java", "MiB/s"): _THROUGHPUT,
    **{(name, figure): _LATENCY for name in ("paced", "paced-java") for figure in ("p50 ms", "p99 ms")},
    **{(name, "server CPU ms/record"): _COST for name in ("paced", "paced-java")},
    ("one-in-flight", "p50 ms"): _LATENCY,
    ("end-to-end", "p50 ms"): _LATENCY,
    ("transactions", "eight producers' transactions/s"): (Target("Kafka", 1.0), Target("Kafka synced", 3.0)),
    ("consume", "MiB/s"): (Target("Kafka", 1.0),),
    ("consume-warm", "MiB/s"): (Target("Kafka", 1.0),),
}

Found = Mapping[tuple[str, str], Mapping[str, Sequence[float]]]


def misses(found: Found) -> dict[tuple[str, str], list[Target]]:
    """Return the targets that are missed for each workload. A server that was not measured has no target."""
    missed: dict[tuple[str, str], list[Target]] = {}
    for row, values in found.items():
        ratios = {server: _ratio(values["Sluice"], values[server]) for server in values}
        if short := [
            each for each in TARGETS.get(row, ()) if each.server in ratios and not each.met(ratios[each.server])
        ]:
            missed[row] = short
    return missed


def floors(
    names: Iterable[str], seconds: float, warm_up_s: float = commit_floor.WARM_UP_S
) -> dict[tuple[str, str], float]:
    """Return the figures of programs that only make the commits of these workloads. Each runs on a fresh gateway.
    Workloads without such a program have none.
    """
    figures: dict[tuple[str, str], float] = {}
    for name in names:
        if name not in commit_floor.FLOORS:
            continue
        with fresh_directory("sluice-peers-") as directory:
            gateway = GatewayProcess(directory, database_url=None, settings={}, environment={})
            try:
                gateway.start()
                alone = commit_floor.measure(name, gateway, seconds, warm_up_s)
            finally:
                gateway.close()
        figures.update({(name, figure): value for figure, value in alone.items()})
        print(f"{name:15} commits alone " + ", ".join(f"{value:.2f} {figure}" for figure, value in alone.items()))
    return figures


def report(found: Found, servers: Servers, commits_alone: Mapping[tuple[str, str], float] | None = None) -> str:
    """Return a table with the median, least and greatest value of several rounds, and the ratios of the medians. If
    `commits_alone` is given, the table also shows the targets, and for each missed target the figure of commits without
    other work.
    """
    first, *others = (server for server, *_ in servers)
    heads = ["workload", "figure", first, *others, *(f"{first} ÷ {other}" for other in others)]
    if commits_alone is not None:
        heads += ["target", "its commits alone"]
    missed = misses(found) if commits_alone is not None else {}
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row, values in found.items():
        shown = [_median_and_spread(values[server]) for server, *_ in servers]
        ratios = [_shown_ratio(_ratio(values[first], values[other])) for other in others]
        cells = [*row, *shown, *ratios]
        if commits_alone is not None:
            targets = [_shown(target, target in missed.get(row, ())) for target in TARGETS.get(row, ())]
            floor = commits_alone.get(row) if row in missed else None
            cells += [", ".join(targets), "" if floor is None else f"{floor:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(target: Target, missed: bool) -> str:
    bound = f"{'≤' if target.at_most else '≥'} {target.bound:.1f} × {target.server}"
    return f"{bound}: **missed**" if missed else f"{bound}: met"


def _ratio(values: Sequence[float], other: Sequence[float]) -> float:
    """Return the ratio of the medians. It is infinite if the other median is 0, which happens with times in whole
    milliseconds."""
    divisor = statistics.median(other)
    return statistics.median(values) / divisor if divisor else math.inf


def _shown_ratio(ratio: float) -> str:
    return "–" if math.isinf(ratio) else f"{ratio:.2f}"


def _median_and_spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"one of {', '.join(WORKLOADS)}")
    parser.add_argument("--seconds", type=float, default=30, help="seconds of each produce")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, instead of Apache Kafka")
    parser.add_argument("--write", type=Path, help="also write the report to this file")
    given = parser.parse_args()
    unknown = set(given.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    names, left_out = runnable(given.workloads or list(WORKLOADS))
    print(*left_out, sep="\n")
    if not names:
        parser.error("no workload is left")
    servers = PEERS if given.against is None else checkouts(given.against.resolve())
    found = measure(names, servers, seconds=given.seconds, rounds=given.rounds)
    commits_alone = None
    if given.against is None:
        commits_alone = floors(dict.fromkeys(name for name, _ in misses(found)), given.seconds)
    table = report(found, servers, commits_alone)
    print(table)
    if given.write is not None:
        explained = "\n".join(
            f"- {line}" for line in (*(f"`{name}`: {explanation(name)}" for name in names), *left_out)
        )
        command = shlex.join(["python", "-m", "bench.peers", *sys.argv[1:]])
        title, about = ("Beside Apache Kafka", _ABOUT) if given.against is None else ("Beside another checkout", "")
        text = f"# {title}\n\n{measured_by(command)}\n\n{about}\n\n{explained}\n\n{table}\n"
        given.write.write_text(text)


_ABOUT = (
    "Servers take turns, one at a time, the same stock client before each. Kafka acknowledges before a sync as it is "
    "shipped, and with one for every message where it says synced; Sluice always syncs. A ratio above 1 says that "
    "Sluice has more, or needs more where the figure is a time or a cost. Several rounds show their median, and their "
    "least and greatest value. If a target is missed, the last column has the figure of a program that makes only the "
    "commits of the workload, without a gateway (`bench/commit_floor.py`). It is empty if there is no such program."
)


def runnable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the workloads that this machine can run, and for each other workload a sentence that says why not."""
    able: list[str] = []
    left_out: list[str] = []
    for name in names:
        workload = WORKLOADS[name]
        missing = workload.producer.missing() if isinstance(workload, ClientWorkload) else None
        if missing is None:
            able.append(name)
        else:
            left_out.append(f"`{name}` is left out: its client {missing}.")
    return able, left_out


def explanation(name: str) -> str:
    """Return what a workload does, in one paragraph."""
    workload = WORKLOADS[name]
    text = workload.says if isinstance(workload, ClientWorkload) else workload.__doc__ or ""
    return " ".join(text.split("\n\n")[0].split())


if __name__ == "__main__":
    main()
