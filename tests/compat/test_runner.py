"""The runner of suites. The test suites hang, crash, lie or are missing. Each must end as rows, and only proven
scenarios may pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.compat import scenarios
from tests.compat.answers import WHOLE_SUITE, ask
from tests.compat.brokers import sluice_nodes
from tests.compat.process import Limit
from tests.compat.report import Outcome, Row, SuiteResult, red, reds, write, write_oracle
from tests.compat.run import FLAKY, ask_again, main, run_suite
from tests.compat.suites import FOLDER, ROOT, Suite, SuiteError, discover, load
from tests.rotation import PARTS
from tests.steps.waiting import wait_for

LOG_LINES = [
    {"t": 1, "event": "scenario", "mode": "eager", "topic": "t", "partitions": 1, "produced": {"0": 1}},
    {"t": 2, "event": "assigned", "member": "c1", "partition": 0},
    {"t": 3, "event": "delivered", "member": "c1", "partition": 0, "offset": 0},
]


def suite_of(folder: Path, program: str, *, more: str = "", limit_s: float = 20) -> Path:
    """Write a suite whose program is a Python script. In the script, `answer(name, outcome, detail)` prints one answer
    as suites do.
    """
    folder.mkdir(parents=True)
    preamble = """
        import json, os, signal, subprocess, sys, time, urllib.request

        def answer(name, outcome="passed", detail=""):
            line = {"scenario": name, "outcome": outcome, "seconds": 0.1, "detail": detail}
            print(json.dumps(line), flush=True)
    """
    (folder / "program.py").write_text(textwrap.dedent(preamble) + textwrap.dedent(program))
    (folder / "suite.toml").write_text(
        f'client = "Fake"\nlanguage = "Python"\nrun = ["{{python}}", "{{suite}}/program.py"]\n'
        f"limit_s = {limit_s}\n{more}"
    )
    return folder


def ask_suite(tmp_path: Path, program: str, *, more: str = "scenarios = []\n", limit_s: float = 20) -> list[Row]:
    """Run a fake suite without a gateway."""
    suite = load(suite_of(tmp_path / "fake", program, more=more, limit_s=limit_s))
    deliveries = tmp_path / "deliveries"
    deliveries.mkdir()
    environment = {**os.environ, "COMPAT_DELIVERIES": str(deliveries)}
    seen: list[Row] = []
    stderr = tmp_path / "stderr.log"
    rows = ask(
        suite, [], environment=environment, deliveries=deliveries, stderr=stderr, on_row=seen.append, limit=Limit()
    )
    assert seen == rows
    return rows


def outcomes(rows: list[Row]) -> dict[str, str]:
    return {row.scenario: row.outcome for row in rows}


def test_a_suite_that_hangs_is_killed_with_its_children_and_fails(tmp_path: Path) -> None:
    """Children of the suite hold its stdout, are stopped, or have left the process group."""
    rows = ask_suite(
        tmp_path,
        f"""
        answer("mine.one")
        pids = []
        for session in (False, False, True):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
            pids.append(child.pid)
        os.kill(pids[1], signal.SIGSTOP)
        with open({str(tmp_path / "pids")!r}, "w") as file:
            file.write(" ".join(map(str, [os.getpid(), *pids])))
        time.sleep(600)
        """,
        more='scenarios = ["mine.one", "mine.two", "mine.three"]\n',
        limit_s=3,
    )
    assert outcomes(rows) == {
        "mine.one": "passed",
        WHOLE_SUITE: "failed",
        "mine.two": "failed",
        "mine.three": "failed",
    }
    assert {row.detail for row in rows if row.outcome == "failed"} == {
        "did not end: killed after its limit of 3 s",
        "not answered",
    }
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(10)


@pytest.mark.parametrize("stuck_at", ["random-uuid", "format", "server.properties"])
def test_sigterm_ends_a_run_whose_kafka_is_starting(tmp_path: Path, stuck_at: str) -> None:
    """Kafka may be at any step of its start. Every process that the run has started must end, and no more processes may
    start.
    """
    suite_of(tmp_path / "fake", f"open({str(tmp_path / 'asked')!r}, 'w')", more="scenarios = []\n")
    (tmp_path / "java.py").write_text(
        f"""
