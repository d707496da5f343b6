"""Errors of commands that cannot do their work, and remarks beside their results."""

from __future__ import annotations

import sys

from protocol.shown import shown


class CommandError(Exception):
    """An error as one line for a person: what failed, and the next step if there is one. The line may repeat names that
    any client has chosen and texts of any broker. So it contains nothing that moves a terminal's cursor.
    """

    def __init__(self, text: str) -> None:
        super().__init__(shown(text, None))


class PassingError(CommandError):
    """A broker does not respond now. It may be restarting."""


class UnreachableError(PassingError):
    """Error for an address at which no process listens, or to which no route leads."""


def remark(text: str) -> None:
    """Print a remark to stderr. It is escaped in the same way as a CommandError."""
    print(f"sluice: {shown(text, None)}", file=sys.stderr, flush=True)
