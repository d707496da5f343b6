"""The installed version of the program."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "sluice-kafka"


def program_version() -> str:
    """Return the installed version, or `unknown` in a tree that was never installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