import os, signal, sys, time
print("an-id")
if sys.argv[-1].endswith({stuck_at!r}) or {stuck_at!r} in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open({str(tmp_path / "unready")!r}, "w") as file:
        file.write(str(os.getpid()))
    os.rename({str(tmp_path / "unready")!r}, {str(tmp_path / "pid")!r})
    time.sleep(600)
"""
    )
    script = f"""
import sys
from dataclasses import replace
from pathlib import Path
from tests.compat import run, suites
from tests.kafka import process

process.java = lambda main_class, *arguments, **_: [sys.executable, {str(tmp_path / "java.py")!r}, *arguments]
run.APACHE_KAFKA = replace(
    run.APACHE_KAFKA, version=lambda: "none", process=lambda d, s: process.KafkaProcess(d, settings=s)
)
run.discover = lambda: [suites.load(Path({str(tmp_path / "fake")!r}))]
run.CACHE = Path({str(tmp_path)!r})
sys.exit(run.main(["fake", "--broker", "kafka"]))
"""
    command = [sys.executable, "-c", script]
    with (tmp_path / "said").open("wb") as said, subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said) as run:
        stuck: list[psutil.Process] = []
        try:
            wait_for(lambda: (tmp_path / "pid").exists() or run.poll() is not None, "Kafka starts")
            assert run.poll() is None, (tmp_path / "said").read_text()
            stuck = psutil.Process(run.pid).children()
            assert [process.pid for process in stuck] == [int((tmp_path / "pid").read_text())]
            run.terminate()
            assert run.wait(10) == 128 + signal.SIGTERM, (tmp_path / "said").read_text()
            assert not psutil.wait_procs(stuck, timeout=5)[1]
        finally:
            for process in (run, *stuck):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    assert not (tmp_path / "asked").exists()


def test_a_suite_that_crashes_fails_with_the_end_of_its_stderr(tmp_path: Path) -> None:
    rows = ask_suite(tmp_path, 'answer("data.codec.none")\nsys.exit("no such broker")', more="")
    assert rows[0] == Row("data.codec.none", "passed", 0.1)
    assert rows[1].scenario == WHOLE_SUITE
    assert rows[1].detail == "ended with exit code 1: no such broker"
    unanswered = {row.scenario for row in rows[2:]}
    assert unanswered == {scenario.name for scenario in scenarios.SCENARIOS} - {"data.codec.none"}
    assert {row.outcome for row in rows[1:]} == {"failed"}


def test_a_suite_killed_by_a_signal_fails(tmp_path: Path) -> None:
    rows = ask_suite(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert rows[0].detail.startswith("ended with signal 11")


def test_a_suite_that_cannot_be_started_fails(tmp_path: Path) -> None:
    folder = suite_of(tmp_path / "fake", "")
    toml = (folder / "suite.toml").read_text().replace("{python}", "/no/such/program")
    (folder / "suite.toml").write_text(toml)
    arguments = {"environment": os.environ, "deliveries": tmp_path, "stderr": tmp_path / "stderr.log"}
    rows = ask(load(folder), [], **arguments, on_row=lambda row: None, limit=Limit())  # type: ignore[arg-type]
    assert outcomes(rows) == {WHOLE_SUITE: "failed"}


def test_a_line_that_is_no_answer_is_a_fault(tmp_path: Path) -> None:
    rows = ask_suite(
        tmp_path,
        """
        print("PASS TestSomething")
        print(json.dumps({"scenario": "x", "outcome": "splendid", "seconds": 1}))
        answer("mine.one")
        answer("mine.one")
        """,
    )
    assert Counter(row.scenario for row in rows) == {"mine.one": 2, WHOLE_SUITE: 3}
    faults = [row.detail for row in rows if row.scenario == WHOLE_SUITE]
    assert faults[0] == "not an answer: PASS TestSomething"
    assert faults[2] == "mine.one was answered twice"


@pytest.mark.parametrize("said", ["skipped", "unasked"])
def test_a_skip_needs_a_reason_and_does_not_count_as_passed(tmp_path: Path, said: str) -> None:
    rows = ask_suite(tmp_path, f'answer("mine.one", "{said}")\nanswer("mine.two", "{said}", "has no groups")')
    assert outcomes(rows) == {"mine.one": "failed", "mine.two": said}


def test_an_assignor_answers_for_all_and_own_scenarios_owe_nothing(tmp_path: Path) -> None:
    answered = {scenario.name.replace(scenarios.ASSIGNOR_FIELD, "sticky") for scenario in scenarios.SCENARIOS}
    assert scenarios.unanswered(answered) == []
    assert scenarios.unanswered(answered - {"groups.sticky.1-2-4"}) == ["groups.<assignor>.1-2-4"]
    assert outcomes(ask_suite(tmp_path, 'answer("upstream.TestIt")', more="")) == {"upstream.TestIt": "passed"}


@pytest.mark.parametrize(
    ("lines", "outcome", "detail"),
    [
        (LOG_LINES, "passed", ""),
        ([*LOG_LINES, LOG_LINES[-1]], "failed", "delivery log: t-0 offset 0 was delivered again, to c1"),
        ([], "failed", "no delivery log"),
        ([LOG_LINES[0], LOG_LINES[2]], "failed", "delivery log: nothing was ever assigned"),
        (
            [{**LOG_LINES[0], "produced": {"0": "many"}}],
            "failed",
            "delivery log: cannot be read: invalid literal for int() with base 10: 'many'",
        ),
    ],
)
def test_a_pass_that_the_delivery_log_disproves_is_a_failure(
    tmp_path: Path, lines: list[object], outcome: str, detail: str
) -> None:
    written = "\n".join(json.dumps(line) for line in lines)
    rows = ask_suite(
        tmp_path,
        f"""
        if {written!r}:
            with open(os.environ["COMPAT_DELIVERIES"] + "/fake.groups.leave.jsonl", "w") as log:
                log.write({written!r})
        answer("groups.leave")
        """,
        more='scenarios = ["groups.leave"]\n',
    )
    assert [(row.scenario, row.outcome, row.detail) for row in rows] == [("groups.leave", outcome, detail)]


def test_a_missing_toolchain_leaves_the_suite_out(tmp_path: Path) -> None:
    suite = load(suite_of(tmp_path / "fake", "", more='needs = ["no-such-compiler"]\n'))
    result = run_suite(suite, directory=tmp_path / "run", on_row=lambda row: None)
    assert result.left_out == "needs no-such-compiler, not on PATH"
    assert result.rows == []
    other = load(suite_of(tmp_path / "other", ""))
    used = run_suite(other, build_first=[suite], directory=tmp_path / "run", on_row=lambda row: None)
    assert used.left_out == "fake needs no-such-compiler, not on PATH"


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ('build = ["{python}", "-c", "import sys; sys.exit(\'no such crate\')"]', "exit code 1: no such crate"),
        ('build = ["/no/such/compiler"]', "could not be built"),
        ('build = ["sleep", "600"]\nbuild_limit_s = 1', "killed after its limit of 1 s"),
    ],
)
def test_a_build_that_fails_or_hangs_fails_the_suite(tmp_path: Path, build: str, said: str) -> None:
    suite = load(suite_of(tmp_path / "fake", 'answer("mine.one")', more=build + "\n"))
    try:
        result = run_suite(suite, directory=tmp_path / "run", on_row=lambda row: None)
    finally:
        shutil.rmtree(suite.build_dir, ignore_errors=True)
    assert outcomes(result.rows) == {WHOLE_SUITE: "failed"}
    assert said in result.rows[0].detail


def test_a_build_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    tried = tmp_path / "tried"
    build = f'build = ["sh", "-c", "test -e {tried} || {{ touch {tried}; exit 1; }}"]\n'
    suite = load(suite_of(tmp_path / "fake", 'answer("mine.one")', more=build))
    try:
        result = run_suite(suite, directory=tmp_path / "run", on_row=lambda row: None)
    finally:
        shutil.rmtree(suite.build_dir, ignore_errors=True)
    assert outcomes(result.rows) == {"mine.one": "passed"}


def test_the_whole_run_has_a_limit_that_no_suite_outlives(tmp_path: Path) -> None:
    """The running build or suite is killed, and later suites do not begin. One row for each says so."""

    def run_one(name: str, limit: Limit, more: str = 'build = ["true"]\n') -> SuiteResult:
        suite = load(suite_of(tmp_path / name, "time.sleep(600)", more=f"scenarios = []\n{more}", limit_s=500))
        try:
            return run_suite(suite, directory=tmp_path / "run", on_row=lambda row: None, limit=limit)
        finally:
            shutil.rmtree(suite.build_dir, ignore_errors=True)

    built = run_one("building", Limit(1), 'build = ["sleep", "600"]\n')
    assert [row.detail for row in built.rows] == [
        "building: the build was killed after the limit of the whole run, 1 s"
    ]
    late = Limit(0)
    assert [row.detail for row in run_one("unbuilt", late).rows] == [
        "unbuilt: not built: the limit of the whole run, 0 s has passed"
    ]
    assert [row.detail for row in run_one("unrun", late, "").rows] == [
        "not run: the limit of the whole run, 0 s has passed"
    ]
    suite = load(tmp_path / "unrun")
    stderr = tmp_path / "stderr.log"
    rows = ask(
        suite, [], environment=os.environ, deliveries=tmp_path, stderr=stderr, on_row=lambda row: None, limit=Limit(1)
    )
    assert rows[0].detail == "did not end: killed after the limit of the whole run, 1 s"


def test_an_error_of_the_runner_fails_only_its_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other suites run, and the card is written. The card shows the failure, and so does the exit code."""
    names = ("one", "two", "three")
    suites = [load(suite_of(tmp_path / name, f'answer("mine.{name}")', more="scenarios = []\n")) for name in names]

    def run_fake(suite: Suite, **_: object) -> SuiteResult:
        if suite.name == "one":
            raise SuiteError("one is being run already")
        if suite.name == "two":
            raise RuntimeError("no room left")
        row = Row(f"mine.{suite.name}", "passed", 0.1)
        return SuiteResult(suite.name, suite.client, suite.language, "2026-01-02", "abc", rows=[row])

    monkeypatch.setattr("tests.compat.run.discover", lambda: suites)
    monkeypatch.setattr("tests.compat.run.run_suite", run_fake)
    assert main(["--report", str(tmp_path / "card")]) == 1
    card = json.loads((tmp_path / "card" / "compatibility.json").read_text())
    assert {suite["name"]: [row["detail"] for row in suite["rows"]] for suite in card["suites"]} == {
        "one": ["one is being run already"],
        "two": ["the runner: RuntimeError('no room left')"],
        "three": [""],
    }
    assert "compat: 1 passed, 2 failed, 0 unserved, 0 skipped, 0 unasked" in capsys.readouterr().out


