"""Run a command of `sluice` as a process of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.gateway_process import ROOT, clean_environment

TIMEOUT_S = 120.0


def sluice(*words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its exit code and both outputs. `said` is its standard input."""
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *words],
        cwd=ROOT,
        env=clean_environment(),
        input=said,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def output_of(*words: str) -> str:
    """Run a command that must succeed, and return its output."""
    done = sluice(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
