"""Read the answers of a suite's program, and decide which of them are accepted.

The one idea: a suite's failures and skips are accepted as reported, but not its passes. The delivery log decides which
scenarios passed. A scenario without an answer has failed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.compat import scenarios
from tests.compat.checker import Verdict, check, read_log
from tests.compat.process import Limit, run_limited
from tests.compat.report import OUTCOMES, WHOLE_SUITE, Row
from tests.compat.suites import Suite

STDERR_TAIL_LINES = 15


def ask(
    suite: Suite,
    named: Sequence[str],
    *,
    environment: Mapping[str, str],
    deliveries: Path,
    stderr: Path,
    on_row: Callable[[Row], None],
    limit: Limit,
) -> list[Row]:
    """Run a suite's program until it ends or reaches its limit. Return all rows, including rows for scenarios without
    an answer.
    """
    answers = Answers()
    rows: list[Row] = []
    adding = threading.Lock()

    def add(row: Row) -> None:
        with adding:
            rows.append(row)
        on_row(row)

    def on_line(line: str) -> None:
        row = answers.take(line)
        if row is not None:
            add(judged(row, deliveries))

    started = time.monotonic()
    try:
        ended = run_limited(
            suite.command(suite.run),
            cwd=suite.folder,
            environment=environment,
            limit_s=limit.of(suite.limit_s),
            stderr=stderr,
            on_line=on_line,
        )
    except OSError as error:
        add(Row(WHOLE_SUITE, "failed", 0.0, f"could not be started: {error}"))
        return rows
    faults = list(answers.faults)
    if ended.timed_out:
        faults.append(f"did not end: killed after {limit.reached(suite.limit_s)}")
    elif ended.returncode:
        faults.append(f"ended with {ending(ended.returncode)}{tail_of(stderr)}")
    for fault in faults:
        add(Row(WHOLE_SUITE, "failed", time.monotonic() - started, fault))
    for name in expected(suite, named, answered=answers.scenarios):
        add(Row(name, "failed", 0.0, "not answered"))
    return rows


@dataclass(slots=True)
class Answers:
    """The answers that a suite prints on stdout. `faults` are lines that are not answers, and second answers to one
    scenario.
    """

    scenarios: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def take(self, line: str) -> Row | None:
        if not line.strip():
            return None
        try:
            entry = json.loads(line)
            row = Row(str(entry["scenario"]), entry["outcome"], float(entry["seconds"]), str(entry.get("detail") or ""))
            if row.outcome not in OUTCOMES:
                raise ValueError(row.outcome)
        except (ValueError, KeyError, TypeError):
            self.faults.append(f"not an answer: {line[:200]}")
            return None
        if row.scenario in self.scenarios:
            self.faults.append(f"{row.scenario} was answered twice")
        if row.outcome in ("skipped", "unasked") and not row.detail:
            row = Row(row.scenario, "failed", row.seconds, f"{row.outcome} without a reason")
        self.scenarios.add(row.scenario)
        return row


def expected(suite: Suite, named: Sequence[str], *, answered: set[str]) -> list[str]:
    """Return the scenarios that the suite should have answered but did not, neither as a whole nor in parts
    (`scenario[part]`). A suite that lists scenarios of its own need not answer the canonical ones.
    """
    if named:
        wholes = {name.partition("[")[0] for name in answered}
        return [name for name in named if name not in answered and name not in wholes]
    if suite.scenarios:
        return [name for name in suite.scenarios if name not in answered]
    if answered and not any(scenarios.find(name) for name in answered):
        return []
    return scenarios.unanswered(answered)


def judged(row: Row, deliveries: Path) -> Row:
    """Return the row, corrected by its delivery log. A scenario that is judged by its log cannot pass without one."""
    if row.outcome != "passed":
        return row
    scenario = scenarios.find(row.scenario)
    logs = sorted(deliveries.glob(f"*.{row.scenario}.jsonl"))
    if not logs:
        if scenario is None or not scenario.logged:
            return row
        return Row(row.scenario, "failed", row.seconds, "no delivery log")
    outage = scenario is not None and scenario.outage
    try:
        read = [read_log(path.read_text(errors="replace")) for path in logs]
        verdicts = [check(log, outage=outage) for log in read]
    except (ValueError, TypeError) as error:
        return Row(row.scenario, "failed", row.seconds, f"delivery log: cannot be read: {error}")
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    if (
        scenario is not None
        and scenario.logged
        and not any(ev.event == "assigned" for log in read for ev in log.events)
    ):
        problems.append("nothing was ever assigned")
    return Row(
        row.scenario,
        "failed" if problems else "passed",
        row.seconds,
        f"delivery log: {'; '.join(problems)}" if problems else row.detail,
        _summary(verdicts),
    )


def _summary(verdicts: Sequence[Verdict]) -> dict[str, float]:
    summary: dict[str, float] = {
        "deliveries": sum(verdict.deliveries for verdict in verdicts),
        "duplicates": sum(verdict.duplicates for verdict in verdicts),
        "rewinds": sum(verdict.rewinds for verdict in verdicts),
        "handovers": sum(verdict.handovers for verdict in verdicts),
    }
    for retained, name in ((True, "pause_retained_ms"), (False, "pause_moved_ms")):
        pauses = [pause for verdict in verdicts if (pause := verdict.longest_pause_ms(retained=retained)) is not None]
        if pauses:
            summary[name] = round(max(pauses))
    return summary


def tail_of(stderr: Path) -> str:
    """Return the last lines of stderr, joined, for the end of a sentence."""
    lines = stderr.read_text(errors="replace").splitlines()[-STDERR_TAIL_LINES:] if stderr.exists() else []
    return ": " + " | ".join(line.strip() for line in lines if line.strip()) if lines else ""


def ending(returncode: int) -> str:
    """Describe in words how a process ended."""
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