def test_an_unasked_scenario_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = load(suite_of(tmp_path / "one", 'answer("mine.one")', more="scenarios = []\n"))

    def run_fake(suite: Suite, **_: object) -> SuiteResult:
        row = Row("mine.one", "unasked", 0.0, "no time")
        return SuiteResult(suite.name, suite.client, suite.language, "2026-01-02", "abc", rows=[row])

    monkeypatch.setattr("tests.compat.run.discover", lambda: [suite])
    monkeypatch.setattr("tests.compat.run.run_suite", run_fake)
    assert main(["one"]) == 0
    assert "compat: 0 passed, 0 failed, 0 unserved, 0 skipped, 1 unasked" in capsys.readouterr().out


def test_a_suite_whose_description_is_wrong_fails_alone(tmp_path: Path) -> None:
    suite_of(tmp_path / "good", "")
    suite_of(tmp_path / "wrong", "", more="colour = 1\n")
    good, wrong = discover(tmp_path)
    assert not good.fault
    assert "unknown: colour" in wrong.fault
    result = run_suite(wrong, directory=tmp_path / "run", on_row=lambda row: None)
    assert outcomes(result.rows) == {WHOLE_SUITE: "failed"}
    for toml in ("client = 1", 'client = "x"\nlanguage = "y"\nrun = "z"', 'client = "x"', "= nothing"):
        (tmp_path / "good" / "suite.toml").write_text(toml)
        with pytest.raises(SuiteError, match=r"suite\.toml"):
            load(tmp_path / "good")


