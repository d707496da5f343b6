"""Helm as a program: the one that is installed, or one that Go builds from Helm's module."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.go_programs import built

VERSION = "v3.22.0"


def missing() -> str | None:
    """Return why this machine has no Helm and cannot build it."""
    return None if shutil.which("helm") or shutil.which("go") else "neither helm nor go is installed"


def program() -> Path:
    """Return the path of Helm."""
    installed = shutil.which("helm")
    return Path(installed) if installed else built("helm.sh/helm/v3/cmd/helm", VERSION, f"helm/{VERSION}")
