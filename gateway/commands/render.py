"""Print a command's results: as a table for people, as JSON for programs.

The one idea: a command gathers rows, each a mapping of column to value, and knows nothing of their form. `--json`
prints them whole, with their types. A table prints them aligned, numbers to the right, and a missing value as a dash.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from protocol.shown import shown

_UNPRINTABLE = re.compile(r"[^\n -~]")
"""Characters that may need an escape: those beyond printable ASCII, except the line ends of JSON itself."""

Value = str | int | float | bool | None | Sequence[object] | Mapping[str, object]
Row = Mapping[str, Value]


def show(rows: Sequence[Row], columns: Sequence[str], *, as_json: bool, out: TextIO | None = None) -> None:
    """Print rows. `columns` are the columns of a table, in order. In JSON every field of a row is printed."""
    stream = sys.stdout if out is None else out
    if as_json:
        print(json_text([dict(row) for row in rows], indent=2), file=stream)
        return
    print("\n".join(table(rows, columns)), file=stream)


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return JSON with an escape sequence for each character that is not printable. It may reach a terminal, and
    a lone surrogate of an undecodable name cannot be printed at all."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return text if text.isascii() and "\x7f" not in text else _UNPRINTABLE.sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    character = found[0]
    return character if character.isprintable() else json.dumps(character)[1:-1].replace("\x7f", "\\u007f")


def ranges(numbers: Iterable[int]) -> str:
    """Return the text 0-3,7 for the numbers 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def table(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return the lines of a table. Its header is in capitals."""
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
        return ", ".join(shown(f"{key}={value[key]}", None) for key in value)
    if isinstance(value, Sequence):
        return ", ".join(shown(str(element), None) for element in value) or "-"
    return str(value)
