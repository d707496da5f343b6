"""Run the checker: `python -m tests.trust [--minutes 30] [--seed 7] [--report FOLDER]`.

Exit code 0 if every promise was kept, 1 if not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from tests.trust.run import run


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trust", description="Attack a cluster, and judge what it told its clients."
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults come (10)")
    parser.add_argument("--seed", type=int, help="chooses workloads and faults (a new one each time)")
    parser.add_argument(
        "--report", type=Path, default=Path(".trust"), help="folder of the report and the history (.trust)"
    )
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    _say(f"Seed {seed}, {arguments.minutes:g} minutes.")
    verdict = run(seed, arguments.minutes * 60, say=_say)
    for name, sentences in verdict.violations.items():
        _say(f"{'ok  ' if not sentences else 'FAIL'} {name}")
        for sentence in sentences:
            _say(f"       {sentence}")
    _say(", ".join(f"{count} {name}" for name, count in verdict.counts.items()))
    arguments.report.mkdir(parents=True, exist_ok=True)
    verdict.history.write(arguments.report / f"history-{seed}.jsonl")
    for name, text in verdict.logs.items():
        (arguments.report / f"node-{name.rpartition(':')[2]}.log").write_text(text)
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
