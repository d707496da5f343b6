"""Fuzz the readers: `python -m tests.fuzz [--seconds 60] [--only TARGET …] [--runs N]`.

Each target runs in a process of its own under atheris, which chooses inputs by coverage, and starts with valid messages
(`seeds.py`). Inputs that reach new code are kept in `.fuzz/TARGET`, which is not committed. The exit code is 1 if a
target raised an error that no reader documents. The input is then in `.fuzz/TARGET-crash-…`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

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
    for target in arguments.only:
        seconds = max(1, arguments.seconds // len(arguments.only))
        executions, ended = fuzz(target, seconds, arguments.runs)
        sys.stdout.write(f"{target}: {executions:,} inputs, {'ok' if ended == 0 else 'FAILED'}\n")
        sys.stdout.flush()
        failed += ended != 0
    return 1 if failed else 0


def fuzz(target: str, seconds: int, runs: int = -1) -> tuple[int, int]:
    """Fuzz one target; return the number of inputs and the exit code of its process."""
    found = FOUND / target
    found.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(target)):
        (found / f"seed-{number}").write_bytes(data)
    command = [
        *(sys.executable, "-m", "tests.fuzz.process", target, str(found)),
        f"-max_total_time={seconds}",
        f"-runs={runs}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={MAX_SECONDS_PER_INPUT}",
        f"-rss_limit_mb={MAX_MEMORY_MIB}",
        f"-artifact_prefix={FOUND}/{target}-",
        "-print_final_stats=1",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", ended.stderr)
    if ended.returncode:
        sys.stdout.write(ended.stdout[-4_000:] + ended.stderr[-4_000:])
    return int(counted[1]) if counted else 0, ended.returncode


if __name__ == "__main__":
    sys.exit(main())
