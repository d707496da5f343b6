"""Programs that Go builds from their modules, once for each version. They are kept in .compat."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

BUILDS = Path(__file__).parents[1] / ".compat"
BUILD_TIMEOUT_S = 1_200


def built(package: str, version: str, folder: str) -> Path:
    """Return the program of a Go package at a version. Build it if `folder` of .compat does not have it yet."""
    program = BUILDS / folder / package.rpartition("/")[2]
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["go", "install", f"{package}@{version}"],
            env={**os.environ, "GOBIN": str(program.parent)},
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
    return program