def test_two_runs_of_one_suite_do_not_share_their_logs(tmp_path: Path) -> None:
    nested = f"""
        import sys
        from pathlib import Path
        from tests.compat.run import run_suite
        from tests.compat.suites import SuiteError, load
        try:
            run_suite(load(Path({str(tmp_path / "fake")!r})), directory=Path(sys.argv[1]), on_row=print)
        except SuiteError as error:
            answer("mine.refused", "skipped", str(error))
    """
    suite = load(
        suite_of(tmp_path / "outer", nested, more='build = ["true"]\nscenarios = ["mine.refused"]\n').with_name("outer")
    )
    suite_of(tmp_path / "fake", "")
    run = (sys.executable, str(suite.folder / "program.py"), str(tmp_path / "run"))
    outer = type(suite)("outer", suite.folder, "Fake", "Python", run, scenarios=("mine.refused",), limit_s=30)
    result = run_suite(outer, directory=tmp_path / "run", on_row=lambda row: None)
    assert [(row.scenario, row.detail) for row in result.rows] == [("mine.refused", "run is being run already")]


def test_a_failed_scenario_is_asked_again_and_its_first_failure_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "asked before"
    program = f"""
        mark = {str(mark)!r}
        asked_before = os.path.exists(mark)
        open(mark, "w").close()
        names = os.environ["COMPAT_SCENARIOS"] if asked_before else "mine.flaky,mine.known,mine.broken,mine.fine"
        for name in names.split(","):
            fails = name == "mine.broken" or (name != "mine.fine" and not asked_before)
            answer(name, "failed" if fails else "passed", "too slow" if fails else "")
    """
    more = 'scenarios = []\n[flaky]\n"mine.known" = "a race"\n'
    suite = load(suite_of(tmp_path / "again", program, more=more))
    directory = tmp_path / "run"
    first = run_suite(suite, directory=directory, on_row=lambda _row: None)
    rows = {"mine.flaky": "failed", "mine.known": "failed", "mine.broken": "failed", "mine.fine": "passed"}
    assert outcomes(first.rows) == rows
    second = ask_again(suite, [], first, directory, Limit())
    assert outcomes(second.rows) == {**rows, "mine.known": "passed", "mine.flaky": "passed"}
    assert second.rows[0].detail == f"{FLAKY}, for no known reason; the first: too slow"
    assert second.rows[1].detail == f"{FLAKY}, a race; the first: too slow"
    assert "FLAKY: again mine.flaky, for no known reason: too slow" in capsys.readouterr().out


