"""Programs that Go builds from their modules, once for each version. They are kept in .compat."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

BUILDS = Path(__file__).parents[1] / ".compat"
BUILD_TIMEOUT_S = 1_200


def built(package: str, version: str, folder: str) -> Path:
    """Return the program of a Go package at a version. Build it if `folder` of .compat does not have it yet."""
    program = BUILDS / folder / package.rpartition("/")[2]
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        run_go("install", f"{package}@{version}", directory=program.parent, environment={"GOBIN": str(program.parent)})
    return program


def run_go(*arguments: str, directory: Path, environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a go command. Raise CalledProcessError if it fails; its messages appear on stderr."""
    return subprocess.run(
        ["go", *arguments],
        cwd=directory,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=BUILD_TIMEOUT_S,
    ).stdout
