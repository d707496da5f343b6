"""Find the files that another user of the machine can read. This needs root, which can become another user."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def readable_by(uid: int, directory: Path) -> list[str]:
    """Return the files and directories below `directory`, itself included, that the user can list or read. Their names
    are those that root sees.
    """
    paths = [directory, *(Path(parent) / name for parent, dirs, files in os.walk(directory) for name in dirs + files)]
    regular = [str(path) for path in paths if path.is_dir() or path.is_file()]
    read = 'if [ -d "$each" ]; then ls "$each"; else head -c1 "$each"; fi >/dev/null 2>&1'
    script = f'for each; do {read} && echo "$each"; done; true'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *regular],
        user=uid,
        group=uid,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    return done.stdout.splitlines()
