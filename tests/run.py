"""Run the suite: `python -m tests.run [--long-tests [--part N]] [arguments of pytest]`.

Most tests wait more than they work, so workers run them in parallel (pytest-xdist), all on one Postgres. Tests marked
`alone` measure their own process or the machine. They follow in one process when the workers have ended. Tests marked
`long` run only with --long-tests: all of them, or one of PARTS parts.

--ask-again runs failed tests once more, to recognise flaky ones. The run prints every flaky test at its end. The run
fails if more than MAX_FLAKY of them have no reason in FLAKY, a committed list. Developers should repair the printed
tests.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rotation import PARTS, part_whose_turn_it_is

ROOT = Path(__file__).parents[1]
FLAKY = Path(__file__).parent / "flaky.json"
"""Reasons of known flaky tests, by the test's id."""
OTHER_SUITES = ("tests/pipeline", "tests/containers", "tests/objects")
"""Suites that have requirements and commands of their own."""
WORKERS = int(2.5 * (os.cpu_count() or 1))
"""More per CPU leave the tests that depend on time too little of it."""
MAX_ASKED_AGAIN = 10
"""If more tests than this fail, the run does not repeat them, because so many failures are no accident."""
MAX_FLAKY = 5
"""Number of flaky tests without a listed reason that one run may have."""
TESTS_FAILED = 1
CUT_OFF = 2
NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Verdict:
    """Result of running failed tests once more."""

    failed: Sequence[str]
    """Tests that failed twice, or were not run again."""
    flaky: Sequence[str]
    """Tests that failed first and then passed, without a listed reason."""
    known: Mapping[str, str]
    """Tests that failed first and then passed, each with its listed reason."""

    @property
    def passed(self) -> bool:
        return bool(self.known or self.flaky) and not self.failed and len(self.flaky) <= MAX_FLAKY

    def lines(self) -> list[str]:
        return [
            *(f"failed: {test}" for test in self.failed),
            *(f"flaky: failed first, passed then: {test}" for test in self.flaky),
            *(f"known to be flaky ({reason}): {test}" for test, reason in self.known.items()),
        ]


def judge(first: Sequence[str], second: Sequence[str], reasons: Mapping[str, str]) -> Verdict:
    """Judge a run. `first` are the tests that failed in the run, `second` those that failed again."""
    passed_then = [test for test in first if test not in set(second)]
    return Verdict(
        failed=[test for test in first if test in set(second)],
        flaky=[test for test in passed_then if test not in reasons],
        known={test: reasons[test] for test in passed_then if test in reasons},
    )


def counted(code: int, before: Collection[str], after: Collection[str]) -> int:
    """Return the exit code of a run of pytest, given the recorded failures before and after it. If the run reports
    failures and has recorded none, return CUT_OFF: the watchdog (`tests/watchdog.py`) has ended it, and not all of its
    tests have run.
    """
    return CUT_OFF if code == TESTS_FAILED and set(after) <= set(before) else code


def worst(codes: Sequence[int]) -> int:
    """Return the exit code of several runs of pytest. A run that a signal ended has a negative code, and not all of its
    tests have run.
    """
    severity = {NOTHING_COLLECTED: 0, 0: 1, TESTS_FAILED: 2}
    return max(codes, key=lambda code: severity.get(code, 3))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run", allow_abbrev=False)
    parser.add_argument("--long-tests", action="store_true", help="the long tests, which do not run otherwise")
    parser.add_argument("--part", type=int, choices=range(1, PARTS + 1), help="of the long tests one part")
    parser.add_argument("--say-part", action="store_true", help="print the part whose turn it is, and end")
    parser.add_argument("--workers", type=int, default=WORKERS, help="0: one process")
    parser.add_argument("--ask-again", action="store_true", help="run failed tests again, to tell flaky ones")
    parser.add_argument("--cache", default=".pytest_cache", help="where pytest keeps which tests failed")
    options, rest = parser.parse_known_args(arguments)
    if options.say_part:
        print(part_whose_turn_it_is())
        return 0
    # A shell lets its background commands ignore SIGINT. The programs that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    common = ["-o", f"cache_dir={options.cache}", *rest]
    # The cache belongs to this run: --ask-again must not use the cache of an earlier run.
    _last_failed(options.cache).unlink(missing_ok=True)
    if options.workers:
        common = [word for suite in OTHER_SUITES for word in ("--ignore", suite)] + common
    if options.part:
        common += ["--part", str(options.part)]
    collected = ["--marked", "long"] if options.long_tests else []
    kind = "long" if options.long_tests else "not long"
    if options.workers:
        workers = ["-n", str(options.workers), "--dist", "worksteal", "--max-worker-restart", "3"]
        codes = [
            _counted(options.cache, *workers, *collected, "-m", f"{kind} and not alone", *common),
            _counted(options.cache, "--marked", "alone", "-m", f"{kind} and alone", *common),
        ]
    else:
        codes = [_counted(options.cache, *([*collected, "-m", kind] if options.long_tests else []), *common)]
    ended = worst(codes)
    return _ask_again(options.cache) if ended == TESTS_FAILED and options.ask_again else ended


def _ask_again(cache: str) -> int:
    first = _failed(cache)
    if 0 < len(first) <= MAX_ASKED_AGAIN:
        code = _pytest("-o", f"cache_dir={cache}", "--last-failed", *first)
        second = _failed(cache) if code in (0, 1) else first
    else:
        second = first
    verdict = judge(first, second, json.loads(FLAKY.read_text()))
    print("\n".join(verdict.lines()), flush=True)
    return 0 if verdict.passed else 1


def _last_failed(cache: str) -> Path:
    return ROOT / cache / "v" / "cache" / "lastfailed"


def _failed(cache: str) -> list[str]:
    path = _last_failed(cache)
    return list(json.loads(path.read_text())) if path.exists() else []


def _counted(cache: str, *arguments: str) -> int:
    before = _failed(cache)
    return counted(_pytest(*arguments), before, _failed(cache))


def _pytest(*arguments: str) -> int:
    # Keep compiled modules. Otherwise every gateway that a test starts would compile all of them anew.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
