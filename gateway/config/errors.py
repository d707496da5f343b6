"""The refusal of a configuration. It is in a module of its own, so that a command can import it without loading the
settings.
"""

from __future__ import annotations


class ConfigurationError(Exception):
    """A value that is refused at start; the message is one line that names option, value and origin."""

    def __init__(self, option: str, value: str, origin: str, reason: str) -> None:
        super().__init__(f"{option}: {value!r} (from {origin}): {reason}")
