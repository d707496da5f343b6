"""Helm as a program: the one that is installed, or one that Go builds from Helm's module and keeps in .compat."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.gateway_process import ROOT

VERSION = "v3.22.0"
BUILDS = ROOT / ".compat" / "helm" / VERSION
BUILD_TIMEOUT_S = 1_200


def missing() -> str | None:
    """Return why this machine has no Helm and cannot build it."""
    return None if shutil.which("helm") or shutil.which("go") else "neither helm nor go is installed"


def program() -> Path:
    """Return the path of Helm. Build it if it is not installed and was not built before."""
    installed = shutil.which("helm")
    if installed is not None:
        return Path(installed)
    built = BUILDS / "helm"
    if not built.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["go", "install", f"helm.sh/helm/v3/cmd/helm@{VERSION}"],
            env={**os.environ, "GOBIN": str(BUILDS)},
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
    return built
