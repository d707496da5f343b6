"""`python -m release bill|dist|third-party|version`: the commands that the image's build, `make dist` and `make
third-party` run.

The one idea: `dist` builds from the last commit, not from the working directory, and takes every date from that commit.
So two builds of a commit are equal byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from release.bill import LOCK, ROOT, components, cyclonedx, page
from release.version import VARIABLE, version

DIST = ROOT / "dist"
EXIT_REFUSED = 2


def main(words: list[str]) -> int:
    match words:
        case ["version"]:
            print(version())
        case ["third-party"]:
            (ROOT / "THIRD-PARTY.md").write_text(page(components(LOCK.read_text())))
        case ["bill", path]:
            bill(Path(path))
        case ["dist"]:
            dist(DIST)
        case ["dist", directory]:
            dist(Path(directory))
        case _:
            print("usage: python -m release bill FILE | dist [DIR] | third-party | version", file=sys.stderr)
            return EXIT_REFUSED
    return 0


def bill(path: Path) -> None:
    """Write the bill of materials of this tree. The locked packages must be installed, because their metadata states
    the licences.
    """
    built_s = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cyclonedx(components(LOCK.read_text()), version(), built_s), indent=2) + "\n")


def dist(directory: Path) -> None:
    """Write wheel, source distribution, bill of materials and SHA256SUMS of the last commit."""
    directory.mkdir(parents=True, exist_ok=True)
    built_s = int(_git("show", "--no-patch", "--format=%ct", "HEAD"))
    present = version()
    with tempfile.TemporaryDirectory(prefix="sluice-dist-") as name:
        tree = Path(name)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory.absolute())]
        environment = {**os.environ, VARIABLE: present, "SOURCE_DATE_EPOCH": str(built_s)}
        subprocess.run(command, cwd=tree, env=environment, check=True)
        document = cyclonedx(components((tree / LOCK.name).read_text()), present, built_s)
    stem = f"sluice_kafka-{present}"
    (directory / f"{stem}.cdx.json").write_text(json.dumps(document, indent=2) + "\n")
    names = (f"{stem}-py3-none-any.whl", f"{stem}.tar.gz", f"{stem}.cdx.json")
    sums = [f"{hashlib.sha256((directory / each).read_bytes()).hexdigest()}  {each}\n" for each in names]
    (directory / f"{stem}.SHA256SUMS").write_text("".join(sums))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
