"""Choose the slow tests that one run of continuous integration runs: one part of PARTS.

A run contains one part of the long tests. Of the data pipeline's tests, a run contains one part, and the first test of
every module. Of the clients' suites, it contains all of one part, and the core of all others.
A run of an odd part contains the tests in containers, and a run of an even part those of object stores. All other
tests run each time. A committed number, `.ci/turn`, chooses the part, so a run of the same commit runs the same part.
`make turn` raises the number. Developers run it once before each push, so five pushes in a row run every part.
`.ci/run` says which part it ran; CI_PART=N names another.

The checksum of its name determines the part of a test. So no test changes its part when other
tests are added or removed. A client's suite names its part and its core in suite.toml.
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
"""The file that counts pushes. Only `make turn` writes it."""


def part_of(name: str) -> int:
    """Return the part, counted from 1, of a test."""
    return zlib.crc32(name.encode()) % PARTS + 1


def rotated(tests: Sequence[str], part: int) -> set[str]:
    """Return the ids of the tests of a part, and of the first test of every module."""
    first: dict[str, str] = {}
    for test in tests:
        first.setdefault(_module_of(test), test)
    return {test for test in tests if part_of(test) == part} | set(first.values())


def part_whose_turn_it_is() -> int:
    """Return the part of this run: CI_PART, or else the part that the committed number selects."""
    named = os.environ.get("CI_PART")
    return int(named) if named else int(TURN.read_text()) % PARTS + 1


def next_turn() -> int:
    """Raise the committed number, and return the part that it now selects."""
    TURN.write_text(f"{int(TURN.read_text()) + 1}\n")
    return int(TURN.read_text()) % PARTS + 1


def _module_of(test: str) -> str:
    return test.partition("::")[0]


if __name__ == "__main__":
    sys.stdout.write(f"The next run of continuous integration runs part {next_turn()} of {PARTS}. Commit .ci/turn.\n")
