"""Run the checker: `python -m tests.trust [--minutes 30] [--seed 7] [--report FOLDER] [--record FILE]`.

Exit code 0 if every promise was kept, 4 if not, 3 if the only fault is that a workload did not finish in time, and 1 if
an error ended the run. Such an error is the checker's, or a node did not start.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.gateway_process import ROOT
from tests.trust.members import ALL_KINDS
from tests.trust.nemeses import NEMESES
from tests.trust.record import record
from tests.trust.report import write_report
from tests.trust.run import run

EXIT_UNFINISHED = 3
EXIT_BROKEN = 4


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def _commit() -> str:
    """Return the commit of the sources, with a plus sign if they have changes that are not committed."""
    described = ["git", "describe", "--always", "--abbrev=8", "--dirty=+"]
    ended = subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trust", description="Attack a cluster, and judge what it told its clients."
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults come (10)")
    parser.add_argument("--seed", type=int, help="chooses workloads and faults (a new one each time)")
    parser.add_argument(
        "--report", type=Path, default=Path(".trust"), help="folder of the report and the history (.trust)"
    )
    parser.add_argument(
        "--standby", action=argparse.BooleanOptionalAction, help="whether Postgres has a synchronous standby (by seed)"
    )
    parser.add_argument("--clients", nargs="+", choices=ALL_KINDS, help="kinds of clients (by seed)")
    parser.add_argument("--faults", nargs="+", choices=sorted(NEMESES), metavar="FAULT", help="only these faults")
    parser.add_argument("--record", type=Path, help="append a line to this table of runs (docs/trust-runs.csv)")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    commit = _commit()
    _say(f"Seed {seed}, {arguments.minutes:g} minutes, commit {commit}.")
    faults = arguments.faults or NEMESES
    verdict = run(
        seed, arguments.minutes * 60, standby=arguments.standby, kinds=arguments.clients, faults=faults, say=_say
    )
    for name, sentences in verdict.violations.items():
        _say(f"{'ok  ' if not sentences else 'FAIL'} {name}")
        for sentence in sentences:
            _say(f"       {sentence}")
    _say(", ".join(f"{count} {name}" for name, count in verdict.counts.items()))
    folder = arguments.report / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    verdict.history.write(folder / "history.jsonl")
    for name, text in verdict.logs.items():
        (folder / f"{name}.log").write_text(text)
    write_report(folder / "report.html", verdict, commit)
    if arguments.record is not None:
        record(arguments.record, verdict, commit)
    _say(f"Report: {folder / 'report.html'}")
    if verdict.only_unfinished:
        return EXIT_UNFINISHED
    return 0 if verdict.passed else EXIT_BROKEN


if __name__ == "__main__":
    sys.exit(main())
