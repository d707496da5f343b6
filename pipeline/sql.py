"""Words of Spark's SQL."""

from __future__ import annotations


def literal(content: str) -> str:
    """Return a text as SQL takes it."""
    return "'" + content.replace("\\", "\\\\").replace("'", "\\'") + "'"
