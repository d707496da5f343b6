"""What analysis refuses, in words."""

from __future__ import annotations


class AnalysisError(Exception):
    """Analysis cannot go on: the cause, and what to do next."""

    def __init__(self, cause: str, next_step: str) -> None:
        super().__init__(f"{cause}; {next_step}")
        self.cause = cause
        self.next_step = next_step
