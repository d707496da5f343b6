"""Find, check and fetch the jars that are not part of Spark.

The one idea: only `pom.xml` beside this file has their coordinates. `fetch` lets Maven copy them into a folder, from
the repository that Maven's own settings name. A job then starts from that folder without a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from pipeline.errors import PipelineError

POM = Path(__file__).with_name("pom.xml")
FETCH_SECONDS = 900
_NAMESPACE = "{http://maven.apache.org/POM/4.0.0}"


def folder() -> Path:
    """Return the folder of the jars: SLUICE_PIPELINE_JARS, or a folder of this Python installation."""
    named = os.environ.get("SLUICE_PIPELINE_JARS")
    return Path(named) if named else Path(sys.prefix) / "share" / "sluice" / "jars"


def coordinates() -> list[tuple[str, str, str]]:
    """Return group, artifact and version of each jar."""
    found: list[tuple[str, str, str]] = []
    for dependency in ElementTree.parse(POM).getroot().iter(f"{_NAMESPACE}dependency"):
        group, artifact, version = (
            dependency.findtext(f"{_NAMESPACE}{name}", "") for name in ("groupId", "artifactId", "version")
        )
        found.append((group, artifact, version))
    return found


def names() -> list[str]:
    return [f"{artifact}-{version}.jar" for _, artifact, version in coordinates()]


def missing(where: Path) -> list[str]:
    """Return the names of jars that are missing or empty. An interrupted copy leaves an empty file."""
    return [name for name in names() if not (where / name).is_file() or not (where / name).stat().st_size]


def paths(where: Path) -> list[Path]:
    """Return the paths of all jars. Raise PipelineError if one is absent."""
    lacking = missing(where)
    if lacking:
        raise PipelineError(
            f"{len(lacking)} of {len(names())} jars are absent from {where} or empty, the first of them {lacking[0]}.",
            "Run `sluice-pipeline jars` (it needs Maven), or name their folder with --jars or SLUICE_PIPELINE_JARS.",
        )
    return [where / name for name in names()]


def fetch(where: Path) -> None:
    """Let Maven copy the absent jars. Raise PipelineError if it cannot."""
    if not missing(where):
        return
    maven = shutil.which("mvn")
    if maven is None:
        raise PipelineError(
            "Maven (mvn), which fetches the jars, is not installed.",
            "Install it (Debian: apt-get install maven), or copy what `sluice-pipeline jars --names` lists to that "
            f"folder: {where}.",
        )
    where.mkdir(parents=True, exist_ok=True)
    # Maven does not replace a jar that exists, even if it is empty.
    for name in missing(where):
        (where / name).unlink(missing_ok=True)
    command = [
        *(maven, "--quiet", "--batch-mode", "--file", str(POM), "dependency:copy-dependencies"),
        *("-DincludeScope=runtime", f"-DoutputDirectory={where}"),
    ]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FETCH_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise PipelineError(
            f"Maven has not fetched the jars within {FETCH_SECONDS // 60} minutes.",
            "Check that Maven reaches its repository or mirror (its settings.xml), then run it again.",
        ) from error
    if done.returncode:
        words = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
        raise PipelineError(
            f"Maven could not fetch the jars: {words[0] if words else 'it said nothing'}",
            "Check that Maven reaches its repository or mirror (its settings.xml), then run it again.",
        )
    paths(where)
