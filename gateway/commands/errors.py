"""Errors of commands that cannot do their work."""

from __future__ import annotations


class CommandError(Exception):
    """One line for a person: what failed, and the next step if there is one."""


class UnreachableError(CommandError):
    """Nothing listens at an address, or no route leads there."""
