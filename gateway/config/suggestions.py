"""Suggest the names that a mistyped name may have meant, and tell whether an unknown name may hold a secret."""

from __future__ import annotations

from collections.abc import Iterable

SUGGESTIONS = 3
"""Maximal number of topics or groups that are suggested."""
_SIMILARITY = 0.6
"""difflib's own threshold: at most two letters in five differ."""
_SECRET = ("password", "passwd", "secret", "jaas", "token", "credential", "private", "keystore.key")


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return the known names that resemble `name` most, the nearest first."""
    from difflib import get_close_matches

    by_lower: dict[str, str] = {}
    for each in known:
        by_lower.setdefault(each.lower(), each)
    return [by_lower[found] for found in get_close_matches(name.lower(), by_lower, count, _SIMILARITY)]


def did_you_mean(name: str, known: Iterable[str], count: int = 1, prefix: str = "") -> str:
    """Return "; did you mean …?" to append to a message, or nothing if no known name resembles `name`. A `prefix` that
    all names share is not compared."""
    found = nearest(name.removeprefix(prefix), (each.removeprefix(prefix) for each in known), count)
    return f"; did you mean {_listed([prefix + each for each in found])}?" if found else ""


def _listed(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def may_be_secret(name: str) -> bool:
    """Return whether the name of an unknown setting says that its value is a secret."""
    lowered = name.lower()
    return any(word in lowered for word in _SECRET)
