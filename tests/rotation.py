"""What continuous integration runs in turns: one part of PARTS in each run.

It runs one part of the long tests; of the data pipeline's tests the modules of one part, and the first test of every
other module; one part of the clients' suites whole, and the core of the others. The rest runs each time. The part
follows from the number of commits, so a run of the same commit runs the same part. `.ci/run` says which part it ran;
CI_PART=N names another.

A long test and a module of the pipeline belong to a part by a checksum of their names, so that none changes its part
when another comes or goes. A client's suite says its part and its core in suite.toml.
"""

from __future__ import annotations

import os
import subprocess
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = 5
DAY_SECONDS = 86_400


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
    """The part of this run. A clone that does not have all commits goes by the day."""
    named = os.environ.get("CI_PART")
    if named:
        return int(named)
    if _git("rev-parse", "--is-shallow-repository") == "false":
        return int(_git("rev-list", "--count", "HEAD")) % PARTS + 1
    return int(time.time() / DAY_SECONDS) % PARTS + 1


def _module_of(test: str) -> str:
    return test.partition("::")[0]


def _git(*arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip()
