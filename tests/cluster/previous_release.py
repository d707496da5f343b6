"""The sources of releases before this one, out of the repository's own history."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from tests.gateway_process import ROOT

COMMIT = "63584a4c489954668972f3ab8fd68aaa8010177c"
"""The last state in which migration 0003 was the newest. To be moved on with each release."""

WITH_NAMED_PARTITIONS = "7eadad18740c6b32e05adef50e6f569f133ba07c"
"""The last one of transaction.version 1."""

ROOMS = ("gateway", "protocol", "storage")


def unpack(directory: Path, commit: str = COMMIT) -> Path:
    """Its rooms below `directory`. AssertionError where the commit cannot be had: what is not tested must not pass."""
    if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        # A clone of the newest commits only.
        _git("fetch", "--quiet", "--depth=1", "origin", commit)
    archive = _git("archive", "--format=tar", commit, *ROOMS)
    assert archive.returncode == 0, f"the release {commit} is not in the history: {archive.stderr.decode()}"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    return directory


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    # A checkout that belongs to somebody else, as a container's may, is still this one.
    return subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments], capture_output=True, timeout=120
    )
