"""How the suite runs: which long tests belong to a part, and when a run with failures passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rotation import PARTS, next_turn, part_of, part_whose_turn_it_is, rotated
from tests.run import FLAKY, MAX_FLAKY, ROOT, counted, judge, worst

KNOWN = {"a": "a reason"}


@pytest.mark.parametrize(
    ("first", "second", "passed", "lines"),
    [
        (["a"], [], True, ["known to be flaky (a reason): a"]),
        (["a"], ["a"], False, ["failed: a"]),
        (["b"], [], True, ["flaky: failed first, passed then: b"]),
        (["a", "b"], [], True, ["flaky: failed first, passed then: b", "known to be flaky (a reason): a"]),
        (["a", "b"], ["b"], False, ["failed: b", "known to be flaky (a reason): a"]),
        # The run failed for another reason: for example, it was interrupted, or a module could not be imported.
        ([], [], False, []),
    ],
)
def test_a_failure_that_passes_when_run_again_is_printed_and_forgiven(
    first: list[str], second: list[str], passed: bool, lines: list[str]
) -> None:
    verdict = judge(first, second, KNOWN)
    assert (verdict.passed, verdict.lines()) == (passed, lines)


def test_more_flaky_tests_than_the_bound_fail_the_run() -> None:
    first = [f"test {number}" for number in range(MAX_FLAKY + 1)]
    assert not judge(first, [], KNOWN).passed
    assert judge(first[1:], [], KNOWN).passed


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, 5], 0),
        ([5, 5], 5),
        ([1, 0], 1),
        ([1, 5], 1),
        ([1, 2], 2),
        ([-9, 0], -9),
        ([0, -11], -11),
        ([1, -9], -9),
    ],
)
def test_run_of_which_a_signal_ended_a_part_fails(codes: list[int], code: int) -> None:
    assert worst(codes) == code


def test_run_that_reports_failures_and_records_none_was_cut_off() -> None:
    assert counted(1, ["a"], ["a", "b"]) == 1
    assert counted(1, ["a"], ["a"]) == counted(1, [], []) == 2
    assert [counted(code, [], []) for code in (0, 5, -9)] == [0, 5, -9]


def test_flaky_tests_are_listed_with_a_reason_and_exist(request: pytest.FixtureRequest) -> None:
    for test, reason in json.loads(FLAKY.read_text()).items():
        path, _, name = test.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        assert f"def {function}(" in (request.config.rootpath / path).read_text()
        assert reason


def test_a_part_holds_a_fair_share_of_the_long_tests_and_each_test_has_one() -> None:
    parts = [part_of(f"tests/chaos/test_kill.py::test_kill[{number}]") for number in range(1000)]
    assert set(parts) == set(range(1, PARTS + 1))
    assert max(map(parts.count, set(parts))) < 2 * 1000 / PARTS


def test_five_pushes_in_a_row_run_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CI_PART", raising=False)
    monkeypatch.setattr("tests.rotation.TURN", tmp_path / "turn")
    (tmp_path / "turn").write_text("7\n")
    parts: list[int] = []
    for _ in range(PARTS):
        parts.append(next_turn())
        assert part_whose_turn_it_is() == parts[-1]
    assert sorted(parts) == list(range(1, PARTS + 1))


def test_the_committed_turn_is_a_number_and_ci_part_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI_PART", raising=False)
    assert part_whose_turn_it_is() in range(1, PARTS + 1)
    for part in range(1, PARTS + 1):
        monkeypatch.setenv("CI_PART", str(part))
        assert part_whose_turn_it_is() == part


def test_every_test_is_run_in_some_part_and_every_module_in_each() -> None:
    sizes = [100, *[3] * 20]
    tests = [f"tests/test_{module}.py::test_{number}" for module, size in enumerate(sizes) for number in range(size)]
    runs = [rotated(tests, part) for part in range(1, PARTS + 1)]
    assert set().union(*runs) == set(tests)
    for run in runs:
        assert {test.partition("::")[0] for test in run} == {test.partition("::")[0] for test in tests}
        assert len(run) < 2 * len(tests) / PARTS + len(sizes)


def collected(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "pyproject.toml", "--collect-only", "-q"]
    return subprocess.run(
        [*command, *arguments, str(directory)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_run_of_one_mark_collects_only_modules_that_mention_it(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text("import pytest\n\n@pytest.mark.long\ndef test_it(): ...\n")
    (tmp_path / "test_short.py").write_text("raise AssertionError('collected')\n")
    run = collected(tmp_path, "--marked", "long", "-m", "long")
    assert run.returncode == 0, run.stdout
    assert "test_long.py::test_it" in run.stdout


def test_mark_that_a_module_does_not_mention_is_refused(tmp_path: Path) -> None:
    hidden = "import pytest\n\n@getattr(pytest.mark, 'lo' + 'ng')\ndef test_it(): ...\n"
    (tmp_path / "test_hidden.py").write_text(hidden)
    run = collected(tmp_path)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "has tests with the mark long but none of the names" in run.stderr
