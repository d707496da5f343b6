"""The table of runs: one line for each run, in the order in which they ended."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

from tests.trust.history import Consumed, Faulted, History
from tests.trust.record import COLUMNS, record
from tests.trust.run import Verdict

AT = datetime(2026, 11, 26, tzinfo=UTC)


def verdict(seed: int, **violations: list[str]) -> Verdict:
    history = History()
    history.add(Consumed("g", "m", "t", 0, 0, 1, 0.0))
    history.add(Faulted("kill_postgres", "Postgres killed by SIGKILL", 0.0, 1.0))
    return Verdict(seed, 90.0, violations, {}, history, {})


def test_each_run_is_a_line_below_one_header(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    record(table, verdict(7, lost=[]), "49bbbb3e", AT)
    record(table, verdict(8, lost=["value 1 is lost"], twice=[]), "49bbbb3e+", AT)
    with table.open() as file:
        rows = list(csv.reader(file))
    assert rows == [
        list(COLUMNS),
        ["2026-11-26", "49bbbb3e", "7", "1.5", "1", "1", "kept"],
        ["2026-11-26", "49bbbb3e+", "8", "1.5", "1", "1", "broken: lost"],
    ]
