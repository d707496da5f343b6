"""Named, described SQL statements, read from the `.sql` files beside this module.

The one idea: a statement is text in a file of its concern, `-- name: <name>` followed by at least one line of comment
that says what it does. `statement(name)` gives its text; names are unique over all files. Nothing is composed at run
time: every value is a parameter.
"""

from __future__ import annotations

import re
from importlib.resources import files

_NAME = re.compile(r"^-- name: ([a-z][a-z0-9_]*)$")


def parse_statements(source: str, text: str) -> dict[str, str]:
    """Return the statements of one file by name. Raise ValueError if the file breaks the rules above. `source` is
    its name."""
    statements: dict[str, str] = {}
    name: str | None = None
    description: list[str] = []
    body: list[str] = []

    def finish() -> None:
        if name is None:
            return
        sql = "\n".join(body).strip().removesuffix(";")
        if not description or not sql or name in statements:
            raise ValueError(f"{source}: statement {name} needs a description, a body and a name of its own")
        statements[name] = sql

    for line in text.splitlines():
        if match := _NAME.match(line):
            finish()
            name, description, body = match[1], [], []
        elif not body and line.startswith("--"):
            description.append(line)
        elif body or line.strip():
            if name is None:
                raise ValueError(f"{source}: SQL before the first name: {line!r}")
            body.append(line)
    finish()
    return statements


def _load() -> dict[str, str]:
    statements: dict[str, str] = {}
    for file in sorted(files(__name__).iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".sql"):
            for name, sql in parse_statements(file.name, file.read_text(encoding="utf-8")).items():
                if name in statements:
                    raise ValueError(f"{file.name}: statement {name} exists twice")
                statements[name] = sql
    return statements


_STATEMENTS = _load()


def statement(name: str) -> str:
    """Return the SQL text of a named statement. Raise KeyError if it does not exist."""
    return _STATEMENTS[name]