def test_each_part_asks_whole_suites_and_the_core_of_the_others(tmp_path: Path) -> None:
    def asked(name: str, more: str) -> list[tuple[str, ...] | None]:
        suite = load(suite_of(tmp_path / name, "", more=more))
        return [suite.asked_in(part) for part in (1, 2)]

    assert asked("canonical", "part = 2\n") == [scenarios.CORE, ()]
    assert asked("own", 'part = 2\nscenarios = ["a", "b"]\n') == [None, ()]
    assert asked("own-core", 'part = 2\nscenarios = ["a", "b"]\ncore = ["a"]\n') == [("a",), ()]
    assert asked("coreless", "part = 2\ncore = []\n") == [None, ()]


def test_every_suite_has_a_part_and_a_core_of_its_scenarios() -> None:
    assert {suite.part for suite in discover()} == set(range(1, PARTS + 1))
    assert all(scenarios.find(name) for name in scenarios.CORE)
    for suite in discover():
        assert not suite.core or set(suite.core) <= set(suite.scenarios), suite.name


def test_an_unserved_scenario_is_no_failure_but_fails_if_it_passes(tmp_path: Path) -> None:
    program = """
        answer("mine.missing", "failed", "refused")
        answer("mine.there")
        answer("mine.broken", "failed", "oh")
        answer("mine.later", "unasked", "no time")
        answer("mine.left", "skipped", "wants six brokers")
    """
    not_served = ("missing", "there", "later", "left")
    more = "scenarios = []\n[unserved]\n" + "".join(f'"mine.{name}" = "transactions"\n' for name in not_served)
    result = run_suite(
        load(suite_of(tmp_path / "fake", program, more=more)), directory=tmp_path / "run", on_row=lambda _row: None
    )
    assert outcomes(result.rows) == {
        "mine.missing": "unserved",
        "mine.there": "failed",
        "mine.broken": "failed",
        "mine.later": "unasked",
        "mine.left": "skipped",
    }
    assert next(row.detail for row in result.rows if row.scenario == "mine.missing") == "transactions"


