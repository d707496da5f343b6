"""A commit of a table, of either format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Commit:
    version: int
    operation: str
    metadata: str | None
    """The progress that a job committed together with `rows`; None if another writer made the commit."""
    rows: int
