"""Kafka strings in Postgres text columns.

The one idea: a Kafka string may hold U+0000, which Postgres text cannot, so it is escaped reversibly with U+241B
(symbol for escape). Strings without either character, in practice all of them, are stored as they are.
"""

from __future__ import annotations

from typing import overload

_NUL, _ESCAPE = "\0", "\u241b"
_ESCAPED_NUL, _ESCAPED_ESCAPE = _ESCAPE + "0", _ESCAPE + _ESCAPE


@overload
def stored(value: str) -> str: ...
@overload
def stored(value: None) -> None: ...
def stored(value: str | None) -> str | None:
    """Return the text to store for a Kafka string."""
    if value is None or (_NUL not in value and _ESCAPE not in value):
        return value
    return value.replace(_ESCAPE, _ESCAPED_ESCAPE).replace(_NUL, _ESCAPED_NUL)


def loaded(value: str) -> str:
    """Return the Kafka string of a stored text."""
    if _ESCAPE not in value:
        return value
    parts = value.split(_ESCAPED_ESCAPE)
    return _ESCAPE.join(part.replace(_ESCAPED_NUL, _NUL) for part in parts)


def loaded_or_none(value: str | None) -> str | None:
    """Do the same for a nullable column."""
    return None if value is None else loaded(value)
