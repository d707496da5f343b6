"""Clients of franz-go (franz_go/main.go)."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from tests.gateway_process import ROOT
from tests.trust.foreign import ForeignProcess

SOURCE = Path(__file__).with_name("franz_go")
BUILDS = ROOT / ".compat" / "trust"
BUILD_S = 1_200.0


def missing() -> str | None:
    """Return the reason why these clients cannot run here, if there is one."""
    return None if shutil.which("go") else "go is not installed"


def build() -> Path:
    """Build the program if its source has changed, and return its path."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCE.iterdir()))).hexdigest()
    program = BUILDS / f"franz-go-{digest[:16]}"
    if not program.exists():
        subprocess.run(["go", "build", "-o", str(program), "."], cwd=SOURCE, check=True, timeout=BUILD_S)
    return program


class FranzGo(ForeignProcess):
    def __init__(self, bootstrap: str) -> None:
        super().__init__([str(build()), bootstrap])
