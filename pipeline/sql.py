"""Text for Spark's SQL."""

from __future__ import annotations


def identifier(name: str) -> str:
    """Return the name of a column, a field or a table in backticks."""
    return "`" + name.replace("`", "``") + "`"


def literal(content: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + content.replace("\\", "\\\\").replace("'", "\\'") + "'"
