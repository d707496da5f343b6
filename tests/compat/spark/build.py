"""Fetch pyspark and Spark's Kafka connector: `python -m tests.compat.spark.build FOLDER`.

The one idea: FOLDER/venv has the packages of requirements.lock, and FOLDER/jars has the jars of pom.xml. Each is
fetched again only if its file (requirements.lock or pom.xml) has changed. Packages and jars come from the sources that
pip and Maven are configured to use.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


def main(folder: Path) -> int:
    for description, target, fetch in (
        (HERE / "pom.xml", folder / "jars", _fetch_jars),
        (HERE / "requirements.lock", folder / "venv", _fetch_packages),
    ):
        _bring_up_to_date(description, target, fetch)
    return 0


def _bring_up_to_date(description: Path, target: Path, fetch: Callable[[Path, Path], None]) -> None:
    """Call `fetch` with an empty `target`, unless `target` was fetched for exactly this description. Raise
    CalledProcessError if that fails. The stamp is written last, so an interrupted fetch is repeated.
    """
    stamp = target.with_suffix(".stamp")
    wanted = hashlib.sha256(description.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    fetch(description, target)
    stamp.write_text(wanted)


def _fetch_jars(pom: Path, target: Path) -> None:
    subprocess.run(
        [
            *("mvn", "--quiet", "--batch-mode", "--file", str(pom)),
            *("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={target}"),
        ],
        check=True,
    )


def _fetch_packages(lock: Path, target: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    pip = [str(target / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--require-hashes", "--no-cache-dir", "-r", str(lock)], check=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
