"""The names that a topic may have (upstream's Topic.validate), and the pairs of names that must not exist together.

The one idea: one rule for Metadata, Produce and CreateTopics, so that a name is legal everywhere or nowhere. It knows
nothing of the topics that exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from protocol.shown import MAX_NAME_CHARS, shown

CONSUMER_OFFSETS = "__consumer_offsets"
TRANSACTION_STATE = "__transaction_state"
CLUSTER_METADATA = "__cluster_metadata"
"""Kafka's own log of metadata, which no client may create."""

INTERNAL_TOPICS = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, "__share_group_state"})
"""Upstream's Topic.INTERNAL_TOPICS: a topic of such a name is internal, regardless of its creator."""

_LEGAL = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)


def why_illegal(name: str) -> str | None:
    """Return a sentence for the client that says why the name is illegal; None if it is legal."""
    if not name:
        return "Topic name is invalid: the empty string is not allowed"
    if name in (".", ".."):
        return f"Topic name is invalid: '{name}' is not allowed"
    said = shown(name)
    if len(name) > MAX_NAME_CHARS:
        return f"Topic name is invalid: the length of '{said}' is longer than the max allowed length {MAX_NAME_CHARS}"
    if not _LEGAL.fullmatch(name):
        return (
            f"Topic name is invalid: '{said}' contains one or more characters other than ASCII alphanumerics, '.', '_'"
            " and '-'"
        )
    return None


class RenderedNames:
    """Names as metrics render them, with '_' in place of '.': upstream refuses a name that renders like another.
    `existing` has the existing topics by their rendered names."""

    def __init__(self, existing: Mapping[str, str]) -> None:
        self._existing = existing
        self._planned: dict[str, str] = {}

    def find_collision(self, name: str) -> str | None:
        """Return a name that renders like `name`, and that exists or was planned before."""
        if "." not in name and "_" not in name:
            return None
        found = self._existing.get(rendered(name)) or self._planned.get(rendered(name))
        return found if found != name else None

    def plan(self, name: str) -> None:
        """Note a name whose topic is about to be created."""
        self._planned[rendered(name)] = name


def rendered(name: str) -> str:
    return name.replace(".", "_")
