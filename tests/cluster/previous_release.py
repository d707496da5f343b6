"""The sources of earlier releases, from the repository's own history."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from tests.gateway_process import ROOT

COMMIT = "63584a4c489954668972f3ab8fd68aaa8010177c"
"""The last commit whose newest migration is 0003. Each release must move this on."""

WITH_NAMED_PARTITIONS = "7eadad18740c6b32e05adef50e6f569f133ba07c"
"""The last commit that served only transaction.version 1."""

ROOMS = ("gateway", "protocol", "storage")


def unpack(directory: Path, commit: str = COMMIT) -> Path:
    """Write the commit's rooms below `directory`. AssertionError if the commit is not available: a test that did not
    run must not pass."""
    if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        # The clone contains only the newest commits.
        _git("fetch", "--quiet", "--depth=1", "origin", commit)
    archive = _git("archive", "--format=tar", commit, *ROOMS)
    assert archive.returncode == 0, f"the release {commit} is not in the history: {archive.stderr.decode()}"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    return directory


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    # Git also has to accept a checkout that belongs to another user, as a container's may.
    return subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments], capture_output=True, timeout=120
    )
