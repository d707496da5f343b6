"""The version of a build, derived from git's tags.

The one idea: a tag `vX.Y.Z` is the only place where a version is written. A commit after a tag is the next patch's
development version; a tree without git is `0+unknown`, unless SLUICE_BUILD_VERSION gives the version.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
VARIABLE = "SLUICE_BUILD_VERSION"
UNKNOWN = "0+unknown"
DESCRIBED = re.compile(r"v(?P<release>\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)-(?P<commits>\d+)-g(?P<commit>[0-9a-f]+)")
PYTHON_INFO = re.compile(r"^Version: (\S+)$", re.MULTILINE)


def version(root: Path = ROOT) -> str:
    """Return the version of the tree. It comes from the variable, from a source distribution, or from git."""
    given = os.environ.get(VARIABLE)
    if given:
        return given
    packed = root / "PKG-INFO"
    if packed.is_file() and (found := PYTHON_INFO.search(packed.read_text())) is not None:
        return found.group(1)
    if not (root / ".git").exists():
        return UNKNOWN
    described = _git(root, "describe", "--tags", "--long", "--match", "v[0-9]*", "--abbrev=9")
    if described is not None and (parts := DESCRIBED.fullmatch(described)) is not None:
        return _of_tag(parts["release"], int(parts["commits"]), parts["commit"])
    commits, commit = _git(root, "rev-list", "--count", "HEAD"), _git(root, "rev-parse", "--short=9", "HEAD")
    return UNKNOWN if commits is None or commit is None else f"0.dev{commits}+g{commit}"


def _of_tag(release: str, commits: int, commit: str) -> str:
    """Return `release` for the tagged commit itself, otherwise a development version of the next release."""
    return release if commits == 0 else f"{_next(release)}.dev{commits}+g{commit}"


def _next(release: str) -> str:
    """Return the release with its last number raised by one."""
    *head, last = re.split(r"(\d+)$", release)[:2]
    return f"{''.join(head)}{int(last) + 1}"


def _git(root: Path, *words: str) -> str | None:
    """Return git's output; None if git is missing or fails."""
    try:
        answer = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
