"""What a command says when it cannot do what it was asked."""

from __future__ import annotations


class CommandError(Exception):
    """One line for a person: what failed, and where there is one, the next step."""


class UnreachableError(CommandError):
    """Nothing listens at an address, or no way leads there."""
