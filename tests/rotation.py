"""What continuous integration runs in turns: one part of PARTS in each run.

It runs one part of the long tests; of the data pipeline's tests the modules of one part, and the first test of every
other module; one part of the clients' suites whole, and the core of the others. The rest runs each time. A committed
number, `.ci/turn`, chooses the part, so a run of the same commit runs the same part. `make turn` raises the number.
Whoever pushes runs it once before each push, so five pushes in a row run every part. `.ci/run` says which part it ran;
CI_PART=N names another.

A long test and a module of the pipeline belong to a part by a checksum of their names, so that none changes its part
when another comes or goes. A client's suite says its part and its core in suite.toml.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = 5
TURN = ROOT / ".ci" / "turn"
"""Counts the pushes; only `make turn` writes it."""


def part_of(name: str) -> int:
    """The part, from 1, of a test or a module."""
    return zlib.crc32(name.encode()) % PARTS + 1


def rotated(tests: Sequence[str], part: int) -> set[str]:
    """Tests, by id, of the modules of a part, and the first one of every other module."""
    first: dict[str, str] = {}
    for test in tests:
        first.setdefault(_module_of(test), test)
    return {test for test in tests if part_of(_module_of(test)) == part} | set(first.values())


def part_whose_turn_it_is() -> int:
    """Return the part of this run: CI_PART, or else the one that the committed number names."""
    named = os.environ.get("CI_PART")
    return int(named) if named else int(TURN.read_text()) % PARTS + 1


def next_turn() -> int:
    """Raise the committed number, and return the part that it names now."""
    TURN.write_text(f"{int(TURN.read_text()) + 1}\n")
    return int(TURN.read_text()) % PARTS + 1


def _module_of(test: str) -> str:
    return test.partition("::")[0]


if __name__ == "__main__":
    sys.stdout.write(f"The next run of continuous integration runs part {next_turn()} of {PARTS}. Commit .ci/turn.\n")
