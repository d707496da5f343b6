"""Keep a table with one line per run: what was tried, how often, and the result. The table is committed."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

from tests.trust.run import Verdict

COLUMNS = ("date", "commit", "seed", "minutes", "operations", "faults", "verdict")


def record(path: Path, verdict: Verdict, commit: str, at: datetime | None = None) -> None:
    """Append the run to the table at `path`, and create the table if it does not exist.

    `commit` is the commit of the attacked sources. `at` is the time at which the run ended, now if None. Operations are
    records that were acknowledged or consumed, commits, changes of owners and observations.
    """
    broken = [name for name, sentences in verdict.violations.items() if sentences]
    row = (
        (at or datetime.now(UTC)).strftime("%Y-%m-%d"),
        commit,
        str(verdict.seed),
        f"{verdict.seconds / 60:.1f}",
        str(verdict.operations),
        str(verdict.faults),
        "kept" if not broken else "broken: " + "; ".join(broken),
    )
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerow(row)