@pytest.mark.long
def test_a_suite_restarts_and_kills_its_gateway(tmp_path: Path) -> None:
    """The whole path with a real gateway: the control interface, settings, versions on the wire, and the environment of
    a suite.
    """
    program = f"""
        sys.path.insert(0, {str(FOLDER.parents[1])!r})
        from tests.gateway_process import answers
        bootstrap, control = os.environ["COMPAT_BOOTSTRAP"], os.environ["COMPAT_CONTROL"]
        assert answers(bootstrap)
        for action in ("restart", "kill"):
            with urllib.request.urlopen(urllib.request.Request(f"{{control}}/{{action}}", method="POST")) as reply:
                assert json.load(reply) == {{"ok": True}}
            answer(f"mine.{{action}}", "passed" if answers(bootstrap) else "failed")
        try:
            urllib.request.urlopen(urllib.request.Request(f"{{control}}/explode", method="POST"))
        except urllib.error.HTTPError as error:
            answer("mine.unknown", "passed" if error.code == 404 else "failed")
    """
    more = '[settings]\n"num.partitions" = "3"\n'
    suite = load(suite_of(tmp_path / "fake", program, more=more, limit_s=120))
    result = run_suite(suite, directory=tmp_path / "run", on_row=lambda row: None)
    assert outcomes(result.rows) == {"mine.restart": "passed", "mine.kill": "passed", "mine.unknown": "passed"}
    assert result.api_versions == {"ApiVersions": [0]}
    assert (tmp_path / "run" / "gateway.log").read_text().count('"event": "serving"') == 3


