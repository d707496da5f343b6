"""Print a command's results: as a table for people, as JSON for programs.

The one idea: a command gathers rows, each a mapping of column to value, and knows nothing of their form. `--json`
prints them whole, with their types. A table prints them aligned, numbers to the right, and a missing value as a dash.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from protocol.shown import shown

Value = str | int | float | bool | None | Sequence[object] | Mapping[str, object]
Row = Mapping[str, Value]


def show(rows: Sequence[Row], columns: Sequence[str], *, as_json: bool, out: TextIO | None = None) -> None:
    """Print rows; `columns` are the columns of a table, in order. JSON holds every field of a row."""
    stream = sys.stdout if out is None else out
    if as_json:
        print(json.dumps([dict(row) for row in rows], indent=2, ensure_ascii=False), file=stream)
        return
    print("\n".join(table(rows, columns)), file=stream)


def ranges(numbers: Iterable[int]) -> str:
    """Return 0-3,7 for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def table(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return the lines of a table, its head in capitals."""
    numeric = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]
    lines = [[column.replace("_", "-").upper() for column in columns]]
    lines += [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[position]) for line in lines) for position in range(len(columns))]
    return [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]


def _cell(value: Value) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return shown(value, None)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={shown(str(value[key]), None)}" for key in value)
    if isinstance(value, Sequence):
        return ", ".join(shown(str(element), None) for element in value) or "-"
    return str(value)
