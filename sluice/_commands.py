"""The console scripts: make the rooms (the program's packages) importable, then run the program.

The one idea: only the process of a Sluice command can import the rooms. A program that imports `sluice` or
`sluice.testing` keeps its own modules named `storage` or `protocol`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOMS = Path(__file__).with_name("_rooms")
"""Directory of the rooms in an installed wheel. A checkout has no such directory, because its rooms are already on the
import path.
"""
EXIT_REFUSED = 2
NO_WINDOWS = (
    "sluice: Sluice does not run on Windows, because it needs Unix sockets and file locks: use WSL 2 or the container "
    "image"
)


def main() -> int:
    """Run `sluice` and return its exit code."""
    if sys.platform == "win32":
        print(NO_WINDOWS, file=sys.stderr)
        return EXIT_REFUSED
    _enter()
    from gateway.cli import main as run

    return run()


def pipeline_main() -> int:
    """Run `sluice-pipeline` and return its exit code."""
    if sys.platform == "win32":
        print(NO_WINDOWS, file=sys.stderr)
        return EXIT_REFUSED
    _enter()
    if ROOMS.is_dir():
        # Spark's Python workers inherit the environment of the JVM, which inherits this process's.
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOMS), *([others] if others else [])])
    from pipeline.cli import main as run

    return run()


def _enter() -> None:
    """Put the directory of the rooms in front of this process's import path."""
    if ROOMS.is_dir():
        sys.path.insert(0, str(ROOMS))
