"""Fuzz the readers: `python -m tests.fuzz [--seconds 60] [--only TARGET …] [--runs N]`.

Each target runs in a fork of its own under atheris, which chooses inputs by coverage, and starts with valid messages
(`seeds.py`). Inputs that reach new code are kept in `.fuzz/TARGET`, which is not committed. The exit code is 1 if a
target raised an error that no reader documents. The input is then in `.fuzz/TARGET-crash-…`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS
from tests.gateway_process import ROOT

FOUND = ROOT / ".fuzz"
MAX_INPUT_BYTES = 4096
MAX_SECONDS_PER_INPUT = 5
MAX_MEMORY_MIB = 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the readers of strangers' bytes.")
    parser.add_argument("--seconds", type=int, default=60, help="time for all targets together (60)")
    parser.add_argument("--runs", type=int, default=-1, help="end a target after so many inputs")
    parser.add_argument("--only", nargs="+", choices=sorted(TARGETS), default=sorted(TARGETS), help="these targets")
    arguments = parser.parse_args()
    failed = 0
    seconds = max(1, arguments.seconds // len(arguments.only))
    for target, executions, ended in fuzz(arguments.only, seconds, arguments.runs):
        sys.stdout.write(f"{target}: {executions:,} inputs, {'ok' if ended == 0 else 'FAILED'}\n")
        sys.stdout.flush()
        failed += ended != 0
    return 1 if failed else 0


def fuzz(targets: Sequence[str], seconds: int, runs: int = -1) -> Iterator[tuple[str, int, int]]:
    """Fuzz targets one after the other, each for `seconds`. Yield each target with the number of its inputs and the
    exit code of its process.
    """
    for target in targets:
        found = FOUND / target
        found.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds(target)):
            (found / f"seed-{number}").write_bytes(data)
    options = [
        f"-max_total_time={seconds}",
        f"-runs={runs}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={MAX_SECONDS_PER_INPUT}",
        f"-rss_limit_mb={MAX_MEMORY_MIB}",
        "-print_final_stats=1",
    ]
    with (
        tempfile.TemporaryDirectory() as logs,
        subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.process", str(FOUND), logs, *targets, "--", *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        for line in process.stdout or ():
            target, code = line.split()
            told = (Path(logs) / target).read_text(errors="replace")
            counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", told)
            if int(code):
                sys.stdout.write(told[-8_000:])
            yield target, int(counted[1]) if counted else 0, int(code)


if __name__ == "__main__":
    sys.exit(main())
