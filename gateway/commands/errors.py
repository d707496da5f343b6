"""Errors of commands that cannot do their work, and remarks beside their results."""

from __future__ import annotations

import sys

from protocol.shown import shown


class CommandError(Exception):
    """One line for a person: what failed, and the next step if there is one. It repeats names that any client may have
    chosen and texts of any broker, so nothing in it moves a terminal's cursor."""

    def __init__(self, text: str) -> None:
        super().__init__(shown(text, None))


class PassingError(CommandError):
    """A broker does not answer now. It may be restarting."""


class UnreachableError(PassingError):
    """Error for an address at which no process listens, or to which no route leads."""


def remark(text: str) -> None:
    """Print a remark to stderr, escaped as the text of a CommandError is."""
    print(f"sluice: {shown(text, None)}", file=sys.stderr, flush=True)