@pytest.mark.long
def test_a_suite_runs_against_several_nodes(tmp_path: Path) -> None:
    """The suite's addresses lead to all nodes, also after each node was restarted or killed."""
    program = """
        from confluent_kafka.admin import AdminClient

        def all_there():
            admin = AdminClient({"bootstrap.servers": os.environ["COMPAT_BOOTSTRAP"]})
            deadline = time.monotonic() + 20
            while len(admin.list_topics(timeout=20).brokers) != 3 and time.monotonic() < deadline:
                time.sleep(0.1)
            return "passed" if len(admin.list_topics(timeout=20).brokers) == 3 else "failed"

        answer("mine.start", all_there())
        for action in ("restart", "kill"):
            with urllib.request.urlopen(
                urllib.request.Request(f"{os.environ['COMPAT_CONTROL']}/{action}", method="POST")
            ) as reply:
                assert json.load(reply) == {"ok": True}
            answer(f"mine.{action}", all_there())
        answer("mine.metrics", "failed" if os.environ["COMPAT_METRICS"] else "passed")
        answer("mine.unserved", "failed")
    """
    more = 'scenarios = []\n[unserved]\n"mine.unserved" = "transactions"\n'
    suite = load(suite_of(tmp_path / "fake", program, more=more, limit_s=120))
    result = run_suite(suite, directory=tmp_path / "run", on_row=lambda row: None, broker=sluice_nodes(3))
    passed = dict.fromkeys(("mine.start", "mine.restart", "mine.kill", "mine.metrics"), "passed")
    assert outcomes(result.rows) == {**passed, "mine.unserved": "unserved"}
    assert result.api_versions == {}
    assert (tmp_path / "run" / "gateway.log").read_text().count('"event": "serving"') == 9


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--nodes", "0"), "--nodes 0: a suite needs at least one node"),
        (("--nodes", "3", "--broker", "kafka"), "--nodes goes with neither"),
        (("--nodes", "3", "--report"), "--nodes goes with neither"),
    ],
)
def test_a_number_of_nodes_that_kafka_cannot_have_is_refused(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kcat", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_the_card_keeps_suites_that_did_not_run_and_names_those_left_out(tmp_path: Path) -> None:
    def result(name: str, rows: list[Row], left_out: str = "") -> SuiteResult:
        return SuiteResult(name, name.title(), "C", "2026-01-02T03:04:05+00:00", "abc", "1.0", left_out, rows=rows)

    logged = {"deliveries": 8, "duplicates": 0, "rewinds": 0, "handovers": 2, "pause_moved_ms": 40}
    left = Row("groups.leave", "passed", 1.0, "at the second try", deliveries=logged)
    one = result("one", [left, Row("mine", "failed", 2.0, "a | b")])
    write(tmp_path, [one, result("two", [], "needs go, not on PATH")], keep_others=False)
    write(tmp_path, [result("three", [Row("groups.leave", "skipped", 0.0, "has no groups")])], keep_others=True)
    card = (tmp_path / "compatibility.md").read_text()
    assert "| One | C | 1.0 | 1 | 1 | 0 | 0 | 0 | 0 |" in card
    assert "left out: needs go, not on PATH" in card
    assert "| groups.leave | ✓ | – |" in card
    assert "| One | mine | a \\| b |" in card
    assert "| One | groups.leave | at the second try |" in card
    assert "| Three | groups.leave | has no groups |" in card
    assert "| One | groups.leave | 2 | 8 | 0 |  | 40 |" in card
    names = [suite["name"] for suite in json.loads((tmp_path / "compatibility.json").read_text())["suites"]]
    assert names == ["one", "three", "two"]


def test_a_scenario_that_kafka_passes_and_we_do_not_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.compat.report.FOLDER", tmp_path)

    def result(broker: str, outcomes: dict[str, Outcome]) -> SuiteResult:
        rows = [Row(scenario, outcome, 1.0, "not served") for scenario, outcome in outcomes.items()]
        return SuiteResult("one", "One", "C", "2026-01-02T03:04:05+00:00", broker, "1.0", rows=rows)

    theirs: dict[str, Outcome] = {
        "both": "passed",
        "listed": "skipped",
        "ours": "failed",
        "theirs": "passed",
        "left": "passed",
        "later": "passed",
        "neither": "failed",
        "no": "skipped",
    }
    ours: dict[str, Outcome] = {
        "both": "passed",
        "listed": "passed",
        "ours": "passed",
        "theirs": "failed",
        "left": "skipped",
        "later": "unasked",
        "neither": "unasked",
        "no": "skipped",
    }
    write_oracle(tmp_path, [result("Apache Kafka 9", theirs)], keep_others=False)
    write(tmp_path, [result("abc", {**ours, "new": "failed"})], keep_others=False)
    card = json.loads((tmp_path / "compatibility.json").read_text())
    assert [row["scenario"] for _, row in red(card)] == ["left", "theirs"]
    text = (tmp_path / "compatibility.md").read_text()
    # Kafka does not know the scenario "new". The run against Kafka left "listed" out, so there is no answer of Kafka
    # for it.
    assert "| One | Apache Kafka 9 | 2026-01-02 | 2 | 3 | **2** | 1 | 2 | 1 |" in text
    assert "| One | C | 1.0 | 3 | 2 | 0 | 2 | 2 | 0 |" in text
    assert "| later | ? | 1.0 | not served |" in text
    assert "| no | – | 1.0 | not served |" in text
    assert "| One | theirs | failed | not served |" in text
    # The suites ran against Kafka again after the card was written. The card shows that at once.
    write_oracle(tmp_path, [result("Apache Kafka 10", {**theirs, "theirs": "failed"})], keep_others=True)
    text = (tmp_path / "compatibility.md").read_text()
    assert "| One | Apache Kafka 10 | 2026-01-02 | 2 | 2 | **1** | 1 | 2 | 1 |" in text
    assert reds([result("abc", {"theirs": "failed", "left": "skipped", "both": "passed"})]) == [
        "one left skipped: not served"
    ]


def test_the_command_refuses_unknown_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-client"]) == 2
    assert "no suite no_such_client" in capsys.readouterr().err
    assert main(["kcat", "--list"]) == 0
    assert "kcat (C)" in capsys.readouterr().out


def test_asking_kafka_a_part_of_a_suite_keeps_its_other_answers(tmp_path: Path) -> None:
    def result(*rows: Row) -> SuiteResult:
        return SuiteResult("fake", "Fake", "Python", "2026-01-01", "Apache Kafka 9", rows=list(rows))

    write_oracle(
        tmp_path, [result(Row("a", "failed", 0.0, "why a"), Row("b", "failed", 0.0, "why b"))], keep_others=False
    )
    write_oracle(tmp_path, [result(Row("a", "passed", 0.0))], keep_others=True, keep_rows=True)
    # The program was killed during the run against Kafka, so there is no answer of Kafka.
    write_oracle(tmp_path, [result(Row("a", "failed", 0.0), Row("(suite)", "failed", 0.0, "killed"))], keep_others=True)
    said = json.loads((tmp_path / "oracle.json").read_text())["fake"]
    assert said["outcomes"] == {"a": "passed", "b": "failed"}
    assert said["reasons"] == {"b": "why b"}
    write_oracle(tmp_path, [result(Row("b", "unasked", 0.0, "no time"))], keep_others=True, keep_rows=True)
    assert json.loads((tmp_path / "oracle.json").read_text())["fake"]["outcomes"] == {"a": "passed", "b": "failed"}


def test_asking_a_part_of_a_suite_keeps_the_cards_other_rows(tmp_path: Path) -> None:
    def result(*rows: Row) -> SuiteResult:
        return SuiteResult("fake", "Fake", "Python", "2026-01-01", "abc", rows=list(rows))

    def rows() -> dict[str, str]:
        (suite,) = json.loads((tmp_path / "compatibility.json").read_text())["suites"]
        return {row["scenario"]: row["outcome"] for row in suite["rows"]}

    whole = [Row("a", "passed", 1.0), Row("b", "failed", 1.0), Row("c", "unasked", 0.0, "no time")]
    write(tmp_path, [result(*whole)], keep_others=False)
    part = [Row("b", "passed", 1.0), Row("c[one]", "passed", 1.0), Row("c[two]", "failed", 1.0)]
    write(tmp_path, [result(*part)], keep_others=True, keep_rows=True)
    assert rows() == {"a": "passed", "b": "passed", "c[one]": "passed", "c[two]": "failed"}
    write(tmp_path, [result(Row("b", "failed", 1.0))], keep_others=True)
    assert rows() == {"b": "failed"}


def test_a_card_of_parts_names_date_and_gateway_of_its_oldest_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.compat.report.FOLDER", tmp_path)

    def result(day: int, broker: str, *names: str) -> SuiteResult:
        rows = [Row(name, "passed", 1.0) for name in names]
        return SuiteResult("fake", "Fake", "C", f"2026-01-0{day}T03:04:05+00:00", broker, "1.0", rows=rows)

    write_oracle(tmp_path, [result(1, "Apache Kafka 9", "a", "b", "c")], keep_others=False)
    write(tmp_path, [result(3, "abc", "a", "b", "c")], keep_others=False)
    for day, broker, name in ((4, "def", "a"), (5, "fed", "b")):
        write_oracle(tmp_path, [result(day - 2, "Apache Kafka 9", name)], keep_others=True, keep_rows=True)
        write(tmp_path, [result(day, broker, name)], keep_others=True, keep_rows=True)
    text = (tmp_path / "compatibility.md").read_text()
    assert "Gateway abc, def, fed, run on 2026-01-03 to 2026-01-05." in text
    assert "| Fake | Apache Kafka 9 | 2026-01-01 to 2026-01-03 | 3 | 3 | 0 | 0 | 0 | 0 |" in text
    # All scenarios run again, so no old row remains.
    write_oracle(tmp_path, [result(6, "Apache Kafka 9", "a", "b", "c")], keep_others=True, keep_rows=True)
    write(tmp_path, [result(7, "new", "a", "b", "c")], keep_others=True, keep_rows=True)
    text = (tmp_path / "compatibility.md").read_text()
    assert "Gateway new, run on 2026-01-07." in text
    assert "| Fake | Apache Kafka 9 | 2026-01-06 | 3 | 3 | 0 | 0 | 0 | 0 |" in text
