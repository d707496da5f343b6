"""`python -m bench.peers`: Sluice beside Apache Kafka, the same client on the same machine, one server at a time.

    python -m bench.peers                        all workloads, three servers, two rounds: most of an hour
    python -m bench.peers produce one-in-flight  some of it
    python -m bench.peers --seconds 5 --rounds 1 paced-java end-to-end
    python -m bench.peers --against ../before --rounds 4 consume   beside another checkout instead of Kafka

Servers take turns within a round, so that other load on the machine falls on all. Kafka is measured twice: as it is
shipped, when it acknowledges before a sync, and with a sync for every message (`log.flush.interval.messages=1`). Sluice
always syncs. Two checkouts change their order with each round. Ratios are of medians. A ratio above 1 says that Sluice
is faster, or needs more if the figure is a cost.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.machine import measured_by
from bench.workloads import WORKLOADS, Workload
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
    """Return this checkout and another one, which runs with the same packages."""

    def process(directory: Path, settings: Mapping[str, str]) -> BrokerProcess:
        return GatewayProcess(directory, database_url=None, settings=settings, environment={}, root=other)

    return (("Sluice", SLUICE, {}), (other.name, replace(SLUICE, name=other.name, process=process), {}))


def measure(
    names: Sequence[str], servers: Servers, *, seconds: float, rounds: int
) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return, per workload and figure, each server's values in the order of the rounds."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name in names:
        for number in range(rounds):
            # Servers alternate in coming first, so that the order favours neither.
            turns = servers[::-1] if len(servers) == 2 and number % 2 else servers
            for server, broker, settings in turns:
                directory = Path(tempfile.mkdtemp(prefix="sluice-peers-", dir=os.environ.get("SLUICE_BENCH_DIR")))
                directory.chmod(0o755)
                process = broker.process(directory, settings)
                try:
                    process.start()
                    figures = WORKLOADS[name](process, seconds)
                finally:
                    process.close()
                    shutil.rmtree(directory)
                for figure, value in figures.items():
                    found.setdefault((name, figure), {}).setdefault(server, []).append(value)
                print(
                    f"{name:15} {server:13} " + ", ".join(f"{value:.2f} {figure}" for figure, value in figures.items())
                )
    return found


def report(found: Mapping[tuple[str, str], Mapping[str, Sequence[float]]], servers: Servers) -> str:
    """Return a table of medians with the least and greatest value of several rounds, and the ratios of medians."""
    first, *others = (server for server, *_ in servers)
    heads = ["workload", "figure", first, *others, *(f"{first} ÷ {other}" for other in others)]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for (name, figure), values in found.items():
        shown = [_median_and_spread(values[server]) for server, *_ in servers]
        medians = [statistics.median(values[server]) for server, *_ in servers]
        ratios = [f"{medians[0] / median:.2f}" for median in medians[1:]]
        lines.append(f"| {' | '.join((name, figure, *shown, *ratios))} |")
    return "\n".join(lines)


def _median_and_spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"one of {', '.join(WORKLOADS)}")
    parser.add_argument("--seconds", type=float, default=30, help="seconds of each produce")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, instead of Apache Kafka")
    parser.add_argument("--write", type=Path, help="also write the report to this file")
    given = parser.parse_args()
    unknown = set(given.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    names = given.workloads or list(WORKLOADS)
    servers = PEERS if given.against is None else checkouts(given.against.resolve())
    table = report(measure(names, servers, seconds=given.seconds, rounds=given.rounds), servers)
    print(table)
    if given.write is not None:
        explained = "\n".join(f"- `{name}`: {_first_paragraph(WORKLOADS[name])}" for name in names)
        title, about = ("Beside Apache Kafka", _ABOUT) if given.against is None else ("Beside another checkout", "")
        text = f"# {title}\n\n{measured_by('make bench-peers')}\n\n{about}\n\n{explained}\n\n{table}\n"
        given.write.write_text(text)


_ABOUT = (
    "Servers take turns, one at a time, the same stock client before each. Kafka acknowledges before a sync as it is "
    "shipped, and with one for every message where it says synced; Sluice always syncs. A ratio above 1 says that "
    "Sluice has more, or needs more where the figure is a time or a cost. Several rounds show their median, and their "
    "least and greatest value."
)


def _first_paragraph(workload: Workload) -> str:
    return " ".join((workload.__doc__ or "").split("\n\n")[0].split())


if __name__ == "__main__":
    main()
